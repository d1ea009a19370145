"""Whole numbers that replicas assign have to agree: there is no mean of them.

They are compared in the graph of the step, so that nothing waits for an answer; where they
differ the step fails, and what it fails with becomes a refusal by name.
"""

import contextlib
import re

import tensorflow as tf

from parallel_keras.capabilities import check

_SAID = "replicas assigned different whole numbers"
_MET = re.compile(_SAID + r": (\w+), (.+?)\]")


def agreeing(values, rows, feature, path):
    """The first replica's value, once it is known that the others have the same.

    Args:
        values: List of tensors, one for each replica.
        rows: List of their `Rows`. A replica without rows does not count.
        feature: String, the key of the table of capabilities for where they differ.
        path: String, the variable's.
    """
    first, *others = values
    with tf.device("/CPU:0"):
        checks = [
            tf.debugging.Assert(
                tf.reduce_all(tf.equal(first, other)) | tf.logical_not(of_other.some),
                [f"{_SAID}: {feature}, {path}]"],
            )
            for other, of_other in zip(others, rows[1:], strict=True)
            if first.dtype != tf.string and of_other.some is not False
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
        feature, path = met.groups()
        received = f"variable {path} differs from replica to replica"
        check(feature, strategy, "tensorflow", received)
        raise
