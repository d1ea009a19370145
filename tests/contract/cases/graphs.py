"""Graphs that are hard to cut into the stages of a pipeline."""

import keras
import models
import numpy as np
import rows
import stage_models
from keras import losses

from cases import adam, case, compiled


def _pictures():
    data = rows.images()
    return {"x": data["x"], "y": np.abs(data["x"]) - 0.5 * data["x"].mean(axis=-1, keepdims=True)}


def _three_times():
    data = rows.classes()
    return {"x": data["x"], "y": [data["y"], 2 - data["y"], data["y"]]}


def _slow():
    return keras.optimizers.SGD(0.001)


def _ends():
    return {"x": rows.two_inputs_dict()["x"], "y": rows.two_outputs()["y"]}


def _without_other():
    data = rows.classes()
    return {"x": {"x": data["x"], "other": None}, "y": data["y"]}


def _validated():
    data = rows.classes()
    return {**data, "validation_data": (data["x"][:9], data["y"][:9])}


TRACED: set = set()

CASES = [
    case("chain", stage_models.chain, compile=compiled(adam)),
    case(
        "other_in_inference",
        stage_models.OtherInInference,
        _validated,
        compile=compiled(adam),
    ),
    case(
        "chain_sequential",
        stage_models.chain_sequential,
        compile=compiled(
            adam, lambda: losses.SparseCategoricalCrossentropy(from_logits=True)
        ),
    ),
    case("chain_subclassed", stage_models.Chain, compile=compiled(adam)),
    case("u_net", stage_models.u_net, _pictures, compiled(loss="mse", metrics=("mae",))),
    case(
        "early_output",
        stage_models.ends,
        _ends,
        compiled(
            loss={"label": "sparse_categorical_crossentropy", "amount": "mse"},
            loss_weights={"label": 1.0, "amount": 0.3},
            metrics={"label": ["accuracy"]},
        ),
    ),
    case("confident_early", stage_models.confident_early, _three_times, compiled(
        _slow, loss=["sparse_categorical_crossentropy"] * 3, metrics=None)),
    case("confident_early_sum", stage_models.confident_early, _three_times, compiled(
        _slow, loss=lambda: [losses.SparseCategoricalCrossentropy(reduction="sum")] * 3,
        metrics=None)),
    case("confident_early_raw", lambda: stage_models.confident_early(models.TensorFlowsSoftmax),
        _three_times, compiled(_slow, loss=["sparse_categorical_crossentropy"] * 3, metrics=None),
        backend="tensorflow"),
    # Twelve rows are cut into four of 3: as many as there are outputs.
    case("target_of_one_output", stage_models.confident_early, compile=compiled(
        _slow, loss=[None, None, "sparse_categorical_crossentropy"], metrics=None),
        fit={"batch_size": 12}),
    case("whole_numbers", stage_models.whole_numbers),
    case("masked_loss", models.masked_steps, rows.padded),
    case("tied_weights", stage_models.tied, rows.tokens, compiled(adam)),
    case("attended", stage_models.attended, rows.tokens),
    case("shared_layer", stage_models.shared, compile=compiled(adam)),
    case("nested_models", stage_models.nested),
    case("penalties", stage_models.penalties),
    case("frozen_start", stage_models.frozen_start, compile=compiled(adam)),
    case("branches", stage_models.branches),
    case("optional_input", stage_models.optional_input, _without_other),
    # Fewer rows than micro-batches, and rows that do not divide by them.
    case("batch_of_7", stage_models.chain, fit={"batch_size": 7}),
    case("batch_of_2", stage_models.chain, lambda: rows.classes(7), fit={"batch_size": 2}),
]  # fmt: skip
