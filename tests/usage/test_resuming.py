"""A program that is killed and started anew, elsewhere: on other devices or another backend."""

import itertools

import numpy as np
import pytest
from programs import BACKENDS, run

# Killed by a signal that nothing can catch, in the middle of the second epoch.
TRAIN = """
import os
import signal
import sys

import keras
import numpy as np
import parallel_keras as pk

directory, strategy, save_freq, end = sys.argv[1:]
save_freq = int(save_freq) if save_freq.isdigit() else save_freq
strategy = {"none": None, "pipeline=2": pk.PipelineParallel(2, microbatches=2)}.get(
    strategy, strategy
)


class End(keras.callbacks.Callback):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 2):
            self.how()


def kill():
    print("KILLED", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt():
    raise KeyboardInterrupt


def make():
    keras.utils.set_random_seed(0)
    x = keras.Input((6,))
    h = keras.layers.Dense(8, activation="tanh")(x)
    model = keras.Model(x, keras.layers.Dense(3, activation="softmax")(h))
    schedule = keras.optimizers.schedules.CosineDecay(0.02, decay_steps=6)
    optimizer = keras.optimizers.Adam(schedule, gradient_accumulation_steps=3)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(model, directory, how=None):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(49, 6)).astype("float32"), rng.integers(0, 3, 49)
    backup = keras.callbacks.BackupAndRestore(directory, save_freq=save_freq)
    ending = [] if how is None else [End(how)]
    return model.fit(
        x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=[backup, *ending]
    ).history


def values(model, history):
    variables = [*model.weights, *model.optimizer.variables]
    return [*history.values(), *map(keras.ops.convert_to_numpy, variables)]


model = pk.parallelize(make(), strategy)
history = train(model, os.path.join(directory, "backup"), kill if end == "kill" else None)

# What plain Keras makes of it.
plain, place = make(), os.path.join(directory, "plain")
if save_freq == "epoch":  # as if nothing had happened
    expected = {k: v[-len(history["loss"]):] for k, v in train(plain, place).items()}
else:  # the batches since the beginning of the epoch come once more
    try:
        train(make(), place, interrupt)
    except KeyboardInterrupt:
        expected = train(plain, place)
pairs = zip(values(plain, expected), values(model, history), strict=True)
difference = max(
    float(np.abs(np.asarray(a, "float64") - np.asarray(b, "float64")).max()) for a, b in pairs
)
assert len(history["loss"]) == 2, history
assert difference < 1e-5, difference
print("RESUMED", difference)
"""

STRATEGIES = ("none", "data=2", "data=3", "model=2", "pipeline=2")
QUICK = ("data=2", "pipeline=2", "epoch")
PAIRS = (*itertools.pairwise([*STRATEGIES, "none"]), ("data=3", "data=2"), QUICK[:2])
LINES = [(*pair, save_freq) for pair in PAIRS for save_freq in ("epoch", "5")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "before, after, save_freq",
    [pytest.param(*line, marks=[] if line == QUICK else [pytest.mark.long]) for line in LINES],
)
def test_killed_in_mid_epoch_and_started_under_another_strategy(
    before, after, save_freq, backend, tmp_path
):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    killed = run([str(script), str(tmp_path), before, save_freq, "kill"], backend)
    assert killed.returncode == -9, killed.stderr
    assert "KILLED" in killed.stdout, killed.stdout
    resumed = run([str(script), str(tmp_path), after, save_freq, "end"], backend)
    assert resumed.returncode == 0, resumed.stderr
    print(before, after, save_freq, backend, resumed.stdout)
    assert "RESUMED" in resumed.stdout, resumed.stdout


# Trains on from a file, which the first program of a pair makes.
ACROSS = """
import os
import sys

import keras
import numpy as np
import parallel_keras as pk

before, after, strategy, result = sys.argv[1:]
if os.path.exists(before):
    model = pk.load_model(before, strategy=strategy)
else:
    keras.utils.set_random_seed(0)
    x = keras.Input((6,))
    h = keras.layers.Dense(8, activation="tanh")(x)
    model = keras.Model(x, keras.layers.Dense(3, activation="softmax")(h))
    schedule = keras.optimizers.schedules.CosineDecay(0.1, decay_steps=20)
    model.compile(
        keras.optimizers.SGD(schedule, momentum=0.9), "sparse_categorical_crossentropy"
    )
    pk.parallelize(model, strategy)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(49, 6)).astype("float32"), rng.integers(0, 3, 49)
history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
model.save(after)
np.savez(result, loss=history["loss"], predict=model.predict(x, verbose=0),
         iterations=int(model.optimizer.iterations))
"""


@pytest.mark.long
@pytest.mark.parametrize("writer, reader", [BACKENDS, BACKENDS[::-1]])
def test_a_file_goes_on_on_the_other_backend(writer, reader, tmp_path):
    script = tmp_path / "across.py"
    script.write_text(ACROSS)

    def train(backend, before, name, strategy):
        files = [tmp_path / f"{name}.keras", tmp_path / f"{name}.npz"]
        done = run(
            [str(script), str(tmp_path / before), str(files[0]), strategy, str(files[1])], backend
        )
        assert done.returncode == 0, done.stderr
        return dict(np.load(files[1]))

    train(writer, "none", "written", "data=2")
    expected = train(writer, "written.keras", "same", "data=2")
    assert expected["iterations"] == 16
    for strategy in ("data=2", "pipeline=2"):
        received = train(reader, "written.keras", strategy, strategy)
        for key, value in expected.items():
            print(writer, reader, strategy, key, np.abs(value - received[key]).max())
            np.testing.assert_allclose(received[key], value, rtol=0, atol=1e-4)
