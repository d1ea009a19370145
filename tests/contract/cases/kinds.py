"""How models are made, and kinds of layers."""

import keras
import models
import rows
import stage_models

from cases import adam, case, compiled, sgd

LONG = {"quick": ()}

# A bias before BatchNormalization, and the bias of attention's keys, do not
# change the output: their gradient is zero in exact arithmetic and what they
# get is rounding, which Adam blows up to its full rate.
CONV_BIAS = {r"\bconv/bias$": "a bias before BatchNormalization"}
KEY_BIAS = {r"\battention/key/bias$": "the bias of attention's keys"}


def two_outputs(name, model, **rest):
    return case(
        name,
        model,
        rows.two_outputs,
        compiled(
            loss={"label": "sparse_categorical_crossentropy", "amount": None},
            metrics={"label": ["accuracy"]},
        ),
        **rest,
    )


def accumulating():
    return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)


def batch_norm(name, optimizer, model=models.synchronized_cnn, data=rows.images, loss=None, **rest):
    arguments = {} if loss is None else {"loss": loss}
    return case(name, model, data, compiled(optimizer, **arguments), **rest)


# What `make test` runs on TensorFlow too (see harness.grid).
TRACED = {
    "sequential_unbuilt",
    "subclassed",
    "unreached_output",
    "inputs_dict",
    "embedding_adam",
    "batch_norm_synchronized",
    "layer_state",
}

CASES = [
    case("sequential", models.sequential),
    case("sequential_unbuilt", models.sequential_unbuilt, quick=(2, 3)),
    case("said_to_be_built", models.said_to_be_built, compile=compiled(adam)),
    case("subclassed", models.Subclassed, compile=compiled(adam), quick=(2, 3)),
    case("subclass_called_functional", models.subfunctional),
    case("nested", models.nested),
    case("shared", models.shared),
    case("frozen", models.frozen, compile=compiled(adam)),
    case("unreached_layer", models.unreached),
    two_outputs("unreached_output", models.unreached_output, quick=(2, 3)),
    case("inputs_dict", models.two_inputs_dict, rows.two_inputs_dict),
    case("inputs_tuple", models.two_inputs_tuple, rows.two_inputs_tuple),
    case("embedding_sgd", models.embedding, rows.tokens),
    case("embedding_adam", models.embedding, rows.tokens, compiled(adam)),
    case("positions", models.positions, rows.tokens, compiled(adam)),
    case("positions_of_each_row", models.positions_of_each_row, rows.tokens, compiled(adam)),
    case("embedding_twice", models.embedding_twice, rows.tokens, compiled(adam), **LONG),
    case(
        "embedding_regularized", models.embedding_regularized, rows.tokens, compiled(adam), **LONG
    ),
    case("embedding_tied", stage_models.tied, rows.tokens, compiled(adam), **LONG),
    case("cnn", models.cnn, rows.images),
    case("lstm", models.lstm, rows.series),
    case(
        "orthogonal",
        models.orthogonal,
        rows.series,
        compiled(loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
    ),
    case("conv_lstm", models.conv_lstm, rows.films),
    case("scores_kept", models.shown, fit={"epochs": 3}),
    case("spectral", models.spectral, backend="torch"),
    case("weights_clipped_in_call", models.clipped, backend="torch"),
    case("gru_bidirectional", models.gru, rows.series, **LONG),
    case("transformer_sgd", models.transformer, rows.tokens, compiled(sgd)),
    case("transformer_adam", models.transformer, rows.tokens, compiled(adam), loose=KEY_BIAS),
    case(
        "transformer_large_epsilon",
        models.transformer,
        rows.tokens,
        compiled(lambda: adam(1e-3)),
        **LONG,
    ),
    batch_norm("batch_norm_masked", sgd, models.synchronized_masked, rows.tokens, **LONG),
    batch_norm("batch_norm_renorm", sgd, models.synchronized_renorm, **LONG),
    case("normalizers", models.normalizers, rows.images, **LONG),
    batch_norm("batch_norm_synchronized", sgd),
    # On torch the bias is moved by rounding so far that the moving mean does not catch up:
    # `evaluate` shows it, on one device as well.
    batch_norm("batch_norm_synchronized_adam", adam, loose=CONV_BIAS, backend="tensorflow", **LONG),
    batch_norm("batch_norm_synchronized_adam_no_bias", adam, models.synchronized_twice),
    batch_norm(
        "batch_norm_whole_loss",
        lambda: keras.optimizers.SGD(0.01),
        models.synchronized_heads,
        rows.images,
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(reduction="sum"),
    ),
    batch_norm("batch_norm_accumulated", accumulating, models.synchronized_twice, **LONG),
    batch_norm("batch_norm_user_layer", sgd, models.synchronized_of_the_user),
    batch_norm("batch_norm_in_evaluate", sgd, models.synchronized_always, **LONG),
    case(
        "batch_norm_one_row",
        models.synchronized_twice,
        lambda: rows.images(5),
        fit={"batch_size": 2},
        quick=(3, 4),
    ),
    batch_norm("batch_norm_synchronized_large_epsilon", lambda: adam(1e-3), **LONG),
    case(
        "mobilenet",
        models.mobilenet,
        lambda: rows.images(13, 32, 3),
        fit={"batch_size": 6, "epochs": 1},
    ),
    case("adapted_normalization", models.adapted_normalization),
    case("layer_metric", models.layer_metric),
    case("layer_state", models.running_mean),
]
