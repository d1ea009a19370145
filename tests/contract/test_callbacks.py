"""Callbacks run once, live, in the caller, and what they change takes effect everywhere."""

import os
import zipfile

import harness
import keras
import models
import numpy as np
import pytest
import rows
from cases import adam, compiled
from harness import LONG_WHERE_TRACED, fit, make, state
from keras import callbacks, layers, ops

import parallel_keras as pk
from parallel_keras import keras_internals

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}


class Events(callbacks.Callback):
    """Writes down every call: which hook, its number, its logs, and where it ran."""

    def __init__(self):
        super().__init__()
        self.events, self.places = [], set()

    def _note(hook):
        def note(self, *arguments, logs=None):
            *number, last = [*arguments, logs] if logs is not None else [*arguments, {}]
            if number and isinstance(number[-1], dict):  # logs given by position
                last = number.pop()
            numbers = {key: float(value) for key, value in (last or {}).items()}
            self.events.append({"hook": hook, "number": list(number), "logs": numbers})
            self.places.add((os.getpid(), id(self.model)))

        return note

    for _hook in ("train", "epoch", "train_batch", "test", "test_batch"):
        for _when in ("begin", "end"):
            locals()[f"on_{_hook}_{_when}"] = _note(f"on_{_hook}_{_when}")


def with_callbacks(name, make_callbacks, model=models.mlp, arguments=None, after=None, **options):
    """A scenario: train with callbacks and validation, and record all they saw."""

    def scenario(strategy, directory):
        made = make(model, (arguments or compiled())(), strategy)
        events = Events()
        chosen = make_callbacks(directory)
        data = rows.with_validation(rows.classes())
        history = fit(
            made, **data, **{**OPTIONS, "epochs": 3, **options}, callbacks=[*chosen, events]
        )
        assert events.places == {(os.getpid(), id(made))}
        record = {"history": history, "events": events.events, **state(made)}
        if after is not None:
            record["after"] = after(made, chosen, directory)
        return record

    scenario.__name__ = f"callback_{name}"
    return scenario


# ---- callbacks of Keras -------------------------------------------------------


def _load(model, chosen, directory):
    """The file that ModelCheckpoint wrote opens in plain Keras."""
    files = sorted(path.name for path in directory.glob("*.keras"))
    loaded = keras.models.load_model(directory / files[-1])
    assert type(loaded) is type(model)
    with zipfile.ZipFile(directory / files[-1]) as archive:
        assert b"parallel_keras" not in archive.read("config.json")
    return {
        "files": files,
        "predict": loaded.predict(rows.classes()["x"], verbose=0),
        **state(loaded),
    }


def _csv(model, chosen, directory):
    lines = (directory / "log.csv").read_text().splitlines()
    return {
        "head": lines[0].split(","),
        "rows": [[float(number) for number in line.split(",")] for line in lines[1:]],
    }


def _stopped(model, chosen, directory):
    return {"stopped": chosen[0].stopped_epoch, "best": chosen[0].best_epoch}


SCENARIOS = [
    with_callbacks(
        "early_stopping",
        lambda directory: [
            callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        ],
        # A rate at which the loss soon rises.
        arguments=compiled(lambda: keras.optimizers.SGD(3.0)),
        after=_stopped,
        epochs=8,
    ),
    with_callbacks(
        "reduce_lr_on_plateau",
        lambda directory: [
            callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.2)
        ],
        epochs=4,
    ),
    with_callbacks(
        "learning_rate_scheduler",
        lambda directory: [
            callbacks.LearningRateScheduler(lambda epoch, rate: 0.2 / (epoch + 1))
        ],
    ),
    with_callbacks(
        "model_checkpoint",
        lambda directory: [callbacks.ModelCheckpoint(directory / "at-{epoch}.keras")],
        after=_load,
    ),
    with_callbacks(
        "model_checkpoint_best_weights",
        lambda directory: [
            callbacks.ModelCheckpoint(
                directory / "best.weights.h5", "val_loss", save_best_only=True,
                save_weights_only=True,
            )
        ],
        after=lambda model, chosen, directory: {"files": sorted(os.listdir(directory))},
    ),
    with_callbacks(
        "csv_logger",
        lambda directory: [callbacks.CSVLogger(str(directory / "log.csv"))],
        after=_csv,
    ),
    with_callbacks("swap_ema_weights",
        lambda directory: [callbacks.SwapEMAWeights(swap_on_epoch=True)],
        arguments=compiled(lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.7)),
    ),
    with_callbacks("terminate_on_nan", lambda directory: [callbacks.TerminateOnNaN()]),
    with_callbacks(
        "lambda",
        lambda directory: [
            callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: (directory / f"{epoch}").touch()
            )
        ],
        after=lambda model, chosen, directory: {"files": sorted(os.listdir(directory))},
    ),
]  # fmt: skip


# ---- callbacks of the user ----------------------------------------------------


class Scale(callbacks.Callback):
    """Sets weights in the middle of an epoch, in two ways."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])
        if batch == 2:
            kernel = self.model.layers[-1].kernel
            kernel.assign(0.9 * ops.convert_to_numpy(kernel))


class Rate(callbacks.Callback):
    """A learning rate for each batch."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (batch + 1)


class Freeze(callbacks.Callback):
    """Sets a layer's `trainable` in mid-fit: torch sees it at once, TensorFlow when it traces."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[1].trainable = epoch != 1


class Stop(callbacks.Callback):
    """Stops in the middle of the second epoch."""

    def on_train_begin(self, logs=None):
        self.epochs = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs += 1

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and self.epochs == 2:
            self.model.stop_training = True


class Numbers(callbacks.Callback):
    """Reads scalars of the optimizer as Python numbers, as callbacks often do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        self.seen.append([int(optimizer.iterations), float(optimizer.learning_rate)])


class Look(callbacks.Callback):
    """Uses the model at every epoch's end; what it sees is what has been trained."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        x, y = rows.classes(7).values()
        self.seen.append(
            {
                "call": ops.convert_to_numpy(self.model(x)),
                "predict": self.model.predict(x, verbose=0),
                "evaluate": self.model.evaluate(x, y, verbose=0),
                "kernel": ops.convert_to_numpy(self.model.layers[1].kernel),
            }
        )


class Save(callbacks.Callback):
    """Saves the whole model at every epoch's end."""

    def __init__(self, directory):
        super().__init__()
        self.directory = directory

    def on_epoch_end(self, epoch, logs=None):
        self.model.save(self.directory / "model.keras")


class Beta(callbacks.Callback):
    """Changes plain attributes that `call` reads, of the model and of a layer."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.beta = float(epoch)
        self.model.scale.factor = 1.0 + 0.5 * epoch


class BetaOfBatch(callbacks.Callback):
    """The same in the middle of an epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.beta = 0.5 * batch


class Replace(callbacks.Callback):
    """Puts objects into the place of others, in the middle of an epoch.

    torch sees it at the next step, TensorFlow when it traces the step.
    """

    def __init__(self, replace):
        super().__init__()
        self.replace = replace

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (1, 2):
            self.replace(self.model)


def _activation(model):
    model.layers[1].activation = keras.activations.relu


def _optimizer(model):
    optimizer = adam()
    if harness.BACKEND == "tensorflow":  # the step that is traced goes on with the old one
        optimizer.build(model.trainable_variables)
    model.optimizer = optimizer


def _rules(model):
    """A penalty on a weight and on an output, and a constraint."""
    first, last = model.layers[1], model.layers[-1]
    first.kernel.regularizer = keras.regularizers.L2(0.3)
    first.activity_regularizer = keras.regularizers.L2(0.1)
    last.kernel.constraint = keras.constraints.MaxNorm(0.5)


def _strengths(model):
    """Numbers inside of a penalty, a constraint and a schedule."""
    layer = model.layers[1]
    layer.kernel.regularizer.l2 = 0.3
    layer.kernel.constraint.max_value = 0.5
    layer.activity_regularizer.l2 = 0.1
    keras_internals.schedule_of(model.optimizer).initial_learning_rate = 0.3


def penalized():
    x = keras.Input((6,))
    hidden = layers.Dense(
        8,
        activation="tanh",
        kernel_regularizer=keras.regularizers.L2(0.01),
        activity_regularizer=keras.regularizers.L2(0.01),
        kernel_constraint=keras.constraints.MaxNorm(2.0),
    )(x)
    return keras.Model(x, layers.Dense(3, activation="softmax")(hidden))


def _scheduled():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.9))


class Threshold(keras.metrics.Metric):
    """The share of the rows whose largest probability is above a plain number."""

    def __init__(self, name="above"):
        super().__init__(name=name)
        self.threshold = 0.4
        self.above = self.add_variable((), "zeros", name="above")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        above = ops.max(y_pred, axis=-1) > self.threshold
        self.above.assign_add(ops.sum(ops.cast(above, "float32")))
        self.rows.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))

    def result(self):
        return self.above / self.rows


def _threshold(model):
    model.metrics[1].metrics[0].threshold = 0.6


class Factor(layers.Layer):
    factor = 1.0

    def call(self, x):
        return x * self.factor


class WithBeta(keras.Model):
    """Reads plain attributes of itself and of a layer."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="tanh")
        self.scale = Factor()
        self.head = layers.Dense(3)
        self.beta = 0.0

    def call(self, x):
        y = self.scale(self.hidden(x))
        self.add_loss(self.beta * ops.mean(ops.square(y)))
        return ops.softmax(self.head(y))


OWN = [
    with_callbacks("sets_weights", lambda directory: [Scale()]),
    with_callbacks("sets_weights_adam", lambda directory: [Scale()], arguments=compiled(adam)),
    with_callbacks("sets_learning_rate", lambda directory: [Rate()]),
    with_callbacks("sets_trainable", lambda directory: [Freeze()]),
    with_callbacks("stops", lambda directory: [Stop()]),
    with_callbacks("reads_numbers", lambda directory: [Numbers()], after=lambda m, c, d: c[0].seen),
    with_callbacks("looks", lambda directory: [Look()], after=lambda m, c, d: c[0].seen),
    with_callbacks("saves", lambda directory: [Save(directory)], after=_load),
    with_callbacks("sets_attributes", lambda directory: [Beta()], model=WithBeta),
    with_callbacks("sets_attributes_of_a_batch", lambda directory: [BetaOfBatch()], model=WithBeta),
    with_callbacks("replaces_an_activation", lambda directory: [Replace(_activation)]),
    with_callbacks("replaces_the_optimizer", lambda directory: [Replace(_optimizer)]),
    with_callbacks("replaces_rules", lambda directory: [Replace(_rules)]),
    with_callbacks("sets_a_threshold", lambda directory: [Replace(_threshold)],
                   arguments=compiled(metrics=lambda: [Threshold()])),
    with_callbacks("sets_strengths", lambda directory: [Replace(_strengths)], model=penalized,
                   arguments=compiled(_scheduled)),
]  # fmt: skip


# What `make test` runs on TensorFlow too, where each scenario is traced anew.
TRACED = {
    "callback_early_stopping",
    "callback_learning_rate_scheduler",
    "callback_model_checkpoint",
    "callback_swap_ema_weights",
    "callback_sets_weights",
    "callback_sets_attributes",
    "callback_stops",
    "callback_looks",
    "callback_reads_numbers",
}


def _scenarios():
    return [
        pytest.param(
            scenario,
            strategy,
            id=f"{scenario.__name__.removeprefix('callback_')}-{strategy.replace('=', '')}",
            marks=[
                *([] if strategy == "data=3" else [pytest.mark.long]),
                *([] if scenario.__name__ in TRACED else [LONG_WHERE_TRACED]),
            ],
        )
        for scenario in [*SCENARIOS, *OWN]
        for strategy in ("data=2", "data=3", "model=2", "pipeline=2")
    ]


@pytest.mark.parametrize("scenario, strategy", _scenarios())
def test_equals_plain_keras(scenario, strategy, tmp_path):
    records = []
    for chosen in (None, strategy):
        directory = tmp_path / str(chosen)
        directory.mkdir()
        records.append(scenario(chosen, directory))
    harness.compare(scenario.__name__, strategy, *records)


# ---- what has no oracle of the same form --------------------------------------


@pytest.mark.parametrize("strategy", ["data=3"])
def test_terminate_on_nan_stops_at_the_batch(strategy):
    data = rows.classes()
    data["x"][20] = np.nan
    events = []
    for chosen in (None, strategy):
        model = make(models.mlp, compiled()(), chosen)
        seen = Events()
        fit(model, **data, **OPTIONS, epochs=2, callbacks=[callbacks.TerminateOnNaN(), seen])
        events.append([(event["hook"], event["number"]) for event in seen.events])
    assert events[0] == events[1]


class Crash(callbacks.Callback):
    """Ends the first fit in its second epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("strategy", ["data=3"])
def test_backup_and_restore(strategy, tmp_path):
    data = rows.classes()
    arguments = {**OPTIONS, "epochs": 4}
    plain = make(models.mlp, compiled(adam)(), None)
    history = fit(plain, **data, **arguments)

    def backup():
        return callbacks.BackupAndRestore(tmp_path / "backup")

    first = make(models.mlp, compiled(adam)(), strategy)
    with pytest.raises(KeyboardInterrupt):
        fit(first, **data, **arguments, callbacks=[backup(), Crash()])
    second = make(models.mlp, compiled(adam)(), strategy)
    rest = fit(second, **data, **arguments, callbacks=[backup()])
    assert len(rest["loss"]) < 4
    tail = {key: values[-len(rest["loss"]) :] for key, values in history.items()}
    harness.compare(
        "callback_backup_and_restore",
        strategy,
        {"history": tail, **state(plain)},
        {"history": rest, **state(second)},
    )


@pytest.mark.parametrize("strategy", ["data=3"])
def test_epoch_lines_are_printed_once(strategy, capfd):
    model = make(models.mlp, compiled()(), strategy)
    model.fit(**rows.classes(), batch_size=16, epochs=2, verbose=2)
    printed = capfd.readouterr().out
    assert printed.count("Epoch 1/2") == 1
    assert printed.count("Epoch 2/2") == 1
    assert printed.count("4/4 - ") == 2


@pytest.mark.parametrize("strategy", ["data=3"])
def test_first_fit_says_what_runs_where(strategy, caplog):
    caplog.set_level("INFO", "parallel_keras")
    arguments = {**rows.classes(), "batch_size": 16, "epochs": 1}
    model = make(models.mlp, compiled()(), strategy)
    model.fit(**arguments, verbose=0)
    assert not caplog.messages, "verbose=0 is silent"
    model.fit(**arguments, verbose=2)
    model.fit(**arguments, verbose=2)
    (said,) = caplog.messages
    for words in ("DataParallel(devices=3)", "cpu:2", "global batch 16 = 6 + 5 + 5 rows"):
        assert words in said


@pytest.mark.parametrize("strategy", ["data=3"])
def test_exception_in_a_callback_reaches_the_caller(strategy):
    model = make(models.mlp, compiled()(), strategy)

    def fail(batch, logs):
        raise LookupError("from the callback")

    with pytest.raises(LookupError, match="from the callback"):
        fit(
            model,
            **rows.classes(),
            **OPTIONS,
            callbacks=[callbacks.LambdaCallback(on_train_batch_end=fail)],
        )
    # The next fit works.
    plain = make(models.mlp, compiled()(), None)
    again = make(models.mlp, compiled()(), strategy)
    histories = [fit(model, **rows.classes(), **OPTIONS) for model in (plain, again)]
    harness.compare("fit_after_an_exception", strategy, histories[0], histories[1])


@pytest.mark.backend("torch")
@pytest.mark.parametrize("strategy", ["data=3", "pipeline=2"])
def test_an_activation_that_comes_later_is_looked_at(strategy):
    """It mixes the rows: refused, as it would be on the first batch, and nothing is trained."""
    weights = []

    def mix(model):
        model.layers[1].activation = lambda x: x - ops.mean(x, axis=0)
        weights.append(model.get_weights())

    model = make(models.mlp, compiled()(), strategy)
    with pytest.raises(pk.UnsupportedError, match="mixes the rows.*Received: Dense"):
        fit(model, **rows.classes(), **OPTIONS, epochs=3, callbacks=[Replace(mix)])
    harness.compare("mixed_later", strategy, weights[0], model.get_weights(), tolerance=0.0)
