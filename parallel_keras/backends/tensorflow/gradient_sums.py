"""The gradient of each variable, added up over micro-batches and stages."""

import tensorflow as tf

from parallel_keras import keras_internals


class GradientSums:
    """Collects parts of gradients, and adds them up where the variable lives."""

    def __init__(self):
        self._parts: dict = {}  # by the id of a variable

    def add(self, variable, gradient, rows=None):
        """Take a part of a variable's gradient.

        Args:
            variable: A Keras variable.
            gradient: Tensor, `tf.IndexedSlices`, or `None`.
            rows: `Rows` that it was computed on, `None` for no rows.
        """
        if gradient is None:
            return
        if isinstance(gradient, tf.IndexedSlices) and rows is not None and rows.may_be_none:
            # Left out, not zeroed: optimizers treat each entry by itself.
            kept = tf.where(rows.some, tf.shape(gradient.indices)[0], 0)
            gradient = tf.IndexedSlices(
                gradient.values[:kept], gradient.indices[:kept], gradient.dense_shape
            )
        self._parts.setdefault(id(variable), []).append(gradient)

    def total(self, variable):
        """The whole gradient of a variable; `None` where it has none."""
        parts = self._parts.get(id(variable))
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0]
        with tf.device(keras_internals.tf_variable(variable).device):
            if not any(isinstance(part, tf.IndexedSlices) for part in parts):
                return tf.add_n(parts)
            # As TensorFlow adds up the gradients of a variable that is used twice.
            slices = [_as_slices(part) for part in parts]
            return tf.IndexedSlices(
                tf.concat([part.values for part in slices], axis=0),
                tf.concat([part.indices for part in slices], axis=0),
                slices[0].dense_shape,
            )


def _as_slices(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            gradient.values, tf.cast(gradient.indices, "int64"), gradient.dense_shape
        )
    count = tf.shape(gradient, out_type="int64")
    return tf.IndexedSlices(gradient, tf.range(count[0]), count)
