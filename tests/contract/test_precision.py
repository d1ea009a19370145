"""An overflow anywhere skips the step, and halves the loss scale, everywhere."""

import numpy as np
import pytest
import rows
from cases import precision
from harness import BACKEND, compare, make, number, oracle, state

import parallel_keras as pk

STRATEGIES = [
    pk.DataParallel(3),
    pytest.param(pk.ModelParallel(2), marks=pytest.mark.long),
    pytest.param(
        pk.PipelineParallel(2, microbatches=4),
        marks=[pytest.mark.long] if BACKEND == "tensorflow" else [],
    ),
]


def run(strategy, model, overflow):
    """Six steps, and the loss scale after each."""
    build = precision.under("mixed_float16", model)
    optimizer = precision.scaled(scale=2.0**14, growth=2)
    arguments = {"optimizer": optimizer(), "loss": "sparse_categorical_crossentropy"}
    model = make(build, arguments, strategy)
    data = rows.classes()
    scales, finite = [], []
    for step in range(6):
        weights = np.ones(16, "float32")
        if step in overflow:
            weights[15] = 1e5  # of the last replica and micro-batch: it leaves float16
        model.train_on_batch(data["x"][:16], data["y"][:16], sample_weight=weights)
        scales.append(number(model.optimizer.dynamic_scale))
        finite.append(all(np.isfinite(w).all() for w in model.get_weights()))
    steps = number(model.optimizer.iterations)
    return {"scales": scales, "finite": finite, "steps": steps, **state(model)}


@pytest.mark.parametrize("model", [precision.named, precision.end_is_frozen])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_loss_scale_after_each_step(strategy, model):
    expected, received = (run(each, model, overflow=(1, 2)) for each in (None, strategy))
    start = 2.0**14
    assert expected["scales"] == [start, start / 2, start / 4, start / 4, start / 2, start / 2], (
        "the oracle did not overflow twice and grow again"
    )
    assert received["scales"] == expected["scales"]
    assert received["steps"] == expected["steps"] == 4
    assert all(received["finite"])
    compare("loss_scale_of_each_step", strategy, expected, received, precision.HALF)


OVERFLOWS = [case for case in precision.CASES if "float16_overflow" in case.name]


@pytest.mark.parametrize("case", OVERFLOWS, ids=lambda case: case.name)
def test_cases_that_overflow_do(case):
    """In both epochs one of four steps is skipped."""
    optimizer = oracle(case)["optimizer"]
    taken = max(int(v) for path, v in optimizer.items() if path.endswith("/iteration"))
    assert taken == 6


@pytest.mark.backend("torch")
def test_types_of_weights_are_reduced_in_one_order_on_all_ranks():
    """Weights of several types travel in a piece for each: ranks that disagree would hang."""
    build = precision.policies_of_layers("float64", "bfloat16", "float32")
    records = []
    for strategy in (None, "data=2"):
        model = make(build, precision.smooth()(), strategy)
        model.fit(**rows.classes(16), batch_size=8, shuffle=False, verbose=0)
        records.append({"weights": state(model)["weights"]})
    assert {v.dtype for v in model.weights} == {"float64", "bfloat16", "float32"}
    compare("types_of_weights", "data=2", *records, tolerance=precision.BRAIN)
