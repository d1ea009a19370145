"""Layers laid out over cuda:0 and host memory, and over two CUDA devices where they are."""

import keras
import numpy as np
import pytest

import parallel_keras as pk

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.backend("torch"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
PAIRS = [["cuda:0", "cpu:0"]]
if torch.cuda.device_count() > 1:
    PAIRS.append(["cuda:0", "cuda:1"])


def model(width=32):
    keras.utils.set_random_seed(0)
    x = keras.Input((16,))
    with pk.place(0):
        h = keras.layers.Dense(width, activation="tanh", name="first")(x)
    with pk.place(1):
        y = keras.layers.Dense(width, activation="tanh", name="second")(h) + h
        y = keras.layers.Dense(1, name="third")(y)
    return keras.Model(x, y)


def trained(strategy, optimizer):
    made = pk.parallelize(model())
    made.compile(optimizer, "mse", strategy=strategy)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(69, 16)).astype("float32"), rng.normal(size=(69, 1))
    made.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return made


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam_global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adamw_accumulated": lambda: keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=3),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


@pytest.mark.parametrize("devices", PAIRS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_one_device(name, devices):
    one = trained(None, OPTIMIZERS[name]())
    laid_out = trained(pk.ModelParallel(devices), OPTIMIZERS[name]())
    for a, b in zip(one.get_weights(), laid_out.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    where = {"first": devices[0], "second": devices[1], "third": devices[1]}
    for layer, device in where.items():
        for variable in laid_out.get_layer(layer).weights:
            assert variable._value.device.type == torch.device(device).type
            assert variable._value.grad.device == variable._value.device


def test_a_model_is_never_built_whole_on_one_device():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(0)
    with pk.host():
        big = model(width=4096)
    assert torch.cuda.max_memory_allocated(0) == before, "host() allocates nothing on cuda:0"
    pk.parallelize(big, pk.ModelParallel(["cuda:0", "cpu:0"]))
    held = torch.cuda.max_memory_allocated(0) - before
    first = sum(v._value.nbytes for v in big.get_layer("first").weights)
    assert held < 2 * first + 2**22, "cuda:0 holds its own layers only"
