"""What losses and penalties keep beside the model's variables, and who writes it."""

import collections

import keras
import models
import numpy as np
import pytest
import rows
from harness import BACKEND, LONG_WHERE_TRACED, BatchLogs, compare, fit, make, state
from keras import layers, losses, ops

import parallel_keras as pk

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}
LONG = pytest.mark.long
ON_TORCH = pytest.mark.backend("torch")


def error(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


class Box:
    """Holds a variable where Keras does not look."""

    def __init__(self, value):
        self.variable = keras.Variable(value, trainable=False)


# ---- losses that change their own state ----------------------------------------


class Counted(losses.Loss):
    """Weighs less with each call."""

    def __init__(self):
        super().__init__(name="counted")
        self.calls = keras.Variable(0.0, trainable=False)

    def call(self, y_true, y_pred):
        self.calls.assign_add(1.0)
        return error(y_true, y_pred) / self.calls


class Relative(losses.Loss):
    """The errors relative to their moving average."""

    def __init__(self):
        super().__init__(name="relative")
        self.average = keras.Variable(1.0, trainable=False)

    def call(self, y_true, y_pred):
        errors = error(y_true, y_pred)
        self.average.assign(0.9 * self.average + 0.1 * ops.stop_gradient(ops.mean(errors)))
        return errors / self.average


class Listed(losses.Loss):
    """Counts its calls in a queue, and in an attribute."""

    def __init__(self):
        super().__init__(name="listed")
        self.calls, self.number = collections.deque(maxlen=5), 0

    def call(self, y_true, y_pred):
        self.calls.append(1)
        self.number += 1
        return error(y_true, y_pred) / (len(self.calls) + self.number)


def queue():
    """A function that keeps the last means in an array, and how many it has seen."""
    means, seen = np.ones(4, "float32"), 0

    def loss(y_true, y_pred):
        nonlocal seen
        means[seen % 4] = float(ops.mean(ops.stop_gradient(y_pred)))
        seen += 1
        return error(y_true, y_pred) + means.mean() * seen

    return loss


STATEFUL = [
    Counted,
    pytest.param(Relative, marks=LONG),
    pytest.param(Listed, marks=ON_TORCH),
    pytest.param(queue, marks=ON_TORCH),
]


@pytest.mark.parametrize("loss", STATEFUL)
def test_a_loss_that_keeps_state(loss):
    """The last batch has one row: two of three replicas have none."""
    records = []
    for strategy in (None, "data=3"):
        arguments = {"optimizer": keras.optimizers.SGD(0.05), "loss": loss()}
        model = make(lambda: models.regressor(outputs=3), arguments, strategy)
        data = rows.regression(outputs=3)
        logs = BatchLogs()
        history = fit(model, **data, **OPTIONS, epochs=2, callbacks=[logs])
        records.append({"history": history, "batches": logs.batches, **state(model)})
        records[-1]["evaluate"] = model.evaluate(**data, batch_size=16, verbose=0)
    compare(f"loss_{loss.__name__}", "data=3", *records)


# ---- variables that the program writes -------------------------------------------


class Penalty(keras.regularizers.Regularizer):
    def __init__(self, box):
        self.box = box

    def __call__(self, weights):
        return self.box.variable * ops.sum(ops.square(weights))


class Gate(layers.Layer):
    def __init__(self, box):
        super().__init__()
        self.box = box

    def call(self, x):
        return x * self.box.variable


def of_a_function(box):
    return models.regressor(), lambda y_true, y_pred: error(y_true, y_pred) * box.variable


def of_a_penalty(box):
    return models.regressor(kernel_regularizer=Penalty(box)), "mse"


def of_a_layer(box):
    x = keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh")(x)
    return keras.Model(x, layers.Dense(1)(Gate(box)(hidden))), "mse"


class Anneal(keras.callbacks.Callback):
    def __init__(self, box):
        super().__init__()
        self.box = box

    def on_train_batch_begin(self, batch, logs=None):
        self.box.variable.assign(0.2 * (batch + 1))


@pytest.mark.parametrize(
    "strategy", ["data=3", pytest.param("pipeline=2", marks=LONG_WHERE_TRACED)]
)
@pytest.mark.parametrize(
    "build",
    [
        of_a_function,
        *(pytest.param(b, marks=LONG_WHERE_TRACED) for b in (of_a_penalty, of_a_layer)),
    ],
)
def test_variables_that_a_callback_writes(build, strategy):
    """Before each batch, and once more between two calls of `fit`."""
    records = []
    for chosen in (None, strategy):
        box = Box(0.1)
        keras.utils.set_random_seed(3)
        model, loss = build(box)
        pk.parallelize(model, chosen).compile(keras.optimizers.SGD(0.1), loss)
        data = rows.regression()
        histories = [fit(model, **data, **OPTIONS, callbacks=[Anneal(box)])]
        box.variable.assign(0.7)
        histories.append(fit(model, **data, **OPTIONS))
        records.append({"histories": histories, **state(model)})
        records[-1]["evaluate"] = model.evaluate(**data, batch_size=16, verbose=0)
    compare(f"written_{build.__name__}", strategy, *records)


@ON_TORCH
@pytest.mark.parametrize("strategy", ["data=3", pytest.param("pipeline=2", marks=LONG)])
def test_a_tensor_that_a_callback_writes(strategy):
    import torch

    records = []
    for chosen in (None, strategy):
        beta = torch.zeros(())

        def loss(y_true, y_pred, beta=beta):
            return error(y_true, y_pred) * (1 + beta)

        write = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs, beta=beta: beta.fill_(0.3 * batch)
        )
        arguments = {"optimizer": keras.optimizers.SGD(0.1), "loss": loss}
        model = make(models.regressor, arguments, chosen)
        history = fit(model, **rows.regression(), **OPTIONS, callbacks=[write])
        records.append({"history": history, **state(model)})
    compare("written_tensor", strategy, *records)


# ---- what is refused ------------------------------------------------------------


class Centred(keras.Model):
    """Its loss moves what the forward pass subtracts."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.center = self.add_weight(shape=(1,), initializer="zeros", trainable=False)

    def call(self, x):
        return self.dense(x) - self.center

    def error(self, y_true, y_pred):
        self.center.assign(0.9 * self.center + 0.1 * ops.mean(y_pred, axis=0))
        return error(y_true, y_pred)


def centred():
    model = Centred()
    return model, model.error


def counted():
    return models.regressor(), Counted()


def near_its_start():
    model = models.regressor()
    kernel = model.layers[1].kernel
    return model, lambda y_true, y_pred: error(y_true, y_pred) + ops.mean(ops.square(kernel))


def by_iteration():
    model = models.regressor()
    return (
        model,
        lambda y_true, y_pred: (
            error(y_true, y_pred) * (1.0 + ops.cast(model.optimizer.iterations, "float32"))
        ),
    )


class Fading(Penalty):
    def __call__(self, weights):
        self.box.variable.assign(0.9 * self.box.variable)
        return super().__call__(weights)


def fading():
    return models.regressor(kernel_regularizer=Fading(Box(0.1))), "mse"


@pytest.mark.parametrize(
    ("build", "strategy", "what", "name"),
    [
        (counted, "pipeline=2", "keeps state from batch to batch", "counted"),
        pytest.param(
            centred, "data=3", "assigns a variable of the model", "variable", marks=ON_TORCH
        ),
        (near_its_start, "pipeline=2", "reads a variable of the model", "kernel"),
        pytest.param(by_iteration, "pipeline=2", "reads a variable", "iteration", marks=LONG),
        pytest.param(fading, "data=3", "regularizer that keeps state", "Fading", marks=ON_TORCH),
    ],
)
def test_refused_before_the_first_step(build, strategy, what, name):
    model, loss = build()
    with pytest.raises(pk.UnsupportedError, match=f"(?s){what}.*Received.*{name}"):
        pk.parallelize(model, strategy).compile("sgd", loss)
        model.fit(**rows.regression(), **OPTIONS)
    assert not hasattr(model, "optimizer") or int(model.optimizer.iterations) == 0


def size(model):
    """A metric that Keras computes when the weights have changed."""

    def of_kernel(y_true, y_pred):
        return ops.sum(ops.square(model.layers[1].kernel))

    return of_kernel


def rate(model):
    def of_optimizer(y_true, y_pred):
        return model.optimizer.learning_rate

    return of_optimizer


def reading(metric, strategy):
    keras.utils.set_random_seed(3)
    model = pk.parallelize(models.regressor(), strategy)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[metric(model)])
    return model


@pytest.mark.parametrize("strategy", ["data=3", pytest.param("pipeline=2", marks=LONG)])
def test_a_metric_that_reads_a_weight(strategy):
    model = reading(size, strategy)
    with pytest.raises(
        pk.UnsupportedError, match="(?s)reads a weight.*Received.*of_kernel.*kernel"
    ):
        model.fit(**rows.regression(), **OPTIONS)
    assert int(model.optimizer.iterations) == 0
    evaluated = model.evaluate(**rows.regression(), batch_size=16, verbose=0)
    plain = reading(size, None).evaluate(**rows.regression(), batch_size=16, verbose=0)
    compare("metric_of_a_weight", strategy, {"evaluate": plain}, {"evaluate": evaluated})


@LONG_WHERE_TRACED
@pytest.mark.parametrize("strategy", ["data=3", "pipeline=2"])
def test_a_metric_that_reads_the_learning_rate(strategy):
    change = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1))
    records = []
    for chosen in (None, strategy):
        model = reading(rate, chosen)
        history = fit(model, **rows.regression(), **OPTIONS, epochs=2, callbacks=[change])
        records.append({"history": history, **state(model)})
    compare("metric_of_the_rate", strategy, *records)


@pytest.mark.skipif(BACKEND == "torch", reason="refused there: see above")
@pytest.mark.parametrize("strategy", [pytest.param("data=3", marks=LONG)])
def test_what_tensorflow_runs(strategy):
    for build in (centred, fading):
        records = []
        for chosen in (None, strategy):
            keras.utils.set_random_seed(3)
            model, loss = build()
            pk.parallelize(model, chosen).compile(keras.optimizers.SGD(0.05), loss)
            history = fit(model, **rows.regression(), **OPTIONS, epochs=2)
            records.append({"history": history, **state(model)})
        compare(f"runs_{build.__name__}", strategy, *records)
