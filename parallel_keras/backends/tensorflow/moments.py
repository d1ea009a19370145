"""Synchronized moments in which a replica without rows does not count.

Such a replica computes on a row of another (of no rows at all, TensorFlow's
convolutions give wrong shapes), so `BatchNormalization(synchronized=True)` has to
be told to leave it out.
"""

import contextlib
import threading

import keras
import tensorflow as tf

from parallel_keras import keras_internals

_replica = threading.local()


@contextlib.contextmanager
def counting(weight, share=None):
    """Inside, in this replica's thread, its rows count with a weight of one or zero.

    Args:
        weight: Scalar tensor or number.
        share: The replica's share of the rows, where its gradients are weighted with it after
            they are computed; `None` where its loss has been.
    """
    keras_internals.replace_synchronized_moments(_moments)
    keras_internals.replace_masked_moments(_masked_moments)
    _replica.weight, _replica.share = weight, share
    try:
        yield
    finally:
        del _replica.weight, _replica.share


def _add_up(context, values):
    """The sum over the replicas, and its gradient."""
    share = _replica.share
    if share is None:
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)
    share = tf.cast(share, values.dtype)

    @tf.custom_gradient
    def add_up(values):
        def gradient(upstream):
            # What other replicas send back counts with their share, not with this one's.
            total = context.all_reduce(tf.distribute.ReduceOp.SUM, upstream * share)
            return tf.math.divide_no_nan(total, share)

        return context.all_reduce(tf.distribute.ReduceOp.SUM, values), gradient

    return add_up(values)


def _moments(x, axes, keepdims, stock):
    """Mean and variance over the rows of all replicas."""
    weight = getattr(_replica, "weight", None)
    context = tf.distribute.get_replica_context()
    if weight is None or context is None:
        return stock(x, axes, keepdims)
    weight = tf.cast(weight, x.dtype)
    parts = [
        tf.reduce_sum(values, axis=axes, keepdims=True) * weight
        for values in (x, tf.square(x), tf.ones_like(x))
    ]
    # One reduction of all three, in the order of the layers.
    total, squares, count = tf.unstack(_add_up(context, tf.stack(parts)))
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def _masked_moments(layer, x, mask, stock):
    """Mean and variance over the entries of all replicas that are not masked."""
    weight = getattr(_replica, "weight", None)
    context = tf.distribute.get_replica_context()
    if weight is None or context is None:
        return stock(layer, x, mask)
    weight = tf.cast(weight, x.dtype)
    kept = tf.broadcast_to(tf.cast(mask, "bool")[..., tf.newaxis], tf.shape(x))
    epsilon = keras.config.epsilon()  # as Keras has it, where all may be masked

    def everywhere(values):
        values = tf.where(kept, values, tf.zeros_like(values))
        return tf.reduce_sum(values, axis=layer._reduction_axes, keepdims=True) * weight

    sums = tf.stack([everywhere(x), everywhere(tf.ones_like(x))])
    total, count = tf.unstack(_add_up(context, sums))
    mean = total / (count + epsilon)
    squares = _add_up(context, everywhere(tf.square(x - mean)))
    return tf.squeeze(mean), tf.squeeze(squares / (count + epsilon))
