"""ModelParallel next to other models, other optimizers and methods of the user's own."""

import pickle

import keras
import numpy as np
import pytest
from keras import layers

import parallel_keras as pk

RNG = np.random.default_rng(0)
X = RNG.normal(size=(49, 6)).astype("float32")
Y = RNG.integers(0, 3, 49)
FIT = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


def sequential(with_input=True):
    keras.utils.set_random_seed(3)
    head = [keras.Input((6,))] if with_input else []
    body = [layers.Dense(16, "gelu"), layers.Dense(16, "gelu"), layers.Dense(3, "softmax")]
    model = keras.Sequential([*head, *body])
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def test_a_plain_model_that_shares_layers_sees_the_training():
    found = []
    for strategy in (None, "model"):
        keras.utils.set_random_seed(3)
        x = keras.Input((6,))
        h = layers.Dense(16, "gelu")(layers.Dense(16, "gelu")(x))
        plain, model = keras.Model(x, h), keras.Model(x, layers.Dense(6)(h))
        plain.predict(X, verbose=0)
        pk.parallelize(model)
        model.compile("adam", "mse", strategy=strategy)
        model.fit(X, X, **FIT)
        first = plain.predict(X, verbose=0)
        model.set_strategy(None)
        model.fit(X, X, **FIT)
        found.append((first, plain.predict(X, verbose=0)))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_evaluate_after_the_places_changed():
    found = []
    for strategy in (None, "model"):
        model = pk.parallelize(sequential(with_input=False), strategy)
        model.evaluate(X, Y, verbose=0)
        model.fit(X, Y, **FIT)
        pk.place_layers(model, {model.layers[0].name: 1})
        model.fit(X, Y, **FIT)
        found.append([model.evaluate(X, Y, verbose=0), *model.predict(X, verbose=0).ravel()])
    np.testing.assert_allclose(*found, atol=1e-5)


def test_the_strategy_changes_in_mid_training_with_slots():
    one, two = sequential(), pk.parallelize(sequential())
    for strategy in (None, "model", "model=3", None, "model"):
        two.set_strategy(strategy)
        for model in (one, two):
            model.fit(X, Y, **FIT)
        np.testing.assert_allclose(one.predict(X, verbose=0), two.predict(X, verbose=0), atol=1e-5)


@pytest.mark.parametrize("name", ["train_step", "call"])
def test_a_method_of_the_instance_runs_and_stays(name):
    model, calls = sequential(), []
    owner = model if name == "train_step" else model.layers[1]
    stock = getattr(owner, name)

    def own(*args, **kwargs):
        calls.append(1)
        return stock(*args, **kwargs)

    setattr(owner, name, own)
    pk.parallelize(model, "model").fit(X, Y, **FIT)
    assert calls
    model.set_strategy(None)
    assert vars(owner)[name] is own


def test_a_layer_is_as_keras_made_it_afterwards():
    model = sequential()
    before = [{key: id(value) for key, value in vars(layer).items()} for layer in model.layers]
    pk.parallelize(model, "model").fit(X, Y, **FIT)
    model.set_strategy(None)
    for layer, members in zip(model.layers, before, strict=True):
        for name in ("call", "build", "quantize", "quantized_call"):
            entry = vars(layer).get(name)
            assert (entry and id(entry)) == members.get(name)


def test_an_optimizer_is_as_keras_made_it_afterwards():
    plain, model = sequential(), pk.parallelize(sequential(), "model")
    for each in (plain, model):
        each.fit(X, Y, **FIT)  # builds the optimizer
    model.set_strategy(None)
    assert vars(model.optimizer).keys() == vars(plain.optimizer).keys()
    found = []
    for each in (plain, model, pickle.loads(pickle.dumps(model))):
        each.fit(X, Y, **FIT)
        found.append(each.predict(X, verbose=0))
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    np.testing.assert_allclose(found[2], found[0], atol=1e-5)


def test_a_place_out_of_range_leaves_the_strategy():
    model = pk.parallelize(sequential())
    pk.place(1)(model.layers[1])
    for wrong in (pk.ModelParallel(1), pk.ModelParallel(["cpu:1"])):
        with pytest.raises(ValueError, match="device number 1"):
            model.set_strategy(wrong)
        assert model.strategy == pk.SingleDevice()
    model.fit(X, Y, **FIT)
