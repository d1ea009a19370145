"""`evaluate` and `predict` of any number of rows, and the methods that take one batch."""

import functools

import keras
import models
import numpy as np
import pytest
import rows
from cases import compiled
from harness import BACKEND, check_scenario, compare, fit, make, scenarios, state

import parallel_keras as pk

SIZES = (1, 2, 5, 23)


def evaluate(strategy):
    model = make(models.mlp, compiled()(), strategy)
    record = {}
    for n in SIZES:
        record[n] = model.evaluate(**rows.classes(n), batch_size=4, verbose=0, return_dict=True)
        record[f"{n} rows, as a list"] = model.evaluate(
            **rows.weighted(rows.classes(n)), batch_size=16, verbose=0
        )
    record["one step"] = model.evaluate(**rows.classes(23), batch_size=8, steps=1, verbose=0)
    return {**record, "weights": state(model)["weights"]}


def predict(strategy):
    losses = {"label": "sparse_categorical_crossentropy", "amount": "mse"}
    model = make(models.two_outputs, compiled(loss=losses, metrics=None)(), strategy)
    x = rows.classes(23)["x"]
    record = {n: model.predict(x[:n], batch_size=4, verbose=0) for n in SIZES}
    record["one step"] = model.predict(x, batch_size=8, steps=1, verbose=0)
    record["list"] = make(models.two_outputs_list, {}, strategy).predict(x, verbose=0)
    record["subclassed"] = make(models.Subclassed, {}, strategy).predict(x, verbose=0)
    return record


def train_on_batch(strategy):
    model = make(models.mlp, compiled(weighted_metrics=("accuracy",))(), strategy)
    record = {"train": [], "test": [], "predict": []}
    for n in (16, 1):
        x, y, weight = rows.weighted(rows.classes(n)).values()
        record["train"].append(model.train_on_batch(x, y, return_dict=True))
        record["train"].append(model.train_on_batch(x, y, sample_weight=weight + 0.1))
        record["train"].append(model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0, 2: 0.5}))
        record["test"].append(model.test_on_batch(x, y, return_dict=True))
        record["test"].append(model.test_on_batch(x, y, sample_weight=weight + 0.1))
        record["predict"].append(model.predict_on_batch(x))
    return {**record, **state(model)}


def train_on_batch_unbuilt(strategy):
    model = make(models.sequential_unbuilt, compiled()(), strategy)
    x, y = rows.classes(5).values()
    logs = [model.train_on_batch(x, y, return_dict=True) for _ in range(3)]
    return {"logs": logs, **state(model)}


def train_on_batch_structures(strategy):
    model = make(models.two_inputs_dict, compiled()(), strategy)
    record = {"train": [], "predict": []}
    for n in (7, 1):
        x, y = rows.two_inputs_dict(n).values()
        record["train"].append(model.train_on_batch(x, y))
        record["predict"].append(model.predict_on_batch(x))
    return {**record, **state(model)}


def mixed_calls(strategy):
    """fit, evaluate, predict and single batches by turns, on one model."""
    model = make(models.mlp, compiled()(), strategy)
    data = rows.classes(37)
    options = {"batch_size": 16, "verbose": 0}
    return {
        "first": fit(model, **data, **options, shuffle=True),
        "batch": model.train_on_batch(data["x"][:7], data["y"][:7]),
        "evaluate": model.evaluate(**data, **options),
        "second": fit(model, **data, **options, epochs=2, validation_split=0.2),
        "predict": model.predict(data["x"], **options),
        "third": fit(model, **data, **options, initial_epoch=1, epochs=2),
        **state(model),
    }


@pytest.mark.parametrize(
    "scenario, strategy",
    scenarios(
        [
            evaluate,
            predict,
            train_on_batch,
            train_on_batch_unbuilt,
            train_on_batch_structures,
            mixed_calls,
        ]
    ),
)
def test_equals_plain_keras(scenario, strategy):
    check_scenario(scenario, strategy)


NOTHING = {"x": np.zeros((0, 6), "float32"), "y": np.zeros((0,), "int64")}


@pytest.mark.parametrize("strategy", ["data=3", "pipeline=2"])
def test_no_rows(strategy):
    model = make(models.mlp, compiled()(), strategy)
    with pytest.raises(ValueError, match="given no rows.*Received"):
        model.predict(NOTHING["x"], verbose=0)
    if BACKEND == "tensorflow":
        # Keras on torch fails over it.
        assert model.evaluate(**NOTHING, verbose=0) == []
    with pytest.raises(pk.UnsupportedError, match="a batch without rows.*Received"):
        model.train_on_batch(**NOTHING)


class CountRows(keras.metrics.Metric):
    """How many rows a metric has been shown."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.shape(y_pred)[0])

    def result(self):
        return self.count


@pytest.mark.parametrize("n", [1, 2, 5, 21, 23])
@pytest.mark.parametrize("strategy", ["data=3", pytest.param("data=4", marks=pytest.mark.long)])
def test_evaluate_sees_each_row_once(n, strategy):
    model = _identity(strategy)
    x = np.arange(n, dtype="float32")[:, None]
    logs = model.evaluate(x, x, batch_size=4, verbose=0, return_dict=True)
    assert logs["rows"] == n


@pytest.mark.parametrize("n", [1, 2, 5, 23])
@pytest.mark.parametrize("strategy", ["data=3", pytest.param("data=4", marks=pytest.mark.long)])
def test_predict_gives_rows_in_order(n, strategy):
    model = _identity(strategy)
    x = np.arange(n, dtype="float32")[:, None]
    sizes = (1, 4, 32)
    received = {size: model.predict(x, batch_size=size, verbose=0) for size in sizes}
    compare(f"predict_order_{n}_rows", strategy, dict.fromkeys(sizes, x), received, tolerance=0.0)


# Kept from test to test: a traced function is not traced again.
@functools.cache
def _identity(strategy):
    arguments = compiled(loss="mse", metrics=lambda: [CountRows()])()
    return make(models.identity, arguments, strategy)
