"""`torch.nn` modules as layers, and what they keep in buffers."""

import os

import keras
import numpy as np
import pytest
import rows
from cases import compiled
from harness import compare, fit, make, state

import parallel_keras as pk

pytestmark = pytest.mark.backend("torch")

if os.environ.get("KERAS_BACKEND") == "torch":
    import torch
    import torch_modules as modules

OPTIONS = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False}
REPLICAS = ["data=3", pytest.param("data=2", marks=pytest.mark.long)]
STRATEGIES = [*REPLICAS, "model=2"]


def _make(build, strategy, **compile):
    return make(build, {**compiled()(), **compile}, strategy)


def _record(model, history):
    x = rows.classes()["x"]
    return {
        "history": history,
        **state(model),
        "buffers": modules.buffers(model),
        "predict": model.predict(x, batch_size=16, verbose=0),
    }


def _trained(build, strategy, data=None, **options):
    model = _make(getattr(modules, build), strategy)
    data = rows.classes() if data is None else data
    return _record(model, fit(model, **data, **{**OPTIONS, **options}))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("build", ["running", "spectral", "linear", "Bare", "OwnStep"])
def test_modules_are_trained_as_on_one_device(build, strategy):
    """Sums and counts too: the last batch has one row, which leaves replicas with none."""
    data = {**rows.classes(), "validation_data": tuple(rows.classes(n=20).values())}
    expected, received = (_trained(build, each, data) for each in (None, strategy))
    assert build == "linear" or expected["buffers"]
    compare(f"torch_{build}", strategy, expected, received)


@pytest.mark.parametrize("strategy", ["pipeline=2"])
def test_a_pipeline_takes_modules_whose_buffers_stay(strategy):
    expected, received = (_trained("linear", each) for each in (None, strategy))
    compare("torch_linear", strategy, expected, received)


@pytest.mark.parametrize("strategy", REPLICAS)
def test_batch_norm_is_per_device_and_agrees_on_all(strategy):
    plain, model = (_make(modules.batch_norm, each) for each in (None, strategy))
    data = rows.classes(n=48)
    for each in (plain, model):
        fit(each, **data, **{**OPTIONS, "epochs": 1, "batch_size": 48})
    expected, received = (modules.buffers(each) for each in (plain, model))
    assert [value.dtype for value in expected.values()] == [
        value.dtype for value in received.values()
    ]
    names = [name.split(".")[-1] for name in expected]
    assert names == ["running_mean", "running_var", "num_batches_tracked"]
    before, variance, batches = received.values()
    # A mean of the replicas' means is the mean of the batch; of their variances it is not.
    torch.testing.assert_close(before, next(iter(expected.values())), atol=1e-6, rtol=0)
    assert (variance != 1).all()
    assert int(batches) == 1
    fit(model, **data, **OPTIONS)
    assert int(list(modules.buffers(model).values())[-1]) == 1 + 2 * 3
    # Each replica predicts its rows with the statistics that it holds.
    spread = model.predict(data["x"], verbose=0)
    model.set_strategy(None)
    np.testing.assert_allclose(model.predict(data["x"], verbose=0), spread, atol=1e-6)


@pytest.mark.parametrize("strategy", REPLICAS)
def test_batch_norm_in_a_step_of_the_models_own(strategy):
    """Its statistics change nothing in training here, so that all else is exact."""
    plain, model = (_make(modules.NormStep, each) for each in (None, strategy))
    data = rows.classes(n=48)
    for each in (plain, model):
        fit(each, **data, **OPTIONS)
    compare("torch_norm_step", strategy, state(plain), state(model))
    mean, variance, batches = modules.buffers(model).values()
    expected = modules.buffers(plain)
    torch.testing.assert_close(mean, expected["0.running_mean"], atol=1e-6, rtol=0)
    assert (variance != 1).all()
    assert int(batches) == int(expected["0.num_batches_tracked"]) >= 6
    spread = model.predict(data["x"], verbose=0)
    model.set_strategy(None)
    np.testing.assert_allclose(model.predict(data["x"], verbose=0), spread, atol=1e-6)


class _Writes(keras.callbacks.Callback):
    """Writes buffers past Keras: in place, by a kernel, as another tensor."""

    def on_train_batch_begin(self, batch, logs=None):
        norm = self.model.layers[1].module
        if batch == 1:
            norm.running_mean.fill_(0.25)
        if batch == 2:
            norm.momentum = 1.0
            norm.train()(torch.ones(4, modules.FEATURES) * torch.arange(4.0)[:, None])
            norm.momentum = 0.0
        if batch == 3:
            norm.running_var = torch.full((modules.FEATURES,), 2.0)


def test_what_a_callback_writes_into_buffers_reaches_all():
    """With a momentum of zero the statistics are what was written."""
    records = []
    for strategy in (None, "data=3"):
        model = _make(modules.batch_norm, strategy)
        model.layers[1].module.momentum = 0.0
        fit(model, **rows.classes(n=64), **OPTIONS, callbacks=[_Writes()])
        records.append({k: v for k, v in modules.buffers(model).items() if "running" in k})
        spread = model.predict(rows.classes()["x"], verbose=0)
        model.set_strategy(None) if strategy else None
        np.testing.assert_allclose(model.predict(rows.classes()["x"], verbose=0), spread, atol=1e-6)
    compare("torch_written_buffers", "data=3", *records)


def test_draws_of_a_module_differ_and_repeat():
    histories = [_trained("dropout", strategy) for strategy in ("data=3", "data=3", None)]
    compare("torch_dropout_rerun", "data=3", *histories[:2])
    assert histories[0]["history"] != histories[2]["history"]


def test_files_hold_the_buffers(tmp_path):
    """Weights go to plain Keras and back, in mid-training."""
    plain, model = (_make(modules.running, each) for each in (None, "data=3"))
    fit(model, **rows.classes(), **OPTIONS)
    model.save_weights(tmp_path / "own.weights.h5")
    plain.load_weights(tmp_path / "own.weights.h5")
    compare("torch_files", "data=3", modules.buffers(model), modules.buffers(plain))
    plain.save_weights(tmp_path / "plain.weights.h5")
    model.load_weights(tmp_path / "plain.weights.h5")
    # The optimizer of one has gone on: what is compared are the buffers.
    for each in (plain, model):
        fit(each, **rows.classes(), **OPTIONS)
    compare("torch_files_again", "data=3", modules.buffers(plain), modules.buffers(model))


def test_each_process_computes_its_rows(tmp_path):
    model = _make(lambda: modules.noting(str(tmp_path)), "data=3")
    x, y = rows.classes(n=16).values()
    model.train_on_batch(x, y)  # probes in the caller
    for file in tmp_path.iterdir():
        file.unlink()
    model.train_on_batch(x, y)
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == ["5", "5", "6"]


SPREAD = ["data=3", "pipeline=2"]


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("sync_batch_norm", "SyncBatchNorm"),
        ("old_spectral_norm", "parametrizations"),
        ("InAList", "ModuleList"),
        ("counts_rows", "rows"),
        ("counts_rows_beside_dropout", "rows"),
        ("keeps_largest", "largest"),
        ("counts_always", "calls"),
    ],
)
def test_what_cannot_be_exact_is_refused(build, words, strategy):
    model = make(getattr(modules, build), compiled()(), None)
    model.evaluate(**rows.classes(n=4), verbose=0)  # Keras builds the rest by a call
    pk.parallelize(model, strategy)
    before = [np.array(w) for w in model.get_weights()]
    held = modules.buffers(model)
    with pytest.raises(pk.UnsupportedError, match=words):
        fit(model, **rows.classes(n=48), **OPTIONS)
    for one, other in zip(before, model.get_weights(), strict=False):
        np.testing.assert_array_equal(one, other)
    for name, value in held.items():
        torch.testing.assert_close(value, modules.buffers(model)[name], atol=0, rtol=0)


def test_whole_numbers_that_come_apart_later_end_the_step():
    model = _make(modules.counts_rows_later, "data=3")
    with pytest.raises(pk.UnsupportedError, match="replica to replica"):
        fit(model, **rows.classes(n=49), **OPTIONS)
    assert int(model.layers[1].module.calls) == 3


@pytest.mark.parametrize("build", ["running", "batch_norm", "spectral"])
def test_a_pipeline_refuses_buffers_that_move(build):
    model = _make(getattr(modules, build), "pipeline=2")
    with pytest.raises(pk.UnsupportedError, match="micro-batch"):
        fit(model, **rows.classes(), **OPTIONS)
