"""Whole numbers that parts of a batch assign have to agree: there is no mean of them.

They are compared in the graph of the step, so that nothing waits for an answer. Where they
differ the step goes on with those of the first part and fails at its end, when all that it
assigns is assigned: weights that one replica has updated, the others have too. What it
fails with becomes a refusal by name.
"""

import contextlib
import re
import threading

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from parallel_keras.capabilities import check

_SAID = "whole numbers that differ"
_MET = re.compile(_SAID + r": (.+?)\]")
_here = threading.local()


def agreeing(values, rows, variable, part):
    """The first part's value; the step will fail where another's differs.

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
        _here.found += [
            (tf.reduce_all(tf.equal(first, other)) | tf.logical_not(of_other.some), said)
            for other, of_other in zip(others, rows[1:], strict=True)
        ]
    return first


@contextlib.contextmanager
def compared():
    """Surrounds one step, traced or eager, in which `agreeing` is called."""
    outer, _here.found = getattr(_here, "found", None), []
    try:
        yield
        if _here.found:
            with tf.control_dependencies(_effects()), tf.device("/CPU:0"):
                for condition, said in _here.found:
                    tf.debugging.Assert(condition, [said])
    finally:
        _here.found = outer


def _effects():
    """What has been traced and changes something."""
    if tf.executing_eagerly():
        return []
    operations = tf.compat.v1.get_default_graph().get_operations()
    return [operation for operation in operations if auto_control_deps.op_is_stateful(operation)]


@contextlib.contextmanager
def refused(strategy):
    """Surrounds the run of steps: whole numbers that differ raise an `UnsupportedError`.

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
