"""What a worker can import by name, as the caller has it.

cloudpickle takes whatever is in `sys.modules` for importable. A module that was loaded
from a path of its own, or made by hand, is not: its functions and classes have to go
by value, as those of the user's script do. The other way round, a lambda inside of a
function of a module has no name to be imported by, but a place in that function's code:
Keras has half a dozen of them in each layer.
"""

import contextlib
import importlib
import inspect
import os
import sys
import types
from typing import Any

import cloudpickle


def is_importable(thing):
    """Whether a worker finds a function or class where it says that it is."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    if module is None or not is_importable_module(module.__name__):
        return False
    return _named(module, thing.__qualname__) is thing


def is_importable_module(name):
    """Whether an import in a process with our import path gives what we have imported."""
    if name in cloudpickle.list_registry_pickle_by_value():
        return False  # the user says that it is not
    # A package that is found is trusted with what is in it.
    return _is_found(name.partition(".")[0]) and not _is_reloaded(name)


@contextlib.contextmanager
def by_value_where_needed():
    """Surrounds a pickling by cloudpickle.

    Yields:
        A function to be told the name of each module that is met.
    """
    known: set = set()
    packages: dict = {}
    before = cloudpickle.list_registry_pickle_by_value()

    def meet(name):
        if name in known:
            return
        known.add(name)
        module = sys.modules.get(name)
        if name in before or name == "__main__" or not hasattr(module, "__name__"):
            return  # cloudpickle knows by itself
        package = name.partition(".")[0]
        if package not in packages:
            packages[package] = _is_found(package)
        if not packages[package] or _is_reloaded(name):
            cloudpickle.register_pickle_by_value(module)

    try:
        yield meet
    finally:
        # The user's own use of cloudpickle is as it was.
        for name in cloudpickle.list_registry_pickle_by_value() - before:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])


def inner_function(function):
    """Where a function without state stands inside of one that a worker can import.

    Returns:
        The arguments of `make_inner_function`, or `None`.
    """
    code = function.__code__
    if id(code) not in _places:
        _places[id(code)] = code, _place(function)  # the id is its own while we keep it
    stateless = not (function.__closure__ or function.__defaults__ or function.__kwdefaults__)
    return _places[id(code)][1] if stateless and not vars(function) else None


def make_inner_function(module, outer, numbers, qualname):
    """The function that `inner_function` told the place of."""
    function = inspect.unwrap(_named(importlib.import_module(module), outer))
    code = function.__code__
    for number in numbers:
        code = code.co_consts[number]
    made = types.FunctionType(code, function.__globals__)
    made.__qualname__ = qualname
    return made


def _is_found(package):
    if package == "__main__":
        return False
    module, spec = sys.modules.get(package), _find(package)
    if module is None or spec is None:
        return False
    file = getattr(module, "__file__", None)
    if file is None or not spec.has_location:  # built in, or a package without a file
        return getattr(module, "__spec__", None) is not None
    return os.path.realpath(file) == os.path.realpath(spec.origin)


def _find(name):
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # other people's finders
            spec = finder.find_spec(name, None)
            if spec is not None:
                return spec
    return None


_specs: dict = {}


def _is_reloaded(name):
    """Whether a module was loaded anew since we first saw it: workers have the old one."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return _specs.setdefault(name, spec) is not spec


_places: dict = {}


def _place(function):
    outer, inside, _ = function.__qualname__.partition(".<locals>.")
    module = sys.modules.get(function.__module__ or "")
    if not inside or module is None or not is_importable_module(function.__module__):
        return None
    found = _named(module, outer)
    found = found if found is None else inspect.unwrap(found)
    if not isinstance(found, types.FunctionType) or found.__globals__ is not function.__globals__:
        return None
    numbers = _numbers(found.__code__, function.__code__)
    return numbers and (function.__module__, outer, numbers, function.__qualname__)


def _named(module, qualname):
    """What a module has under a name, or `None`."""
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


def _numbers(code, wanted):
    """The numbers of the constants that lead from a function's code to one inside of it."""
    for number, constant in enumerate(code.co_consts):
        if constant is wanted:
            return (number,)
        if isinstance(constant, types.CodeType):
            rest = _numbers(constant, wanted)
            if rest:
                return (number, *rest)
    return None
