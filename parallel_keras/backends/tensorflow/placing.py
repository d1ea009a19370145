"""Devices of operations and variables in TensorFlow's graphs."""

import contextlib
import functools

import tensorflow as tf

from parallel_keras import keras_internals
from parallel_keras.backends.lowering import KINDS, stock_function


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
        Whether it has moved: then `tell` has to be called.
    """
    old = variable._value
    if not isinstance(old, tf.Variable):
        return False
    wanted = "/device:" + device.strip("/") if device else _default()
    # One of several replicas has been left there by another model that shares it.
    is_mirrored = getattr(old, "_distribute_strategy", None) is not None
    if old.device.endswith(wanted) and not is_mirrored:
        return False
    with tf.init_scope():
        value = tf.convert_to_tensor(old)
        with tf.device(device or _default()):
            variable._value = made_anew(variable, value)
        give_up(old)
    return True


def give_up(old):
    """Empty a `tf.Variable`, or one of several replicas, that has been made anew elsewhere.

    A function that was traced with it would go on with the old numbers, and keep their
    memory. Now it finds none, and fails.
    """
    for part in getattr(old, "values", (old,)):
        empty = tf.zeros([0], part.dtype)
        tf.raw_ops.AssignVariableOp(resource=part.handle, value=empty, validate_shape=False)


def made_anew(variable, value):
    """A new `tf.Variable` for a Keras variable, in the scopes that are open.

    Args:
        variable: A Keras variable.
        value: Tensor, its value: read before, since a scope may not read what another made.
    """
    return tf.Variable(
        value,
        dtype=value.dtype,
        # Not Keras's flag, which changes: a tape looks at this one, which does not.
        trainable=keras_internals.tf_variable(variable).trainable,
        name=variable.name,
        aggregation=keras_internals.tf_aggregation(variable),
        synchronization=keras_internals.tf_synchronization(variable),
    )


def tell(variables):
    """Tell what knows these variables that they have moved.

    Optimizers look a variable up by what is inside of it, and traced steps hold that,
    those of other models too: a plain one may share a layer.
    """
    models, optimizers = keras_internals.users_of(variables)
    for optimizer in optimizers:
        keras_internals.index_trainables(optimizer)
    for model in models:
        state = vars(model).get(keras_internals.STATE)
        make = functools.partial(stock_function, model)
        if state is not None:
            make = state.lowering.make_function
        for kind in KINDS:
            if getattr(model, f"{kind}_function") is not None:
                # Made now, and traced when it is called: its fit may be running.
                setattr(model, f"{kind}_function", make(kind))


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
