"""`tf.Variable`s in layers, which Keras does not know."""

import os
import types

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
    _module = types.ModuleType("counts")
    _module.count = tf.Variable(0.0, trainable=False)

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


def _decorated(method):
    """As `tf.function`, which is there on one backend only."""
    return tf.function(method) if os.environ.get("KERAS_BACKEND") == "tensorflow" else method


class Global(layers.Layer):
    def call(self, x):
        return x * (1.0 + _global)


class InABranch(layers.Layer):
    """Names the variable in functions inside of `call` only."""

    def call(self, x):
        return tf.cond(tf.shape(x)[1] > 0, lambda: x * (1.0 + _global), lambda: x)


class InAMethod(layers.Layer):
    def call(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return x * (1.0 + _global)


class OfABase(InAMethod):
    def call(self, x):
        return super().call(x)


class Decorated(layers.Layer):
    @_decorated
    def call(self, x):
        return x * (1.0 + _global)


class OfAModule(layers.Layer):
    def call(self, x):
        return x * (1.0 + _module.count)


def of_a_closure():
    variable = tf.Variable(2.0, trainable=False)
    return layers.Lambda(lambda x: x * variable)


KINDS = [
    *(Attribute, InAList, InAModule, InAnObject, of_a_closure),
    *(Global, InABranch, InAMethod, OfABase, OfAModule, Decorated),
]


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


class OfKeras(layers.Layer):
    """Refers to variables that Keras knows, and to a model that has a raw one."""

    def __init__(self):
        super().__init__()
        self.inside = layers.Dense(6)
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.scaled(self.inside(x))

    def scaled(self, x):
        assert not isinstance(x, Global)
        return tf.cond(tf.shape(x)[1] > 0, lambda: x * self.scale, lambda: x)


class NamesOneWhereItIsMade(layers.Layer):
    """Takes the value that a variable has now, and no variable."""

    def __init__(self):
        super().__init__()
        self.start = 1.0 + float(_global)

    def get_config(self):
        return {"now": float(_global)}

    def call(self, x):
        return x * self.start


def steps_of_the_script():
    """What no layer calls."""
    return _global.assign_add(1.0)


@pytest.mark.parametrize("kind", [OfKeras, NamesOneWhereItIsMade], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("strategy", ["data=2", "pipeline=2"])
def test_those_of_the_script_and_of_keras_are_not(kind, strategy):
    before = float(_global)
    records = []
    for chosen in (None, strategy):
        model = _make(kind, chosen)
        records.append({"history": fit(model, **rows.classes(), **OPTIONS), **state(model)})
    compare("no_raw_variable", strategy, *records)
    assert float(steps_of_the_script()) == before + 1


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
