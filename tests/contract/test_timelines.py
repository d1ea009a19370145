"""Timelines of real steps: everything was done once, in order, and nothing overlaps."""

import itertools
import json

import keras
import numpy as np
import pytest

import parallel_keras as pk
from parallel_keras import rates, schedule

ROWS, MICROBATCHES = 24, 4


def made(strategy, optimizer="adam"):
    keras.utils.set_random_seed(0)
    x = keras.Input((6,))
    h = x
    for _ in range(3):
        h = keras.layers.Dense(8, activation="relu")(h)
    model = pk.parallelize(keras.Model(x, keras.layers.Dense(2)(h)), strategy)
    model.compile(optimizer, "mse")
    return model


def fit(model, rows=ROWS, **options):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(rows, 6)), random.normal(size=(rows, 2))
    options = {"batch_size": ROWS, "verbose": 0, **options}
    return model.fit(x.astype("float32"), y.astype("float32"), **options)


def check_nothing_overlaps(timeline):
    for device in timeline.devices:
        for before, after in itertools.pairwise(timeline.of(device)):
            assert before.end <= after.start


# ---- pipeline ----


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_pipeline(name, stages, backend):
    model = made(pk.PipelineParallel(stages, microbatches=MICROBATCHES, schedule=name))
    fit(model, epochs=2)
    timeline = model.timeline()
    assert not timeline.is_predicted
    assert timeline.devices == [f"cpu:{stage}" for stage in range(stages)]
    assert timeline.kinds == ("forward", "backward", "update")
    orders = schedule.order(name, stages, MICROBATCHES)
    for stage, device in enumerate(timeline.devices):
        *passes, update = timeline.of(device)
        assert [(e.stage, e.microbatch, e.kind) for e in passes] == orders[stage]
        assert (update.kind, update.stage, update.microbatch) == ("update", stage, None)
    check_nothing_overlaps(timeline)
    found = {(e.kind, e.stage, e.microbatch): e for e in timeline.events}
    for stage, microbatch in itertools.product(range(1, stages), range(MICROBATCHES)):
        for kind, order in (("forward", (stage - 1, stage)), ("backward", (stage, stage - 1))):
            first, second = (found[kind, s, microbatch] for s in order)
            assert first.start < second.start
            if backend == "torch":  # a graph goes on when what it needs is there, not all
                assert first.end <= second.start
    assert 0 < timeline.bubble < 1 and timeline.step_time > 0


@pytest.mark.parametrize("strategy", ["pipeline=2", "data=2"])
def test_the_last_training_step_is_shown(strategy):
    model = made(strategy)
    validation = np.zeros((4, 6)), np.zeros((4, 2))
    fit(model, batch_size=3, validation_data=validation)
    microbatches = {None, 0, 1, 2} if strategy == "pipeline=2" else {None}
    assert {e.microbatch for e in model.timeline().events} == microbatches
    before = model.timeline().events
    model.evaluate(*validation, verbose=0)
    assert model.timeline().events == before


def test_a_pipeline_is_predicted_before_and_after_a_step(tmp_path):
    model = made("pipeline=2")
    with pytest.raises(ValueError, match="model.timeline.batch_size=32"):
        model.timeline(predicted=True)
    with pytest.raises(ValueError, match="no training step"):
        model.timeline()
    before = model.timeline(batch_size=ROWS)
    assert before.is_predicted and before.step_time > 0
    assert len(before.events) == 2 * (2 * 8 + 1)
    check_nothing_overlaps(before)
    fit(model)
    after = model.timeline(predicted=True)
    assert after.is_predicted and "last training step" in str(after)
    assert len(after.events) == len(model.timeline().events)
    more = model.timeline(batch_size=64, strategy=pk.PipelineParallel(3, microbatches=16))
    assert len(more.devices) == 3 and len(more.events) == 3 * (2 * 16 + 1)
    model.timeline().save(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == len(after.events)


@pytest.mark.parametrize("masked", [False, True])
def test_the_order_of_work_is_predicted_as_it_is_done(masked):
    x = keras.Input((5,), dtype="int32")
    h = keras.layers.Embedding(11, 4, mask_zero=masked)(x)
    for _ in range(3):
        h = keras.layers.Dense(4, activation="relu")(h)
    strategy = pk.PipelineParallel(2, microbatches=MICROBATCHES, schedule="1f1b")
    model = pk.parallelize(keras.Model(x, keras.layers.Dense(1)(h)), strategy)
    model.compile("sgd", "mse")
    predicted = model.timeline(batch_size=ROWS)
    plans = [
        model.plan(strategy=pk.PipelineParallel(2, microbatches=MICROBATCHES, schedule=name))
        for name in ("1f1b", "gpipe")
    ]
    words = np.random.default_rng(0).integers(0, 11, size=(ROWS, 5))
    model.fit(words, np.zeros((ROWS, 5, 1), "float32"), batch_size=ROWS, verbose=0)
    done = schedule.order("gpipe" if masked else "1f1b", 2, MICROBATCHES)
    for timeline in (predicted, model.timeline()):
        for stage, device in enumerate(timeline.devices):
            *passes, _ = timeline.of(device)
            assert [(e.stage, e.microbatch, e.kind) for e in passes] == done[stage]
    # What a stage keeps of its micro-batches is planned for the same order.
    kept, of_gpipe = ([layer.activations for layer in plan.layers] for plan in plans)
    assert (kept == of_gpipe) is masked


# ---- data parallel ----


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas(replicas):
    model = made(pk.DataParallel(replicas))
    fit(model, rows=4 * ROWS)
    timeline = model.timeline()
    assert timeline.kinds == ("compute", "all-reduce", "waiting for data", "update")
    for device in timeline.devices:
        events = timeline.of(device)
        wanted = ["waiting for data", "compute", "all-reduce", "update"]
        assert [e.kind for e in events] == wanted
        assert all(e.stage is None and e.microbatch is None for e in events)
    check_nothing_overlaps(timeline)
    # Nobody has all gradients before everybody has computed some.
    reduced = [e.end for e in timeline.events if e.kind == "all-reduce"]
    started = [e.start for e in timeline.events if e.kind == "compute"]
    assert min(reduced) > max(started)


def test_what_is_between_two_calls_of_fit_is_no_waiting_for_data():
    model = made("data=2")
    for _ in range(2):
        fit(model)
        kinds = [e.kind for e in model.timeline().of("cpu:0")]
        assert kinds == ["compute", "all-reduce", "update"]


def test_a_replica_without_rows():
    model = made("data=2")
    fit(model, rows=1)
    for device in model.timeline().devices:
        assert {e.kind for e in model.timeline().of(device)} >= {"compute", "update"}


@pytest.mark.parametrize("optimizer", ["accumulating", "clipping"])
def test_replicas_whose_gradients_go_another_way(optimizer):
    options = {"accumulating": {"gradient_accumulation_steps": 2}, "clipping": {"clipnorm": 1.0}}
    model = made("data=2", keras.optimizers.SGD(0.1, **options[optimizer]))
    fit(model, rows=4 * ROWS)
    timeline = model.timeline()
    check_nothing_overlaps(timeline)
    assert {e.kind for e in timeline.events} == set(timeline.kinds)


def test_replicas_are_predicted():
    timeline = made("data=2").timeline(batch_size=ROWS)
    assert "not predicted" in str(timeline)
    assert {e.kind for e in timeline.events} == {"compute", "all-reduce", "update"}


# ---- others ----


@pytest.mark.parametrize("strategy", [None, "model=2", "data=1"])
def test_what_is_not_measured_is_refused_by_name(strategy):
    model = made(strategy)
    fit(model)
    with pytest.raises(pk.UnsupportedError, match="a measured timeline.*batch_size"):
        model.timeline()
    timeline = model.timeline(batch_size=ROWS)
    assert timeline.is_predicted and timeline.step_time > 0
    check_nothing_overlaps(timeline)


def test_devices_that_are_not_there():
    timeline = made("pipeline=2").timeline(batch_size=64, devices="4x80GB")
    assert timeline.devices == ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]


@pytest.mark.parametrize("rows", [0, -4, 2.5, "16"])
def test_what_is_no_number_of_rows(rows):
    model = made("pipeline=2")
    for method in (model.timeline, model.plan):
        with pytest.raises(ValueError, match="batch_size.*Received"):
            method(batch_size=rows)


def test_a_prediction_leaves_keras_as_it_was():
    model = made("pipeline=2")
    before = keras.layers.Dense(1).name
    model.timeline(batch_size=ROWS)
    number = int(before.rpartition("_")[2]) if "_" in before else 0
    assert keras.layers.Dense(1).name == f"dense_{number + 1}"


def test_stages_that_are_too_small_are_said_to_be(monkeypatch):
    """Also where the machine gets busy between the measurements for two devices and for one."""
    seconds, of = [1e-4], rates.of

    def busier(*arguments):
        found = of(*arguments)
        seconds[0] *= 10
        return found

    for name in ("_measured", "_per_layer"):
        monkeypatch.setattr(rates, name, {}, raising=False)
    monkeypatch.setattr(rates, "_seconds", lambda *_: seconds[0])
    monkeypatch.setattr(rates, "of", busier)
    model = made(pk.PipelineParallel(2, microbatches=8))
    text = str(model.timeline(batch_size=16))
    assert "Warning: one device is predicted to take" in text
