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
    ".costs.times",
    ".costs",
    ".devices",
    ".methods",
    ".model",
    ".placement",
    ".plan",
    ".schedule",
    ".strategies.base",
    ".strategies.data",
    ".strategies.model",
    ".strategies.pipeline",
    ".tables",
    ".timeline",
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"parallel_keras{name}")
    failed, tried = doctest.testmod(module)
    assert tried and not failed
