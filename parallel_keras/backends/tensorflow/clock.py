"""When each piece of a step's work began and ended, measured inside its graph."""

import tensorflow as tf

# What a row of numbers holds: the kind's place in this list, stage, micro-batch, start, end.
KINDS = ("forward", "backward", "update")


class Clock:
    """Times of one traced step.

    Args:
        is_on: Bool. Without it a mark is an operation that does nothing.
    """

    def __init__(self, is_on):
        self.is_on = is_on
        self._rows: dict = {}  # by stage

    def mark(self, after):
        """An operation that runs, and reads the time, when others have."""
        with tf.control_dependencies(list(after)):
            return tf.timestamp() if self.is_on else tf.no_op()

    def note(self, kind, stage, microbatch, start, end):
        """Take down a piece of work, by the marks of its start and its end."""
        if self.is_on:
            row = [KINDS.index(kind), stage, -1 if microbatch is None else microbatch]
            row = [tf.constant(number, "float64") for number in row]
            self._rows.setdefault(stage, []).append(tf.stack([*row, start, end]))

    def read(self):
        """All pieces of work, as a matrix with a row for each."""
        parts = [tf.stack(rows) for rows in self._rows.values()]
        return tf.concat(parts, axis=0) if parts else tf.zeros([0, 5], "float64")


def events(matrix, devices):
    """The rows of `Clock.read` as a list of tuples.

    Args:
        matrix: What `read` gave.
        devices: Tuple of the device names of the stages.

    Returns:
        List of `(device, kind, stage, microbatch, start, end)`, times in seconds; an
        update has no micro-batch.
    """
    found = []
    for kind, stage, microbatch, start, end in matrix.numpy().tolist():
        number = None if microbatch < 0 else int(microbatch)
        found.append((devices[int(stage)], KINDS[int(kind)], int(stage), number, start, end))
    return sorted(found, key=lambda event: event[-2])
