"""Workers see the caller's settings, also those that change between two fits."""

import os

import numpy as np
import pytest

if os.environ.get("KERAS_BACKEND") != "torch":
    pytest.skip("torch's worker processes", allow_module_level=True)

import keras
import torch

import parallel_keras as pk


class Writes(keras.layers.Layer):
    """Writes the settings that it computes under, one file for each process."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.caller = str(folder), os.getpid()

    def call(self, x, training=False):
        if training:
            who = "caller" if os.getpid() == self.caller else "worker"
            seen = (torch.get_float32_matmul_precision(), keras.config.epsilon())
            with open(os.path.join(self.folder, who), "w") as file:
                file.write(repr(seen))
        return x


@pytest.fixture
def restored():
    """The settings of this process as they were."""
    before = torch.get_float32_matmul_precision(), keras.config.epsilon()
    yield
    torch.set_float32_matmul_precision(before[0])
    keras.config.set_epsilon(before[1])


def test_settings_that_change_between_two_fits(tmp_path, restored):
    model = keras.Sequential([Writes(tmp_path), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    pk.parallelize(model, pk.DataParallel(2))
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    for precision, epsilon in (("highest", 1e-7), ("medium", 1e-4)):
        torch.set_float32_matmul_precision(precision)
        keras.config.set_epsilon(epsilon)
        model.fit(x, y, verbose=0)
        for who in ("caller", "worker"):
            assert (tmp_path / who).read_text() == repr((precision, epsilon)), who
