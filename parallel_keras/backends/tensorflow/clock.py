"""When each piece of a step's work began and ended, measured inside its graph."""

import tensorflow as tf

from parallel_keras.backends.tensorflow.ordering import run_independently
from parallel_keras.timeline import Event

# What a row of numbers holds: the kind's place in this list, the device's number,
# micro-batch, start, end.
KINDS = ("forward", "backward", "update", "compute", "all-reduce")


class Clock:
    """Times of one traced step.

    Args:
        is_on: Bool. Without it a mark is an operation that does nothing.
    """

    def __init__(self, is_on):
        self.is_on = is_on
        self._rows: dict = {}  # by the device's number

    def mark(self, after):
        """An operation that runs, and reads the time, when others have."""
        with tf.control_dependencies(list(after)):
            return _timestamp() if self.is_on else tf.no_op()

    def note(self, kind, number, microbatch, start, end):
        """Take down a piece of work, by the marks of its start and its end."""
        if self.is_on:
            row = [KINDS.index(kind), number, -1 if microbatch is None else microbatch]
            row = [tf.constant(entry, "float64") for entry in row]
            self._rows.setdefault(number, []).append(tf.stack([*row, start, end]))

    def read(self):
        """All pieces of work, as a matrix with a row for each."""
        parts = [tf.stack(rows) for rows in self._rows.values()]
        return tf.concat(parts, axis=0) if parts else tf.zeros([0, 5], "float64")


def _timestamp():
    """The time, read when what the operation depends on is there."""
    time = tf.timestamp()
    if not tf.executing_eagerly():
        run_independently(time.op)
    return time


def dense(tensors):
    """Tensors that can be waited for, of a list with sparse ones and `None` in it."""
    there = [tensor for tensor in tensors if tensor is not None]
    return [t.values if isinstance(t, tf.IndexedSlices) else t for t in there]


def events(matrix, devices, are_stages):
    """The rows of `Clock.read` as events.

    Args:
        matrix: What `read` gave.
        devices: Tuple of device names.
        are_stages: Bool. Whether each device is a stage.

    Returns:
        List of `timeline.Event`; an update has no micro-batch.
    """
    found = []
    for kind, number, microbatch, start, end in matrix.numpy().tolist():
        number = int(number)
        stage = number if are_stages else None
        part = None if microbatch < 0 else int(microbatch)
        found.append(Event(devices[number], KINDS[int(kind)], stage, part, start, end))
    return found
