"""The rows of one replica, sliced from the global batch inside the graph.

The numbers are those of `parallel_keras/batch.py`; here they may be tensors, since
a traced step serves batches of any size.
"""

import tensorflow as tf
from keras import tree

from parallel_keras import batch
from parallel_keras.backends.tensorflow.past_the_end import has_no_batch
from parallel_keras.capabilities import check


class Rows:
    """A replica's place in the rows of the global batch.

    Args:
        total: Int or scalar tensor, rows of the global batch.
        replicas: Int.
        replica: Int, from 0 up.

    A replica without rows computes on one of another, which counts for nothing.
    """

    def __init__(self, total, replicas, replica):
        if isinstance(total, int):
            self.count = batch.row_counts(total, replicas)[replica]
            start = batch.row_slices(total, replicas)[replica].start
            self.size = max(self.count, 1)
            self.start = min(start, total - self.size)
        else:
            base, extra = total // replicas, total % replicas
            self.count = base + tf.cast(replica < extra, total.dtype)
            start = replica * base + tf.minimum(replica, extra)
            self.size = tf.maximum(self.count, 1)
            self.start = tf.minimum(start, total - self.size)
        self.total = total
        self.replicas = replicas
        # Then what a replica counts by its share is known without the batch.
        self.are_absent = has_no_batch()

    @property
    def may_be_none(self):
        """Whether a replica may have to do without rows."""
        if self.are_absent:
            return False
        return not isinstance(self.count, int) or self.count == 0

    @property
    def some(self):
        """Whether this replica has rows: a bool or a scalar tensor."""
        return self.count > 0

    def share(self, dtype):
        """This replica's weight in the mean of the batch."""
        if self.are_absent:
            return tf.constant(1 / self.replicas, dtype)
        return tf.cast(self.count, dtype) / tf.cast(self.total, dtype)

    def take(self, data):
        """These rows of each array; sliced on the host, so that only they travel."""

        def part(leaf):
            if leaf is None:
                return None
            with tf.device("/CPU:0"):
                rows = leaf[self.start : self.start + self.size]
            if isinstance(self.size, int):
                rows.set_shape([self.size, *leaf.shape[1:]])
            return rows

        return tree.map_structure(part, data)

    def own(self, leaf, strategy):
        """An output computed from these rows, without that of a row of another."""
        known = leaf.shape[0] if leaf.shape.rank else None
        # A size that is known where the number of rows is not has nothing to do with it.
        other = not isinstance(self.size, int) or known != self.size
        if leaf.shape.rank == 0 or (known is not None and other):
            check("row_output", strategy, "tensorflow", f"an output of shape {tuple(leaf.shape)}")
        return leaf[: self.count] if self.may_be_none else leaf


def total_rows(data, strategy):
    """The rows of a global batch: an int where it is known when the step is traced."""
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    for leaf in leaves:
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            check("ragged", strategy, "tensorflow", f"a {type(leaf).__name__}")
    shapes = [leaf.shape for leaf in leaves]
    if any(shape.rank == 0 for shape in shapes):
        check("row_shape", strategy, "tensorflow", f"shapes {[tuple(s) for s in shapes]}")
    known = {shape[0] for shape in shapes if shape[0] is not None}
    if known == {0}:
        check("no_rows", strategy, "tensorflow", f"shapes {[tuple(s) for s in shapes]}")
    if len(known) > 1:
        check("row_shape", strategy, "tensorflow", f"shapes {[tuple(s) for s in shapes]}")
    if len(known) == 1 and all(shape[0] is not None for shape in shapes):
        return known.pop()
    totals = [tf.shape(leaf)[0] for leaf in leaves]
    same = [
        tf.debugging.assert_equal(
            totals[0], total, "The arrays of a batch have different numbers of rows"
        )
        for total in totals[1:]
    ]
    with tf.control_dependencies([op for op in same if op is not None]):
        return tf.identity(totals[0])
