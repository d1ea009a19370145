"""Where a layer keeps `tf.Variable`s that Keras does not know.

Strategies copy and combine Keras's variables. What is in a raw one would be written once by
each replica, and once for each micro-batch.
"""

import functools
import types

import keras

from parallel_keras import keras_internals

# A vocabulary may have millions of these.
_PLAIN = (str, bytes, int, float, type(None))
_OF_OTHERS = ("keras.", "tensorflow.", "parallel_keras.", "numpy.", "torch.")


def of_layer(layer, is_of_keras):
    """The names of the attributes in which a layer holds such a variable, itself or deep inside.

    Looked through are containers, objects of the user's own, `tf.Module`s, and what functions
    refer to. Other layers speak for themselves.

    Args:
        layer: A Keras layer.
        is_of_keras: Bool. Whether its class is Keras's own and calls no function of the
            user's: such a one is looked at no deeper than its attributes.
    """
    if keras.backend.backend() != "tensorflow":
        return []
    # Those with this prefix are TensorFlow's notes of what is there anyway.
    held = {name: value for name, value in vars(layer).items() if not name.startswith("_self_")}
    if is_of_keras:
        return [name for name, value in held.items() if keras_internals.is_raw_tf_variable(value)]
    held = {"call": type(layer).call, **held}  # which may refer to a global one
    return [name for name, value in held.items() if _holds_one(value, layer)]


def _holds_one(value, layer):
    # One after another: what a user's objects refer to may be a long chain.
    waiting, seen = [value], {id(layer)}
    while waiting:
        one = waiting.pop()
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        if keras_internals.is_raw_tf_variable(one):
            return True
        seen.add(id(one))
        waiting += _parts(one)
    return False


def _parts(value):
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, (type, types.ModuleType, keras.Variable)):
        return []
    if isinstance(value, keras_internals.KerasSaveable) or _is_of_others(type(value)):
        return _variables_of_module(value)
    return list(getattr(value, "__dict__", {}).values())


def _is_of_others(thing):
    return f"{thing.__module__}.".startswith(_OF_OTHERS)


def _variables_of_module(value):
    """Those of a `tf.Module` that is TensorFlow's own, as a dense layer of another library."""
    is_module = any(
        base.__module__ == "tensorflow.python.module.module" for base in type(value).__mro__
    )
    return list(value.variables) if is_module else []


def _parts_of_function(function):
    if _is_of_others(function):
        return []
    parts = [name for name in function.__code__.co_names if name in function.__globals__]
    parts = [function.__globals__[name] for name in parts]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    # A model, or a layer, that a function refers to is looked at where it belongs.
    return [part for part in parts if not isinstance(part, keras_internals.KerasSaveable)]
