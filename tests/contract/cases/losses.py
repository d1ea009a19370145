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


# ---- losses of the whole batch ----


def contrastive(y_true, y_pred):
    """Compares the rows of a batch with each other."""
    similarity = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.mean(ops.square(similarity - ops.matmul(y_true, ops.transpose(y_true))))


def root(y_true, y_pred):
    """A mean under a root: the root of means is not the mean of roots."""
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def total(y_true, y_pred):
    """A sum over the batch."""
    return 0.1 * ops.sum(ops.square(y_true - y_pred))


def correlation(y_true, y_pred):
    """How far the outputs of a batch are from going up and down with the targets."""
    x, y = (t - ops.mean(t, axis=0) for t in (y_true, y_pred))
    norm = ops.sqrt(ops.sum(x * x) * ops.sum(y * y) + 1e-3)
    return 1.0 - ops.sum(x * y) / norm


def reduced(reduction, make=losses.SparseCategoricalCrossentropy, **rest):
    """Arguments of `compile` with a loss of this reduction."""
    return compiled(adam, loss=lambda: make(reduction=reduction), **rest)


def slow():
    """Wide weights make rounding large as it is."""
    return keras.optimizers.SGD(0.001)


def reduced_slow(reduction):
    return compiled(slow, loss=lambda: losses.SparseCategoricalCrossentropy(reduction=reduction))


def squared_crossentropy(y_true, y_pred):
    """One value per row, made of a loss of Keras."""
    return ops.square(losses.sparse_categorical_crossentropy(y_true, y_pred))


def steady_adam():
    """Its epsilon keeps it from making much of the rounding of a gradient near zero."""
    return adam(1e-3)


def straight_through(y_true, y_pred):
    """Its value adds up over the rows, its gradient does not."""
    rows_error = ops.mean(ops.square(y_true - y_pred), axis=-1)
    spread = ops.mean(ops.square(y_pred - ops.mean(y_pred, axis=0)))
    return rows_error + spread - ops.stop_gradient(spread)


def of_the_batch(name, optimizer=steady_adam, data=None, model=None, loss=contrastive, **rest):
    """A loss that compares rows, together with something else."""
    return case(
        f"loss_{name}",
        model or three_regressors,
        data or three_targets,
        compiled(optimizer, loss=loss, metrics=("mae", "mse")),
        **rest,
    )


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
    "loss_confident_sum",
    "loss_function_rows",
    "loss_weights_dict",
    "add_loss_sum",
    "loss_contrastive_and_sums",
    "loss_masked_weighted",
    "loss_of_one_output",
}

CASES = [
    case("loss_confident", models.confident, compile=compiled(slow)),
    case("loss_confident_sum", models.confident, compile=reduced_slow("sum")),
    # Keras knows what TensorFlow's own softmax returns from the operation, and only where
    # the loss goes with it.
    *(
        case(
            f"loss_confident_raw_{name}",
            lambda activation=activation: models.confident(activation),
            rows.one_hot,
            compiled(slow, loss, metrics=()),
            backend="tensorflow",
        )
        for name, activation, loss in (
            ("softmax", models.TensorFlowsSoftmax, "categorical_crossentropy"),
            ("sigmoid", models.TensorFlowsSigmoid, "binary_crossentropy"),
            ("other", models.TensorFlowsSoftmax, "binary_crossentropy"),
            (
                "sum",
                models.TensorFlowsSoftmax,
                lambda: losses.CategoricalCrossentropy(reduction="sum"),
            ),
        )
    ),
    case("loss_function_classes", compile=compiled(loss=squared_crossentropy)),
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
    # Eight rows are cut into 3, 3 and 2: as many as there are outputs.
    case(
        "target_of_one_output",
        models.two_outputs_list,
        compile=compiled(loss=["sparse_categorical_crossentropy", None], metrics=None),
        fit={"batch_size": 8},
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
    # The rate is for sums, whose gradients are as large as the batch.
    case("add_loss_sum", models.summed_losses, compile=compiled(adam), quick=(2, 3)),
    case(
        "add_loss_sum_accumulated",
        models.summed_losses,
        compile=compiled(
            lambda: keras.optimizers.SGD(0.02, gradient_accumulation_steps=3, global_clipnorm=0.5)
        ),
        **LONG,
    ),
    case(
        "add_loss_sum_alone",
        models.SumEncoder,
        lambda: {"x": rows.classes()["x"]},
        compiled(adam, loss=None, metrics=()),
    ),
    case("add_loss_sum_twice", models.sum_called_twice, compile=compiled(adam), **LONG),
    case("activity_sum", models.summed_activity, compile=compiled(adam), **LONG),
    of_the_batch("contrastive_and_sums", model=models.summed_losses_regressor),
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
    # These need the whole batch.
    keras_loss("Dice", lambda: models.sigmoid(3), lambda: rows.binary(outputs=3), adam),
    keras_loss("Tversky", lambda: models.sigmoid(3), lambda: rows.binary(outputs=3), adam, **LONG),
    keras_loss("Circle", lambda: models.embeddings(), rows.classes, adam),
    case("loss_sum", compile=reduced("sum"), quick=(2, 3)),
    case(
        "loss_mean_of_weights",
        data=lambda: rows.weighted(rows.classes()),
        compile=reduced("mean_with_sample_weight", weighted_metrics=["accuracy"]),
        quick=(2, 3),
    ),
    case(
        "loss_mean_of_class_weights",
        data=lambda: rows.with_weighted_validation(rows.classes()),
        compile=reduced("mean_with_sample_weight"),
        fit={"class_weight": {0: 0.3, 1: 2.0, 2: 1.0}},
    ),
    case("loss_vector", compile=reduced(None), backend="tensorflow"),
    case("loss_masked", models.masked_steps, rows.padded, quick=(2, 3)),
    case("loss_masked_weighted", models.masked_steps, rows.weighted_padded, quick=(2, 3)),
    case(
        "loss_masked_accumulation",
        models.masked_steps,
        rows.padded,
        compiled(
            lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, global_clipnorm=0.05)
        ),
    ),
    case(
        "loss_ignore_class",
        compile=compiled(
            loss=lambda: losses.SparseCategoricalCrossentropy(ignore_class=1), metrics=()
        ),
    ),
    case(
        "loss_of_one_output",
        models.two_outputs,
        rows.two_outputs_weighted,
        compiled(
            adam,
            loss=lambda: {
                "label": "sparse_categorical_crossentropy",
                "amount": losses.MeanSquaredError(reduction="sum"),
            },
            loss_weights={"label": 0.7, "amount": 2.0},
            metrics={"label": ["accuracy"], "amount": ["mae"]},
        ),
        quick=(2, 3),
    ),
    of_the_batch("contrastive", quick=(2, 3)),
    of_the_batch("root", loss=root),
    of_the_batch("straight_through", loss=straight_through),
    of_the_batch("along_the_rows", loss=lambda: losses.CosineSimilarity(axis=0)),
    of_the_batch("total", loss=total),
    of_the_batch("correlation", loss=correlation),
    of_the_batch("contrastive_penalized", model=models.penalized_regressor, quick=(2, 3)),
    of_the_batch(
        "contrastive_accumulation",
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
        model=models.penalized_regressor,
    ),
    of_the_batch("contrastive_clipped", lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05)),
    of_the_batch(
        "contrastive_scaled",
        lambda: keras.optimizers.LossScaleOptimizer(steady_adam(), dynamic_growth_steps=3),
        model=models.penalized_regressor,
    ),
    of_the_batch("contrastive_validation", data=lambda: rows.with_validation(three_targets())),
    of_the_batch("contrastive_two_rows", fit={"batch_size": 2, "epochs": 1}),
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
