"""What a worker can import by name, as the caller has it.

cloudpickle takes whatever is in `sys.modules` for importable. A module that was loaded
from a path of its own, or made by hand, is not: its functions and classes have to go
by value, as those of the user's script do.
"""

import contextlib
import os
import sys

import cloudpickle


def is_importable(thing):
    """Whether a worker finds a function or class where it says that it is."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    if module is None or not is_importable_module(module.__name__):
        return False
    found = module
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def is_importable_module(name):
    """Whether an import in a process with our import path finds what we have imported."""
    # A package that is found is trusted with what is in it.
    top = name.partition(".")[0]
    if top == "__main__":
        return False
    module, spec = sys.modules.get(top), _find(top)
    if module is None or spec is None:
        return False
    file = getattr(module, "__file__", None)
    if file is None or not spec.has_location:  # built in, or a package without a file
        return getattr(module, "__spec__", None) is not None
    return os.path.realpath(file) == os.path.realpath(spec.origin)


@contextlib.contextmanager
def by_value_where_needed():
    """Surrounds a pickling by cloudpickle.

    Yields:
        A function to be told the name of each module that is met.
    """
    known: dict = {}
    before = cloudpickle.list_registry_pickle_by_value()

    def meet(name):
        if name not in known:
            module = sys.modules.get(name)
            ours = name not in before and name != "__main__" and hasattr(module, "__name__")
            known[name] = ours and not is_importable_module(name)
            if known[name]:
                cloudpickle.register_pickle_by_value(module)

    try:
        yield meet
    finally:
        # The user's own use of cloudpickle is as it was.
        for name in cloudpickle.list_registry_pickle_by_value() - before:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])


def _find(name):
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # other people's finders
            spec = finder.find_spec(name, None)
            if spec is not None:
                return spec
    return None
