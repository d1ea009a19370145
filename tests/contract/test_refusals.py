"""What cannot be made exact is refused by name, before the first step."""

import keras
import models
import numpy as np
import pytest
import rows
from cases import compiled
from harness import BACKEND, number
from keras import layers, losses, ops

import parallel_keras as pk

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}


class Refusal:
    """One line: a model, its compile arguments, its data, and the words of the message.

    Args:
        name: What is refused.
        words: Strings that the message has to hold, in any case.
        model, compile, data: As in a case.
        call: What to call; `fit` unless told.
        fit: What differs in the arguments of `fit`.
    """

    def __init__(self, name, words, model=models.mlp, compile=None, data=rows.classes, call=None):
        self.name = name
        self.words = words
        self.model = model
        self.compile = compile or compiled()
        self.data = data
        self.call = call or (lambda model, data: model.fit(**data, **OPTIONS))

    def __repr__(self):
        return self.name


# ---- models with a step of their own -------------------------------------------


class Base(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.dense(x)


class TrainStep(Base):
    def train_step(self, data):
        return super().train_step(data)


class TestStep(Base):
    __test__ = False

    def test_step(self, data):
        return super().test_step(data)


class PredictStep(Base):
    def predict_step(self, data):
        return super().predict_step(data)


class ComputeLoss(Base):
    def compute_loss(self, *arguments, **keywords):
        return super().compute_loss(*arguments, **keywords)


class ComputeMetrics(Base):
    def compute_metrics(self, *arguments, **keywords):
        return super().compute_metrics(*arguments, **keywords)


# ---- what does not add up over the rows ----------------------------------------


class Centred(layers.Layer):
    """Takes synchronized moments, and does not say so."""

    def call(self, x, training=False):
        return x - ops.moments(x, [0], synchronized=True)[0] if training else x


def secretly_synchronized():
    # With a random layer the probe looks at inference only.
    x = keras.Input((6,))
    y = layers.Dropout(0.1)(Centred()(x))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


class LargestPenalty(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(x))
        self.add_loss(0.01 * ops.max(ops.square(x)))
        return x


def largest_penalty():
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3, activation="softmax")(LargestPenalty()(x)))


class TrainingPenalty(layers.Layer):
    def call(self, x, training=False):
        if training:
            self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


def hidden_penalty():
    """What it adds in training cannot be told: other rows have other draws."""
    x = keras.Input((6,))
    y = TrainingPenalty()(layers.Dropout(0.5)(x))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def broadcast():
    """Its second input may have one row for the whole batch."""
    first, second = keras.Input((6,)), keras.Input((6,))
    return keras.Model((first, second), layers.Dense(3, activation="softmax")(first + second))


def centred(x):
    return x - ops.mean(x, axis=0, keepdims=True)


def activated():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation=centred), layers.Dense(1)]
    )


def softmax_over_rows():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8), layers.Softmax(axis=0), layers.Dense(1)]
    )


def of_sixteen_rows():
    cut = layers.Lambda(lambda x: ops.reshape(x, (16, 3, 2)))
    return keras.Sequential([keras.Input(batch_shape=(16, 6)), cut, layers.Flatten(),
                             layers.Dense(3, activation="softmax")])  # fmt: skip


def largest_activity():
    layer = layers.Dense(8, activity_regularizer=lambda x: ops.max(ops.abs(x)))
    return keras.Sequential([keras.Input((6,)), layer, layers.Dense(1)])


def stateful():
    return keras.Sequential(
        [keras.Input(batch_shape=(16, 4, 3)), layers.LSTM(5, stateful=True), layers.Dense(3)]
    )


def regression(loss, metrics=()):
    return compiled(loss=loss, metrics=metrics)


def on_batch(method):
    return lambda model, data: getattr(model, method)(data["x"][:7], data["y"][:7])


# Under "data" they run: see test_own_steps.py.
OWN_STEPS = [
    Refusal("train_step", ["train_step", "TrainStep"], TrainStep),
    Refusal("train_on_batch", ["train_step", "TrainStep"], TrainStep,
            call=on_batch("train_on_batch")),
    Refusal("test_step", ["test_step", "TestStep"], TestStep,
            call=lambda model, data: model.evaluate(**data, verbose=0)),
    Refusal("predict_step", ["predict_step", "PredictStep"], PredictStep,
            call=lambda model, data: model.predict(data["x"], verbose=0)),
    Refusal("compute_loss", ["compute_loss", "ComputeLoss"], ComputeLoss),
    Refusal("compute_metrics", ["compute_metrics", "ComputeMetrics"], ComputeMetrics),
]  # fmt: skip

MODELS = [
    Refusal("add_loss_largest", ["LargestPenalty", "add_loss"], largest_penalty),
    # Keras on torch cannot train with it either.
    *([Refusal("reduction_none", ["none", "sum_over_batch_size"], compile=compiled(
        loss=lambda: losses.SparseCategoricalCrossentropy(reduction=None)))]
      if BACKEND == "torch" else []),
    *([Refusal("synchronized_moments", ["moments(synchronized=True)", "self.synchronized = True"],
                secretly_synchronized)] if BACKEND == "torch" else []),
    Refusal("add_loss_largest_on_batch", ["LargestPenalty"], largest_penalty,
            call=on_batch("train_on_batch")),
    Refusal("add_loss_in_training_only", ["TrainingPenalty", "training only"], hidden_penalty),
    Refusal("activation", ["mixes the rows"], activated, regression("mse"), rows.regression),
    Refusal("softmax_over_rows", ["mixes the rows"], softmax_over_rows, regression("mse"),
            rows.regression),
    Refusal("activity_regularizer", ["add_loss"], largest_activity, regression("mse"),
            rows.regression),
    Refusal("fixed_batch_size", ["one batch size only", "shape(x)[0]", "Lambda.call()"],
            of_sixteen_rows),
    Refusal("stateful_rnn", ["stateful"], stateful, data=rows.series),
    # Keras on torch cannot either.
    *([Refusal("steps_per_execution", ["steps_per_execution"],
               compile=compiled(steps_per_execution=2))] if BACKEND == "torch" else []),
    *([Refusal("sparse", ["sparse tensors", "torch.sparse_coo"], data=lambda: _sparse(),
               call=lambda model, data: model.train_on_batch(data["x"], data["y"]))]
      if BACKEND == "torch" else []),
    Refusal("jit_compile", ["jit_compile"], compile=compiled(jit_compile=True)),
    Refusal("rows_of_different_length", ["rows"], broadcast, data=lambda: _broadcast(),
            call=lambda model, data: model.train_on_batch(data["x"], data["y"])),
]  # fmt: skip


def _sparse():
    import torch

    data = rows.classes(16)
    return {"x": torch.from_numpy(data["x"]).to_sparse(), "y": data["y"]}


def _broadcast():
    x = rows.classes()["x"][:16]
    return {"x": (x, np.ones((1, 6), "float32")), "y": rows.classes()["y"][:16]}


@pytest.mark.parametrize(
    ("refusal", "strategy"),
    [
        *(pytest.param(refusal, "data=3", id=f"{refusal}-data3") for refusal in MODELS),
        *(pytest.param(refusal, "pipeline=2", id=f"{refusal}-pipeline2") for refusal in OWN_STEPS),
    ],
)
def test_refused_before_the_first_step(refusal, strategy):
    keras.utils.set_random_seed(0)
    model = pk.parallelize(refusal.model())
    data = refusal.data()
    before = None
    with pytest.raises(ValueError) as caught:
        if model.built:
            before = model.get_weights()
        model.compile(**refusal.compile(), strategy=strategy)
        refusal.call(model, data)
    message = str(caught.value)
    for word in refusal.words:
        assert word.lower() in message.lower(), f"{word!r} is not in: {message}"
    if refusal.words:
        assert isinstance(caught.value, pk.UnsupportedError), message
        assert "Received:" in message
    if before is not None:
        for a, b in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    optimizer = getattr(model, "optimizer", None)
    assert optimizer is None or number(optimizer.iterations) == 0


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize("strategy", ["data=2", pytest.param("pipeline", marks=pytest.mark.long)])
def test_a_weight_that_is_assigned_in_a_call(strategy):
    model = pk.parallelize(
        keras.Sequential(
            [keras.Input((6,)), layers.SpectralNormalization(layers.Dense(8)), layers.Dense(1)]
        )
    )
    model.compile("sgd", "mse", strategy=strategy)
    with pytest.raises(pk.UnsupportedError, match="(?s)SpectralNormalization.*Received"):
        model.fit(**rows.regression(), **OPTIONS)
    assert number(model.optimizer.iterations) == 0


@pytest.mark.parametrize("refusal", [OWN_STEPS[0], MODELS[0]], ids=repr)
def test_what_is_refused_runs_on_a_single_device(refusal):
    model = pk.parallelize(refusal.model())
    model.compile(**refusal.compile(), strategy=None)
    refusal.call(model, refusal.data())
    assert number(model.optimizer.iterations) > 0


# ---- strategies ----------------------------------------------------------------

NAMES = {
    "auto": ["auto", "not supported yet"],
    "sharded": ["sharded", "not supported yet"],
    "data=2,pipeline=2": ["product", "not supported yet"],
    "ddp": ["'data'", "ddp"],
    "mirrored": ["'data'", "mirrored"],
    "MirroredStrategy": ["'data'"],
    "fsdp": ["sharded", "not supported yet"],
    "pp": ["'pipeline'"],
    "pipeline=0": [],
    "pipeline=99": ["99"],
    "dta": ["did you mean 'data'"],
    "nonsense": ["'data'"],
    "data=many": ["data=2"],
    "data=0": [],
    "data=99": ["99"],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["parallelize", "compile", "set_strategy"])
def test_names_of_strategies(name, way):
    stock = models.mlp()
    model = pk.parallelize(stock)
    before = model.strategy
    with pytest.raises(ValueError) as caught:
        if way == "parallelize":
            pk.parallelize(model, name)
        elif way == "compile":
            model.compile(**compiled()(), strategy=name)
        else:
            model.set_strategy(name)
    message = str(caught.value)
    for word in [*NAMES[name], "Received"]:
        assert word.lower() in message.lower(), f"{word!r} is not in: {message}"
    assert model.strategy == before
    assert not model.compiled, "a wrong strategy leaves the model as it was"


def _foreign():
    objects = {"an int": 2, "a list": [0, 1], "the class": pk.DataParallel}
    devices = ["cpu:0"]
    objects["keras.distribution.DeviceMesh"] = keras.distribution.DeviceMesh(
        (1,), ["batch"], devices
    )
    if BACKEND == "tensorflow":
        import tensorflow as tf

        objects["MirroredStrategy"] = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
        objects["OneDeviceStrategy"] = tf.distribute.OneDeviceStrategy("cpu:0")
    return objects


@pytest.mark.parametrize(
    "name",
    [
        "an int",
        "a list",
        "the class",
        "keras.distribution.DeviceMesh",
        pytest.param("MirroredStrategy", marks=pytest.mark.backend("tensorflow")),
        pytest.param("OneDeviceStrategy", marks=pytest.mark.backend("tensorflow")),
    ],
)
def test_objects_of_others(name):
    model = pk.parallelize(models.mlp())
    with pytest.raises(ValueError) as caught:
        model.compile(**compiled()(), strategy=_foreign()[name])
    message = str(caught.value)
    assert "Received" in message
    assert "pk.DataParallel(" in message, message
    if name == "MirroredStrategy":
        assert "pk.DataParallel(2)" in message, message


@pytest.mark.backend("tensorflow")
def test_a_model_made_inside_a_scope():
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(
        ["cpu:0", "cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    ).scope():
        model = models.mlp()
        model.compile(**compiled()())
    with pytest.raises(ValueError, match="(?s)scope.*Received"):
        pk.parallelize(model, "data=2")


def test_devices_that_are_not_there():
    model = pk.parallelize(models.mlp())
    for devices in (99, ["gpu:7"], [0, 0], ["cpu:0", "cpu:0"], ["nonsense"], [], 0, True):
        with pytest.raises(ValueError, match="Received"):
            model.set_strategy(pk.DataParallel(devices))


def test_parallelize_takes_keras_models():
    for thing in (None, "model", layers.Dense(3), models.mlp):
        with pytest.raises(ValueError, match="keras.Model.*Received"):
            pk.parallelize(thing, "data")


def test_strategies_are_frozen_values():
    strategy = pk.DataParallel(2)
    assert strategy == pk.DataParallel(2) != pk.DataParallel(3)
    assert len({strategy, pk.DataParallel(2), pk.SingleDevice()}) == 2
    with pytest.raises(AttributeError, match="(?s)Received"):
        strategy.timeout = 3


def test_the_strategy_of_a_model_is_not_assigned():
    model = pk.parallelize(models.mlp())
    model.compile(**compiled()(), strategy="data=3")
    with pytest.raises(AttributeError, match="(?s)set_strategy.*Received.*'model'"):
        model.strategy = "model"
    assert model.strategy == pk.DataParallel(3)
    model.any_other = "attribute"
    assert model.any_other == "attribute"
