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
import step_models
from cases import own_steps
from executed import MOVES, executed
from harness import SEED, compare, fit, make, state
from keras import layers

import parallel_keras as pk
from parallel_keras import keras_internals

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
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_evaluate_and_predict_run_where_the_layers_are(build, method):
    arguments = {"optimizer": "sgd", "loss": "sparse_categorical_crossentropy"}
    model = make(build, arguments, "model")
    data = rows.classes()
    if method == "predict":
        data = {"x": data["x"]}

    def run():
        getattr(model, method)(**data, batch_size=16, verbose=0)

    seen = {}
    # TensorFlow hands a graph over when it is made: this is the first run.
    for name, operation, device in executed(run):
        found = re.search(r"/(first|second|third)(_\d+)?/", name)
        if found and operation not in MOVES:
            assert device == WHERE[found[1]], f"{operation} {name} ran on device {device}"
            seen.setdefault(found[1], set()).add(operation)
    assert set(seen) == set(WHERE)
    assert all(any("MatMul" in operation for operation in ran) for ran in seen.values()), seen


@pytest.mark.parametrize("build", [models.placed_skip, Blocks])
def test_the_numbers_are_those_of_plain_keras(build):
    records = []
    for strategy in (None, "model"):
        arguments = {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["accuracy"]}
        model = make(build, {**arguments, "loss": "sparse_categorical_crossentropy"}, strategy)
        history = fit(model, **rows.classes(), **{**OPTIONS, "epochs": 2})
        records.append({"history": history, **state(model)})
    compare(f"placed_{build.__name__}", "model", *records)


class OwnStep(step_models.Steps):
    """Its layers, and its optimizer, are built when its step is traced."""

    def __init__(self):
        super().__init__()
        with pk.place(0):
            self.first = layers.Dense(8, activation="tanh", name="first")
        with pk.place(1):
            self.second = layers.Dense(8, activation="tanh", name="second")
        with pk.place(-1):
            self.third = layers.Dense(3, activation="softmax", name="third")

    def call(self, x):
        return self.third(self.second(self.first(x)))

    def computed(self, x):
        return self(x)

    def train_step(self, data):
        x, y = data

        def loss_of():
            return self.compute_loss(y=y, y_pred=self.computed(x))

        # Asked for when there are some.
        self.computed(x)
        return {"own": self.update(self.optimizer, self.trainable_variables, loss_of)}


class OwnStepOfLayers(OwnStep):
    """Keras makes the variables at once where it is not the model that is called."""

    def computed(self, x):
        return self.call(x)


def placed_gan():
    model = step_models.GAN()
    generator, discriminator = model.generator.name, model.discriminator.name
    return pk.place_layers(model, {f"{generator}$": 0, f"{discriminator}$": -1})


def classifying(optimizer):
    return lambda: {"optimizer": optimizer, "loss": "sparse_categorical_crossentropy"}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    "build, arguments, data",
    [
        (OwnStep, classifying("adam"), rows.classes),
        (OwnStep, classifying("adafactor"), rows.classes),
        (OwnStepOfLayers, classifying("adam"), rows.classes),
        (placed_gan, own_steps.gan(), step_models.latent),
    ],
)
def test_what_a_step_of_the_models_own_builds_is_in_its_place_at_once(
    build, arguments, data, devices
):
    model = make(build, arguments(), f"model={devices}")
    fit(model, **data(), **OPTIONS)
    last = f"CPU:{devices - 1}"
    parts = {"first": "CPU:0", "second": "CPU:1", "third": last}
    if build is placed_gan:
        parts = {"generator": "CPU:0", "discriminator": last}
    home = {id(v): device for name, device in parts.items() for v in getattr(model, name).weights}
    for variable in model.weights:
        assert variable.value.device.endswith(home[id(variable)]), variable.path

    seen = set()
    for optimizer in own_optimizers(model):
        assert optimizer.built
        for slot, weight in keras_internals.slots(optimizer):
            assert slot.value.device.endswith(home[id(weight)]), slot.path
            seen.add(id(weight))
    assert seen == {id(v) for v in model.trainable_variables}


def own_optimizers(model):
    if isinstance(model, step_models.GAN):
        return [model.d_optimizer, model.g_optimizer]
    return [model.optimizer]


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
@pytest.mark.parametrize("build", [OwnStep, OwnStepOfLayers])
def test_the_numbers_of_what_is_built_in_a_step_are_those_of_plain_keras(build, optimizer):
    records = []
    for strategy in (None, "model=3"):
        model = make(build, classifying(optimizer)(), strategy)
        history = fit(model, **rows.classes(), **{**OPTIONS, "epochs": 2})
        records.append({"history": history, **state(model)})
    compare(f"{build.__name__}_{optimizer}", "model=3", *records)


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
