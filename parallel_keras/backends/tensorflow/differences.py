"""What a number went up by, in the graph, where it may be infinite."""

import tensorflow as tf


def difference(value, before):
    """What a value went up by; infinity that stays is no change.

    Args:
        value, before: Tensors, or a `tf.Variable`.
    """
    value = tf.convert_to_tensor(value)
    changed = value - before
    return tf.where(value == before, tf.zeros_like(changed), changed)


def deviation(value, first):
    """What a value adds to a mean that is taken from the first one on.

    Values that are equal to the first leave it as it is, and so do all numbers beside
    infinity: a mean with it is infinite.
    """
    apart = difference(value, first)
    if not apart.dtype.is_floating:
        return apart
    is_nothing = tf.math.is_inf(first) & tf.math.is_finite(value)
    return tf.where(is_nothing, tf.zeros_like(apart), apart)
