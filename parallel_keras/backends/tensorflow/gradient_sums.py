"""The gradient of each variable, added up over micro-batches and stages."""

import tensorflow as tf

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow import entries


class GradientSums:
    """Collects parts of gradients, and adds them up where the variable lives.

    Args:
        strategy: A `PipelineParallel`, for messages.
    """

    def __init__(self, strategy):
        self.strategy = strategy
        self._parts: dict = {}  # by the id of a variable, then by who uses it

    def add(self, user, variable, gradient, rows=None, data=()):
        """Take a part of a variable's gradient.

        Args:
            user: What the gradient comes through, the same for all micro-batches.
            variable: A Keras variable.
            gradient: Tensor, `tf.IndexedSlices`, or `None`.
            rows: `Rows` that it was computed on, where they are a part of the batch.
            data: List of the tensors of these rows.
        """
        if gradient is None:
            return
        uses = entries.split(gradient, data, self.strategy)
        if rows is not None:
            uses = [entries.of_rows(one, rows) for one in uses]
        users = self._parts.setdefault(id(variable), {})
        users.setdefault(user, []).append(uses)

    def total(self, variable):
        """The whole gradient of a variable; `None` where it has none."""
        users = self._parts.get(id(variable))
        if not users:
            return None
        with tf.device(keras_internals.tf_variable(variable).device):
            uses = [use for parts in users.values() for use in entries.join(parts)]
            return entries.as_gradient(uses, tuple(variable.shape))
