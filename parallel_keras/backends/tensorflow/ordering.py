"""The order of operations with side effects, kept for each stage by itself.

A `tf.function` runs all operations that are stateful and use no variable (a clock, Python
code, a print) one after the other, in the order in which they were traced. For a pipeline
that would be one long queue over all stages.
"""

import contextlib

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps


class Order:
    """The side effects of what one stage computes."""

    def __init__(self):
        self._last = None

    @contextlib.contextmanager
    def kept(self):
        """What is traced inside waits for what was traced in this order, and for no other."""
        graph = tf.compat.v1.get_default_graph()
        count = len(graph.get_operations())
        yield
        for operation in graph.get_operations()[count:]:
            if auto_control_deps.op_is_stateful(operation) and not any(
                tensor.dtype == tf.resource for tensor in operation.inputs
            ):
                if self._last is not None:
                    operation._add_control_input(self._last)
                run_independently(operation)
                self._last = operation


def run_independently(operation):
    """Let an operation of a graph wait only for what it says itself.

    framework/auto_control_deps.py, TensorFlow 2.21.
    """
    manager = operation.graph.experimental_acd_manager
    if manager is not None:
        manager.run_independently(operation)
