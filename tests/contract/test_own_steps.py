"""A model's own `train_step` and the like, under "data", against the same with no strategy."""

import json
import os

import keras
import numpy as np
import pytest
import rows
import step_models
from cases import compiled, own_steps
from harness import (
    BACKEND,
    LONG_WHERE_TRACED,
    BatchLogs,
    check,
    check_scenario,
    compare,
    fit,
    grid,
    make,
    number,
    scenarios,
    state,
)
from keras import ops

import parallel_keras as pk

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}


@pytest.mark.parametrize(("case", "strategy"), grid(own_steps))
def test_equals_plain_keras(case, strategy):
    check(case, strategy)


# ---- other ways to run --------------------------------------------------------------


def on_batch(strategy):
    model = make(step_models.Classifier, compiled(own_steps.adam)(), strategy)
    record = {"train": [], "test": []}
    for n in (16, 1, 7):
        x, y, weight = rows.weighted(rows.classes(n)).values()
        record["train"].append(model.train_on_batch(x, y, return_dict=True))
        record["train"].append(model.train_on_batch(x, y, weight + 0.1, return_dict=True))
        record["test"].append(model.test_on_batch(x, y, return_dict=True))
    return {**record, **state(model)}


def slots_of_all_optimizers(strategy):
    """Also the optimizers that a model holds as attributes, and `evaluate` in between."""
    model = make(step_models.GAN, own_steps.gan()(), strategy)
    data = step_models.latent(33)
    histories = [fit(model, **data, **OPTIONS, epochs=1) for _ in range(2)]
    slots = [v for o in (model.d_optimizer, model.g_optimizer) for v in o.variables]
    values = [ops.convert_to_numpy(v) for v in slots]
    return {"history": histories, "slots": values, "weights": state(model)["weights"]}


def rate_of_an_attribute(strategy):
    """A callback sets the learning rate of an optimizer that is not the compiled one."""
    model = make(step_models.GAN, own_steps.gan()(), strategy)

    class Slower(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.d_optimizer.learning_rate = 0.001
            self.model.generator.layers[0].trainable = False

    history = fit(model, **step_models.latent(33), **OPTIONS, epochs=3, callbacks=[Slower()])
    return {"history": history, **state(model)}


def validated(strategy):
    model = make(step_models.VAE, own_steps.nothing(), strategy)
    x = rows.classes()["x"]
    return {"history": fit(model, x, validation_split=0.3, **OPTIONS, epochs=2), **state(model)}


@pytest.mark.parametrize(
    ("function", "strategy"),
    [
        *scenarios([on_batch, slots_of_all_optimizers]),
        *scenarios([rate_of_an_attribute, validated], quick=(3,) if BACKEND == "torch" else ()),
    ],
)
def test_scenarios(function, strategy):
    if not strategy.startswith("data"):
        pytest.skip("its steps are Keras's own there, or refused")
    check_scenario(function, strategy)


@pytest.mark.parametrize(
    "model",
    [step_models.GAN, pytest.param(step_models.Classifier, marks=LONG_WHERE_TRACED)],
)
def test_a_tour_of_strategies(model):
    arguments = own_steps.gan() if model is step_models.GAN else compiled(own_steps.adam)
    data = step_models.latent(33) if model is step_models.GAN else rows.classes(33)
    plain, toured = make(model, arguments(), None), pk.parallelize(make(model, arguments(), None))
    records = ([], [])
    for strategy in (None, "data=2", "data=3", None):
        toured.set_strategy(strategy)
        for one, record in zip((plain, toured), records, strict=True):
            record.append(fit(one, **data, **OPTIONS))
    compare("tour", "tour", [records[0], state(plain)], [records[1], state(toured)])


def test_a_strategy_that_a_callback_changes():
    class Change(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.set_strategy((None, "data=2", "data=3", None)[epoch])

    plain = make(step_models.Target, own_steps.nothing(), None)
    changed = pk.parallelize(make(step_models.Target, own_steps.nothing(), None))
    expected = fit(plain, **rows.classes(), **OPTIONS, epochs=4)
    received = fit(changed, **rows.classes(), **OPTIONS, epochs=4, callbacks=[Change()])
    compare("changed", "data", [expected, state(plain)], [received, state(changed)])


# ---- random draws -------------------------------------------------------------------


def _noisy(strategy):
    model = make(lambda: step_models.VAE(noise=1.0), own_steps.nothing(), strategy)
    return fit(model, rows.classes()["x"], **OPTIONS, epochs=2), state(model)


@LONG_WHERE_TRACED
def test_draws_are_the_same_in_a_rerun_and_differ_from_one_device():
    compare("draws", "data=2", _noisy("data=2"), _noisy("data=2"), tolerance=0.0)
    one, two = _noisy(None), _noisy("data=2")
    # The first replica draws what one device would, so the first rows are alike.
    difference = abs(one[0]["loss"][0] - two[0]["loss"][0])
    assert 1e-6 < difference < 1.0


class Drawing(step_models.Classifier):
    """Logs what its replica draws."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    @pk.reduce_logs(least="min", most="max")
    def train_step(self, data):
        found = super().train_step(data)
        draw = keras.random.uniform((), seed=self.seed)
        return {**found, "least": draw, "most": draw}


def test_replicas_draw_different_numbers():
    model = make(Drawing, compiled(own_steps.adam)(), "data=3")
    history = fit(model, **rows.classes(48), **OPTIONS)
    assert history["most"][0] - history["least"][0] > 1e-3


# ---- logs ---------------------------------------------------------------------------


def test_reduce_logs_leaves_the_step_as_it_is():
    def train_step(self, data):
        """Docs."""

    decorated = pk.reduce_logs(rows="sum")(train_step)
    assert decorated is train_step
    with pytest.raises(
        ValueError, match=r"one of 'mean', 'sum', 'max', 'min'.*Received: a='median'"
    ):
        pk.reduce_logs(a="median")


class Numbers(step_models.Classifier):
    """Plain numbers, nested logs, and a metric's result as a number."""

    @pk.reduce_logs(rows="sum")
    def test_step(self, data):
        x, y = data[0], data[1]
        y_pred = self(x)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {
            "rows": int(x.shape[0]),
            "as_number": float(self.metrics[0].result()),
            "of_the_batch": loss.item(),
            "nested": {"loss": loss, "metrics": [m.result() for m in self.metrics[:1]]},
        }


@pytest.mark.backend("torch")
def test_logs_of_many_kinds():
    records = []
    for strategy in (None, "data=3"):
        model = make(Numbers, compiled(own_steps.adam)(), strategy)
        data = rows.classes()
        found = [
            model.test_on_batch(data["x"][:n], data["y"][:n], return_dict=True) for n in (7, 1)
        ]
        records.append(found)
    compare("logs", "data=3", *records)


@pytest.mark.parametrize("far", [16, 31], ids=["first", "last"])
def test_infinity_stays_what_it_is(far):
    """In a variable, and in logs of all replicas or of one."""
    records = []
    for strategy in (None, "data=2"):
        data = rows.classes(32)
        data["x"][far, 0] = 1e9
        logs = BatchLogs()
        model = make(step_models.Infinite, compiled(own_steps.still, metrics=None)(), strategy)
        fit(model, **data, **OPTIONS, callbacks=[logs])
        batch = [[batch["all"], batch["one"]] for batch in logs.batches]
        records.append([batch, number(model.best), number(model.mean)])
    assert np.isinf(records[0][0][1]).all() and np.isinf(records[0][1:]).all()
    compare("infinity", "data=2", *records)


@pytest.mark.parametrize("strategy", ["data=2", pytest.param("data=3", marks=LONG_WHERE_TRACED)])
def test_variables_in_logs_show_what_the_step_has_made_of_them(strategy):
    """The model's own, the optimizer's, and what a metric holds: read after each batch."""
    records = []
    for chosen in (None, strategy):
        seen = []

        def read(batch, logs, seen=seen):
            seen.append({key: float(ops.convert_to_numpy(leaf)) for key, leaf in logs.items()})

        model = make(step_models.Live, compiled(own_steps.adam)(), chosen)
        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=read)]
        history = fit(model, **rows.classes(), **OPTIONS, epochs=2, callbacks=callbacks)
        assert [batch["steps"] for batch in seen] == [3 * n for n in range(1, 9)]
        records.append({"history": history, "batches": seen, **state(model)})
    compare("variables_in_logs", strategy, *records)


# ---- spread -------------------------------------------------------------------------


class Witness(step_models.Classifier):
    """Writes down which process computes which rows."""

    def __init__(self, directory):
        super().__init__()
        self.directory = str(directory)

    def train_step(self, data):
        with open(os.path.join(self.directory, str(os.getpid())), "a") as file:
            file.write(json.dumps(data[0][:, 0].tolist()) + os.linesep)
        return super().train_step(data)


@pytest.mark.backend("torch")
@pytest.mark.parametrize(("replicas", "counts"), [(2, [8, 8]), (3, [6, 5, 5])])
def test_each_process_has_its_rows(tmp_path, replicas, counts):
    data = rows.classes(16)
    data["x"][:, 0] = np.arange(16)
    model = make(lambda: Witness(tmp_path), compiled(own_steps.adam)(), f"data={replicas}")
    model.train_on_batch(data["x"][:1], data["y"][:1])  # too few to be probed
    for path in tmp_path.iterdir():
        path.unlink()
    fit(model, **data, **OPTIONS)
    last = {
        int(path.name): [int(n) for n in json.loads(path.read_text().splitlines()[-1])]
        for path in tmp_path.iterdir()
    }
    assert os.getpid() in last
    found = sorted(last.values())
    assert [len(part) for part in found] == counts
    assert sum(found, []) == list(range(16))


def test_the_probe_leaves_no_trace():
    """Variables, attributes and random states are as if only the steps had run."""

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.calls = getattr(self, "calls", [])
            self.calls.append(self.model.calls)

    look = Look()
    model = make(step_models.Target, own_steps.nothing(), "data=2")
    fit(model, **rows.classes(32), **OPTIONS, callbacks=[look])
    assert look.calls == ([0, 1] if BACKEND == "torch" else [0, 0])
    assert number(model.steps) == number(model.optimizer.iterations) == 2


def test_a_first_fit_says_where_replicas_meet(caplog):
    model = make(step_models.Classifier, compiled(own_steps.adam)(), "data=2")
    fit(model, **rows.classes(32), **{**OPTIONS, "verbose": 2})
    fit(model, **rows.classes(32), **{**OPTIONS, "verbose": 2})
    lines = [record.message for record in caplog.records]
    assert sum("Classifier.train_step is the model's own" in line for line in lines) == 1, lines


# ---- trouble ------------------------------------------------------------------------


class Failing(step_models.Classifier):
    """Fails in a worker, in the third step."""

    def train_step(self, data):
        if os.getpid() != self.caller and int(self.optimizer.iterations) == 2:
            raise RuntimeError("a step that fails in one process")
        return super().train_step(data)


class OtherUpdates(step_models.Classifier):
    """From the third step on a worker makes one update more."""

    def train_step(self, data):
        found = super().train_step(data)
        if os.getpid() != self.caller and int(self.optimizer.iterations) == 3:
            super().train_step(data)
        return found


@pytest.mark.backend("torch")
def test_an_error_in_a_worker_reaches_the_caller():
    model = make(Failing, compiled(own_steps.adam)(), pk.DataParallel(3, timeout=60))
    model.caller = os.getpid()
    with pytest.raises(pk.WorkerError, match="a step that fails in one process") as caught:
        fit(model, **rows.classes(64), **OPTIONS)
    assert "train_step" in str(caught.value)
    model.caller = None
    model.compile(**compiled(own_steps.adam)())
    assert len(fit(model, **rows.classes(16), **OPTIONS)["loss"]) == 1


@pytest.mark.backend("torch")
def test_ranks_that_part_ways_end_with_an_error():
    model = make(OtherUpdates, compiled(own_steps.adam)(), pk.DataParallel(2, timeout=60))
    model.caller = os.getpid()
    with pytest.raises(pk.UnsupportedError, match="end of its step.*Received|Received.*end of its"):
        fit(model, **rows.classes(64), **OPTIONS)


# ---- refused, before anything trains --------------------------------------------------

REFUSED = {
    "sum_of_losses": (step_models.SumLoss, ["compute_loss", "mean over the rows"]),
    "sum_with_a_coefficient_of_zero": (step_models.SumLater, ["train_step", "beta for 0"]),
    "in_batch_contrast": (step_models.InBatch, ["train_step", "gradient of"]),
    "centred_batch": (step_models.Centred, ["train_step", "gradient of"]),
    "twice_a_result": (step_models.TwiceTheResult, ["twice", "result()"]),
    "held_by_a_metric": (step_models.HeldByMetric, ["more is computed from what a metric holds"]),
    "largest_in_logs": (step_models.LargestLog, ["largest", "reduce_logs"]),
    "largest_in_a_metric": (step_models.LargestMetric, ["metric largest"]),
    "smallest_in_a_metric": (step_models.SmallestMetric, ["metric smallest"]),
    "infinite_metric": (step_models.LaterMetric, ["metric later", "starts at infinity"]),
    "largest_in_a_variable": (step_models.LargestState, ["variable", "largest"]),
    "foreign_global": (step_models.ForeignGlobal, ["none of the model's", "variable counted"]),
    "foreign_attribute": (step_models.ForeignAttribute, ["none of the model's", "hidden_mean"]),
    "foreign_closure": (step_models.ForeignClosure, ["none of the model's", "held_scale"]),
    "fixed_rows": (step_models.FixedRows, ["keras.ops.shape(x)[0]", "7 of its 16 rows"]),
}


QUICK = {"sum_of_losses", "in_batch_contrast", "largest_in_a_variable", "fixed_rows"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else LONG_WHERE_TRACED) for name in REFUSED],
)
def test_refused_by_name(name):
    build, words = REFUSED[name]
    # Without metrics: plain Keras on TensorFlow fails where a step updates none of them.
    model = make(build, compiled(own_steps.adam, metrics=None)(), "data=2")
    before = model.get_weights()
    with pytest.raises(pk.UnsupportedError) as caught:
        fit(model, **rows.classes(48), **OPTIONS)
    for word in [*words, "Received:", build.__name__]:
        if word != "compute_loss":
            assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert number(model.optimizer.iterations) == 0
    model.set_strategy(None)
    fit(model, **rows.classes(48), **OPTIONS)
    assert number(model.optimizer.iterations) == 3


def test_a_variable_of_nobody_s_stays_what_it_was():
    model = make(step_models.ForeignGlobal, compiled(own_steps.adam, metrics=None)(), "data=2")
    step_models.COUNTED.assign(5.0)
    with pytest.raises(pk.UnsupportedError, match="variable counted"):
        fit(model, **rows.classes(48), **OPTIONS)
    assert number(step_models.COUNTED) == 5


@pytest.mark.backend("torch")
@pytest.mark.parametrize("in_caller", [True, False], ids=["caller", "worker"])
def test_a_variable_of_nobody_s_is_refused_when_it_is_first_assigned(in_caller):
    """On TensorFlow a branch of Python's own is one of the traced step."""
    arguments = compiled(own_steps.adam, metrics=None)()
    model = make(lambda: step_models.ForeignLater(in_caller), arguments, "data=2")
    step_models.COUNTED.assign(5.0)
    with pytest.raises(pk.UnsupportedError, match=r"(?s)none of the model's.*variable counted"):
        fit(model, **rows.classes(64), **OPTIONS)
    assert number(step_models.COUNTED) == 5


@pytest.mark.backend("torch")
def test_a_term_that_a_callback_turns_on_is_refused_then():
    """On TensorFlow the attribute is a constant of the traced step, as in plain Keras."""
    model = make(step_models.SumByAttribute, compiled(own_steps.adam, metrics=None)(), "data=2")

    def up(epoch, logs=None):
        model.beta = 0.1 * epoch

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=up)]
    with pytest.raises(pk.UnsupportedError, match="(?s)mean over the rows.*train_step"):
        fit(model, **rows.classes(48), **OPTIONS, epochs=3, callbacks=callbacks)
    assert number(model.optimizer.iterations) == 3, "the first epoch is trained"


def test_predictions_that_mix_rows_are_refused():
    model = make(step_models.MixedPredictions, compiled(metrics=None)(), "data=2")
    with pytest.raises(pk.UnsupportedError, match=r"(?s)predict_step.*Received"):
        model.predict(rows.classes(16)["x"], verbose=0)


def test_a_key_that_the_step_does_not_return():
    model = make(step_models.Unknown, compiled(own_steps.adam)(), "data=2")
    with pytest.raises(ValueError, match=r"reduce_logs names.*Received: wosrt"):
        fit(model, **rows.classes(16), **OPTIONS)


@pytest.mark.backend("torch")
def test_gradients_that_add_up_over_steps_are_refused():
    model = make(step_models.UnclearedGradients, compiled(own_steps.adam)(), "data=2")
    with pytest.raises(pk.UnsupportedError, match=r"(?s)zero_grad.*Received"):
        fit(model, **rows.classes(16), **OPTIONS)


def test_an_error_of_the_step_itself_is_that_of_plain_keras():
    class Wrong(step_models.Classifier):
        def train_step(self, data):
            raise KeyError("mine")

    model = make(Wrong, compiled(own_steps.adam)(), "data=2")
    with pytest.raises(KeyError, match="mine"):
        fit(model, **rows.classes(16), **OPTIONS)
