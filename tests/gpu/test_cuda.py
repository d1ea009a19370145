"""What only a machine with CUDA devices can show: NCCL, placement, mixed precision.

Run with `KERAS_BACKEND=torch pytest tests/gpu`; without such a machine it says so.
"""

import keras
import numpy as np
import pytest

import parallel_keras as pk

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.backend("torch"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def _trained(strategy, policy="float32"):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((16,)), keras.layers.Dense(32, "relu", dtype=policy)]
    model = keras.Sequential([*layers, keras.layers.Dense(1, dtype="float32")])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    pk.parallelize(model, strategy)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(69, 16)).astype("float32"), rng.normal(size=(69, 1))
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(("policy", "tolerance"), [("float32", 1e-5), ("mixed_bfloat16", 2e-2)])
def test_all_cuda_devices_equal_one(policy, tolerance):
    one, all_of_them = _trained(None, policy), _trained("data", policy)
    for a, b in zip(one.get_weights(), all_of_them.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)


def test_devices_are_the_cuda_devices():
    assert pk.list_devices() == [f"gpu:{n}" for n in range(torch.cuda.device_count())]
    assert all(v.value.device.type == "cuda" for v in _trained("data").weights)
