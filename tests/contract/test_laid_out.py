"""Under "model" the work is where the layers are: variables, slots, forward and backward.

Read off TensorFlow's partition graphs, which is what its devices have run. On torch
tests/torch/test_places.py looks at each operation.
"""

import re

import keras
import models
import numpy as np
import pytest
import rows
from executed import MOVES, executed
from harness import SEED, compare, fit, make, state
from keras import layers

import parallel_keras as pk

pytestmark = pytest.mark.backend("tensorflow")

OPTIONS = {"batch_size": 16, "epochs": 1, "shuffle": False, "verbose": 0}


def recurrent():
    """Loops, whose bodies are graphs of their own."""
    x = keras.Input((4, 3))
    with pk.place(0):
        h = layers.LSTM(5, return_sequences=True, name="first")(x)
    with pk.place(1):
        h = layers.GRU(5, name="second")(h)
        y = layers.Dense(3, activation="softmax", name="third")(h)
    return keras.Model(x, y)


class Blocks(keras.Model):
    """Layers made in `__init__`, placed by blocks in `call`."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(8, activation="tanh", name="first")
        with pk.place(1):
            self.second = layers.Dense(8, activation="tanh", name="second")
        self.third = layers.Dense(3, activation="softmax", name="third")

    def call(self, x):
        with pk.place(0):
            h = self.first(x)
        y = self.second(h)
        with pk.place(1):
            return self.third(y + h)


WHERE = {"first": 0, "second": 1, "third": 1}


@pytest.mark.parametrize(
    "build, data",
    [(models.placed_skip, rows.classes), (recurrent, rows.series), (Blocks, rows.classes)],
)
def test_forward_and_backward_run_where_the_layers_are(build, data):
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    arguments = {"optimizer": optimizer, "loss": "sparse_categorical_crossentropy"}
    model = make(build, {**arguments, "metrics": ["accuracy"]}, "model")
    data = data()
    fit(model, **data, **OPTIONS)
    for variable in (*model.weights, *model.optimizer.variables):
        name = next((n for n in WHERE if re.search(rf"\b{n}[/_]", variable.path)), None)
        if name is not None:
            assert variable.value.device.endswith(f"CPU:{WHERE[name]}"), variable.path

    nodes = list(executed(lambda: fit(model, **data, **OPTIONS)))
    seen = set()
    for name, operation, device in nodes:
        found = re.search(r"/(first|second|third)(_\d+)?/", name)
        if found and operation not in MOVES:
            assert device == WHERE[found[1]], f"{operation} {name} ran on device {device}"
            seen.add((found[1], "gradient_tape" in name))
    expected = {(name, backward) for name in WHERE for backward in (False, True)}
    assert seen == expected
    # The update of a layer is where its variables are: as many operations as there are slots.
    updates = [device for name, op, device in nodes if "/adam" in name and op.startswith("Assign")]
    assert set(updates) == {0, 1}
    losses = [device for _, op, device in nodes if "CrossEntropy" in op]
    assert losses and set(losses) == {1}, "the loss is where the outputs are"


@pytest.mark.parametrize("build", [models.placed_skip, Blocks])
def test_the_numbers_are_those_of_plain_keras(build):
    records = []
    for strategy in (None, "model"):
        arguments = {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["accuracy"]}
        model = make(build, {**arguments, "loss": "sparse_categorical_crossentropy"}, strategy)
        history = fit(model, **rows.classes(), **{**OPTIONS, "epochs": 2})
        records.append({"history": history, **state(model)})
    compare(f"placed_{build.__name__}", "model", *records)


def test_a_model_comes_back_plain():
    model = make(
        models.mlp, {"optimizer": "sgd", "loss": "sparse_categorical_crossentropy"}, "model"
    )
    fit(model, **rows.classes(), **OPTIONS)
    model.set_strategy(None)
    assert {v.value.device[-5:] for v in model.weights} == {"CPU:0"}
    for layer in model.layers:
        assert "call" not in vars(layer)
    fit(model, **rows.classes(), **OPTIONS)
    keras.utils.set_random_seed(SEED)
    assert np.isfinite(model.predict(rows.classes()["x"], verbose=0)).all()
