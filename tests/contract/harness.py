"""Runs a case with no strategy and under a strategy, and compares everything.

The oracle is always the same Keras model in the same run: never parallelized,
built from the same seed, fed the same rows in the same order. What is compared:
History, the logs of every batch, every weight, every optimizer variable,
`evaluate` and `predict`. The largest difference of each run is kept in `TABLE`
and printed, also where it is far below the tolerance.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import keras
import numpy as np
import pytest

import parallel_keras as pk

BACKEND = keras.backend.backend()
SEED = 1729
TOLERANCE = 1e-5

# Tracing takes seconds: these tests are for `make test-all` where it is done.
LONG_WHERE_TRACED = pytest.mark.long("tensorflow")

# Rows of the table: (case, strategy, largest difference, where, tolerance).
TABLE = []


@dataclass(frozen=True, eq=False)
class Case:
    """One line of a list of cases.

    Args:
        name: What the case is about.
        model: Function that builds the model, with fixed layer names where
            `loose` needs them.
        data: Function that gives the arguments of `fit` that hold rows: `x`,
            `y`, and `sample_weight` and `validation_data` where there are any.
        compile: Function that gives fresh arguments for `compile`.
        fit: What differs from `FIT` in the arguments of `fit`.
        loose: Dict from a pattern of variable paths to the reason why these
            weights are only noise. They are compared through History and
            predict, and by a second case with a large epsilon.
        tolerance: Above 1e-5 only where the case's own type is coarser.
        quick: The numbers of replicas that `make test` runs, in increasing
            order; `make test-all` runs 1 to 4.
        backend: A backend's name where the feature exists on one only.
        built: Whether the optimizer's variables are made before the first step.
    """

    name: str
    model: Callable
    data: Callable
    compile: Callable
    fit: Mapping = field(default_factory=dict)
    loose: Mapping = field(default_factory=dict)
    tolerance: float = TOLERANCE
    quick: tuple = (3,)
    backend: str | None = None
    built: bool = False


# 49 rows in batches of 16 over 3 replicas: 6 + 5 + 5 rows three times, then a
# batch of one row, which leaves two replicas with none.
FIT = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


def grid(room, replicas=(1, 2, 3, 4)):
    """pytest parameters `case, strategy` for the `CASES` of a module.

    On TensorFlow every case is traced anew, which takes seconds: there `make
    test` runs those that the module names in `TRACED`, at their largest number
    of replicas only. `make test-all` runs everything on both backends.
    """
    _check_names(room)
    return [
        _parameters(case, f"data={n}", n in _quick(case, room.TRACED))
        for case in room.CASES
        for n in replicas
    ]


def model_grid(room, quick, devices=(2, 3)):
    """The same for `"model"`, with layers split over the devices by the package.

    `make test` runs on TensorFlow the cases named in `quick`, on three devices. On
    torch the devices of one CPU are one: tests/torch/test_places.py runs the cases
    on devices that differ.
    """
    _check_names(room)
    return [
        _parameters(case, f"model={n}", n == devices[-1] and case.name in quick)
        for case in room.CASES
        for n in devices
    ]


def grid_of(room, quick, named, is_quick):
    """The same for any strategy.

    Args:
        room: A module with `CASES`.
        quick: Set of the names of the cases that `make test` runs.
        named: A name and a function that makes the strategy of a case.
        is_quick: Bool. Whether `make test` runs any of these.
    """
    _check_names(room)
    name, make_strategy = named
    return [
        pytest.param(case, make_strategy, id=parameters.id, marks=parameters.marks)
        for case in room.CASES
        for parameters in [_parameters(case, name, is_quick and case.name in quick)]
    ]


def _check_names(room):
    names = [case.name for case in room.CASES]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"two cases have the same name: {twice}"
    assert set(names) >= room.TRACED, f"not there: {room.TRACED - set(names)}"


def _parameters(case, strategy, is_quick):
    return pytest.param(
        case,
        strategy,
        id=f"{case.name}-{strategy.replace('=', '')}",
        marks=[
            *([] if is_quick else [pytest.mark.long]),
            *([pytest.mark.backend(case.backend)] if case.backend else []),
        ],
    )


def _quick(case, traced):
    if BACKEND != "tensorflow":
        return case.quick
    return case.quick[-1:] if case.name in traced else ()


def scenarios(functions, replicas=(1, 2, 3, 4), quick=(3,)):
    """pytest parameters `scenario, strategy` for functions of a strategy that give a record."""
    strategies = [(f"data={n}", n in quick) for n in replicas] + [
        ("model=2", False),
        ("pipeline=2", False),
    ]
    return [
        pytest.param(
            function,
            strategy,
            id=f"{function.__name__}-{strategy.replace('=', '')}",
            marks=[] if is_quick else [pytest.mark.long],
        )
        for function in functions
        for strategy, is_quick in strategies
    ]


def check_scenario(function, strategy, tolerance=TOLERANCE):
    """Run a function of a strategy, and hold its record to that of plain Keras."""
    compare(function.__name__, strategy, oracle(function), function(strategy), tolerance)


def check(case, strategy):
    """Run a case under a strategy and hold it to the oracle."""
    compare(case.name, strategy, oracle(case), run(case, strategy), case.tolerance, case.loose)


@functools.lru_cache(maxsize=4)
def oracle(case_or_function):
    """The record of plain Keras, once for all strategies of a case."""
    if isinstance(case_or_function, Case):
        record = run(case_or_function, None)
    else:
        record = case_or_function(None)
    wrong = [path for path, value in _flat(record).items() if not np.isfinite(value).all()]
    assert not wrong, f"the oracle itself is not finite, so it proves nothing: {wrong[:5]}"
    return record


def run(case, strategy):
    """Train, evaluate and predict; give back everything that can be compared."""
    model = make(case.model, case.compile(), strategy)
    if case.built:
        model.optimizer.build(model.trainable_variables)
    data = case.data()
    logs = BatchLogs()
    history = fit(model, **data, **{**FIT, **case.fit}, callbacks=[logs])
    batch_size = case.fit.get("batch_size", FIT["batch_size"])
    rows = {key: data[key] for key in ("x", "y", "sample_weight") if key in data}
    record = {"history": history, "batches": logs.batches, **state(model)}
    record["evaluate"] = model.evaluate(
        **rows, batch_size=batch_size, verbose=0, return_dict=True, callbacks=[logs]
    )
    record["test_batches"] = logs.test_batches
    record["predict"] = model.predict(data["x"], batch_size=batch_size, verbose=0)
    return record


# ---- making and running models ----------------------------------------------


def make(build, compile_arguments, strategy):
    """A fresh compiled model. Equal seeds make equal initial weights."""
    keras.utils.set_random_seed(SEED)
    model = build()
    if strategy is None:
        model.compile(**compile_arguments)
    else:
        assert pk.parallelize(model) is model
        model.compile(**compile_arguments, strategy=strategy)
    return model


def fit(model, *arguments, **keywords):
    """`fit` from a fixed seed (it draws the order of the rows), as a plain History."""
    keras.utils.set_random_seed(SEED)
    return model.fit(*arguments, **keywords).history


def state(model):
    """Every weight and every optimizer variable, by position and path."""
    record = {"weights": _by_path(model.weights)}
    if getattr(model, "optimizer", None) is not None:
        record["optimizer"] = _by_path(model.optimizer.variables)
    return record


def number(variable):
    """A scalar variable as a float."""
    return float(keras.ops.convert_to_numpy(variable))


class BatchLogs(keras.callbacks.Callback):
    """Keeps the logs of every batch: they are values of the global batch."""

    def __init__(self):
        super().__init__()
        self.batches = []
        self.test_batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))

    def on_test_batch_end(self, batch, logs=None):
        self.test_batches.append(dict(logs))


def _by_path(variables):
    # Layers made twice in one process get other names: what pairs a variable
    # with the oracle's is its place, what names it in messages is its path.
    return {
        f"{position} {variable.path}": keras.ops.convert_to_numpy(variable.value)
        for position, variable in enumerate(variables)
    }


# ---- comparing --------------------------------------------------------------


def compare(name, strategy, expected, received, tolerance=TOLERANCE, loose=()):
    """Hold a record to the oracle's; keep and print the largest difference."""
    expected, received = _flat(expected), _flat(received)
    expected = _paired(expected, received)
    assert list(expected) == list(received), _missing(expected, received)
    largest, where = 0.0, ""
    for path, value in expected.items():
        other = received[path]
        assert value.shape == other.shape, f"{path}: shape {value.shape} became {other.shape}"
        assert value.dtype == other.dtype, f"{path}: type {value.dtype} became {other.dtype}"
        if any(re.search(pattern, path) for pattern in loose) and _is_variable(path):
            continue
        difference = _difference(value, other)
        if difference > largest or not where:
            largest, where = difference, path
    TABLE.append((name, str(strategy), largest, where, tolerance))
    print(_line(*TABLE[-1]))
    assert largest <= tolerance, _report(expected, received, tolerance, loose)
    return largest


def table():
    """The lines of the table: what is above its tolerance, then the rest, worst first."""
    rows = sorted(TABLE, key=lambda row: (row[2] <= row[4], -row[2]))
    return [_line(*row) for row in rows]


def _line(name, strategy, largest, where, tolerance):
    mark = " " if largest <= tolerance else "X"
    return f"{mark} {name:42} {strategy!s:8} {BACKEND:10} {largest:.1e}  {where}"


def _flat(record, path=""):
    """A nested record as a dict from a path to an array."""
    if isinstance(record, Mapping):
        items = record.items()
    elif isinstance(record, (list, tuple)):
        items = enumerate(record)
    else:
        if hasattr(record, "detach"):
            record = record.detach()
        return {path: np.asarray(record)}
    flat = {}
    for key, value in items:
        flat.update(_flat(value, f"{path}/{key}" if path else str(key)))
    return flat


def _paired(expected, received):
    """The oracle's values under the paths of the run, variables paired by position."""
    names = {_position(path): path for path in received if _is_variable(path)}
    return {
        names.get(_position(path), path) if _is_variable(path) else path: value
        for path, value in expected.items()
    }


def _is_variable(path):
    return re.search(r"(^|/)(weights|optimizer)/\d+ ", path) is not None


def _position(path):
    return re.match(r"(.*?(?:weights|optimizer)/\d+) ", path).group(1)


def _difference(value, other):
    if value.dtype.kind not in "biufc" and value.dtype.name != "bfloat16":
        return 0.0 if (value == other).all() else np.inf
    if value.size == 0:
        return 0.0
    value, other = value.astype("float64"), other.astype("float64")
    with np.errstate(invalid="ignore"):
        difference = np.abs(value - other)
    same = (value == other) | (np.isnan(value) & np.isnan(other))
    # Of a value above one (a loss of 61, an iteration count), relative to it:
    # a float32 near 61 has steps of 4e-6.
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, difference / np.maximum(1.0, np.abs(value)))
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def _missing(expected, received):
    lost = [path for path in expected if path not in received]
    new = [path for path in received if path not in expected]
    return f"missing: {lost[:8]}, not expected: {new[:8]} (or in another order)"


def _report(expected, received, tolerance, loose):
    lines = []
    for path, value in expected.items():
        difference = _difference(value, received[path])
        if difference > tolerance and not any(re.search(pattern, path) for pattern in loose):
            lines.append(
                f"  {difference:.3e} {path}: plain Keras {_short(value)}, "
                f"received {_short(received[path])}"
            )
    head = f"{len(lines)} of {len(expected)} values differ by more than {tolerance}:"
    return "\n".join([head, *lines[:12]])


def _short(value):
    return np.array2string(value.ravel()[:3], precision=7)
