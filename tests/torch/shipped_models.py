"""Models that have to travel, as a user's script or cell would define them.

`test_shipping.py` runs this text as `__main__`, from where nothing can be imported,
and some of it as a module.
"""

import keras
import numpy as np
from keras import layers, ops

rng = np.random.default_rng(0)
X = rng.normal(size=(12, 6)).astype("float32")
Y = rng.normal(size=(12, 2)).astype("float32")
TOKENS = rng.integers(0, 20, size=(12, 7))
IMAGES = rng.normal(size=(12, 8, 8, 3)).astype("float32")
SCALE = 0.5  # a global that functions read


def scaled(x):
    return x * SCALE


class Scale(layers.Layer):
    """No get_config."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")

    def call(self, x):
        return x * self.gain * self.factor + scaled(x)


class Lists(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [layers.Dense(6, "tanh"), Scale(0.1)]
        self.heads = {"a": layers.Dense(2), "b": layers.Dense(2)}
        self.pair = (layers.Dropout(0.3, seed=1), layers.BatchNormalization())
        self.names = {"x", "y"}
        self.beta = 0.25

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x)
        for layer in self.pair:
            x = layer(x, training=training)
        return self.heads["a"](x) + self.beta * self.heads["b"](x)


class Injected(keras.Model):
    """Called as `Injected(inputs, outputs)`."""

    def extra(self):
        return len(self.layers)


class Child(Injected):
    pass


class Mae(keras.metrics.Metric):
    def __init__(self, name="mine"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        difference = ops.subtract(y_true, y_pred)
        self.total.assign_add(ops.sum(ops.abs(difference)))
        self.count.assign_add(ops.cast(ops.size(y_true), "float32"))

    def result(self):
        return self.total / self.count


class Loss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(scaled(y_true) - y_pred), axis=-1)


class Sgd(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(scaled(gradient), variable, learning_rate)


class Decay(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, start):
        self.start = start

    def __call__(self, step):
        return self.start / (1.0 + 0.5 * ops.cast(step, "float32"))


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        inner = keras.Input((6,))
        self.inner = keras.Model(inner, layers.Dense(6, "relu")(inner))
        self.rest = keras.Sequential([layers.Dense(4), layers.Dense(2)])

    def call(self, x):
        return self.rest(self.inner(self.inner(x)))


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.tracker = keras.metrics.Mean(name="own")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        logs = super().train_step(data)
        self.tracker.update_state(logs["loss"])
        return {**logs, "own": self.tracker.result()}


def mlp(dtype=None):
    x = keras.Input((6,))
    y = layers.Dense(8, "relu", kernel_regularizer="l2", dtype=dtype)(x)
    y = layers.BatchNormalization(dtype=dtype)(y)
    y = layers.Dropout(0.25, seed=3, dtype=dtype)(y)
    return keras.Model(x, layers.Dense(2, dtype=dtype)(y))


def sequential():
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, "gelu"), layers.Dense(2)])


def unbuilt():
    return keras.Sequential([layers.Dense(4), Scale(2.0), layers.Dense(2)])


def unseeded():
    layers_ = [keras.Input((6,)), layers.GaussianNoise(0.1), layers.Dropout(0.5), layers.Dense(2)]
    return keras.Sequential(layers_)


def lambdas():
    x = keras.Input((6,))
    power = 2
    y = layers.Lambda(lambda t: t**power + SCALE)(x)
    y = layers.Dense(4, activation=lambda t: ops.tanh(t) * SCALE)(y)
    return keras.Model(
        x, layers.Dense(2, activation=scaled)(ops.concatenate([y, y * 2.0], axis=-1))
    )


def shared():
    x, dense = keras.Input((6,)), layers.Dense(6, "tanh")
    y = dense(dense(x))
    return keras.Model(x, layers.Dense(2)(layers.add([x, y])))


def injected(cls=Injected):
    x = keras.Input((6,))
    return cls(x, layers.Dense(2)(Scale(0.3)(x)))


def injected_child():
    return injected(Child)


def nested_functional():
    x = keras.Input((6,))
    inner = sequential()
    return keras.Model(x, inner(inner.layers[0](x) @ np.ones((4, 6), "float32")))


def several():
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    y = layers.Dense(4)(a) + layers.Dense(4)(b)
    outputs = {"one": layers.Dense(2, name="one")(y), "two": layers.Dense(2, name="two")(y)}
    return keras.Model({"a": a, "b": b}, outputs)


def text():
    x = keras.Input((7,), dtype="int32")
    y = layers.Embedding(20, 8, mask_zero=True)(x)
    y = layers.LSTM(8, return_sequences=True)(y)
    y = layers.Bidirectional(layers.GRU(4, return_sequences=True, dropout=0.1, seed=5))(y)
    y = layers.MultiHeadAttention(2, 4)(y, y)
    y = layers.TimeDistributed(layers.Dense(4))(layers.LayerNormalization()(y))
    return keras.Model(x, layers.Dense(2)(layers.GlobalAveragePooling1D()(y)))


def images():
    x = keras.Input((8, 8, 3))
    y = layers.RandomFlip(seed=1)(layers.Rescaling(0.5)(x))
    y = layers.SpectralNormalization(layers.Conv2D(4, 3, padding="same"))(y)
    y = layers.SeparableConv2D(4, 3)(layers.GroupNormalization(2)(y))
    return keras.Model(x, layers.Dense(2)(layers.GlobalMaxPooling2D()(y)))


def adapted():
    norm = layers.Normalization()
    norm.adapt(X)
    return keras.Sequential([keras.Input((6,)), norm, layers.Dense(2)])


def application():
    return keras.applications.MobileNetV2(
        (32, 32, 3), alpha=0.35, weights=None, classes=2, classifier_activation=None
    )


def long():
    x = y = keras.Input((6,))
    for _ in range(300):
        y = y + 0.01 * layers.Dense(6)(y)
    return keras.Model(x, layers.Dense(2)(y))


def frozen():
    model = mlp()
    model.layers[1].trainable = False
    return model


def quantized():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(2)])
    model.quantize("int8")
    return model


def lora():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(2)])
    model.layers[0].enable_lora(2)
    return model
