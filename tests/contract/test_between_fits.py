"""What comes between two epochs or two fits leaves training as it was.

Losses, metrics and layers are looked at before the first step: what was found holds for
steps of that kind until the model is compiled anew.
"""

import keras
import models
import pytest
import rows
from cases import compiled, sgd
from harness import compare, fit, make, state
from keras import ops

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}
STRATEGIES = ["data=3", "pipeline=2"]


def spread(y_true, y_pred):
    """No mean over the rows."""
    return ops.sqrt(ops.mean((ops.cast(y_true, "float32") - y_pred[:, 0]) ** 2))


ARGUMENTS = {
    "added_sum": (models.summed_losses, compiled(sgd)),
    "loss_of_the_batch": (models.mlp, compiled(sgd, spread, metrics=())),
}
ALL = [
    pytest.param(name, strategy)
    for name in ARGUMENTS
    for strategy in STRATEGIES
    # Refused in a pipeline.
    if (name, strategy) != ("loss_of_the_batch", "pipeline=2")
]


def both(name, strategy, run):
    """Compare what `run(model, data)` gives with and without the strategy."""
    records = []
    for chosen in (None, strategy):
        model = make(*(ARGUMENTS[name][0], ARGUMENTS[name][1]()), chosen)
        records.append({"run": run(model, rows.classes()), **state(model)})
    compare(f"between_fits_{name}", strategy, *records)


class Coefficient(keras.layers.Layer):
    """A penalty that is a sum over the rows, and that is off at first."""

    def __init__(self):
        super().__init__(name="coefficient")
        self.beta = 0.0

    def build(self, shape):
        self.gamma = self.add_weight(name="gamma", initializer="zeros", trainable=False)

    def call(self, x):
        self.add_loss(self.beta * ops.sum(ops.abs(x)))
        self.add_loss(self.gamma * ops.sum(x * x))
        return x


def with_coefficient():
    x = keras.Input((6,))
    y = Coefficient()(keras.layers.Dense(8, activation="tanh")(x))
    return keras.Model(x, keras.layers.Dense(3, activation="softmax")(y))


ARGUMENTS["coefficient"] = (with_coefficient, compiled(sgd))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_coefficients_that_a_callback_raises_from_zero(strategy):
    def run(model, data):
        layer = model.get_layer("coefficient")

        def up(epoch, logs=None):
            layer.gamma.assign(0.01 * epoch)
            layer.beta = 0.01 * epoch

        warm_up = keras.callbacks.LambdaCallback(on_epoch_begin=up)
        return fit(model, **data, **OPTIONS, epochs=3, callbacks=[warm_up])

    both("coefficient", strategy, run)


@pytest.mark.parametrize(("name", "strategy"), ALL)
def test_predict_and_a_small_evaluate_between_two_fits(name, strategy):
    def run(model, data):
        first = fit(model, **data, **OPTIONS)
        predicted = model.predict(data["x"], batch_size=16, verbose=0)
        evaluated = model.evaluate(data["x"][:1], data["y"][:1], verbose=0)
        return first, predicted, evaluated, fit(model, **data, **OPTIONS)

    both(name, strategy, run)


def transfer():
    """A base that is frozen at first, under a head."""
    x = keras.Input((6,))
    y = keras.layers.Dense(8, activation="tanh", name="base_0")(x)
    base = keras.Model(x, keras.layers.Dense(8, activation="tanh", name="base_1")(y), name="base")
    base.trainable = False
    x = keras.Input((6,))
    return keras.Model(x, keras.layers.Dense(3, activation="softmax")(base(x)))


ARGUMENTS["fine_tuning"] = (transfer, compiled(sgd))


@pytest.mark.parametrize("strategy", [*STRATEGIES, "model=2"])
def test_a_frozen_base_is_tuned_afterwards(strategy):
    """Its variables are brought to their devices while they are frozen."""

    def run(model, data):
        first = fit(model, **data, **OPTIONS)
        before = model.get_layer("base").get_weights()
        model.get_layer("base").trainable = True
        model.compile(**compiled(sgd)())
        second = fit(model, **data, **OPTIONS)
        after = model.get_layer("base").get_weights()
        assert all((a != b).any() for a, b in zip(before, after, strict=True))
        return first, second

    both("fine_tuning", strategy, run)


@pytest.mark.parametrize(("name", "strategy"), ALL)
def test_validation_of_one_row(name, strategy):
    def run(model, data):
        validation = data["x"][:1], data["y"][:1]
        return fit(model, **data, **OPTIONS, epochs=2, validation_data=validation)

    both(name, strategy, run)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_callback_that_predicts(strategy):
    def run(model, data):
        predict = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: model.predict(data["x"][:5], verbose=0)
        )
        return fit(model, **data, **OPTIONS, epochs=3, callbacks=[predict])

    both("added_sum", strategy, run)
