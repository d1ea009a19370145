# `make quickstart` and `make test` set up what they need on a fresh machine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: quickstart test test-all keras-tests lint install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[torch,tensorflow-cpu,examples,dev]'
	touch $@

quickstart: install
	$(BIN)/python examples/quickstart.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	KERAS_BACKEND=torch $(BIN)/mypy

# Side by side, but for what starts and kills workers of its own.
test: lint
	KERAS_BACKEND=tensorflow $(BIN)/pytest -n 2 tests/contract tests/faults
	KERAS_BACKEND=torch $(BIN)/pytest -n 2 --ignore=tests/faults
	KERAS_BACKEND=torch $(BIN)/pytest tests/faults

test-all: lint
	KERAS_BACKEND=torch $(BIN)/pytest --long
	KERAS_BACKEND=tensorflow $(BIN)/pytest --long tests/contract tests/faults

# Keras's own tests, with every model under a strategy: docs/keras_tests.md.
STRATEGIES ?= data=2 model pipeline=2
keras-tests: install
	KERAS_BACKEND=tensorflow $(BIN)/python tests/keras_own/run.py $(STRATEGIES)
	KERAS_BACKEND=torch $(BIN)/python tests/keras_own/run.py $(STRATEGIES)

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .mypy_cache
