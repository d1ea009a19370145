"""Every case with its layers laid out over devices equals plain Keras."""

import pytest
from cases import batches, kinds, losses, metrics, optimizers
from harness import check, model_grid

ROOMS = (optimizers, batches, losses, kinds, metrics)


@pytest.mark.parametrize("case, strategy", [p for room in ROOMS for p in model_grid(room)])
def test_cases(case, strategy):
    check(case, strategy)
