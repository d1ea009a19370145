"""Runs of a model's own step: on some rows at once, and on parts of them.

A part goes the way of the whole: wherever an optimizer is applied, its gradients are
taken down and those of the whole are applied instead, which is what replicas do.
"""

from typing import Any, NamedTuple

import numpy as np
from keras import ops

from parallel_keras import keras_internals, logs, step_state
from parallel_keras.errors import UnsupportedError
from parallel_keras.probe_rows import rows_of, take
from parallel_keras.step_assigns import Assigns
from parallel_keras.step_numbers import difference, number_of, same_numbers
from parallel_keras.stress import NO_STRESS


class Differs(Exception):
    """What a step did to all rows is not what it did to parts of them.

    Args:
        feature: String, a key of the table of capabilities.
        received: String, what exactly differs.
    """

    def __init__(self, feature, received):
        super().__init__(feature, received)
        self.feature = feature
        self.received = received


class Update(NamedTuple):
    """One call of an optimizer's `apply`, or of a `torch.optim` step."""

    optimizer: Any
    variables: list
    gradients: list  # arrays, `None` among them
    to_apply: list
    values: list  # of the variables, before


class Run(NamedTuple):
    """What a step did."""

    updates: list
    result: dict  # leaves by path: logs, or outputs
    numbers: dict  # theirs at the end of the step, by path: some are variables, which move on
    found: Any  # which of the leaves are results of metrics
    metrics: dict  # by the id of a variable: what it went up by
    metric_results: dict  # by (metric's number, path): the value in the end
    state: dict  # by the id of a variable: before, after
    attributes: dict
    gradients_left: list


class Runs:
    """Runs a step from where the model stands, each time.

    Args:
        model: A Keras model on plain variables.
        kind: `"train"`, `"test"` or `"predict"`.
        kept: The `step_state.Kept` of the model.
        rest: The `resting.Rest` of all random draws.
        scope: The backend's room `step_scope`.
    """

    def __init__(self, model, kind, kept, rest, scope):
        self.model, self.kind, self.kept, self.rest = model, kind, kept, rest
        self.scope = scope
        self.step = getattr(model, f"{kind}_step")
        self.assigns = Assigns(model, _refuse_foreign, kept.note)

    def whole(self, data, rows):
        """On the first rows, of a batch that may be too large to be looked at."""
        total = rows_of(data)
        try:
            return self.run(take(data, slice(0, rows)))
        except (UnsupportedError, Differs):
            raise
        except Exception as error:
            if rows == total:
                raise
            self.run(data)  # raises what plain Keras would
            text = f"{rows} of its {total} rows: {_first_line(error)}"
            raise Differs("step_rows", text) from error

    def part(self, data, whole):
        """On a part of the rows."""
        try:
            return self.run(data, whole=whole)
        except (UnsupportedError, Differs):
            raise
        except Exception as error:
            text = f"{rows_of(data)} of its rows: {_first_line(error)}"
            raise Differs("step_rows", text) from error

    def run(self, data, whole=None, before=None, stress=NO_STRESS):
        """Run the step.

        Args:
            data: What the step takes.
            whole: The `Run` on all rows whose updates are made, instead of its own.
            before: A `Run` on the same rows that came before.
            stress: The `stress.Stress` under which it runs.
        """
        metrics = keras_internals.every_metric(self.model)
        self.kept.restore()
        for metric in metrics:
            metric.reset_state()
        self.scope.leave_gradients(self.model, before.gradients_left if before else [])
        if before is not None:
            _fill(metrics, before.metrics)
        stress.of_model(self.model)
        of_metrics = {id(v): v for metric in metrics for v in metric.variables}
        then = {key: step_state.as_array(v) for key, v in of_metrics.items()}
        start = {id(v): step_state.as_array(v) for v, _ in self.kept.values()}
        numbers = step_state.numbers_of(self.model)
        updates: list = []

        def hook(optimizer, gradients, variables, apply):
            self.assigns.check_update(variables)
            arrays = [None if g is None else step_state.as_array(g) for g in gradients]
            values = [step_state.as_array(v) for v in variables]
            to_apply = [None if g is None else self.scope.kept_gradient(g) for g in gradients]
            updates.append(Update(optimizer, variables, arrays, to_apply, values))
            apply(_of_whole(updates, whole) if whole is not None else gradients)

        self.rest.begin()
        with (
            self.scope.synchronizing(hook),
            self.scope.gradients_scaled(self.model, stress.gradients),
            keras_internals.results_of_metrics(self.model) as found,
            self.scope.running(self.kind),
            self.assigns.watched(),
        ):
            result = self.step(data)
        _refuse_from_infinity(found.updated, then)
        metrics = keras_internals.every_metric(self.model)  # some are made in the step
        of_metrics = {id(v): v for metric in metrics for v in metric.variables}
        now = {key: step_state.as_array(v) for key, v in of_metrics.items()}
        after = step_state.numbers_of(self.model)
        leaves = logs.leaves_by_path(result)
        return Run(
            updates,
            leaves,
            {path: number_of(leaf) for path, leaf in leaves.items()},
            found,
            {k: difference(v, then.get(k, np.zeros_like(v))) for k, v in now.items()},
            _results(metrics),
            self._changed(of_metrics, start),
            {k: v for k, v in after.items() if not same_numbers(v, numbers.get(k))},
            self.scope.gradients_left(self.model),
        )

    def _changed(self, of_metrics, start):
        """Values before and after, of the variables that a step has changed."""
        seeds = {id(state) for state in keras_internals.seed_states(self.model)}
        found = {}
        for variable, first in self.kept.values():
            key = id(variable)
            if key in of_metrics or key in seeds:
                continue
            before, after = start.get(key, first), step_state.as_array(variable)
            if not step_state.same(after, before):
                found[key] = variable, before, after
        return found


def _of_whole(updates, whole):
    """The gradients of the whole at the update that a part has come to."""
    number = len(updates) - 1
    if number >= len(whole.updates):
        text = f"{len(whole.updates)} updates on the whole, more on a part"
        raise Differs("step_control", text)
    one, other = updates[number], whole.updates[number]
    if one.optimizer is not other.optimizer or list(map(id, one.variables)) != list(
        map(id, other.variables)
    ):
        raise Differs("step_control", f"update {number + 1} is of other variables on a part")
    return other.to_apply


# ---- metrics ---------------------------------------------------------------------


def _fill(metrics, changes):
    """Leave in the metrics what no batch would: numbers of their own for each variable."""
    step = 0
    for metric in metrics:
        for variable in metric.variables:
            change = changes.get(id(variable))
            if change is None or not np.any(change != 0) or variable.dtype == "bool":
                continue
            step += 1
            value = step_state.as_array(variable)
            more = 1 + step if value.dtype.kind in "iu" else 0.6180339887 * step + 0.37
            variable.assign(ops.cast(value + np.asarray(more, value.dtype), variable.dtype))


def _refuse_foreign(variable):
    raise Differs("foreign_variable", f"variable {variable.path}")


def _refuse_from_infinity(metrics, then):
    """What a metric's state goes up by from infinity, once it does, nothing can tell."""
    for metric in metrics:
        if any(np.isinf(then.get(id(v), 0)).any() for v in metric.variables):
            text = f"metric {metric.name} ({type(metric).__name__}), which starts at infinity"
            raise Differs("step_metric", text)


def _results(metrics):
    """What each metric's result is now, by the metric's number and the path in the result."""
    found = {}
    for number, metric in enumerate(metrics):
        if not metric.variables:
            continue
        for path, leaf in logs.leaves_by_path(metric.result()).items():
            value = number_of(leaf)
            if value is not None:
                found[number, path] = value
    return found


def _first_line(error):
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
