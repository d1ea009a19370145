"""The way to an object inside of a model, for messages.

What cannot be pickled is often not in the model but in what the model's functions
and classes refer to, which cloudpickle sends along where they cannot be imported.
"""

import functools
import types

import keras
import torch

from parallel_keras.backends.torch.importing import is_importable
from parallel_keras.backends.torch.reducers import BOOKKEEPING


def path_to(culprit, thing):
    """The shortest way from a thing to an object in it, as an expression.

    Args:
        culprit: The object to find, by identity.
        thing: Where to start, usually a Keras model.

    Returns:
        A string such as `"Sequential.layers[2].handle"`.
    """
    waiting, seen = [(type(thing).__name__, thing)], {id(thing)}
    kept = []  # made on the way: an id is one object's only as long as it lives
    for path, part in waiting:  # grows as it goes: breadth first
        if part is culprit:
            return path
        for name, inner in _parts(part):
            kept.append(inner)
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.append((path + name, inner))
    return "an object that it refers to"


def _parts(thing):
    if isinstance(thing, dict):
        return [(f"[{key!r}]", value) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return [(f"[{number}]", value) for number, value in enumerate(thing)]
    if isinstance(thing, types.FunctionType):
        return _parts_of_function(thing)
    if isinstance(thing, types.MethodType):
        return [(".__self__", thing.__self__), (".__func__", thing.__func__)]
    if isinstance(thing, functools.partial):
        return [(".func", thing.func), (".args", thing.args), (".keywords", thing.keywords)]
    if isinstance(thing, property):
        return [(f".{name}", getattr(thing, name)) for name in ("fget", "fset")]
    if isinstance(thing, (staticmethod, classmethod)):
        return [("", thing.__func__)]
    if isinstance(thing, type):
        members = () if is_importable(thing) else vars(thing).items()
        return [(f".{key}", value) for key, value in members]
    if isinstance(thing, (types.ModuleType, torch.Tensor)):
        return []  # a module goes by its name, or is too wide to look through
    return [*_members(thing), (f" (class {type(thing).__name__})", type(thing))]


def _members(thing):
    # Past properties and `__getattr__`, which do things: names are read where they are kept.
    members = _kept(thing)
    parts = []
    if isinstance(thing, keras.Model):
        parts = [(f".layers[{n}]", layer) for n, layer in enumerate(thing.layers)]
    if isinstance(thing, torch.nn.Module):
        for store in ("_modules", "_parameters", "_buffers"):  # attributes, to who wrote them
            parts += [(f".{key}", value) for key, value in members.get(store, {}).items()]
    parts += [(f".{key}", value) for key, value in members.items() if key not in BOOKKEEPING]
    for cls in type(thing).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):  # a slot
                try:
                    parts.append((f".{name}", member.__get__(thing)))
                except AttributeError:
                    continue
    return parts


def _kept(thing):
    try:
        return object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}


def _parts_of_function(function):
    if is_importable(function):
        return []
    parts = []
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            parts.append((f" (variable {name!r})", cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    parts += [(f" (default {value!r})", value) for value in defaults]
    names = [name for name in _names(function.__code__) if name in function.__globals__]
    parts += [(f" (global {name!r})", function.__globals__[name]) for name in names]
    return [*parts, *[(f".{key}", value) for key, value in vars(function).items()]]


def _names(code):
    """The names that a function and the functions inside of it look up."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return names
