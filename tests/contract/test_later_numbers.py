"""What begins to bite in later batches only: seen before the first step, or exact anyway."""

import keras
import later_models
import models
import numpy as np
import pytest
import rows
import step_models
from cases import compiled, own_steps
from harness import LONG_WHERE_TRACED, compare, fit, make, number, state

import parallel_keras as pk
from parallel_keras import probe

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}


def growing(by=10.0):
    """The first batch is of the size of one; in each later one the last rows grow."""
    scale = np.repeat([1.0, by, by**2], 16).astype("float32")
    return np.where(np.arange(48) % 16 < 10, 1.0, scale).astype("float32")[:, None]


def growing_regression():
    data = rows.regression(48)
    return {key: value * growing() for key, value in data.items()}


# ---- steps of the model's own -------------------------------------------------------

REFUSED = {
    "clip_by_value": (later_models.ClippedByValue, ["gradient of", "clipvalue="]),
    "one_clip_by_value": (later_models.OneClippedByValue, ["gradient of", "clipvalue="]),
    "clip_by_value_far_away": (later_models.ClippedFarAway, ["gradient of", "clipvalue="]),
    "clip_by_norm": (later_models.ClippedByNorm, ["gradient of", "global_clipnorm="]),
    "loss": (later_models.CappedLoss, ["gradient of"]),
    "counter": (later_models.Counting, ["gradient of"]),
    "counter_in_float": (later_models.CountingInFloat, ["gradient of"]),
    "counter_of_optimizer": (later_models.CountingOfOptimizer, ["gradient of"]),
    "log": (later_models.CappedLog, ["capped", "reduce_logs"]),
    "state": (later_models.CappedState, ["variable", "capped"]),
    "metric": (later_models.CappedMetric, ["metric capped"]),
}


def _is_refused(model, run, words):
    before = model.get_weights()
    with pytest.raises(pk.UnsupportedError) as caught:
        run()
    for word in [*words, "Received:", "larger numbers", type(model).__name__]:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert number(model.optimizer.iterations) == 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_later_mixes_rows_is_refused(name):
    build, words = REFUSED[name]
    model = make(build, own_steps.nothing(), "data=2")
    _is_refused(model, lambda: fit(model, **rows.regression(32), **OPTIONS), words)


@pytest.mark.parametrize("build", [later_models.ClippedClassifier, later_models.CappedCompiledLoss])
def test_a_classifier_that_later_mixes_rows_is_refused(build):
    model = make(build, compiled(own_steps.adam, metrics=None)(), "data=2")
    _is_refused(model, lambda: fit(model, **rows.classes(32), **OPTIONS), ["gradient of"])


@pytest.mark.backend("torch")
def test_a_counter_in_a_plain_attribute():
    model = make(later_models.CountingPlain, own_steps.nothing(), "data=2")
    _is_refused(model, lambda: fit(model, **rows.regression(32), **OPTIONS), ["gradient of"])
    assert model.calls == 0


def test_evaluate_and_predict():
    arguments = compiled(own_steps.adam, metrics=None)
    model = make(later_models.CappedTest, arguments(), "data=2")
    data = rows.classes(16)
    _is_refused(model, lambda: model.evaluate(**data, verbose=0), ["test_step", "largest"])
    model = make(later_models.CappedPredictions, arguments(), "data=2")
    _is_refused(model, lambda: model.predict(data["x"], verbose=0), ["predict_step"])


@pytest.mark.parametrize(
    "build",
    [
        later_models.Hinges,
        pytest.param(later_models.ByHand, marks=pytest.mark.long),
    ],
)
def test_large_numbers_in_each_row_are_fine(build):
    records = []
    for strategy in (None, "data=3"):
        model = make(build, own_steps.nothing(), strategy)
        records.append({"history": fit(model, **growing_regression(), **OPTIONS), **state(model)})
    compare(f"later_{build.__name__}", "data=3", *records)


def test_what_was_made_large_is_put_back():
    """Variables, counters and attributes are as if only the steps had run."""
    model = make(step_models.Target, own_steps.nothing(), "data=2")
    fit(model, **rows.classes(32), **OPTIONS)
    assert number(model.steps) == number(model.optimizer.iterations) == 2
    assert max(abs(w).max() for w in model.get_weights() if w.dtype.kind == "f") < 5


# ---- losses, metrics and layers under Keras's own step --------------------------------


def _equals_plain_keras(name, build, arguments, data):
    records = []
    for strategy in (None, "data=3"):
        model = make(build, arguments(), strategy)
        records.append({"history": fit(model, **data, **OPTIONS, epochs=2), **state(model)})
    assert np.isfinite(records[0]["history"]["loss"]).all()
    compare(f"later_{name}", "data=3", *records)


def test_a_loss_with_a_cap():
    arguments = compiled(own_steps.adam, loss=later_models.capped, metrics=())
    _equals_plain_keras("loss", models.regressor, arguments, growing_regression())


@LONG_WHERE_TRACED
def test_a_crossentropy_with_a_cap():
    data = rows.classes(48)
    data["x"] = data["x"] * growing(by=30.0)
    arguments = compiled(own_steps.adam, loss=later_models.capped_crossentropy, metrics=())
    _equals_plain_keras("crossentropy", _logits, arguments, data)


@pytest.mark.parametrize("row", [16, 31])
def test_a_metric_that_is_infinite_at_first(row):
    """On the first replica or the last it becomes finite."""
    records, data = [], rows.regression(48)
    data["y"][row] = 500.5
    for strategy in (None, "data=3"):
        arguments = compiled(own_steps.still, loss="mse", metrics=[later_models.SmallestOfAKind])
        history = fit(make(models.regressor, arguments(), strategy), **data, **OPTIONS)
        records.append(history["smallest"])
    assert np.isfinite(records[0]).all()
    compare("later_infinite", "data=3", *records)


def _logits():
    x = keras.Input((6,))
    return keras.Model(x, keras.layers.Dense(3)(x))


@LONG_WHERE_TRACED
def test_a_metric_with_a_cap():
    arguments = compiled(own_steps.adam, loss="mse", metrics=[later_models.capped])
    _equals_plain_keras("metric", models.regressor, arguments, growing_regression())


def test_a_loss_of_each_row_stays_where_it_is():
    """It is not taken to the first device for being large."""
    for loss, word in ((later_models.cubed, 0), (later_models.capped, 1)):
        model = make(models.regressor, compiled(loss=loss, metrics=())(), None)
        x, y = (keras.ops.convert_to_tensor(a[:16]) for a in growing_regression().values())
        keras.utils.set_random_seed(0)
        found = probe.probe(model, pk.DataParallel(2), x, y)
        assert bool(found.of_the_batch) == bool(word)
        assert ("larger numbers" in found.of_the_batch) == bool(word)


@pytest.mark.parametrize(
    "layer",
    [
        later_models.SummedBeyond,
        pytest.param(later_models.MeanBeyond, marks=LONG_WHERE_TRACED),
    ],
)
def test_a_penalty_that_is_zero_at_first(layer):
    build = later_models.penalized(layer)
    _equals_plain_keras(
        layer.__name__,
        build,
        compiled(own_steps.adam, loss="mse", metrics=()),
        growing_regression(),
    )


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        (later_models.MeanAndSumBeyond, "add_loss"),
        (later_models.ScaledByLargest, "mixes the rows"),
    ],
)
def test_a_layer_that_later_mixes_rows_is_refused(layer, word):
    build = later_models.penalized(layer)
    model = make(build, compiled(own_steps.adam, loss="mse", metrics=())(), "data=2")
    with pytest.raises(
        pk.UnsupportedError, match=f"(?s){word}.*Received.*larger numbers"
    ) as caught:
        fit(model, **rows.regression(32), **OPTIONS)
    assert layer.__name__ in str(caught.value)
    assert number(model.optimizer.iterations) == 0
