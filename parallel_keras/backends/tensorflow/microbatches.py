"""A global batch as micro-batches, and what is computed from them as a batch again."""

import keras
import tensorflow as tf
from keras import tree

from parallel_keras.backends.tensorflow import whole_loss
from parallel_keras.backends.tensorflow.rows import Rows, total_rows


class Microbatches:
    """The micro-batches of one global batch, in the graph of a step.

    Args:
        data: `(x, y, sample_weight)` of tensors.
        strategy: A `PipelineParallel`.
        stages: Int. The number of stages.

    Attributes:
        total: Int or scalar tensor, the rows of the batch.
        rows: List of the `Rows` of each micro-batch. Where the number of rows is not
            known when the step is traced, some may have none.
    """

    def __init__(self, data, strategy, stages):
        self.strategy = strategy
        self.data = data
        self.total = total_rows(data, strategy)
        most = self.total if isinstance(self.total, int) else _MANY
        count = strategy.microbatches_of(most, stages)
        self.rows = [Rows(self.total, count, number) for number in range(count)]
        self._taken: list = [[] for _ in self.rows]

    def __len__(self):
        return len(self.rows)

    def take(self, structure, number):
        """The rows of one micro-batch."""
        if len(self) == 1:
            return structure
        taken = self.rows[number].take(structure)
        self._taken[number] += [leaf for leaf in tree.flatten(taken) if leaf is not None]
        return taken

    def part(self, number):
        """The `Rows` of a micro-batch, and all tensors that were taken of them.

        `None` and none where the batch is not cut.
        """
        return (None, ()) if len(self) == 1 else (self.rows[number], self._taken[number])

    def weighted(self, loss, number, is_sum=False):
        """A micro-batch's part of a loss of the batch, from its own mean or sum."""
        if not loss.dtype.is_floating:
            loss = tf.cast(loss, keras.config.floatx())
        if len(self) == 1:
            return loss
        rows = self.rows[number]
        return loss * (tf.cast(rows.some, loss.dtype) if is_sum else rows.share(loss.dtype))

    def together(self, parts):
        """Tensors of all micro-batches as one, with their Keras masks and logits."""
        if len(self) == 1:
            return parts[0]
        return whole_loss.together(parts, self.rows, self.strategy, self.total)

    def part_of_gradient(self, gradient, number):
        """What one micro-batch's rows have of the gradient of a tensor of `together`."""
        if len(self) == 1:
            return gradient
        return whole_loss.part_of_gradient(gradient, self.rows[number])


_MANY = 2**31  # rows enough for any number of micro-batches
