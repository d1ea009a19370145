"""What a model costs is found with Keras: these tests run on one backend."""

import os

import pytest

BACKEND = os.environ.get("KERAS_BACKEND")

if not BACKEND:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _plain_keras_between_tests():
    """A test that changes the global dtype policy does not leak it."""
    import keras

    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)
