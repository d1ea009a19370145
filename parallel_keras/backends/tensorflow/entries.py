"""Gradients of tables, combined to the entries that the whole batch would give.

TensorFlow keeps the gradient of a table as entries, one for each look-up, and Keras's
optimizers treat each entry by itself: Adam squares it, where several may be of one row of
the table. So how a gradient falls into entries counts. A look-up whose places come from
the rows of the batch gives entries of these rows, and parts of a batch give theirs side
by side. One whose places are the same whatever the rows (positions) gives the batch one
list of entries, to each of which every part adds.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from parallel_keras.capabilities import check


class NeedsAnySize(Exception):
    """Which entries there are can be told only in a graph for batches of any size."""


class Entries(NamedTuple):
    """One use's part of a gradient.

    Attributes:
        values: Tensor. The whole gradient where `indices` is `None`.
        indices: Tensor with the row of the table of each entry, or `None`.
        is_shared: Bool. Whether all parts of a batch have the same entries.
    """

    values: Any
    indices: Any
    is_shared: bool


def split(gradient, data, strategy):
    """A gradient as a list of `Entries`, one for each use of the variable.

    Args:
        gradient: Tensor or `tf.IndexedSlices`, just made by a `tf.GradientTape`.
        data: List of the tensors of the batch, or of a part of it, that it comes from.
        strategy: A `Strategy`, for messages.

    Raises:
        UnsupportedError: Outside of a graph.
        NeedsAnySize: If the graph is for batches of one size, and that matters.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return [Entries(gradient, None, is_shared=True)]
    if tf.executing_eagerly():
        check("eager_entries", strategy, "tensorflow")
    leaves = {leaf.op for leaf in data}
    knows_rows = any(leaf.shape[0] is not None for leaf in data)
    found = []
    for values, indices in _uses(gradient.values, gradient.indices):
        is_shared = not _depends_on_rows(indices, leaves)
        if is_shared and knows_rows:
            # A size that is a plain number here may be that of the rows.
            raise NeedsAnySize
        found.append(Entries(values, indices, is_shared))
    return found


def hides_uses(gradient, data):
    """Whether uses of both kinds are in a gradient that was computed with: then none can be told.

    Args:
        gradient: Tensor or `tf.IndexedSlices` of a graph.
        data: As in `split`.
    """
    if not isinstance(gradient, tf.IndexedSlices) or tf.executing_eagerly():
        return False
    whole = _before_cast(gradient.indices)
    if gradient.values.op.type == "ConcatV2" or whole.op.type != "ConcatV2":
        return False
    *places, _ = whole.op.inputs
    leaves = {leaf.op for leaf in data}
    return len({_depends_on_rows(place, leaves) for place in places}) > 1


def _before_cast(indices):
    return indices.op.inputs[0] if indices.op.type == "Cast" else indices


def _uses(values, indices):
    """Pairs of values and indices, one for each use of a variable.

    eager/backprop.py, TensorFlow 2.21: gradients of several uses become one by
    concatenation, each index as an int64.
    """
    whole = _before_cast(indices)
    if values.op.type != "ConcatV2" or whole.op.type != "ConcatV2":
        return [(values, indices)]
    *parts, _ = values.op.inputs
    *places, _ = whole.op.inputs
    return [pair for two in zip(parts, places, strict=True) for pair in _uses(*two)]


def _depends_on_rows(tensor, leaves):
    """Whether the numbers, or how many there are, come from the rows of a batch.

    Args:
        tensor: A tensor of a graph.
        leaves: Set of the operations that make the tensors of the batch.
    """
    waiting, seen = [tensor.op], set()
    while waiting:
        operation = waiting.pop()
        if operation in seen:
            continue
        seen.add(operation)
        if operation in leaves:
            return True
        if operation.type in ("Shape", "ShapeN", "Size"):
            if any(i.shape.rank is None or i.shape[0] is None for i in operation.inputs):
                return True
        elif not _takes_other_sizes(operation):
            waiting += [i.op for i in operation.inputs if i.dtype != tf.resource]
    return False


def _takes_other_sizes(operation):
    """Whether it takes sizes of a shape, that of the rows not among them."""
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    start = tf.get_static_value(operation.inputs[1])
    return start is not None and start[0] >= 1


def of_rows(one, rows):
    """`Entries` of a part of the batch that may have no rows: it then adds nothing.

    Args:
        one: `Entries`, whatever was computed.
        rows: The part's `Rows`.
    """
    if not rows.may_be_none:
        return one
    if one.is_shared:
        return one._replace(values=tf.where(rows.some, one.values, tf.zeros_like(one.values)))
    # Left out, not zeroed: optimizers treat each entry by itself.
    kept = tf.where(rows.some, tf.shape(one.indices)[0], 0)
    return one._replace(values=one.values[:kept], indices=one.indices[:kept])


def side_by_side(one, gradient):
    """`Entries` that travel as `tf.IndexedSlices`, to be put side by side.

    Args:
        one: `Entries` that not all parts of a batch have.
        gradient: The `tf.IndexedSlices` that they are of.
    """
    values = tf.IndexedSlices(one.values, one.indices, gradient.dense_shape)
    return one._replace(values=values, indices=None)


def join(parts):
    """The uses of a variable by a whole batch, from those by its parts.

    Args:
        parts: List with one list of `Entries` for each part, alike in all.

    Returns:
        A list of `Entries`.
    """
    return [_together(use) for use in zip(*parts, strict=True)]


def _together(use):
    first, *others = use
    if not others:
        return first
    values = [one.values for one in use]
    if first.is_shared:
        return first._replace(values=tf.add_n(values))
    indices = tf.concat([one.indices for one in use], axis=0)
    return first._replace(values=tf.concat(values, axis=0), indices=indices)


def as_gradient(uses, shape):
    """All uses of a variable as one gradient, put together as TensorFlow does.

    eager/backprop_util.py, TensorFlow 2.21: one that is dense makes the whole dense.

    Args:
        uses: List of `Entries`.
        shape: Tuple, the variable's.

    Returns:
        A tensor or `tf.IndexedSlices`.
    """
    if any(one.indices is None for one in uses):
        return add_up([_dense(one, shape) for one in uses])
    if len(uses) == 1:
        return tf.IndexedSlices(uses[0].values, uses[0].indices, tf.constant(shape))
    values = tf.concat([one.values for one in uses], axis=0)
    indices = tf.concat([tf.cast(one.indices, "int64") for one in uses], axis=0)
    return tf.IndexedSlices(values, indices, tf.constant(shape))


def _dense(one, shape):
    if one.indices is None:
        return one.values
    return tf.convert_to_tensor(tf.IndexedSlices(one.values, one.indices, tf.constant(shape)))


def add_up(tensors):
    """The sum of one tensor or more."""
    return tensors[0] if len(tensors) == 1 else tf.add_n(tensors)
