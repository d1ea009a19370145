"""BatchNormalization(synchronized=True) outside of a replica, and in files."""

import os
import subprocess
import sys

import keras
import models
import numpy as np
import pytest
import rows
from cases import compiled
from harness import BACKEND, compare, fit, make, state
from keras import layers

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}


def _record(model):
    history = fit(model, **rows.images(), **OPTIONS)
    return {"history": history, **state(model)}


@pytest.mark.parametrize("strategy", [None, "single", "model=2"])
def test_where_nothing_is_per_device_it_is_the_plain_layer(strategy):
    expected = _record(make(models.unsynchronized_cnn, compiled()(), None))
    received = _record(make(models.synchronized_cnn, compiled()(), strategy))
    compare("synchronized_alone", strategy, expected, received)


@pytest.mark.parametrize("arguments", [{}, {"synchronized": True}, {"synchronized": False}])
def test_the_layer_is_made_as_ever(arguments):
    layer = layers.BatchNormalization(2, 0.9, name="norm", **arguments)
    assert (layer.axis, layer.momentum, layer.name) == (2, 0.9, "norm")
    again = layers.BatchNormalization.from_config(layer.get_config())
    assert again.synchronized is layer.synchronized is arguments.get("synchronized", False)


def test_mixed_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    plain, parallel = (
        _record(make(models.synchronized_twice, compiled()(), each)) for each in (None, "data=3")
    )
    # Eight bits of mantissa.
    compare("synchronized_bfloat16", "data=3", plain, parallel, tolerance=2e-2)


_PLAIN = """
import sys
import keras, numpy as np
model = keras.models.load_model(sys.argv[1])
assert [x.synchronized for x in model.layers if hasattr(x, "synchronized")] == [True]
np.save(sys.argv[2], model.predict(np.load(sys.argv[3]), verbose=0))
"""


def test_a_file_opens_in_plain_keras_on_tensorflow(tmp_path):
    model = make(models.synchronized_cnn, compiled()(), "data=2")
    data = rows.images()
    fit(model, **data, **OPTIONS)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", data["x"])
    paths = [str(tmp_path / name) for name in ("model.keras", "y.npy", "x.npy")]

    def opens(backend):
        environment = {**os.environ, "KERAS_BACKEND": backend}
        command = [sys.executable, "-c", _PLAIN, *paths]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    done = opens("tensorflow")
    assert done.returncode == 0, done.stderr
    expected = model.predict(data["x"], verbose=0)
    np.testing.assert_allclose(np.load(paths[1]), expected, atol=1e-5)
    if BACKEND == "torch":
        # Keras's word, where the package is not imported.
        assert "only supported with the TensorFlow backend" in opens("torch").stderr
