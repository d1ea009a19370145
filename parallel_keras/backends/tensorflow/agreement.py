"""Whole numbers that parts of a batch assign have to agree: there is no mean of them.

They are compared in the graph of the step, so that nothing waits for an answer; where they
differ the step fails, and what it fails with becomes a refusal by name.
"""

import contextlib
import re

import tensorflow as tf

from parallel_keras.capabilities import check

_SAID = "whole numbers that differ"
_MET = re.compile(_SAID + r": (.+?)\]")


def agreeing(values, rows, variable, part):
    """The first part's value, once it is known that the others have the same.

    Args:
        values: List of tensors, one for each part of the batch.
        rows: List of their `Rows`. A part without rows does not count.
        variable: The Keras variable, for messages.
        part: String, what the parts are, for messages.
    """
    first, *others = values
    if rows[0].are_absent:
        return first  # only what is the same for all rows comes to pass
    said = f"{_SAID}: variable {variable.path} differs from {part} to {part}]"
    with tf.device("/CPU:0"):
        checks = [
            tf.debugging.Assert(
                tf.reduce_all(tf.equal(first, other)) | tf.logical_not(of_other.some), [said]
            )
            for other, of_other in zip(others, rows[1:], strict=True)
            if of_other.some is not False
        ]
    with tf.control_dependencies([one for one in checks if one is not None]):
        return tf.identity(first)


@contextlib.contextmanager
def refused(strategy):
    """Surrounds the run of a step: whole numbers that differ raise an `UnsupportedError`.

    Args:
        strategy: Our strategy, for messages.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        met = _MET.search(str(error))
        if met is None:
            raise
        check("whole_numbers", strategy, "tensorflow", met.group(1))
        raise
