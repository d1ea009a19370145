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
def counting(weight):
    """Inside, in this replica's thread, its rows count with a weight of one or zero.

    Args:
        weight: Scalar tensor or number.
    """
    keras_internals.replace_synchronized_moments(_moments)
    keras_internals.replace_masked_moments(_masked_moments)
    _replica.weight = weight
    try:
        yield
    finally:
        del _replica.weight


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
    total, squares, count = tf.unstack(
        context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stack(parts))
    )
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

    total, count = tf.unstack(
        context.all_reduce(
            tf.distribute.ReduceOp.SUM, tf.stack([everywhere(x), everywhere(tf.ones_like(x))])
        )
    )
    mean = total / (count + epsilon)
    squares = context.all_reduce(tf.distribute.ReduceOp.SUM, everywhere(tf.square(x - mean)))
    return tf.squeeze(mean), tf.squeeze(squares / (count + epsilon))
