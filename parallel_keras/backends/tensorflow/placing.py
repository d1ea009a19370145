"""Devices of operations and variables in TensorFlow's graphs."""

import contextlib

import tensorflow as tf

from parallel_keras import keras_internals


@contextlib.contextmanager
def device_function(function):
    """Ask a function for the device of each operation that the current graph gets.

    Graphs that are made inside, the bodies of loops and branches, ask it too.
    """
    with tf.compat.v1.get_default_graph().device(function):
        yield


def device_of(tensor):
    """The device that a tensor of a graph is on, as a full name, or `""`."""
    if tensor.dtype == tf.resource:
        return _captured_device(tensor)
    return full_name(tensor.op.device)


def move(variable, device):
    """Bring a Keras variable to a device, in place; `None` for the default one.

    Returns:
        Bool. Whether it is another `tf.Variable` now.
    """
    old = variable._value
    if not isinstance(old, tf.Variable):
        return False
    wanted = "/device:" + device.strip("/") if device else _default()
    if old.device.endswith(wanted):
        return False
    with tf.device(device or _default()):
        variable._value = tf.Variable(
            tf.identity(old),
            dtype=old.dtype,
            trainable=variable.trainable,
            name=variable.name,
            aggregation=keras_internals.tf_aggregation(variable),
            synchronization=keras_internals.tf_synchronization(variable),
        )
    return True


def _default():
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return f"/device:{kind}:0"


def _captured_device(tensor):
    """Where the variable is that a graph has captured, through the graphs around it."""
    graph = tensor.graph
    while graph is not None:
        outer = next(
            (outer for outer, inner in getattr(graph, "captures", ()) if inner is tensor), None
        )
        if outer is None:
            return ""
        if not hasattr(outer, "graph"):
            return outer.device
        tensor, graph = outer, outer.graph
    return ""


def full_name(device):
    """A device with the names of the job and the machine in front."""
    if not device or device.startswith("/job:"):
        return device
    return tf.config.list_logical_devices("CPU")[0].name.split("/device:")[0] + device
