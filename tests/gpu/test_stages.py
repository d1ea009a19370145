"""Stages on two CUDA devices, through NCCL."""

import keras
import numpy as np
import pytest

import parallel_keras as pk

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.backend("torch"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed"),
]


def trained(strategy):
    keras.utils.set_random_seed(0)
    x = keras.Input((16,))
    h = first = keras.layers.Dense(64, activation="tanh", name="first")(x)
    h = keras.layers.Dense(64, activation="tanh", name="second")(h)
    model = pk.parallelize(keras.Model(x, keras.layers.Dense(1, name="third")(h + first)))
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse", strategy=strategy)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(69, 16)).astype("float32"), rng.normal(size=(69, 1))
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return model, history


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_numbers_are_those_of_one_device(schedule, microbatches):
    plain, expected = trained(None)
    strategy = pk.PipelineParallel(
        devices=["cuda:0", "cuda:1"],
        split_points=["second"],
        microbatches=microbatches,
        schedule=schedule,
    )
    model, received = trained(strategy)
    for name, values in expected.items():
        np.testing.assert_allclose(received[name], values, atol=1e-5)
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert 0 < model.timeline().bubble < 1
