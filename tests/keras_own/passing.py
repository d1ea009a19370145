"""A pytest plugin: every model of a test run goes through `parallelize`, and what it gives is kept.

Keras's own tests run as they are. A model gets the strategy when it is compiled, or
when it first runs; what `fit`, `evaluate`, `predict` and the on_batch methods give,
with the weights and the optimizer's state afterwards, is written down for each test,
so that two runs (with no strategy and with one) can be compared. With
`--pass-through=single` nothing is changed, only written down.
"""

import functools
import pickle

import keras
import numpy as np
import pytest
import stand_ins
from keras import tree
from keras.src.backend.common import global_state
from keras.src.testing import test_case, test_utils
from keras.src.trainers import trainer

import parallel_keras as pk
from parallel_keras import capabilities, features, keras_internals
from parallel_keras.state import RUNS

SEED = 1337
MARKERS = ("requires_trainable_backend", "multi_device")
# A refusal that is no line of the capability table: most models of the tests are one layer.
_TOO_SMALL = "cannot be cut into"
_TRAINING = ("fit", "train_on_batch")


class Notes:
    """What is written down of one test.

    Attributes:
        outcome: String: `"passed"`, `"failed"` or `"skipped"`.
        message: String, why it did not pass.
        calls: List of pairs of a method's name and what it gave.
        spread: Int. How many of the calls ran under the strategy.
        refused: List of the features that were refused.
    """

    def __init__(self):
        self.outcome, self.message = "", ""
        self.calls: list = []
        self.spread = 0
        self.refused: list = []


class Recorder:
    """Passes the models of one test run through a strategy, and keeps what they give."""

    def __init__(self, strategy, path):
        self.strategy, self.path = strategy, path
        self.tests: dict = {}
        self.notes = Notes()
        self.depth = 0

    # ---- what is replaced in Keras, and in the package ----

    def install(self):
        # On the base class: with another `compile` on keras.Model, Keras would take it
        # for the user's own and `load_model` would not compile.
        trainer.Trainer.compile = self._compile(trainer.Trainer.compile)
        owner = stand_ins.backend_trainer
        for name in RUNS:
            setattr(owner, name, self._run(name, getattr(owner, name)))
        capabilities.check = self._check(capabilities.check)
        features.is_keras = _but_of_tests(features.is_keras)
        test_utils.get_test_data = _seeded(test_utils.get_test_data)
        test_case.clear_session = _keeping_workers(test_case.clear_session)

    def _passes(self, model):
        return self.strategy != "single" and keras_internals.STATE not in vars(model)

    def _parallelize(self, model):
        pk.parallelize(model, self.strategy)
        for name in RUNS:
            vars(model)[name] = self._recorded(name, vars(model)[name], model)

    def _compile(self, stock):
        @functools.wraps(stock)
        def compile(model, *args, **kwargs):
            if kwargs.get("jit_compile") is True:
                kwargs["jit_compile"] = (
                    False  # refused under every strategy, and slow in plain Keras
                )
            if self._passes(model) and type(model).compile is compile:
                self._parallelize(model)
                return model.compile(*args, **kwargs)
            return stock(model, *args, **kwargs)

        return compile

    def _run(self, name, stock):
        @functools.wraps(stock)
        def run(model, *args, **kwargs):
            if self._passes(model) and getattr(type(model), name) is run:
                self._parallelize(model)
                return getattr(model, name)(*args, **kwargs)
            if keras_internals.STATE in vars(model):
                return stock(model, *args, **kwargs)
            bound = functools.partial(stock, model)
            return self._recorded(name, bound, model)(*args, **kwargs)

        return run

    def _recorded(self, name, method, model):
        @functools.wraps(method)
        def run(*args, **kwargs):
            if self.depth:
                return method(*args, **kwargs)
            self.depth += 1
            try:
                result = method(*args, **kwargs)
            except Exception as error:
                self.notes.calls.append((name, f"{type(error).__name__}: {error}"))
                raise
            finally:
                self.depth -= 1
            self.notes.spread += (
                keras_internals.STATE in vars(model) and model.strategy.name != "single"
            )
            self.notes.calls.append((name, _plain(result)))
            if name in _TRAINING:
                self.notes.calls.append(("weights", _plain(model.variables)))
                if getattr(model, "optimizer", None) is not None:
                    self.notes.calls.append(("optimizer", _plain(model.optimizer.variables)))
            return result

        return run

    def _check(self, stock):
        def check(feature, *args, **kwargs):
            try:
                stock(feature, *args, **kwargs)
            except pk.UnsupportedError:
                self.notes.refused.append(feature)
                raise

        return check

    # ---- pytest ----

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self):
        with stand_ins.jax_at_import():
            return (yield)

    def pytest_collection_finish(self, session):
        if keras.config.backend() == "torch":
            import cloudpickle

            # Workers have no jax and no conftest: they cannot import the tests.
            for module in {item.module for item in session.items}:
                cloudpickle.register_pickle_by_value(module)
            # A loss that calls `self.assertEqual` would take pytest itself along.
            test_case.TestCase.__reduce__ = lambda test: (test_case.TestCase, ())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.notes = self.tests[item.nodeid] = Notes()
        self.depth = 0
        # The same data and the same first weights in both runs.
        keras.utils.set_random_seed(SEED)
        return (yield)

    def pytest_runtest_logreport(self, report):
        notes = self.tests[report.nodeid]
        if report.when == "call" or report.outcome != "passed":
            if notes.outcome != "failed":
                notes.outcome = report.outcome
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                notes.message = crash.message if crash else str(report.longrepr)
                if _TOO_SMALL in notes.message:
                    notes.refused.append("too_few_layers")

    def pytest_sessionfinish(self):
        kept = {test: vars(notes) for test, notes in self.tests.items()}
        with open(self.path, "wb") as file:
            pickle.dump(kept, file)


def _but_of_tests(is_keras):
    """The tests stand among Keras's modules, but what they define is a user's."""

    def is_keras_itself(thing):
        module = getattr(thing, "__module__", None) or type(thing).__module__ or ""
        return is_keras(thing) and not module.endswith("_test")

    return is_keras_itself


def _plain(result):
    """What a method gave, as numbers."""
    if isinstance(result, keras.callbacks.History):
        result = result.history
    # Paths, not structures: a test's own named tuple cannot be pickled.
    return [("/".join(map(str, path)), _array(leaf)) for path, leaf in _leaves(result)]


def _leaves(result):
    return tree.flatten_with_path(result) if tree.is_nested(result) else [((), result)]


def _array(leaf):
    if isinstance(leaf, keras.Variable) or keras.ops.is_tensor(leaf):
        try:
            leaf = keras.ops.convert_to_numpy(leaf)
        except Exception:  # ragged tensors, and variables whose value is gone
            return str(type(leaf).__name__)
    if isinstance(leaf, (bool, int, float, np.ndarray, np.generic)):
        return np.array(leaf)
    return str(type(leaf).__name__)


def _seeded(get_test_data):
    """The rows that tests draw without a seed are the same in both runs."""

    def seeded(*args, **kwargs):
        return get_test_data(*args, **{"random_seed": SEED, **kwargs})

    return seeded


def _keeping_workers(clear_session):
    """Keras clears the session before each test: the workers, which end with it, live on."""

    def clear(*args, **kwargs):
        token = global_state.get_global_attribute(keras_internals.SESSION)
        clear_session(*args, **kwargs)
        if token is not None:
            global_state.set_global_attribute(keras_internals.SESSION, token)

    return clear


def pytest_addoption(parser):
    parser.addoption("--pass-through", default="single", help="the strategy of every model")
    parser.addoption("--record", default="record.pickle", help="where to write what they gave")


def pytest_configure(config):
    for name in MARKERS:
        config.addinivalue_line("markers", f"{name}: a mark of Keras's tests")
    stand_ins.install_conftest()
    stand_ins.make_trainers_models()
    recorder = Recorder(config.getoption("--pass-through"), config.getoption("--record"))
    recorder.install()
    config.pluginmanager.register(recorder)
