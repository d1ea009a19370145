"""Every case as a pipeline equals plain Keras."""

import re

import keras
import pytest
from cases import batches, kinds, losses, metrics, optimizers, own_optimizers, precision
from harness import BACKEND, check, grid_of

import parallel_keras as pk
from parallel_keras.capabilities import FEATURES

ROOMS = (optimizers, own_optimizers, batches, losses, kinds, metrics, precision)
QUICK = {
    "global_clipnorm",
    "ema_overwrite",
    "rows69_batch16",
    "sequential_unbuilt",
    "loss_confident_sum",
    "loss_confident_raw_softmax",
}
if BACKEND == "torch":  # where nothing is traced
    QUICK |= {
        "optimizer_adam",
        "said_to_be_built",
        "loss_confident",
        "loss_confident_raw_other",
        "accumulation_ema",
        "validation_split",
        "loss_weights_dict",
        "regularizers",
        "subclassed",
        "transformer_adam",
        "unreached_output",
        "float16_end_is_frozen",
        "optimizer_per_layer",
        "optimizer_per_type_scaled",
        "add_loss_sum",
        *(case.name for case in own_optimizers.CASES),
    }
# Refused by name.
REFUSED = {
    "loss_contrastive_scaled": "batch_loss",
    "layer_metric": "layer_metric",
    "add_loss_sum_twice": "split_sum",
    "loss_vector": "loss_none",
    **{case.name: "own_update" for case in own_optimizers.CASES},
    **dict.fromkeys(
        [
            *("loss_Dice", "loss_Tversky", "loss_Circle", "loss_root", "loss_total"),
            *("loss_correlation", "loss_contrastive", "loss_contrastive_penalized"),
            *("loss_contrastive_accumulation", "loss_contrastive_clipped"),
            *(
                "loss_contrastive_validation",
                "loss_contrastive_two_rows",
                "float16_loss_of_the_batch",
                "loss_contrastive_and_sums",
            ),
        ],
        "batch_loss",
    ),
}


def pipelines(stages):
    """A pipeline in every way of a case: its name, and a function of the case."""

    def strategy(case):
        model = built(case)
        # By definition micro-batches of these are not what one batch is: test_pipeline.py.
        one = any(
            isinstance(layer, keras.layers.BatchNormalization) or layer._seed_generators
            for layer in model._flatten_layers()
        )
        layers = [x for x in model.layers if not isinstance(x, keras.layers.InputLayer)]
        count = min(stages, max(2, len(layers)))
        return pk.PipelineParallel(count, microbatches=1 if one else 4)

    return f"pipeline={stages}", strategy


def built(case):
    model = case.model()
    if not model.built:
        model(keras.tree.map_structure(lambda a: a[:2], case.data()["x"]))
    return model


CASES = [
    case for room in ROOMS for n in (2, 3) for case in grid_of(room, QUICK, pipelines(n), n == 2)
]


@pytest.mark.parametrize("case, strategy", CASES)
def test_cases(case, strategy, backend):
    feature = REFUSED.get(case.name)
    if feature and FEATURES[feature].reason("pipeline", backend):
        with pytest.raises(pk.UnsupportedError, match=re.escape(FEATURES[feature].title)):
            check(case, strategy(case))
    else:
        check(case, strategy(case))
