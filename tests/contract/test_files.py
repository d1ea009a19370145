"""A file written under any strategy goes on under any other as if it had never been written.

The oracle is plain Keras that calls `fit` twice with no file in between. What it is
compared with wrote its files after the first `fit`, under one strategy; a fresh model
read one under another and called `fit` for the second time.
"""

import functools
import itertools
import zipfile

import keras
import models
import numpy as np
import pytest
import rows
from cases import adam, compiled
from harness import LONG_WHERE_TRACED, compare, fit, make, state
from keras import callbacks, optimizers

import parallel_keras as pk

# Four batches in an epoch, the last of one row.
OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}

STRATEGIES = {
    "none": None,
    "data2": "data=2",
    "data3": "data=3",
    "model2": "model=2",
    "pipeline2": pk.PipelineParallel(2, microbatches=2),
}
# Each strategy writes once and reads once.
RING = ("none", "pipeline2", "data3", "model2", "data2", "none")
FORMS = ("keras", "weights", "weights_over")


def scheduled():
    return optimizers.Adam(optimizers.schedules.CosineDecay(0.02, decay_steps=9))


def accumulating():
    """The file is written when one gradient of three has come in."""
    schedule = optimizers.schedules.ExponentialDecay(0.02, decay_steps=2, decay_rate=0.7)
    return optimizers.Adam(schedule, gradient_accumulation_steps=3)


def averaging():
    """The file is written between two times that the averages become the weights."""
    return optimizers.Adam(0.01, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3)


def loss_scaling():
    """The scale has grown once, and is on its way to the next time."""
    return optimizers.LossScaleOptimizer(adam(), initial_scale=8.0, dynamic_growth_steps=3)


@keras.saving.register_keras_serializable()
class Subclassed(models.Subclassed):
    """One that Keras can make again from a file."""

    def __init__(self, **options):
        keras.Model.__init__(self, **options)
        self.hidden = [keras.layers.Dense(8, activation="tanh") for _ in range(2)]
        self.heads = {"label": keras.layers.Dense(3)}


KINDS = {
    "scheduled": (models.mlp, compiled(scheduled)),
    "accumulating": (models.mlp, compiled(accumulating)),
    "averaging": (models.mlp, compiled(averaging)),
    "loss_scaling": (models.mlp, compiled(loss_scaling)),
    "momentum_subclassed": (Subclassed, compiled()),
}


# ---- what is written, and read ------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function of a kind and a strategy: what the first `fit` gave, and where its files are."""

    @functools.cache
    def write(kind, writer):
        directory = tmp_path_factory.mktemp(f"{kind}-{writer}")
        build, arguments = KINDS[kind]
        model = make(build, arguments(), STRATEGIES[writer])
        history = fit(model, **rows.classes(), **OPTIONS)
        model.save(directory / "whole.keras")
        model.save_weights(directory / "some.weights.h5")
        return history, directory

    return write


@functools.cache
def unbroken(kind):
    """The two histories and the end of plain Keras."""
    build, arguments = KINDS[kind]
    model = make(build, arguments(), None)
    first = fit(model, **rows.classes(), **OPTIONS)
    return goes_on(model, first)


def goes_on(model, first, data=None):
    data = data or rows.classes()
    record = {"history": [first, fit(model, **data, **OPTIONS)], **state(model)}
    record["predict"] = model.predict(data["x"], verbose=0)
    return record


def read(form, kind, directory, strategy):
    """A fresh model that holds what a file holds."""
    build, arguments = KINDS[kind]
    if form == "keras":
        path = directory / "whole.keras"
        plain = strategy is None
        return keras.models.load_model(path) if plain else pk.load_model(path, strategy=strategy)
    model = make(build, arguments(), strategy)
    data = rows.classes()
    if form == "weights_over":
        # It has trained on something else, and all of that goes.
        fit(model, data["x"][::-1], data["y"], **OPTIONS)
    else:
        # Weights are read into what is there, as in Keras.
        model(data["x"][:1])
        model.optimizer.build(model.trainable_variables)
    model.load_weights(directory / "some.weights.h5")
    return model


def _table():
    """Everything by everything for one optimizer, the ring for the others; few are quick."""
    pairs = itertools.product(STRATEGIES, STRATEGIES)
    table = [("scheduled", *pair) for pair in pairs]
    table += [(kind, *pair) for kind in KINDS for pair in itertools.pairwise(RING)]
    table = dict.fromkeys((form, *line) for form in FORMS for line in table)
    return [
        pytest.param(form, kind, writer, reader, marks=_marks(form, kind, writer, reader))
        for form, kind, writer, reader in table
    ]


QUICK = {
    ("keras", "accumulating", "none", "pipeline2"): [LONG_WHERE_TRACED],
    ("weights_over", "accumulating", "none", "pipeline2"): [LONG_WHERE_TRACED],
    ("keras", "scheduled", "pipeline2", "data3"): [LONG_WHERE_TRACED],
    ("weights", "averaging", "data3", "model2"): [],
}


def _marks(*line):
    return QUICK.get(line, [pytest.mark.long])


@pytest.mark.parametrize("form, kind, writer, reader", _table())
def test_a_file_goes_on_under_another_strategy(form, kind, writer, reader, written):
    first, directory = written(kind, writer)
    model = read(form, kind, directory, STRATEGIES[reader])
    compare(f"{form}_{kind}_{writer}_{reader}", reader, unbroken(kind), goes_on(model, first))


# ---- random draws ---------------------------------------------------------------


# Each replica has rows in each batch: one that has none draws nothing.
EVEN = rows.classes(48)

DRAWS_OF_ONE_DEVICE = {
    "none": None,
    "model2": "model=2",
    "pipeline2": pk.PipelineParallel(2, microbatches=1),
}


def dropping():
    """Stock files do not hold the state of its seed: a loaded model draws from the start."""
    x = keras.Input((6,))
    y = keras.layers.Dense(8, activation="tanh")(x)
    y = keras.layers.Dropout(0.4, seed=3, name="drop")(y)
    return keras.Model(x, keras.layers.Dense(3, activation="softmax")(y))


def _seed_of(model):
    return model.get_layer("drop").seed_generator.state


def _through_a_file(tmp_path, writer, reader, with_seed=False):
    """The record of a run that went through a file, and the seed's state at its end."""
    path = tmp_path / "model.keras"
    model = make(dropping, compiled(scheduled)(), writer)
    first = fit(model, **EVEN, **OPTIONS)
    model.save(path)
    plain = reader is None
    loaded = keras.models.load_model(path) if plain else pk.load_model(path, strategy=reader)
    assert np.array_equal(keras.ops.convert_to_numpy(_seed_of(loaded)), [3, 0])
    if with_seed:
        _seed_of(loaded).assign(keras.ops.convert_to_numpy(_seed_of(model)))
    return _with_seed(loaded, first)


def _with_seed(model, first):
    return {**goes_on(model, first, EVEN), "seed": keras.ops.convert_to_numpy(_seed_of(model))}


def _quick_on_torch(quick):
    return LONG_WHERE_TRACED if quick else pytest.mark.long


@pytest.mark.parametrize(
    "writer, reader",
    [
        pytest.param(*pair, marks=_quick_on_torch(pair == ("model2", "pipeline2")))
        for pair in itertools.permutations(DRAWS_OF_ONE_DEVICE, 2)
    ],
)
def test_draws_that_are_those_of_one_device(writer, reader, tmp_path):
    expected = _through_a_file(tmp_path, None, None)
    chosen = DRAWS_OF_ONE_DEVICE[writer], DRAWS_OF_ONE_DEVICE[reader]
    compare(f"draws_{writer}_{reader}", reader, expected, _through_a_file(tmp_path, *chosen))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=_quick_on_torch(n == "data2")) for n in STRATEGIES]
)
def test_draws_go_on_once_the_seed_is_carried_over(name, tmp_path):
    """Of each replica and micro-batch, whose streams all come from the one state."""
    strategy = STRATEGIES[name]
    model = make(dropping, compiled(scheduled)(), strategy)
    expected = _with_seed(model, fit(model, **EVEN, **OPTIONS))
    received = _through_a_file(tmp_path, strategy, strategy, with_seed=True)
    compare(f"draws_{name}", name, expected, received)


@pytest.mark.parametrize(
    "writer, reader",
    [
        pytest.param(*pair, marks=pytest.mark.long)
        for pair in itertools.permutations(["none", "data2", "data3", "model2"], 2)
    ],
)
def test_the_seed_moves_on_as_on_one_device(writer, reader, tmp_path):
    """In a pipeline it moves with each micro-batch."""
    expected = _through_a_file(tmp_path, None, None, with_seed=True)
    chosen = STRATEGIES[writer], STRATEGIES[reader]
    received = _through_a_file(tmp_path, *chosen, with_seed=True)
    compare(
        f"seed_{writer}_{reader}", reader, {"seed": expected["seed"]}, {"seed": received["seed"]}
    )


# ---- files that callbacks write in mid-epoch ------------------------------------


def _checkpoints(directory, strategy, suffix):
    """Every file that ModelCheckpoint wrote, as a fresh plain model reads it and goes on.

    Some are written when the gradients of one or two steps have come in, of three.
    """
    directory.mkdir()
    model = make(models.mlp, compiled(accumulating)(), strategy)
    only_weights = suffix == "weights.h5"
    path = str(directory / "{epoch}-{batch}.") + suffix
    checkpoint = callbacks.ModelCheckpoint(path, save_weights_only=only_weights, save_freq=2)
    history = fit(model, **rows.classes(), **OPTIONS, epochs=3, callbacks=[checkpoint])
    return {
        "history": history,
        "files": {
            path.name: goes_on(_in_plain_keras(path), {}) for path in sorted(directory.iterdir())
        },
    }


def _in_plain_keras(path):
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            assert b"parallel_keras" not in archive.read("config.json")
        return keras.models.load_model(path)
    model = make(models.mlp, compiled(accumulating)(), None)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model


CHECKPOINTS = [
    pytest.param(
        strategy,
        suffix,
        marks=LONG_WHERE_TRACED
        if (strategy, suffix) == ("pipeline2", "keras")
        else [pytest.mark.long],
    )
    for strategy in STRATEGIES
    for suffix in ("keras", "weights.h5")
    if strategy != "none"
]


@pytest.mark.parametrize("strategy, suffix", CHECKPOINTS)
def test_checkpoints_of_mid_epoch_are_plain_keras(strategy, suffix, tmp_path):
    expected = _checkpoints(tmp_path / "plain", None, suffix)
    received = _checkpoints(tmp_path / strategy, STRATEGIES[strategy], suffix)
    assert len(expected["files"]) == 6
    compare(f"checkpoints_{suffix}", strategy, expected, received)


class Break(callbacks.Callback):
    """Ends a `fit` in the middle of its second epoch."""

    def on_train_begin(self, logs=None):
        self.epochs = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs += 1

    def on_train_batch_end(self, batch, logs=None):
        if (self.epochs, batch) == (2, 2):
            raise KeyboardInterrupt


def _backed_up(directory, writer, reader, save_freq):
    """The record of a run that was broken off in mid-epoch and taken up again.

    Of batches that come again, Keras trains on those after the file once more.
    """

    def arguments(*more):
        backup = callbacks.BackupAndRestore(directory, save_freq=save_freq)
        return {**rows.classes(), **OPTIONS, "epochs": 3, "callbacks": [backup, *more]}

    first = make(models.mlp, compiled(accumulating)(), writer)
    with pytest.raises(KeyboardInterrupt):
        fit(first, **arguments(Break()))
    second = make(models.mlp, compiled(accumulating)(), reader)
    record = {"history": fit(second, **arguments()), **state(second)}
    assert not directory.exists(), "Keras takes its backup away after a whole run"
    return record


@pytest.mark.parametrize("save_freq", ["epoch", 5])
@pytest.mark.parametrize(
    "writer, reader",
    [
        pytest.param(*pair, marks=LONG_WHERE_TRACED if pair[0] == "none" else pytest.mark.long)
        for pair in (*itertools.pairwise(RING), ("data3", "data2"))
    ],
)
def test_a_backup_is_taken_up_under_another_strategy(writer, reader, save_freq, tmp_path):
    expected = _backed_up(tmp_path / "plain", None, None, save_freq)
    chosen = STRATEGIES[writer], STRATEGIES[reader]
    received = _backed_up(tmp_path / "backup", *chosen, save_freq)
    compare(f"backup_{save_freq}_{writer}_{reader}", reader, expected, received)


def test_a_backup_of_each_epoch_ends_as_the_run_that_was_never_broken(tmp_path):
    plain = make(models.mlp, compiled(accumulating)(), None)
    history = fit(plain, **rows.classes(), **OPTIONS, epochs=3)
    expected = {"history": {key: values[1:] for key, values in history.items()}, **state(plain)}
    received = _backed_up(tmp_path / "backup", "data=2", "data=3", "epoch")
    compare("backup_unbroken", "data=3", expected, received)


class Look(callbacks.Callback):
    """Looks at what has been accumulated after each batch, and halves it once."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        held = [v for v in self.model.optimizer.variables if "accumulator" in v.path]
        if batch == 1:
            for variable in held:
                variable.assign(0.5 * keras.ops.convert_to_numpy(variable))
        self.seen.append([keras.ops.convert_to_numpy(variable) for variable in held])


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("data3", marks=LONG_WHERE_TRACED),
        *(pytest.param(s, marks=pytest.mark.long) for s in ("data2", "model2", "pipeline2")),
    ],
)
def test_what_is_accumulated_can_be_read_and_written_in_mid_cycle(strategy):
    records = []
    for chosen in (None, STRATEGIES[strategy]):
        model, look = make(models.mlp, compiled(accumulating)(), chosen), Look()
        history = fit(model, **rows.classes(), **OPTIONS, epochs=2, callbacks=[look])
        records.append({"history": history, "seen": look.seen, **state(model)})
    assert np.abs(records[0]["seen"][0][0]).max() > 1e-3
    compare("accumulated", strategy, *records)
