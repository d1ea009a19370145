"""State that layers assign in inference too: as on one device, or refused in the step."""

import keras
import numpy as np
import pytest
import rows
from cases import adam, compiled
from harness import compare, fit, make, state
from keras import layers, ops

import parallel_keras as pk

ROWS = 33  # the last batch has one row
OPTIONS = {"batch_size": 16, "verbose": 0}


class Seen(layers.Layer):
    """Counts its calls and adds up the means of what it is given, whatever the pass is for."""

    def build(self, shape):
        options = {"initializer": "zeros", "trainable": False}
        self.calls = self.add_weight(name="calls", dtype="int32", **options)
        self.marked = self.add_weight(name="marked", dtype="int32", **options)
        self.means = self.add_weight(name="means", shape=(shape[-1],), **options)

    def call(self, x):
        self.calls.assign_add(1)
        self.marked.assign_add(ops.cast(ops.any(ops.abs(x) > 500.0), "int32"))
        self.means.assign_add(ops.mean(x, axis=0))
        return x


def first():
    inputs = keras.Input((6,))
    x = layers.Dense(5, "tanh")(Seen(name="seen")(inputs))
    return keras.Model(inputs, layers.Dense(3, "softmax")(x))


def last():
    """On the second stage of two, and on the first too."""
    inputs = keras.Input((6,))
    with pk.place(0):
        x = layers.Dense(5, "tanh")(Seen(name="seen")(inputs))
    with pk.place(1):
        return keras.Model(inputs, layers.Dense(3, "softmax")(Seen(name="again")(x)))


class AlwaysNorm(layers.Layer):
    """Moving averages of Keras's own that move in each pass."""

    def __init__(self, **options):
        super().__init__(**options)
        self.norm = layers.BatchNormalization(epsilon=0.1)

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x):
        return self.norm(x, training=True)


def norm():
    inputs = keras.Input((6,))
    with pk.place(0):
        x = layers.Dense(5, "tanh")(inputs)
    with pk.place(1):
        return keras.Model(inputs, layers.Dense(3, "softmax")(AlwaysNorm()(x)))


STRATEGIES = {
    "data2": "data=2",
    "data3": "data=3",
    "pipeline2": "pipeline=2",
    "pipeline2x4": pk.PipelineParallel(2, microbatches=4),
    "pipeline2x1": pk.PipelineParallel(2, microbatches=1),
    "model2": "model=2",
}
SPREAD = ["data2", "pipeline2"]


def _model(build, strategy):
    return make(build, compiled(adam, metrics=None)(), strategy)


def _data(row=None):
    data = rows.classes(ROWS)
    if row is not None:
        data["x"][row] = 600.0
    return data


def _state(model):
    found = [v for v in model.non_trainable_variables if "seed" not in v.path]
    return [np.array(ops.convert_to_numpy(v)) for v in found]


def _record(model):
    """The state after each of what a program may do, in an order in which each follows each."""
    data = _data()
    validation = {"validation_data": (data["x"], data["y"]), "validation_batch_size": 16}
    does = {
        "predict": lambda: model.predict(data["x"], **OPTIONS),
        "evaluate": lambda: model.evaluate(**data, **OPTIONS),
        "fit": lambda: fit(model, **data, shuffle=False, epochs=2, **validation, **OPTIONS),
        "predict_on_batch": lambda: model.predict_on_batch(data["x"][:1]),
        "test_on_batch": lambda: model.test_on_batch(data["x"], data["y"]),
        "train_on_batch": lambda: model.train_on_batch(data["x"], data["y"]),
    }
    order = [*does, "predict", "fit", "evaluate", "predict", "train_on_batch", "evaluate"]
    return [(name, does[name](), _state(model))[2] for name in order], state(model)


@pytest.fixture(scope="module")
def expected():
    known = {}

    def record(build):
        if build not in known:
            known[build] = _record(_model(build, None))
        return known[build]

    return record


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("build", [first, last])
def test_between_fits(build, strategy, expected):
    moves = expected(build)[0]
    assert all(np.any(x != y) for x, y in zip(moves[0], moves[1], strict=True) if x.any())
    received = _record(_model(build, STRATEGIES[strategy]))
    compare(f"inference {build.__name__}", strategy, expected(build), received)


@pytest.mark.parametrize("strategy", ["pipeline2", "pipeline2x4"])
def test_moving_averages(strategy):
    """They take the statistics of the whole batch, whichever each micro-batch is scaled by."""
    found = []
    for one in (None, STRATEGIES[strategy]):
        model = _model(norm, one)
        before = _state(model)
        model.predict(_data()["x"], **OPTIONS)
        model.predict(_data()["x"][:16], **OPTIONS)
        found.append(_state(model))
        assert all(np.any(x != y) for x, y in zip(before, found[-1], strict=True))
    compare("inference norm", strategy, *found)


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.parametrize("row", [0, 31], ids=["first", "last"])
@pytest.mark.parametrize("method", ["predict", "evaluate"])
def test_whole_numbers_that_differ_are_refused(method, row, strategy):
    model = _model(first, STRATEGIES[strategy])
    data = {key: value[:32] for key, value in _data(row).items()}
    arguments = [data["x"]] if method == "predict" else [data["x"], data["y"]]
    with pytest.raises(pk.UnsupportedError, match=r"(?s)Received: variable seen.marked"):
        getattr(model, method)(*arguments, **OPTIONS)
    assert model.predict(_data()["x"], **OPTIONS).shape == (ROWS, 3), "it goes on"
