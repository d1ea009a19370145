"""Layers that prepare data, in a tf.data pipeline and inside of a model."""

import keras
import numpy as np
import pytest
import rows
from cases import compiled
from harness import LONG_WHERE_TRACED, compare, fit, make, state
from keras import layers

OPTIONS = {"epochs": 2, "verbose": 0, "shuffle": False}
STRATEGIES = ["data=3", pytest.param("data=2", marks=pytest.mark.long), "model=2", "pipeline=2"]
WORDS = np.array(["red", "green", "blue", "grey"])
LENGTH = 5


def _lookup():
    return layers.StringLookup(vocabulary=list(WORDS[:3]), num_oov_indices=2)


def _integer_lookup():
    return layers.IntegerLookup(vocabulary=[11, 12, 13], output_mode="int")


def _text():
    return layers.TextVectorization(output_sequence_length=LENGTH, vocabulary=list(WORDS))


def _hashing():
    return layers.Hashing(num_bins=8)


def _discretization():
    return layers.Discretization(bin_boundaries=[-0.5, 0.0, 0.5])


def _words(n=rows.N):
    """One of four words for each row."""
    return WORDS[np.random.default_rng(3).integers(0, 4, n)][:, None]


def _sentences(n=rows.N):
    rng = np.random.default_rng(4)
    lines = [" ".join(WORDS[rng.integers(0, 4, rng.integers(1, 7))]) for _ in range(n)]
    return np.array(lines)[:, None]


def _numbers(n=rows.N):
    return np.random.default_rng(5).integers(10, 15, (n, 1))


def _floats(n=rows.N):
    return np.random.default_rng(6).normal(size=(n, 2)).astype("float32")


# Of each: how it is made, what it takes, the type of that, and its shape.
LAYERS = {
    "string_lookup": (_lookup, _words, "string", 1),
    "integer_lookup": (_integer_lookup, _numbers, "int64", 1),
    "text_vectorization": (_text, _sentences, "string", 1),
    "hashing": (_hashing, _words, "string", 1),
    "discretization": (_discretization, _floats, "float32", 2),
}


def _head(y):
    y = layers.GlobalAveragePooling1D()(layers.Embedding(8, 6)(y))
    return layers.Dense(3, activation="softmax")(y)


def _of_ids(width):
    def build():
        x = keras.Input((width,), dtype="int64")
        return keras.Model(x, _head(x))

    return build


def _labels(n=rows.N):
    return np.random.default_rng(7).integers(0, 3, n)


def _record(build, strategy, data, x):
    model = make(build, compiled()(), strategy)
    history = fit(model, data, **OPTIONS)
    return {"history": history, **state(model), "predict": model.predict(x, verbose=0)}


@LONG_WHERE_TRACED
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LAYERS)
def test_in_a_pipeline_of_tf_data(name, strategy):
    tf = pytest.importorskip("tensorflow")
    make_layer, values, _, _ = LAYERS[name]
    layer = make_layer()

    def dataset():
        pairs = tf.data.Dataset.from_tensor_slices((values(), _labels()))
        return pairs.batch(16).map(lambda x, y: (layer(x), y))

    ids = np.concatenate([np.asarray(x) for x, _ in dataset()])
    assert len(np.unique(ids)) > 2
    build = _of_ids(ids.shape[1])
    compare(
        f"tf_data_{name}", strategy,
        *(_record(build, each, dataset(), ids) for each in (None, strategy)),
    )  # fmt: skip


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "text_vectorization" else [pytest.mark.long])
        for name in LAYERS
    ],
)
def test_inside_of_a_model(name, strategy):
    import tensorflow as tf

    make_layer, values, dtype, width = LAYERS[name]

    def build():
        x = keras.Input((width,), dtype=dtype)
        return keras.Model(x, _head(make_layer()(x)))

    x = tf.constant(values())
    data = tf.data.Dataset.from_tensor_slices((x, _labels())).batch(16)
    compare(
        f"inside_{name}", strategy,
        *(_record(build, each, data, x) for each in (None, strategy)),
    )  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "mode", ["adapted", pytest.param("given", marks=pytest.mark.long("tensorflow"))]
)
def test_normalization(mode, strategy):
    data = rows.classes()
    shifted = data["x"] * 3 + 1

    def build():
        x = keras.Input((6,))
        if mode == "adapted":
            norm = layers.Normalization()
            norm.adapt(shifted)
        else:
            norm = layers.Normalization(mean=[1.0] * 6, variance=[9.0] * 6)
        y = layers.Dense(8, activation="tanh")(norm(x))
        return keras.Model(x, layers.Dense(3, activation="softmax")(y))

    records = []
    for each in (None, strategy):
        model = make(build, compiled()(), each)
        history = fit(model, shifted, data["y"], batch_size=16, **OPTIONS)
        records.append({"history": history, **state(model)})
        records[-1]["predict"] = model.predict(shifted, verbose=0)
    compare(f"normalization_{mode}", strategy, *records)


@LONG_WHERE_TRACED
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_normalization_that_is_adapted_anew_in_between(strategy):
    """Keras asks for `compile` after it."""
    data = rows.classes()
    records = []
    for each in (None, strategy):

        def build():
            x = keras.Input((6,))
            norm = layers.Normalization(name="norm")
            norm.adapt(data["x"])
            return keras.Model(x, layers.Dense(3, activation="softmax")(norm(x)))

        model = make(build, compiled()(), each)
        history = [fit(model, **data, batch_size=16, **OPTIONS)]
        model.get_layer("norm").adapt(data["x"] * 2 - 1)
        chosen = {} if each is None else {"strategy": each}
        model.compile(**compiled()(), **chosen)
        history.append(fit(model, **data, batch_size=16, **OPTIONS))
        records.append({"history": history, **state(model)})
    compare("normalization_again", strategy, *records)
