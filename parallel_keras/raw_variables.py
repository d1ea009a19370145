"""Where a layer keeps `tf.Variable`s that Keras does not know.

Strategies copy and combine Keras's variables. What is in a raw one would be written once by
each replica, and once for each micro-batch.
"""

import functools
import pathlib
import sys
import types

import keras

from parallel_keras import keras_internals, references

_OF_OTHERS = {"keras", "tensorflow", "parallel_keras", "numpy", "torch"}
# Methods of a layer that no step calls. What they make and keep is among its attributes.
_NOT_IN_A_STEP = {"__init__", "get_config", "from_config"}
_INSTALLED = {"site-packages", "dist-packages"}


def of_layer(layer, is_of_keras):
    """The names of the attributes in which a layer holds such a variable, itself or deep inside.

    Looked through are containers, objects of the user's own, `tf.Module`s, and what functions
    and methods refer to. Other layers speak for themselves.

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
    classes = [cls for cls in reversed(type(layer).__mro__) if _may_be_the_users(cls)]
    own = {name: value for cls in classes for name, value in vars(cls).items()}
    own = {name: value for name, value in own.items() if name not in _NOT_IN_A_STEP}
    references_of = functools.partial(
        references_of_users, home={package_of(cls) for cls in classes}
    )
    return [name for name, value in {**own, **held}.items() if _holds_one(value, references_of)]


def _holds_one(value, references_of):
    found = references.walk(value, references_of)
    return any(keras_internals.is_raw_tf_variable(one) for one, _ in found)


def references_of_users(value, home):
    """As `references.of`, for what may lead to the user's variables.

    Args:
        value: Any object.
        home: Set of strings, the packages that the layer's own classes are of.
    """
    if isinstance(value, (dict, list, tuple, set, frozenset)):  # of Keras's own kinds, too
        return references.of(value)
    if isinstance(value, (types.FunctionType, type)):
        is_left_out = _is_of_a_layer(value) or _is_of_a_library(value, home)
        return [] if is_left_out else [*references.of(value), *_of_modules(value, home)]
    if isinstance(value, keras.Variable):
        return []
    is_of_keras = isinstance(value, keras_internals.KerasSaveable)
    return _of_others(value) if is_of_keras or _is_of_others(type(value)) else references.of(value)


def _is_of_a_layer(value):
    # A layer that a function refers to, or the class of one, is looked at where it belongs.
    return isinstance(value, type) and issubclass(value, keras_internals.KerasSaveable)


def _of_modules(code, home):
    """What a function may take from modules that it refers to, as `counts.total`."""
    if isinstance(code, type):
        return []
    names, found = references.names(code.__code__), []
    modules = _own_modules(code.__globals__, names, home)
    for module in modules:  # grows, by modules inside of modules
        found += [(".{}", name, vars(module)[name]) for name in names if name in vars(module)]
        inside = _own_modules(vars(module), names, home)
        modules += [one for one in inside if one not in modules]
    return found


def _own_modules(space, names, home):
    found = [space.get(name) for name in names]
    modules = [one for one in found if isinstance(one, types.ModuleType)]
    return [one for one in modules if not _is_of_a_library(one, home)]


def _of_others(value):
    """What is of the user in an object of another library.

    That is the variables of a `tf.Module` of TensorFlow's own, and what was decorated.
    """
    is_module = any(
        base.__module__ == "tensorflow.python.module.module" for base in type(value).__mro__
    )
    found = {"__wrapped__": getattr(value, "__dict__", {}).get("__wrapped__")}
    return references.of({**found, "variables": value.variables} if is_module else found)


def _is_of_others(thing):
    return package_of(thing) in _OF_OTHERS


def _may_be_the_users(thing):
    return not _is_of_others(thing) and package_of(thing) not in sys.stdlib_module_names


def _is_of_a_library(thing, home):
    """Whether a module, class or function is of an installed library, not of the layer's own.

    What these refer to has no end: it may be all that a notebook has.
    """
    if package_of(thing) in home:
        return False
    file = getattr(sys.modules.get(_module_name(thing)), "__file__", None) or ""
    is_installed = not _INSTALLED.isdisjoint(pathlib.PurePath(file).parts)
    return is_installed or not _may_be_the_users(thing)


def package_of(thing):
    return _module_name(thing).partition(".")[0]


def _module_name(thing):
    return str(thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__)
