"""What all tests share: the package comes first, and `--long` runs the whole grid."""

import gc
import os

import pytest

# A test run is for one backend. Without one, only the tests that need no
# framework are collected (see the conftest of each room).
BACKEND = os.environ.get("KERAS_BACKEND")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

if BACKEND:
    # Before anything starts TensorFlow, which fixes the number of CPU devices.
    import parallel_keras  # noqa: F401  imported for what it does to TensorFlow


def pytest_addoption(parser):
    parser.addoption(
        "--long",
        action="store_true",
        help="also run what only `make test-all` runs: every case at 1, 2, 3 and 4 replicas",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "long(backend): only `make test-all` (`pytest --long`) runs it (on this backend)"
    )
    config.addinivalue_line("markers", "backend(name): runs on this Keras backend only")
    # Keras 3.15.1 with numpy 2 warns of this at every conversion.
    config.addinivalue_line(
        "filterwarnings", "ignore:__array__ implementation doesn't accept:DeprecationWarning"
    )


def pytest_collection_modifyitems(config, items):
    everything = config.getoption("--long") or "long" in config.option.markexpr
    kept, dropped = [], []
    for item in items:
        backends = [mark.args[0] for mark in item.iter_markers("backend")]
        wrong_backend = backends and BACKEND not in backends
        too_long = not everything and any(
            not mark.args or BACKEND in mark.args for mark in item.iter_markers("long")
        )
        (dropped if wrong_backend or too_long else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_sessionstart(session):
    # What was imported stays: no collection of garbage need walk through it again.
    gc.freeze()


@pytest.fixture(scope="session")
def backend():
    """The name of the Keras backend of this run."""
    return BACKEND
