"""Losses: Keras's own, the user's own, and what layers add."""

import keras
import models
import rows
from keras import losses, ops

from cases import adam, case, compiled, sgd


def rows_error(y_true, y_pred):
    """One value per row."""
    return ops.mean(ops.abs(y_true - y_pred) ** 1.5, axis=-1)


def scalar_error(y_true, y_pred):
    """The mean over the batch."""
    return ops.mean(ops.square(y_true - y_pred) * 1.5)


class RowsLoss(losses.Loss):
    """A loss class of the user's own."""

    def call(self, y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred), axis=-1) * 0.5


def regression(name, loss, metrics=("mae",), model=models.regressor, data=rows.regression, **rest):
    return case(name, model, data, compiled(loss=loss, metrics=metrics), **rest)


def keras_loss(name, model, data, optimizer=sgd, **rest):
    """A loss of Keras, as an object of its class."""
    return case(
        f"loss_{name}",
        model,
        data,
        compiled(optimizer, loss=lambda: getattr(losses, name)(), metrics=()),
        **rest,
    )


def three_regressors():
    return models.regressor(3)


def three_targets():
    return rows.regression(outputs=3)


LONG = {"quick": ()}

# What `make test` runs on TensorFlow too (see harness.grid).
TRACED = {
    "loss_function_rows",
    "loss_lambda",
    "loss_weights_dict",
    "regularizers",
    "add_loss",
}

CASES = [
    regression("loss_function_rows", rows_error, quick=(2, 3)),
    regression("loss_function_scalar", scalar_error),
    regression("loss_lambda", lambda: _lambda_loss),
    regression("loss_class", lambda: RowsLoss(name="own")),
    regression("loss_method_of_model", lambda: _Bound().loss, **LONG),
    case(
        "loss_weights_dict",
        models.two_outputs,
        rows.two_outputs,
        compiled(
            loss={"label": "sparse_categorical_crossentropy", "amount": "mse"},
            loss_weights={"label": 0.7, "amount": 2.0},
            metrics={"label": ["accuracy"], "amount": ["mae", "mse"]},
        ),
        quick=(2, 3),
    ),
    case(
        "loss_weights_list",
        models.two_outputs_list,
        rows.two_outputs_list,
        compiled(
            loss=["sparse_categorical_crossentropy", "mse"],
            loss_weights=[0.7, 2.0],
            metrics=[["accuracy"], ["mae"]],
        ),
    ),
    case(
        "loss_weights_own",
        models.two_outputs,
        rows.two_outputs,
        compiled(
            loss={"label": "sparse_categorical_crossentropy", "amount": rows_error},
            loss_weights={"label": 0.7, "amount": 2.0},
            metrics={"amount": rows_error},
        ),
    ),
    case(
        "one_loss_for_all_outputs",
        lambda: keras.Model(*_two_regressions()),
        lambda: _two_targets(),
        compiled(loss="mse", metrics=()),
        **LONG,
    ),
    case("regularizers", models.regularized, quick=(2, 3)),
    case("add_loss", models.added_losses),
    case(
        "add_loss_alone",
        models.AutoEncoder,
        lambda: {"x": rows.classes()["x"]},
        compiled(loss=None, metrics=()),
    ),
    case(
        "label_smoothing",
        data=rows.one_hot,
        compile=compiled(loss=lambda: losses.CategoricalCrossentropy(label_smoothing=0.1)),
        **LONG,
    ),
    case(
        "loss_from_logits",
        lambda: models.logits(),
        compile=compiled(loss=lambda: losses.SparseCategoricalCrossentropy(from_logits=True)),
    ),
    keras_loss("MeanAbsoluteError", three_regressors, three_targets, **LONG),
    # A loss in percent has a hundred times the gradient: at this rate it does not diverge.
    keras_loss("MeanAbsolutePercentageError", three_regressors, three_targets, adam, **LONG),
    keras_loss("MeanSquaredLogarithmicError", three_regressors, three_targets, **LONG),
    keras_loss("Huber", three_regressors, three_targets),
    keras_loss("LogCosh", three_regressors, three_targets, **LONG),
    keras_loss("Poisson", three_regressors, three_targets, **LONG),
    keras_loss("CosineSimilarity", three_regressors, three_targets),
    keras_loss("KLDivergence", models.mlp, rows.one_hot, **LONG),
    keras_loss("CategoricalCrossentropy", models.mlp, rows.one_hot, **LONG),
    keras_loss("CategoricalFocalCrossentropy", models.mlp, rows.one_hot, **LONG),
    keras_loss("CategoricalGeneralizedCrossEntropy", models.mlp, rows.classes, **LONG),
    keras_loss("CategoricalHinge", models.mlp, rows.one_hot, **LONG),
    keras_loss("BinaryCrossentropy", models.sigmoid, rows.binary),
    keras_loss("BinaryFocalCrossentropy", models.sigmoid, rows.binary, **LONG),
    keras_loss("Hinge", models.signs, rows.signs, **LONG),
    keras_loss("SquaredHinge", models.signs, rows.signs, **LONG),
    keras_loss("CTC", lambda: models.steps(), lambda: rows.labels_of_steps()),
]

# A lambda is the case: it has no name of its own to send to a worker.
_lambda_loss = lambda y_true, y_pred: ops.mean(ops.square(y_true - y_pred))  # noqa: E731


class _Bound:
    """A loss that is a method of an object."""

    factor = 2.0

    def loss(self, y_true, y_pred):
        return self.factor * ops.mean(ops.square(y_true - y_pred), axis=-1)


def _two_regressions():
    x = keras.Input((6,))
    y = keras.layers.Dense(8, activation="tanh")(x)
    return x, [keras.layers.Dense(1, name="one")(y), keras.layers.Dense(2, name="two")(y)]


def _two_targets():
    return {
        "x": rows.classes()["x"],
        "y": [rows.regression()["y"], rows.regression(outputs=2)["y"]],
    }
