"""What Python objects refer to, and how an expression says so. Knows no framework.

Functions and classes are looked into as well: a variable, or a file, may be held by what a
lambda names and by nothing else. Which of them are worth it is for each walk to say.
"""

import functools
import types

ATTRIBUTE = ".{}"

# They refer to nothing, and a vocabulary may have millions of these.
_PLAIN = (str, bytes, int, float, complex, type(None))


def walk(thing, references):
    """All that can be reached from an object, each once and the nearest first.

    Args:
        thing: Where to start.
        references: Function from an object to triples as those of `of`.

    Yields:
        Pairs of an object and the way to it, for `expression`.
    """
    waiting: list = [(thing, ())]
    seen = {id(thing)}
    for one, way in waiting:  # grows as it goes, and keeps alive what the ids belong to
        yield one, way
        for form, name, inner in references(one):
            if not isinstance(inner, _PLAIN) and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append((inner, (way, form, name)))


def expression(way):
    """What is written after an object to get to where a way leads, as `.layers[2].handle`."""
    texts = []
    while way:
        way, form, name = way
        texts.append(form.format(name))
    return "".join(reversed(texts))


def of(thing):
    """What an object refers to.

    Returns:
        A list of triples `(form, name, value)`; the name put into the form says where the
        value is. A module has none: it goes by its name, and is too wide to look through.
    """
    if isinstance(thing, dict):
        return [("[{!r}]", key, value) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return [("[{}]", number, value) for number, value in enumerate(thing)]
    if isinstance(thing, types.FunctionType):
        return _of_function(thing)
    if isinstance(thing, type):
        bases = [(" (base {})", base.__name__, base) for base in thing.__bases__]
        return [*_named(vars(thing)), *bases]
    if isinstance(thing, types.ModuleType):
        return []
    for kind, names in _PARTS.items():
        if isinstance(thing, kind):
            return [(ATTRIBUTE, name, getattr(thing, name)) for name in names]
    return _of_object(thing)


_PARTS = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}


def names(code):
    """The names that a function and the functions inside of it look up."""
    found = list(code.co_names)
    for constant in code.co_consts:  # a lambda, or a comprehension
        if isinstance(constant, types.CodeType):
            found += names(constant)
    return found


def _named(members):
    return [(ATTRIBUTE, name, value) for name, value in members.items()]


def _of_object(thing):
    # Past properties and `__getattr__`, which do things: names are read where they are kept.
    try:
        members = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        members = {}
    found = _named(members)
    for cls in type(thing).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):  # a slot
                try:
                    found.append((ATTRIBUTE, name, member.__get__(thing)))
                except AttributeError:
                    continue
    return [*found, (" (class {})", type(thing).__name__, type(thing))]


def _of_function(function):
    found = []
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            found.append((" (variable {!r})", name, cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    found += [(" (default {!r})", value, value) for value in defaults]
    space = function.__globals__
    used = dict.fromkeys(name for name in names(function.__code__) if name in space)
    found += [(" (global {!r})", name, space[name]) for name in used]
    return [*found, *_named(vars(function))]
