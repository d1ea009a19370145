"""Sizes of batches, and everything in `fit` that decides which rows make one."""

import models
import numpy as np
import rows

from cases import adam, case, compiled, losses


def together(name, steps, loss="sparse_categorical_crossentropy", data=rows.classes, **rest):
    """Several batches between two callbacks; the last time there may be fewer."""
    metrics = ("mae",) if callable(loss) else ("accuracy",)
    return case(
        f"steps_per_execution_{name}",
        models.regressor if callable(loss) else models.mlp,
        data,
        compiled(adam, loss=loss, metrics=metrics, steps_per_execution=steps),
        backend="tensorflow",
        **rest,
    )


def sized(n, batch_size, **rest):
    return case(
        f"rows{n}_batch{batch_size}",
        data=lambda: rows.classes(n),
        fit={"batch_size": batch_size},
        compile=compiled(adam),
        **rest,
    )


# What `make test` runs on TensorFlow too (see harness.grid).
TRACED = {
    "rows69_batch16",
    "rows9_batch8",
    "sample_weight_per_output",
    "class_weight",
    "steps_per_execution_probed",
}

CASES = [
    sized(48, 16, quick=(2,)),  # even everywhere
    sized(69, 16, quick=(2, 3)),  # the last batch is short
    sized(45, 15, quick=(2,)),  # no batch divides
    sized(17, 8, quick=(2, 3)),  # the last batch is one row
    sized(9, 8, quick=(4,)),  # one row for four replicas
    sized(10, 4, quick=(3,)),  # a batch hardly larger than the replicas
    sized(7, 2, quick=(3,)),  # every batch smaller than the replicas
    sized(3, 1, quick=(2, 3)),  # stochastic gradient descent, literally
    sized(20, 64, quick=(3,)),  # one batch
    case("sample_weight", data=lambda: rows.weighted(rows.classes())),
    case(
        "sample_weight_regression",
        models.regressor,
        lambda: rows.weighted(rows.regression()),
        compiled(loss="mse", metrics=("mae",), weighted_metrics=("mae", "mse")),
    ),
    case(
        "sample_weight_per_output",
        models.two_outputs,
        rows.two_outputs_weighted,
        compiled(
            loss={"label": "sparse_categorical_crossentropy", "amount": "mse"},
            metrics={"label": ["accuracy"], "amount": ["mae"]},
            weighted_metrics={"label": ["accuracy"], "amount": ["mae"]},
        ),
    ),
    case("class_weight", fit={"class_weight": {0: 0.2, 1: 3.0, 2: 1.0}}, quick=(2, 3)),
    case(
        "sample_weight_of_steps",
        lambda: models.lstm_steps(),
        lambda: rows.weighted_steps(),
        compiled(metrics=(), weighted_metrics=("accuracy",)),
    ),
    case("shuffle", fit={"shuffle": True}, quick=(2, 3)),
    case("shuffle_batch", fit={"shuffle": "batch"}, quick=()),
    case("validation_split", fit={"validation_split": 0.3, "shuffle": True}),
    case("validation_data", data=lambda: rows.with_validation(rows.classes())),
    case(
        "validation_weighted",
        data=lambda: rows.with_weighted_validation(rows.classes()),
        compile=compiled(weighted_metrics=("accuracy",)),
        quick=(),
    ),
    case(
        "validation_freq",
        data=lambda: rows.with_validation(rows.classes()),
        fit={"validation_freq": [2, 3], "epochs": 3, "validation_batch_size": 11},
    ),
    case(
        "validation_steps",
        data=lambda: rows.with_validation(rows.classes()),
        fit={"validation_steps": 2, "validation_batch_size": 5},
        quick=(),
    ),
    case("steps_per_epoch", fit={"steps_per_epoch": 2, "epochs": 3}),
    # 4 batches: 3, and the last one, of a single row.
    together("last_partial", 3, data=lambda: rows.with_validation(rows.classes())),
    together("probed", 3, losses.rows_error, rows.regression),
    together("of_one", 4, quick=()),
    together("too_many", 9, quick=()),
    # Plain Keras takes as many as an execution has, even where an epoch has fewer.
    together("of_epoch", 2, fit={"steps_per_epoch": 3, "epochs": 3}, quick=()),
    case("initial_epoch", fit={"initial_epoch": 1, "epochs": 3}),
    case("inputs_float64", data=lambda: _as(rows.classes(), "float64")),
    case("inputs_uint8", data=lambda: _as(rows.classes(), "uint8"), quick=()),
    case("inputs_float16", data=lambda: _as(rows.classes(), "float16"), quick=()),
]


def _as(data, dtype):
    return {**data, "x": np.abs(data["x"]).astype(dtype)}
