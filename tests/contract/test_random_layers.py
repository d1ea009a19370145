"""Layers that draw in training: other numbers on each replica, the same on a rerun."""

import keras
import numpy as np
import pytest
from harness import BACKEND, make
from keras import layers, optimizers

import parallel_keras as pk

ROWS = 12
SIZE = 4

LAYERS = {
    "dropout": lambda: layers.Dropout(0.5, seed=1),  # without: tests/contract/test_random.py
    "spatial_dropout": lambda: layers.SpatialDropout2D(0.5),
    "alpha_dropout": lambda: layers.AlphaDropout(0.5),
    "gaussian_noise": lambda: layers.GaussianNoise(0.5),
    "gaussian_dropout": lambda: layers.GaussianDropout(0.5),
    "random_flip": lambda: layers.RandomFlip(),
    "random_rotation": lambda: layers.RandomRotation(0.4),
}
QUICK = {"gaussian_noise", "random_flip"}
EACH = [
    pytest.param(
        name,
        marks=[] if BACKEND == "torch" or name in QUICK else [pytest.mark.long],
    )
    for name in LAYERS
]
# Each with the rows that are drawn for together.
SPREAD = [
    pytest.param("data=3", 4, id="data3"),
    pytest.param("data=2", 6, id="data2", marks=pytest.mark.long),
    pytest.param(pk.PipelineParallel(2, microbatches=3), 4, id="pipeline2"),
]


def _build(name):
    """All rows are one picture; what training does to each tells what was drawn for it."""

    def build():
        x = keras.Input((1,), dtype="int64")
        y = layers.Embedding(ROWS, SIZE * SIZE * 2, embeddings_initializer="ones", name="table")(x)
        y = layers.Reshape((SIZE, SIZE, 2))(y)
        y = LAYERS[name]()(y)
        y = layers.Dense(
            1,
            use_bias=False,
            kernel_initializer=keras.initializers.RandomUniform(0.5, 1.5, seed=1),
            trainable=False,
        )(layers.Flatten()(y))
        return keras.Model(x, y)

    return build


def _model(name, strategy):
    return make(_build(name), {"optimizer": optimizers.SGD(0.1), "loss": "mse"}, strategy)


def _step(model):
    x = np.arange(ROWS)[:, None]
    before = _table(model)
    model.train_on_batch(x, np.zeros((ROWS, 1), "float32"))
    return _table(model) - before


def _table(model):
    return np.array(keras.ops.convert_to_numpy(model.get_layer("table").embeddings))


def _drawn(name, strategy, steps=2):
    model = _model(name, strategy)
    return [_step(model) for _ in range(steps)]


@pytest.mark.parametrize(("strategy", "together"), SPREAD)
@pytest.mark.parametrize("name", EACH)
def test_draws_differ_between_parts_and_steps_and_repeat(name, strategy, together):
    first, second = _drawn(name, strategy)
    both = np.concatenate([first, second], axis=1)  # a flip alone may fall as another does
    parts = [both[start : start + together] for start in range(0, ROWS, together)]
    for number, part in enumerate(parts):
        for other in parts[:number]:
            assert np.abs(part - other).max() > 1e-3
    assert np.abs(first - second).max() > 1e-3
    for one, again in zip((first, second), _drawn(name, strategy), strict=True):
        np.testing.assert_allclose(one, again, atol=1e-6)


@pytest.mark.parametrize("strategy", ["data=1", "model=2"])
@pytest.mark.parametrize("name", EACH)
def test_where_nothing_is_per_device_they_are_those_of_plain_keras(name, strategy):
    for one, other in zip(_drawn(name, None), _drawn(name, strategy), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("name", EACH)
def test_they_go_on_after_a_file_with_the_seed(name, tmp_path):
    """The seed is carried over: stock files hold none, as docs/files.md says."""
    model = _model(name, "data=3")
    _step(model)
    model.save(tmp_path / "model.keras")
    seeds = [keras.ops.convert_to_numpy(seed) for seed in _seeds(model)]
    expected = _step(model)
    loaded = pk.load_model(tmp_path / "model.keras", strategy="data=3")
    assert len(_seeds(loaded)) == len(seeds) > 0
    for seed, value in zip(_seeds(loaded), seeds, strict=True):
        seed.assign(value)
    np.testing.assert_allclose(_step(loaded), expected, atol=1e-5)


def _seeds(model):
    return [v for v in model.variables if "seed_generator" in v.path]


@pytest.mark.parametrize(("strategy", "together"), SPREAD)
@pytest.mark.parametrize("name", EACH)
def test_they_rest_in_inference(name, strategy, together):
    x = np.arange(ROWS)[:, None]
    plain, model = (_model(name, each) for each in (None, strategy))
    expected = plain.predict(x, verbose=0)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-5)
