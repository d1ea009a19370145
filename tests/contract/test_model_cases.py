"""Every case with its layers laid out over devices equals plain Keras."""

import pytest
from cases import batches, kinds, losses, metrics, optimizers, own_optimizers, precision
from harness import check, model_grid

ROOMS = (optimizers, own_optimizers, batches, losses, kinds, metrics, precision)
QUICK = {
    "global_clipnorm",
    "ema_overwrite",
    "rows69_batch16",
    "loss_weights_dict",
    "subclassed",
    "sequential_unbuilt",
    "unreached_output",
}
CASES = [case for room in ROOMS for case in model_grid(room, QUICK)]

# On torch these devices are one: places.py has some that differ.
pytestmark = [pytest.mark.long("torch")]


@pytest.mark.parametrize("case, strategy", CASES)
def test_cases(case, strategy):
    check(case, strategy)
