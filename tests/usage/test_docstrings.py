"""The examples in the docstrings run."""

import doctest
import importlib

import pytest

MODULES = (
    "",
    ".api",
    ".balance",
    ".batch",
    ".costs.rules",
    ".costs.slots",
    ".costs",
    ".devices",
    ".model",
    ".placement",
    ".plan",
    ".strategies",
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"parallel_keras{name}")
    failed, tried = doctest.testmod(module)
    assert tried and not failed
