"""Runs programs as a user starts them: a script, `python -i`, a notebook kernel."""

import os
import subprocess
import sys

BACKENDS = ("tensorflow", "torch")

# No main guard, everything defined in the script: what a user writes first.
SCRIPT = """
import keras
import numpy as np
import parallel_keras as pk

class Scale(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones", name="w")
    def call(self, x):
        return x * self.w

class Count(keras.callbacks.Callback):
    batches = 0
    def on_train_batch_end(self, batch, logs=None):
        Count.batches += 1

def make():
    keras.utils.set_random_seed(0)
    x = keras.Input((8,))
    h = Scale()(keras.layers.Dense(16, activation="relu")(x))
    model = keras.Model(x, keras.layers.Dense(1)(h))
    model.compile("adam", loss=lambda y, p: keras.ops.mean((y - p) ** 2, axis=-1))
    return model

rng = np.random.default_rng(0)
x, y = rng.normal(size=(37, 8)).astype("float32"), rng.normal(size=(37, 1)).astype("float32")
plain, parallel = make(), pk.parallelize(make(), pk.DataParallel(2))
plain.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
parallel.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[Count()])
difference = max(abs(a - b).max() for a, b in zip(plain.get_weights(), parallel.get_weights()))
assert difference < 1e-5, difference
assert Count.batches == 10, Count.batches
print("TRAINED", difference)
"""


def environment(backend, **more):
    """The environment of a user's shell: nothing of the test run's own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PARALLEL_KERAS"))}
    return {**kept, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2", **more}


def run(command, backend, timeout=120, **options):
    """Run a command to its end; returns the completed process with its output."""
    return subprocess.run(
        [sys.executable, *command],
        env=environment(backend),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )
