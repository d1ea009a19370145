"""Places: every form, which one wins, what keeps them, and what is refused."""

import re

import keras
import numpy as np
import pytest
import rows
from harness import compare, fit, make, state
from keras import layers, ops

import parallel_keras as pk
from parallel_keras import costs, placement


def places(model):
    """The place of each layer and operation that has one, by name without its number."""
    return {
        re.sub(r"_\d+$", "", unit.name): placement.own_place(unit)
        for unit in placement.units(model)
        if placement.own_place(unit) is not None
    }


def dense(name):
    return layers.Dense(4, name=name)


def test_every_form():
    @pk.place(0)
    def encoder(x):
        return dense("in_function")(x)

    @pk.place(1)
    class Head(layers.Layer):
        def __init__(self):
            super().__init__(name="of_class")
            self.inner = dense("inside")

        def call(self, x):
            return self.inner(x)

    x = keras.Input((4,))
    y = encoder(x)
    y = pk.place(2)(dense("instance"))(y)
    with pk.place(-1):
        y = ops.relu(dense("in_block")(y)) + y
    made_outside = dense("made_outside")
    with pk.place("cpu:1"):
        y = made_outside(y)
    model = keras.Model(x, Head()(y))
    assert places(model) == {
        "in_function": 0,
        "instance": 2,
        "in_block": -1,
        "relu": -1,
        "add": -1,
        "made_outside": "cpu:1",
        "of_class": 1,
    }


def test_instance_over_inner_over_outer_over_class_over_pattern():
    @pk.place(4)
    class Of(layers.Dense):
        pass

    with pk.place(2):
        outer = Of(4, name="outer")
        with pk.place(1):
            inner = Of(4, name="inner")
            instance = pk.place(0)(Of(4, name="instance"))
    of_class = Of(4, name="of_class")
    nothing = dense("nothing")
    model = keras.Sequential([keras.Input((4,)), instance, inner, outer, of_class, nothing])
    pk.place_layers(model, {".*": 3})
    assert places(model) == {"instance": 0, "inner": 1, "outer": 2, "of_class": 4, "nothing": 3}


def test_patterns_on_nested_models():
    encoder = keras.Sequential([keras.Input((4,)), dense("a"), dense("b")], name="encoder")
    model = keras.Sequential([keras.Input((4,)), encoder, dense("head_0"), dense("head_1")])
    assert pk.place_layers(model, {"encoder": 0, r"head_(0|1)": 1, "encoder/b": 2}) is model
    assigned = placement.assign(model, ("cpu:0", "cpu:1", "cpu:2"))
    numbers = {
        layer.name: assigned.numbers[id(layer)] for layer in (*encoder.layers, *model.layers)
    }
    assert numbers["a"] == 0 and numbers["b"] == 2 and numbers["head_0"] == numbers["head_1"] == 1
    assert assigned.last == 1


@pytest.mark.parametrize(
    "patterns, words",
    [
        ({"hed_0": 0}, ["no layer", "head_0"]),
        ({"head.*": 0, "head_0": 1}, ["Two patterns", "head_0"]),
        ({"head_0": "nowhere"}, ["nowhere"]),
        ({"head_0": -2}, ["-2"]),
        ({"head_0": 1.5}, ["1.5"]),
        ({"(": 0}, ["regular expressions"]),
        (["head_0"], ["dict", "head_0"]),
    ],
)
def test_refused_patterns(patterns, words):
    model = keras.Sequential([keras.Input((4,)), dense("head_0"), dense("head_1")])
    with pytest.raises(ValueError) as caught:
        pk.place_layers(model, patterns)
    assert all(word in str(caught.value) for word in [*words, "Received"]), str(caught.value)
    assert not places(model)


def test_unplaced_layers_follow_their_inputs():
    x = keras.Input((4,))
    a = pk.place(0)(dense("a"))(x)
    b = pk.place(2)(dense("b"))(x)
    merge, after = layers.Add(), dense("after")
    model = keras.Model(x, after(merge([a, b])))
    numbers = placement.assign(model, ("cpu:0", "cpu:1", "cpu:2")).numbers
    assert numbers[id(merge)] == numbers[id(after)] == 2


@pytest.mark.parametrize("target, words", [(5, ["5", "cpu:1"]), ("gpu:3", ["gpu:3", "cpu:0"])])
def test_a_place_that_the_strategy_does_not_have(target, words):
    model = keras.Sequential([keras.Input((4,)), pk.place(target)(dense("a"))])
    model = pk.parallelize(model)
    with pytest.raises(ValueError) as caught:
        model.compile("sgd", "mse", strategy=pk.ModelParallel(2))
    assert all(word in str(caught.value) for word in [*words, "Received"]), str(caught.value)
    assert model.strategy == pk.SingleDevice() and not model.compiled


def test_what_cannot_be_placed():
    for wrong in (3, "text", object()):
        with pytest.raises(ValueError, match="Received"):
            pk.place(0)(wrong)
    for wrong in (None, True, 1.5, -3, "nowhere"):
        with pytest.raises(ValueError, match="Received"):
            pk.place(wrong)


def placed_model():
    keras.utils.set_random_seed(7)
    x = keras.Input((6,))
    with pk.place(0):
        y = layers.Dense(8, activation="tanh")(x)
    with pk.place(1):
        y = layers.Dense(3, activation="softmax")(layers.Dense(8)(y) + y)
    return pk.ParallelModel(x, y)


def test_files_and_clones_keep_places(tmp_path):
    model = placed_model()
    model.compile("adam", "sparse_categorical_crossentropy", strategy="model")
    data = rows.classes()
    model.fit(**data, batch_size=16, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)

    loaded = pk.load_model(path, strategy="model")
    assert list(placement.places_of(loaded).values()) == list(placement.places_of(model).values())
    assert loaded.strategy == pk.ModelParallel()
    np.testing.assert_array_equal(
        loaded.predict(data["x"], verbose=0), model.predict(data["x"], verbose=0)
    )
    more = [m.fit(**data, batch_size=16, shuffle=False, verbose=0).history for m in (loaded, model)]
    np.testing.assert_allclose(more[0]["loss"], more[1]["loss"], atol=1e-6)

    plain = keras.models.load_model(path)
    assert type(plain) is keras.Model or type(plain).__name__ == "Functional"
    assert not placement.places_of(plain) and "strategy" not in vars(plain)

    clone = pk.clone_model(model)
    assert list(placement.places_of(clone).values()) == list(placement.places_of(model).values())
    assert clone.strategy == model.strategy
    assert "strategy" not in vars(keras.models.clone_model(model))


def test_summary_shows_places():
    lines = []
    placed_model().summary(print_fn=lambda text, **_: lines.append(text))
    text = "\n".join(lines)
    assert "Places:" in text and "(Dense): 0" in text and "(Add): 1" in text
    lines.clear()
    plain = keras.Sequential([keras.Input((4,)), dense("a")])
    pk.parallelize(plain).summary(print_fn=lambda text, **_: lines.append(text))
    assert "Places:" not in "\n".join(lines)


def test_places_do_nothing_under_other_strategies():
    losses = []
    for strategy in (None, "data", "model"):
        model = placed_model()
        model.compile("sgd", "sparse_categorical_crossentropy", strategy=strategy)
        history = model.fit(**rows.classes(), batch_size=16, shuffle=False, verbose=0).history
        losses.append(history["loss"][0])
    np.testing.assert_allclose(losses, losses[0], atol=1e-6)


def test_from_strategy_to_strategy_in_mid_training():
    records = []
    for steps in ([None] * 5, [None, "model", "data", "model=3", None]):
        model = placed_model()
        model.compile("adam", "sparse_categorical_crossentropy")
        kernel = model.layers[1].kernel
        for strategy in steps:
            model.set_strategy(strategy)
            model.fit(**rows.classes(), batch_size=16, shuffle=False, verbose=0)
        assert model.layers[1].kernel is kernel
        weights = [
            keras.ops.convert_to_numpy(v) for v in (*model.weights, *model.optimizer.variables)
        ]
        records.append(weights)
    for expected, received in zip(*records, strict=True):
        np.testing.assert_allclose(received, expected, atol=1e-5)


class TwoOptimizers(keras.Model):
    """A step of the model's own."""

    def __init__(self):
        super().__init__()
        with pk.place(0):
            self.first = layers.Dense(6, activation="tanh")
        with pk.place(1):
            self.second = layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data[:2]
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        else:
            import torch

            self.zero_grad()
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward()
            with torch.no_grad():
                variables = self.trainable_variables
                self.optimizer.apply([v.value.grad for v in variables], variables)
        return {"own": loss}


def test_a_models_own_train_step_works_as_it_is():
    results = []
    for strategy in (None, "model"):
        keras.utils.set_random_seed(3)
        model = pk.parallelize(TwoOptimizers())
        model.compile("adam", "sparse_categorical_crossentropy", strategy=strategy)
        history = model.fit(**rows.classes(), batch_size=16, shuffle=False, epochs=2, verbose=0)
        results.append((history.history["own"], [v.shape for v in model.optimizer.variables]))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-6)
    assert results[0][1] == results[1][1]


class TrainsThePart(TwoOptimizers):
    """Gives its optimizer the second layer only."""

    def train_step(self, data):
        import tensorflow as tf

        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.second.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"own": loss}


@pytest.mark.backend("tensorflow")
def test_an_optimizer_is_for_what_a_step_of_the_models_own_gives_it():
    records = []
    for strategy in (None, "model"):
        arguments = {"optimizer": "nadam", "loss": "sparse_categorical_crossentropy"}
        model = make(TrainsThePart, arguments, strategy)
        history = fit(model, **rows.classes(), batch_size=16, epochs=2, shuffle=False, verbose=0)
        records.append({"history": history, **state(model)})
    compare("trains_a_part", "model", *records)


def test_without_places_the_layers_are_split_by_cost():
    x = keras.Input((8,))
    y = x
    for size in (64, 64, 64, 64):
        y = layers.Dense(size)(y)
    model = pk.ParallelModel(x, y)
    for balance, expected in (("flops", [0, 0, 1, 1]), ((1, 3), [0, 1, 1, 1])):
        model.compile("adam", "mse", strategy=pk.ModelParallel(2, balance=balance))
        plan = model.plan(32)
        assert list(plan.placement) == expected, str(plan)
    with pytest.raises(ValueError, match="balance"):
        model.compile("adam", "mse", strategy=pk.ModelParallel(2, balance=[1, 1]))


class WithoutLayers(keras.Model):
    """What it computes with is its own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


def test_a_model_without_layers_computes_on_one_device():
    data = rows.regression(features=2, outputs=2)
    records = []
    for strategy in (None, "model=2"):
        model = make(WithoutLayers, {"optimizer": "sgd", "loss": "mse"}, strategy)
        history = fit(model, **data, batch_size=16, epochs=2, shuffle=False, verbose=0)
        records.append({"history": history, **state(model)})
    compare("model_without_layers", "model=2", *records)


def test_costs_are_estimated_once_for_each_state_of_the_model(monkeypatch):
    estimated = []

    def counted(model, *arguments, **options):
        estimated.append(model)
        return estimate(model, *arguments, **options)

    estimate = costs.operations_and_costs
    monkeypatch.setattr(costs, "operations_and_costs", counted)
    model = pk.parallelize(keras.Sequential([keras.Input((6,)), dense("a"), dense("b")]))
    model.compile("adam", "mse", strategy="model")
    x = rows.classes()["x"]

    def run():
        model.fit(x, x[:, :4], epochs=2, validation_split=0.2, verbose=0)
        model.train_on_batch(x, x[:, :4])
        model.evaluate(x, x[:, :4], verbose=0)
        model.predict(x, verbose=0)
        return len(estimated)

    assert run() == 1
    model.layers[0].trainable = False
    assert run() == 2
    model.compile("sgd", "mse")
    assert run() == 3
    model.add(dense("c"))
    model.compile("sgd", "mse")
    assert run() == 4
    pk.place(1)(model.layers[0])
    assert run() == 4  # a model with places is not split
    numbers = vars(model)["_parallel_keras"].lowering.numbers
    assert [numbers[id(layer)] for layer in model.layers] == [1, 1, 1]


def test_a_plan_for_devices_that_are_not_there():
    plan = placed_model().plan(batch_size=64, strategy="model", devices="4x80GB")
    text = str(plan)
    assert "gpu:3" in text and "gpu:1" in text
    with pytest.raises(ValueError, match="Received"):
        placed_model().plan(devices="lots")


def test_host_builds_and_the_strategy_moves():
    with pk.host():
        model = placed_model()
    model.compile("sgd", "sparse_categorical_crossentropy", strategy="model")
    assert np.isfinite(model.fit(**rows.classes(), verbose=0).history["loss"]).all()


def test_the_model_is_called_placed_before_and_after_compile():
    x = rows.classes()["x"]
    expected = keras.ops.convert_to_numpy(placed_model()(x))
    model = placed_model()
    model.set_strategy("model")
    np.testing.assert_allclose(keras.ops.convert_to_numpy(model(x)), expected, atol=1e-6)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
    model.compile("sgd", "sparse_categorical_crossentropy")
    np.testing.assert_allclose(keras.ops.convert_to_numpy(model(x)), expected, atol=1e-6)
