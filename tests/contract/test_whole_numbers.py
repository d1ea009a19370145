"""Whole numbers that a step assigns: as on one device, or refused in the step that parts them."""

import keras
import pytest
import rows
import step_models
from cases import compiled, own_steps
from harness import LONG_WHERE_TRACED, compare, fit, make
from keras import layers, ops

import parallel_keras as pk

ROWS, OPTIONS = 33, {"batch_size": 16, "verbose": 0, "shuffle": False}
FIRST, LAST, ALONE = 16, 31, 32  # of the second batch, and of one without other rows


def has_one(x):
    """Whether there is a row of a kind that no first batch has."""
    return ops.any((x > 500.0) & (x < 501.0))


def _zeros(owner, name, shape=(), dtype="int32"):
    return owner.add_weight(
        shape=shape, name=name, initializer="zeros", trainable=False, dtype=dtype
    )


class Step(step_models.Classifier):
    """Counts batches, and those with such a row, in a step of its own."""

    def __init__(self):
        super().__init__()
        self.noted, self.steps = _zeros(self, "noted"), _zeros(self, "steps")

    def train_step(self, data):
        found = super().train_step(data)
        self.noted.assign_add(ops.cast(has_one(data[0]), "int32"))
        self.steps.assign_add(1)
        return found


class Count(layers.Layer):
    """The same in a layer."""

    def build(self, shape):
        self.noted = _zeros(self, "noted")

    def call(self, x, training=False):
        if training:
            self.note(x)
        return x

    def note(self, x):
        self.noted.assign_add(1 + ops.cast(has_one(x), "int32"))


class Flag(Count):
    """A bool."""

    def build(self, shape):
        self.noted = _zeros(self, "noted", dtype="bool")

    def note(self, x):
        self.noted.assign(ops.logical_or(ops.convert_to_tensor(self.noted), has_one(x)))


class Place(Count):
    """Numbers of which the sum is the same either way."""

    def build(self, shape):
        self.noted = _zeros(self, "noted", (2,))

    def note(self, x):
        which = ops.cast(has_one(x), "int32")
        self.noted.assign_add(ops.stack([1 - which, which]))


class PlaceInStep(Step):
    def __init__(self):
        super().__init__()
        self.place = _zeros(self, "place_noted", (2,))

    def train_step(self, data):
        found = super(Step, self).train_step(data)
        which = ops.cast(has_one(data[0]), "int32")
        self.place.assign_add(ops.stack([1 - which, which]))
        return found


def _first(layer):
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(3, "softmax")(layer(inputs)))


def _second(layer):
    """On the second stage of two."""
    inputs = keras.Input((6,))
    with pk.place(0):
        x = layers.Dense(6, use_bias=False, kernel_initializer="identity")(inputs)
    with pk.place(1):
        return keras.Model(inputs, layers.Dense(3, "softmax")(layer(x)))


MODELS = {
    "step": Step,
    "place_in_step": PlaceInStep,
    "count": lambda: _first(Count()),
    "flag": lambda: _first(Flag()),
    "place": lambda: _first(Place()),
    "count_on_the_second": lambda: _second(Count()),
    "flag_on_the_second": lambda: _second(Flag()),
}
RUNS = [
    *((name, "data=2") for name in ("step", "place_in_step", "count", "flag", "place")),
    *((name, "pipeline=2") for name in ("count", "flag_on_the_second")),
    ("count_on_the_second", pk.PipelineParallel(2, recompute=True)),
]
# Those that `make test` runs where steps are traced.
TRACED = {("place_in_step", "data=2"), ("count", "data=2"), ("flag_on_the_second", "pipeline=2")}
CASES = [
    pytest.param(
        *case,
        id=f"{case[0]}-{case[1]}".split("(")[0],
        marks=[] if case in TRACED else LONG_WHERE_TRACED,
    )
    for case in RUNS
]


def _model(name, strategy):
    return make(MODELS[name], compiled(own_steps.still, metrics=None)(), strategy)


def _data(row):
    data = rows.classes(ROWS)
    if row is not None:
        data["x"][row] = 500.5
    return data


def _whole(model):
    found = [v for v in model.non_trainable_variables if not v.dtype.startswith("float")]
    return [ops.convert_to_numpy(ops.cast(v, "float32")) for v in found]


@pytest.mark.parametrize(("name", "strategy"), CASES)
@pytest.mark.parametrize(
    "row", [pytest.param(None, marks=LONG_WHERE_TRACED), ALONE], ids=["none", "alone"]
)
def test_those_that_agree_are_as_on_one_device(name, strategy, row):
    """A replica without rows has no say."""
    models = [_model(name, None), _model(name, strategy)]
    for model in models:
        fit(model, **_data(row), **OPTIONS)
    if row is not None or "flag" not in name:
        assert any(value.any() for value in _whole(models[0]))
    compare(f"whole {name}", strategy, *map(_whole, models), tolerance=0.0)


@pytest.mark.parametrize(("name", "strategy"), CASES)
@pytest.mark.parametrize(
    "row", [pytest.param(FIRST, marks=LONG_WHERE_TRACED), LAST], ids=["first", "last"]
)
def test_those_that_differ_are_refused(name, strategy, row):
    """In the step in which they do, be it the last."""
    model = _model(name, strategy)
    data = {key: value[: LAST + 1] for key, value in _data(row).items()}
    with pytest.raises(pk.UnsupportedError, match=r"(?s)whole numbers.*Received.*noted differs"):
        fit(model, **data, **OPTIONS)
    assert len(fit(model, **rows.classes(16), **OPTIONS)["loss"]) == 1, "it trains on"
    assert not isinstance(model.strategy, pk.SingleDevice)
