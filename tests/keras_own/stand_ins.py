"""What Keras's tests expect around them, and no wheel holds.

Also the base class that makes models of trainer_test's "layer mixed in with a Trainer".
"""

import contextlib
import importlib.util
import sys
import types

import keras
import pytest

# The class that has `fit`.
backend_trainer = next(base for base in keras.Model.__mro__ if "fit" in vars(base))


class TrainerAsModel(keras.Model):
    """In place of the backend's Trainer: what is mixed with a layer becomes a `keras.Model`.

    trainer_test calls `__init__` of the layer and of the Trainer itself, and has
    `build`, `call` and the config from the layer.
    """

    def __init__(self):
        backend_trainer.__init__(self)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for name in ("build", "call", "get_config"):
            owner = next(c for c in cls.__mro__ if name in vars(c) and c is not keras.Model)
            setattr(cls, name, vars(owner)[name])


def make_trainers_models():
    """From now on the tests that import the backend's Trainer get `TrainerAsModel`."""
    setattr(sys.modules[backend_trainer.__module__], backend_trainer.__name__, TrainerAsModel)


def install_conftest():
    """Tests import `skip_if_backend` from the conftest of Keras's repository."""
    conftest = types.ModuleType("conftest")
    conftest.skip_if_backend = _skip_if_backend
    sys.modules["conftest"] = conftest


def _skip_if_backend(name, reason):
    return pytest.mark.skipif(keras.config.backend() == name, reason=reason)


@contextlib.contextmanager
def jax_at_import():
    """trainer_test imports jax at its top, for tests that are skipped on other backends."""
    absent = importlib.util.find_spec("jax") is None
    if absent:
        sys.modules["jax"] = types.ModuleType("jax")
    try:
        yield
    finally:
        if absent:
            del sys.modules["jax"]
