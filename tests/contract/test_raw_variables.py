"""`tf.Variable`s in layers, which Keras does not know."""

import os

import keras
import pytest
import rows
from cases import compiled
from harness import compare, fit, make, state
from keras import layers

import parallel_keras as pk

pytestmark = pytest.mark.backend("tensorflow")

if os.environ.get("KERAS_BACKEND") == "tensorflow":
    import tensorflow as tf

    _global = tf.Variable(0.0, trainable=False)

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}


class Counts(layers.Layer):
    """Counts its calls in training in a variable, and computes with it."""

    def variable(self):
        raise NotImplementedError

    def call(self, x, training=False):
        if training:
            self.variable().assign_add(1.0)
        return x * (1.0 + 0.1 * self.variable())


class Attribute(Counts):
    def __init__(self):
        super().__init__()
        self.count = tf.Variable(0.0, trainable=False)

    def variable(self):
        return self.count


class InAList(Counts):
    def __init__(self):
        super().__init__()
        self.counts = [{"one": tf.Variable(0.0, trainable=False)}]

    def variable(self):
        return self.counts[0]["one"]


class InAModule(Counts):
    def __init__(self):
        super().__init__()
        self.module = tf.Module()
        self.module.count = tf.Variable(0.0, trainable=False)

    def variable(self):
        return self.module.count


class _Plain:
    pass


class InAnObject(Counts):
    def __init__(self):
        super().__init__()
        self.holder = _Plain()
        self.holder.count = tf.Variable(0.0, trainable=False)

    def variable(self):
        return self.holder.count


class Global(layers.Layer):
    def call(self, x):
        return x * (1.0 + _global)


def of_a_closure():
    variable = tf.Variable(2.0, trainable=False)
    return layers.Lambda(lambda x: x * variable)


KINDS = [Attribute, InAList, InAModule, InAnObject, Global, of_a_closure]


def _make(kind, strategy):
    def build():
        x = keras.Input((6,))
        return keras.Model(x, layers.Dense(3, activation="softmax")(kind()(x)))

    return make(build, compiled()(), strategy)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("strategy", ["data=2", "pipeline=2"])
def test_they_are_refused_where_a_batch_is_cut(kind, strategy):
    with pytest.raises(pk.UnsupportedError, match=r"raw `tf.Variable`.*add_weight"):
        _make(kind, strategy)


@pytest.mark.parametrize("kind", [Attribute, InAList], ids=lambda kind: kind.__name__)
def test_they_are_as_on_one_device_under_model(kind):
    records = []
    for strategy in (None, "model=2"):
        model = _make(kind, strategy)
        history = fit(model, **rows.classes(), **OPTIONS)
        count = float(model.layers[1].variable())
        records.append({"history": history, **state(model), "count": count})
    assert records[0]["count"] == 4
    compare("raw_variable", "model=2", *records)
