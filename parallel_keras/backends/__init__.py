"""The two lowerings, and the one line that chooses between them.

Each backend is a package with the same rooms and the same function names:

    devices.py   available(), reserve_cpu_devices(n), bring_home(model), HOST
    data.py      Lowering(model, strategy)
    model.py     Lowering(model, strategy)
    runtime.py   prepare(), shutdown()

A backend is loaded when it is first needed, and never the other one.
"""

import importlib
import types

import keras

SUPPORTED = ("tensorflow", "torch")


def name():
    """The Keras backend of this process, or a ValueError for another one."""
    backend = keras.backend.backend()
    if backend not in SUPPORTED:
        raise ValueError(
            "parallel_keras runs on the Keras backends 'tensorflow' and 'torch'. "
            "Set KERAS_BACKEND to one of them before importing keras. "
            f"Received: KERAS_BACKEND={backend!r}"
        )
    return backend


def prepare():
    """Called when the package is imported, before the user's models are made."""
    name()  # refuses a backend that is not supported
    room("runtime").prepare()


def room(name_of_room):
    """A module of the current backend, such as `room("data")`."""
    return importlib.import_module(f"{__name__}.{name()}.{name_of_room}")


def current():
    """The current backend's rooms: `.devices`, `.runtime`."""
    return types.SimpleNamespace(devices=room("devices"), runtime=room("runtime"))
