"""Keras's global state: registered objects, devices, `clear_session`."""

import contextlib
import weakref

from keras.src.backend.common import global_state
from keras.src.saving import object_registration


def registered_objects():
    """Custom objects known by name: the registered ones, those of a scope around us.

    saving/object_registration.py, 3.15.1.
    """
    scope = global_state.get_global_attribute(_SCOPE_OF_OBJECTS) or {}
    return {"registered": dict(object_registration.GLOBAL_CUSTOM_OBJECTS), "scope": dict(scope)}


def register_objects(objects):
    """Have the custom objects known that `registered_objects` named in the caller."""
    for name, thing in objects["registered"].items():
        object_registration.GLOBAL_CUSTOM_OBJECTS[name] = thing
        object_registration.GLOBAL_CUSTOM_NAMES[thing] = name
    global_state.set_global_attribute(_SCOPE_OF_OBJECTS, objects["scope"])


_SCOPE_OF_OBJECTS = "custom_objects_scope_dict"


def global_state_snapshot():
    """Keras's global attributes of this thread. backend/common/global_state.py, 3.15.1."""
    return dict(vars(global_state.GLOBAL_STATE_TRACKER))


def with_global_state(state, function):
    """`function`, to be run in another thread under this thread's global attributes."""

    def run():
        vars(global_state.GLOBAL_STATE_TRACKER).update(state)
        function()

    return run


@contextlib.contextmanager
def keeping_names():
    """What is made inside does not count in the names that Keras gives out.

    utils/naming.py, 3.15.1.
    """
    before = dict(global_state.get_global_attribute(_NAMES, {}))
    try:
        yield
    finally:
        names = global_state.get_global_attribute(_NAMES)
        if names is not None:
            names.clear()
            names.update(before)


_NAMES = "object_name_uids"


def torch_device():
    """The current device of Keras on torch, as a string. backend/torch/core.py, 3.15.1."""
    from keras.src.backend.torch import core

    return str(core.get_device())


def default_torch_device():
    """The device of Keras on torch outside of any scope."""
    from keras.src.backend.torch import core

    return str(core.DEFAULT_DEVICE)


def set_torch_device(device):
    """Make a device the current one; returns what was current, `None` for the default."""
    before = global_state.get_global_attribute("torch_device", None)
    global_state.set_global_attribute("torch_device", device)
    return before


class _Token:
    """An object that can be referred to weakly."""


SESSION = "parallel_keras_session"


def tie_to_session(callback):
    """Have `callback` called when `keras.utils.clear_session()` drops the global state.

    backend/common/global_state.py, 3.15.1: the state is one thread-local object,
    which clear_session replaces.

    Args:
        callback: A weak reference to a function.
    """

    def call():
        function = callback()
        # One that was replaced by a newer one says nothing, and may go late:
        # the traceback of an exception can hold it.
        if function is not None and global_state.get_global_attribute(SESSION) is None:
            function()

    token = _Token()
    weakref.finalize(token, call).atexit = False
    global_state.set_global_attribute(SESSION, token)
