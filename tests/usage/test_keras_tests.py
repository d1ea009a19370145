"""The tool that runs Keras's own tests under a strategy does run them."""

import pathlib

import pytest
from programs import run

TOOL = pathlib.Path(__file__).parent.parent / "keras_own" / "run.py"


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.long), "torch"])
def test_a_few_of_them(backend):
    chosen = ["--tests", "callbacks/terminate_on_nan_test.py"]
    done = run([str(TOOL), "data=2", *chosen], backend)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(
        [cell.strip() for cell in line.split("|")[1:3]]
        for line in done.stdout.splitlines()
        if line.startswith("| ")
    )
    assert int(counts["passed, with the numbers of plain Keras"]) >= 1, done.stdout
