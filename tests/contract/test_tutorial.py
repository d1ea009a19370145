"""The usual tutorial for a model on two devices: in stock Keras it places nothing."""

import contextlib

import keras
import pytest
import rows
from keras import layers

import parallel_keras as pk

pytestmark = pytest.mark.backend("tensorflow")


class CustomModel(keras.Model):
    """Makes its layers, and calls them, in a scope for each device.

    Args:
        on: Function of a device's number: the scope.
    """

    def __init__(self, on):
        super().__init__()
        self.on = on
        with on(0):
            self.first = layers.Dense(8, activation="relu")
        with on(1):
            self.second = layers.Dense(3, activation="softmax")

    def call(self, x):
        with self.on(0):
            h = self.first(x)
        with self.on(1):
            return self.second(h)


def tf_device(number):
    import tensorflow as tf

    return tf.device(f"/CPU:{number}")


def devices_after_fit(model):
    """The number of the device of each variable, by layer."""
    model.fit(**rows.classes(), batch_size=16, verbose=0)
    return [
        {int(v.value.device.rsplit(":", 1)[1]) for v in layer.variables}
        for layer in (model.first, model.second)
    ]


def test_under_tf_device_everything_is_on_the_first_device():
    model = CustomModel(tf_device)
    model.compile("adam", "sparse_categorical_crossentropy")
    assert devices_after_fit(model) == [{0}, {0}]


@pytest.mark.parametrize("strategy, expected", [("model", [{0}, {1}]), (None, [{0}, {0}])])
def test_with_places_each_layer_is_where_it_was_placed(strategy, expected):
    model = pk.parallelize(CustomModel(pk.place))
    model.compile("adam", "sparse_categorical_crossentropy", strategy=strategy)
    assert devices_after_fit(model) == expected


def test_layers_may_be_placed_where_they_are_made_only():
    model = pk.parallelize(CustomModel(pk.place), "model")
    model.on = lambda number: contextlib.nullcontext()
    model.compile("adam", "sparse_categorical_crossentropy")
    assert devices_after_fit(model) == [{0}, {1}]
