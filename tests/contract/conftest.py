"""The contract tests run on one backend, and end with a table of what was measured."""

import os

import pytest

BACKEND = os.environ.get("KERAS_BACKEND")

if not BACKEND:
    collect_ignore_glob = ["test_*.py"]


def pytest_sessionfinish(session):
    """A process of pytest-xdist hands its lines to the one that prints them."""
    output = getattr(session.config, "workeroutput", None)
    if BACKEND and output is not None:
        import harness

        output["table"] = harness.TABLE


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    import harness

    harness.TABLE += [tuple(row) for row in getattr(node, "workeroutput", {}).get("table", ())]


def pytest_terminal_summary(terminalreporter):
    if not BACKEND:
        terminalreporter.write_line(
            "tests/contract was not run: it needs KERAS_BACKEND=tensorflow or torch"
        )
        return
    import harness

    if harness.TABLE:
        terminalreporter.section(f"largest difference to plain Keras, {BACKEND}")
        for line in harness.table():
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True, scope="session")
def _datasets_end_at_once():
    """TensorFlow: an iterator that is thrown away does not wait for the thread that tunes it.

    It is woken before it is told to end, and then, on a busy machine, may sleep on for a
    minute. What it tunes is only how many elements are prepared at a time.
    """
    if BACKEND != "tensorflow":
        yield
        return
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    stock = tf.data.Dataset.__iter__

    def untuned(self):
        return stock(self.with_options(options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.data.Dataset, "__iter__", untuned)
        yield


@pytest.fixture(autouse=True)
def _plain_keras_between_tests():
    """A test that changes the global dtype policy or type does not leak it."""
    import keras

    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
