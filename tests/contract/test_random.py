"""What is per device by definition."""

import keras
import models
import numpy as np
import pytest
import rows
from cases import compiled
from harness import LONG_WHERE_TRACED, compare, fit, make, state
from keras import layers, optimizers

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}
STRATEGIES = ["data=3", pytest.param("data=2", marks=pytest.mark.long)]


def _ones(rate=0.5, width=40):
    """Dropout of its input, and nothing else that matters."""
    x = keras.Input((width,))
    y = layers.Dropout(rate, name="drop")(x)
    return keras.Model(x, layers.Dense(1, use_bias=False, kernel_initializer="ones")(y))


def _masks(strategy, rows_of_batch=6):
    """Which inputs a training step kept, per row: read off the gradient of a step."""
    model = make(_row_weights, {"optimizer": optimizers.SGD(1.0), "loss": "mse"}, strategy)
    x = np.arange(rows_of_batch)[:, None]
    model.train_on_batch(x, np.zeros((rows_of_batch, 1), "float32"))
    table = keras.ops.convert_to_numpy(model.get_layer("table").embeddings)
    return table != 1


def _row_weights():
    """Each row has a line of weights of its own; those that are dropped get no gradient."""
    x = keras.Input((1,), dtype="int64")
    y = layers.Embedding(12, 40, embeddings_initializer="ones", name="table")(x)
    y = layers.Dropout(0.5)(layers.Flatten()(y))
    y = layers.Dense(1, use_bias=False, kernel_initializer="ones", trainable=False)(y)
    return keras.Model(x, y)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_masks_differ_between_replicas_and_repeat(strategy):
    replicas = int(strategy[-1])
    masks = _masks(strategy)[: replicas * 2]
    assert 0.2 < masks.mean() < 0.8
    # With the same mask on every replica, rows at the same place of their
    # slices would drop the same.
    per_replica = 6 // replicas
    first = masks[0::per_replica][:replicas]
    assert len({tuple(row) for row in first}) == replicas
    np.testing.assert_array_equal(masks, _masks(strategy)[: replicas * 2])


def test_dropout_of_one_replica_is_that_of_plain_keras():
    np.testing.assert_array_equal(_masks(None), _masks("data=1"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_repeats_on_a_rerun_and_rests_in_inference(strategy):
    records = []
    for _ in range(2):
        model = make(models.dropout, compiled()(), strategy)
        history = fit(model, **rows.classes(), **OPTIONS, epochs=2)
        records.append({"history": history, **state(model)})
    compare("dropout_rerun", strategy, *records)
    plain = make(models.dropout, compiled()(), None)
    fit(plain, **rows.classes(), **OPTIONS)
    plain.set_weights(model.get_weights())
    x = rows.classes()["x"]
    compare(
        "dropout_inference", strategy,
        {"predict": plain.predict(x, verbose=0)}, {"predict": model.predict(x, verbose=0)},
    )  # fmt: skip


@LONG_WHERE_TRACED
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_masks_change_from_step_to_step(strategy):
    model = make(_ones, {"optimizer": optimizers.SGD(0.0), "loss": "mae"}, strategy)
    x = np.ones((6, 40), "float32")
    losses = {float(model.train_on_batch(x, np.zeros((6, 1)))) for _ in range(4)}
    assert len(losses) > 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unsynchronized_batch_normalization_is_per_device(strategy):
    """Same structure, finite, and moving statistics that every replica agrees on."""
    plain = make(models.unsynchronized_cnn, compiled()(), None)
    model = make(models.unsynchronized_cnn, compiled()(), strategy)
    data = rows.images(n=48)
    expected, received = (fit(each, **data, **OPTIONS, epochs=2) for each in (plain, model))
    assert expected.keys() == received.keys()
    for a, b in zip(plain.weights, model.weights, strict=True):
        assert a.shape == b.shape
        assert np.isfinite(keras.ops.convert_to_numpy(b)).all()
    # A mean of the replicas' batch means is the mean of the global batch.
    moving = [v for v in model.weights if v.path.endswith("moving_mean")]
    assert all(np.abs(keras.ops.convert_to_numpy(v)).max() > 0 for v in moving)
    before = model.predict(data["x"], verbose=0)
    model.set_strategy(None)
    np.testing.assert_allclose(model.predict(data["x"], verbose=0), before, atol=1e-6)


class Counting(layers.Layer):
    """Counts its calls, in inference too."""

    def build(self, shape):
        options = {"initializer": "zeros", "trainable": False}
        self.calls = self.add_weight(shape=(), name="calls", dtype="int32", **options)
        self.seen = self.add_weight(shape=(), name="seen", **options)

    def call(self, x):
        self.calls.assign_add(1)
        self.seen.assign_add(0.5)
        return x

    def numbers(self):
        return float(self.calls), float(self.seen)


def _counting():
    x = keras.Input((40,))
    return keras.Model(x, layers.Dense(1)(Counting(name="counting")(x)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_forward_pass_assigns_in_inference_is_kept(strategy):
    x, y = np.ones((13, 40), "float32"), np.zeros((13, 1), "float32")
    records = []
    for chosen in (None, strategy):
        model = make(_counting, {"optimizer": "sgd", "loss": "mse"}, chosen)
        counting, record = model.get_layer("counting"), []
        record.append(counting.numbers())
        model.predict(x, batch_size=8, verbose=0)
        record.append(counting.numbers())
        model.evaluate(x, y, batch_size=8, verbose=0)
        record.append(counting.numbers())
        records.append(record)
    assert records[0][2] == (records[0][0][0] + 4, records[0][0][1] + 2)
    assert records[0] == records[1]
