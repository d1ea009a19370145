"""The models of the benchmark, and their data. The batch is the same in all rows."""

import time

import keras
import numpy as np
from keras import layers

# How long a stage sleeps in a step, in seconds: a third of it forward, the rest backward.
SLEEP = {"sleep": 0.4, "nap": 0.2}
# Layers of each stage and their width, and the rows of a batch, by backend.
HEAVY = {"torch": (4, 512, 2048), "tensorflow": (4, 1024, 512)}
# Wide layers first: half of the layers is not half of the work.
UNEVEN = (1024, 1024, 256, 256, 256, 256, 256, 256)
BATCH = {"sleep": 64, "nap": 64, "uneven": 1024}


def batch_size(name):
    return HEAVY[keras.backend.backend()][2] if name == "heavy" else BATCH[name.rstrip("24")]


def make(name):
    if sleeps(name):
        return sleeping(SLEEP[name[:-1]], int(name[-1]))
    if name == "heavy":
        count, units, _ = HEAVY[keras.backend.backend()]
        return dense([units] * (2 * count))
    return dense(UNEVEN)


def sleeps(name):
    return name[:-1] in SLEEP


def dense(widths):
    return keras.Sequential(
        [
            keras.Input((widths[0],)),
            *(layers.Dense(units, activation="relu") for units in widths),
            layers.Dense(10),
        ]
    )


def compile_arguments(name):
    if sleeps(name):
        return {"optimizer": "adam", "loss": "mse"}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": "adam", "loss": loss, "metrics": ["accuracy"]}


def data(name, steps):
    """Random rows for so many batches."""
    rng = np.random.default_rng(0)
    rows = batch_size(name) * steps
    width = make(name).input_shape[-1]
    x = rng.random((rows, width), dtype="float32")
    if sleeps(name):
        return x, x
    return x, rng.integers(0, 10, rows).astype("int64")


# ---- stages that sleep ------------------------------------------------------------


class Sleep(layers.Layer):
    """Takes a time that its rows have of a batch's, forward and backward; computes a product.

    Args:
        seconds: Float, for a whole batch in both directions.
        rows: Int, of a whole batch.
    """

    def __init__(self, seconds, rows):
        super().__init__()
        self.seconds = seconds
        self.rows = rows

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x):
        x = x * self.factor
        if keras.backend.backend() == "torch":
            return self._torch(x)
        return self._tensorflow(x)

    def _sleep(self, count, share):
        time.sleep(self.seconds * share * int(count) / self.rows)

    def _torch(self, x):
        if x.device.type == "meta":
            return x
        return _sleeping_function()(x, self._sleep)

    def _tensorflow(self, x):
        import tensorflow as tf

        def slept(tensor, share):
            def wait(values):
                self._sleep(len(values), share)
                return values

            return tf.ensure_shape(tf.numpy_function(wait, [tensor], tensor.dtype), tensor.shape)

        @tf.custom_gradient
        def both(tensor):
            return slept(tensor, 1 / 3), lambda gradient: slept(gradient, 2 / 3)

        return both(x)


def _sleeping_function():
    import torch

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, x, sleep):
            context.sleep = sleep
            sleep(len(x), 1 / 3)
            return x.view_as(x)

        @staticmethod
        def backward(context, gradient):
            context.sleep(len(gradient), 2 / 3)
            return gradient, None

    return Function.apply


def sleeping(seconds, stages):
    """Equal stages of one layer."""
    naps = (Sleep(seconds, BATCH["sleep"]) for _ in range(stages))
    return keras.Sequential([keras.Input((8,)), *naps])
