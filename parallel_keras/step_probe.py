"""Does a model's own step add up over the rows? Asked of the first batch.

The step is run on some rows at once, as one device would, and on two uneven parts of
them, as two replicas would. A part goes the way of the whole: wherever an optimizer is
applied, its gradients are taken down and those of the whole are applied instead, which
is what replicas do. So the gradients of each update, the metrics' state, other variables
and the logs of the parts can be held against those of the whole. What does not add up is
refused by name, before anything trains.

Everything that a step may change is put back (`step_state`), and random draws and
statistics of the batch are at rest (`resting`).
"""

import contextlib
from typing import Any, NamedTuple

import numpy as np
from keras import ops, tree

from parallel_keras import backends, capabilities, keras_internals, logs, resting, step_state
from parallel_keras.errors import UnsupportedError
from parallel_keras.probe import MAX_ROWS, tolerance, tolerance_of

METRIC = "metric"


class StepFindings(NamedTuple):
    """How the outcome of a step on a batch comes from those on its parts.

    Attributes:
        averaged: Frozenset of the ids of the metrics' variables whose change counts with
            the part's share of the rows. The changes of all others are summed.
        updated: Frozenset of the ids of the variables of the metrics that the step updated.
        logs: Dict from a leaf's path in the logs to `"metric"` or one of `logs.RULES`.
        results: Dict from the path of a `"metric"` to the metric and the path in its result.
        steady: Frozenset of the ids of the variables which the step assigned a value that
            is the same whatever the rows, as a target network's.
    """

    averaged: frozenset = frozenset()
    updated: frozenset = frozenset()
    logs: dict = {}
    results: dict = {}
    steady: frozenset = frozenset()


def probe(model, strategy, kind, data):
    """Hold a model's own step on some rows against the same step on two parts of them.

    Args:
        model: A Keras model on plain variables.
        strategy: The `Strategy`, for messages.
        kind: `"train"`, `"test"` or `"predict"`.
        data: What the step takes, of at least two rows, as backend tensors.

    Returns:
        `StepFindings`.

    Raises:
        UnsupportedError: If something does not add up.
    """
    with contextlib.ExitStack() as stack:
        kept = step_state.Kept(model)
        stack.callback(kept.restore)
        stack.enter_context(tolerance_of(model))
        rest = stack.enter_context(resting.at_rest())
        stack.enter_context(keras_internals.noting_new_variables(kept.note, rest.awake))
        return _Probe(model, strategy, kind, kept, rest).findings(data)


class _Update(NamedTuple):
    """One call of an optimizer's `apply`, or of a `torch.optim` step."""

    optimizer: Any
    variables: list
    gradients: list  # arrays, `None` among them
    to_apply: list
    values: list  # of the variables, before


class _Run(NamedTuple):
    """What a step did."""

    updates: list
    result: dict  # leaves by path: logs, or outputs
    found: Any  # which of the leaves are results of metrics
    metrics: dict  # by the id of a variable: what it went up by
    metric_results: dict  # by (metric's number, path): the value in the end
    state: dict  # by the id of a variable: before, after
    attributes: dict
    gradients_left: list


class _Probe:
    def __init__(self, model, strategy, kind, kept, rest):
        self.model, self.strategy, self.kind = model, strategy, kind
        self.kept, self.rest = kept, rest
        self.scope = backends.room("step_scope")
        self.step = getattr(model, f"{kind}_step")
        self.name = f"{type(model).__name__}.{kind}_step"

    def refuse(self, feature, received):
        capabilities.check(
            feature, self.strategy, backends.name(), f"{self.name} on the first batch: {received}"
        )

    # ---- what is compared ----

    def findings(self, data):
        total = rows_of(data)
        rows = min(MAX_ROWS, total)
        cut = max(1, rows // 3)
        shares = [cut / rows, (rows - cut) / rows]
        whole = self._run_whole(data, rows, total)
        pieces = [
            self._run_part(take(data, part), whole) for part in (slice(0, cut), slice(cut, rows))
        ]
        if self.kind == "predict":
            self._check_outputs(whole, pieces)
            return StepFindings()
        self._check_updates(whole, pieces, shares)
        averaged = self._metrics_that_are_averaged(whole, pieces, shares)
        steady = self._check_state(whole, pieces, shares)
        self._check_attributes(whole, pieces)
        again = self._run_again(take(data, slice(0, rows)), whole)
        self._check_independence(whole, again)
        rules, results = self._check_logs(whole, pieces, again, shares)
        updated = {id(v) for metric in whole.found.updated for v in metric.variables}
        return StepFindings(averaged, frozenset(updated), rules, results, steady)

    def _check_updates(self, whole, pieces, shares):
        for piece in pieces:
            if len(piece.updates) != len(whole.updates):
                self.refuse(
                    "step_control",
                    f"{len(whole.updates)} updates on the whole, {len(piece.updates)} on a part",
                )
        for number, update in enumerate(whole.updates):
            parts = [piece.updates[number] for piece in pieces]
            largest = max(
                (
                    np.max(np.abs(_finite(g)), initial=0.0)
                    for g in update.gradients
                    if g is not None
                ),
                default=0.0,
            )
            scaled = hasattr(update.optimizer, "inner_optimizer")
            for index, gradient in enumerate(update.gradients):
                of_parts = [part.gradients[index] for part in parts]
                if not _adds_up(gradient, of_parts, shares, largest, scaled):
                    self.refuse("step_sum", self._about(update, number, index, of_parts, shares))
                values = [part.values[index] for part in parts]
                if not all(_near(value, update.values[index]) for value in values):
                    self.refuse(
                        "step_state",
                        f"before update {number + 1} the weight "
                        f"{self._path(update.variables[index])} depends on the rows",
                    )

    def _about(self, update, number, index, of_parts, shares):
        def size(gradient):
            return "none" if gradient is None else f"{np.linalg.norm(gradient):.6g}"

        together = None
        if all(part is not None for part in of_parts):
            together = _mean(of_parts, shares)
        return (
            f"the gradient of {self._path(update.variables[index])} in update {number + 1} "
            f"({type(update.optimizer).__name__}) has norm {size(update.gradients[index])} on all "
            f"rows, {size(together)} as the mean of two parts"
        )

    def _metrics_that_are_averaged(self, whole, pieces, shares):
        averaged: set = set()
        for metric in keras_internals.every_metric(self.model):
            keys = [id(variable) for variable in metric.variables]
            changes = [(whole.metrics[k], [piece.metrics[k] for piece in pieces]) for k in keys]
            if all(_near(change, sum(parts)) for change, parts in changes):
                continue
            if not all(_near(change, _mean(parts, shares)) for change, parts in changes):
                self.refuse("step_metric", f"metric {metric.name} ({type(metric).__name__})")
            averaged.update(keys)
        return frozenset(averaged)

    def _check_state(self, whole, pieces, shares):
        steady = set()
        for key in {key for run in (whole, *pieces) for key in run.state}:
            variable, before, after = next(
                run.state[key] for run in (whole, *pieces) if key in run.state
            )
            after = whole.state[key][2] if key in whole.state else before
            parts = [piece.state[key][2] if key in piece.state else before for piece in pieces]
            if all(step_state.same(part, after) for part in parts):
                steady.add(key)
            elif before.dtype.kind != "f" or not _near(
                after - before, _mean([part - before for part in parts], shares), around=after
            ):
                self.refuse("step_state", f"variable {variable.path}")
        return frozenset(steady)

    def _check_attributes(self, whole, pieces):
        for piece in pieces:
            for label in {*whole.attributes, *piece.attributes}:
                one, other = whole.attributes.get(label), piece.attributes.get(label)
                if one is None or other is None or len(one) != len(other):
                    same = False
                else:
                    same = all(
                        a.shape == b.shape and _near(a, b) for a, b in zip(one, other, strict=True)
                    )
                if not same:
                    self.refuse("step_state", f"attribute {label}, which is no keras.Variable")

    def _check_independence(self, whole, again):
        """The same rows after other metrics: nothing but the metrics' results may differ."""
        for one, other in zip(whole.gradients_left, again.gradients_left, strict=False):
            if one is None or other is None:
                continue
            if not _near(step_state.as_array(one), step_state.as_array(other), floor=1e-9):
                self.refuse("step_gradients", "in a second run they were added to the first")
        same = len(whole.updates) == len(again.updates)
        for one, other in zip(whole.updates, again.updates, strict=False):
            same = same and all(
                (a is None) == (b is None) and (a is None or _near(_finite(a), _finite(b)))
                for a, b in zip(one.gradients, other.gradients, strict=True)
            )
        for key, (_, _, after) in whole.state.items():
            same = same and key in again.state and _near(after, again.state[key][2])
        if not same:
            self.refuse("step_metric", "what it computes depends on what its metrics hold")

    def _check_logs(self, whole, pieces, again, shares):
        rules: dict = {}
        results: dict = {}
        for piece in (*pieces, again):
            if list(piece.result) != list(whole.result):
                self.refuse("step_log", f"keys {list(whole.result)} and {list(piece.result)}")
        logs.check_keys(self.step, whole.result)
        for path, leaf in whole.result.items():
            result = self._result_of_metric(whole, again, path)
            if result is not None:
                rules[path], results[path] = METRIC, result
                continue
            rule = rules[path] = logs.rule_of(path, logs.rules_of(self.step))
            values = [number_of(piece.result[path]) for piece in pieces]
            number = number_of(leaf)
            if number is None:
                if any(piece.result[path] != leaf for piece in pieces):
                    self.refuse("step_log", f"{_named(path)} is no number, and depends on the rows")
                continue
            if not _near(number, number_of(again.result[path])):
                self.refuse(
                    "step_log",
                    f"{_named(path)} is computed from what a metric holds, and is not its result()",
                )
            together = None
            if all(value is not None and value.shape == number.shape for value in values):
                together = np.asarray(logs.combine(rule, values, shares))
            if together is None or not _near(number, together):
                self.refuse(
                    "step_log",
                    f"{_named(path)} is {_short(number)} on all rows, {_short(together)} as the "
                    f"{rule} of two parts",
                )
        return rules, results

    def _result_of_metric(self, whole, again, path):
        """The metric whose result a leaf is, as its number and the path in the result."""
        metrics = keras_internals.every_metric(self.model)
        candidates = [
            key
            for key, value in whole.metric_results.items()
            if _is(whole.result[path], value) and _is(again.result[path], again.metric_results[key])
        ]
        metric = whole.found.metric_of(whole.result[path])
        if metric is None:
            # As a plain number, `float(metric.result())`: one that goes where the result goes.
            moved = [
                key
                for key in candidates
                if not _near(whole.metric_results[key], again.metric_results[key])
            ]
            return moved[0] if moved else None
        if not candidates:
            self.refuse("step_log", f"{_named(path)} is what a metric held before its update")
        own = [key for key in candidates if metrics[key[0]] is metric]
        return (own or candidates)[0]

    def _check_outputs(self, whole, pieces):
        for path, leaf in whole.result.items():
            number = number_of(leaf)
            values = [number_of(piece.result.get(path)) for piece in pieces]
            if number is None and not any(value is not None for value in values):
                continue
            fits = number is not None and all(v is not None and v.ndim for v in values)
            together = np.concatenate(values) if fits else None
            if together is None or together.shape != number.shape or not _near(number, together):
                self.refuse("step_output", f"output {_named(path)}")

    # ---- runs ----

    def _run_whole(self, data, rows, total):
        try:
            return self._run(take(data, slice(0, rows)))
        except UnsupportedError:
            raise
        except Exception as error:
            if rows == total:
                raise
            self._run(data)  # raises what plain Keras would
            self.refuse("step_rows", f"{rows} of its {total} rows: {_first_line(error)}")
            raise

    def _run_part(self, data, whole):
        try:
            return self._run(data, whole=whole)
        except UnsupportedError:
            raise
        except Exception as error:
            self.refuse("step_rows", f"{rows_of(data)} of its rows: {_first_line(error)}")
            raise

    def _run_again(self, data, whole):
        return self._run(data, before=whole)

    def _run(self, data, whole=None, before=None):
        metrics = keras_internals.every_metric(self.model)
        self.kept.restore()
        for metric in metrics:
            metric.reset_state()
        self.scope.leave_gradients(self.model, before.gradients_left if before else [])
        if before is not None:
            _fill(metrics, before.metrics)
        of_metrics = {id(v): v for metric in metrics for v in metric.variables}
        then = {key: step_state.as_array(v) for key, v in of_metrics.items()}
        numbers = step_state.numbers_of(self.model)
        updates: list = []

        def hook(optimizer, gradients, variables, apply):
            arrays = [None if g is None else step_state.as_array(g) for g in gradients]
            values = [step_state.as_array(v) for v in variables]
            to_apply = [None if g is None else self.scope.kept_gradient(g) for g in gradients]
            updates.append(_Update(optimizer, variables, arrays, to_apply, values))
            apply(self._of_whole(updates, whole) if whole is not None else gradients)

        self.rest.begin()
        with (
            self.scope.synchronizing(hook),
            keras_internals.results_of_metrics(self.model) as found,
            self.scope.running(self.kind),
        ):
            result = self.step(data)
        metrics = keras_internals.every_metric(self.model)  # some are made in the step
        of_metrics = {id(v): v for metric in metrics for v in metric.variables}
        now = {key: step_state.as_array(v) for key, v in of_metrics.items()}
        after = step_state.numbers_of(self.model)
        return _Run(
            updates,
            logs.leaves_by_path(result),
            found,
            {k: _difference(v, then.get(k, np.zeros_like(v))) for k, v in now.items()},
            _results(metrics),
            self._changed(of_metrics),
            {k: v for k, v in after.items() if not _same_numbers(v, numbers.get(k))},
            self.scope.gradients_left(self.model),
        )

    def _of_whole(self, updates, whole):
        """The gradients of the whole at the update that a part has come to."""
        number = len(updates) - 1
        if number >= len(whole.updates):
            self.refuse(
                "step_control", f"{len(whole.updates)} updates on the whole, more on a part"
            )
        one, other = updates[number], whole.updates[number]
        if one.optimizer is not other.optimizer or list(map(id, one.variables)) != list(
            map(id, other.variables)
        ):
            self.refuse("step_control", f"update {number + 1} is of other variables on a part")
        return other.to_apply

    def _changed(self, of_metrics):
        """Values before and after, of the variables that a step has changed."""
        seeds = {
            id(generator.state)
            for layer in keras_internals.flatten_layers(self.model)
            for generator in keras_internals.seed_generators(layer)
        }
        found = {}
        for variable, before in self.kept.values():
            key = id(variable)
            if key in of_metrics or key in seeds:
                continue
            after = step_state.as_array(variable)
            if not step_state.same(after, before):
                found[key] = variable, before, after
        return found

    def _path(self, variable):
        if hasattr(variable, "path"):
            return variable.path
        for one in self.model.variables:
            if one._value is variable:
                return one.path
        return f"a tensor of shape {tuple(variable.shape)}"


# ---- rows ------------------------------------------------------------------------


def rows_of(data):
    """The rows of a batch."""
    return int(next(leaf for leaf in tree.flatten(data) if leaf is not None).shape[0])


def take(data, rows):
    """Some rows of each array of a batch."""
    return tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], data)


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


# ---- numbers ---------------------------------------------------------------------


def number_of(leaf):
    """A leaf's numbers in float64, `None` where it has none."""
    if leaf is None or isinstance(leaf, (str, bytes)):
        return None
    try:
        return np.asarray(ops.convert_to_numpy(leaf)).astype("float64")
    except (TypeError, ValueError):
        return None


def _difference(value, before):
    value, before = value.astype("float64"), before.astype("float64")
    with np.errstate(invalid="ignore"):
        return np.where(value == before, 0.0, value - before)  # infinity too


def _mean(values, shares):
    return sum(share * value for share, value in zip(shares, values, strict=True))


def _finite(array):
    return np.nan_to_num(array.astype("float64"), nan=0.0, posinf=0.0, neginf=0.0)


def _size(array):
    return float(np.max(np.abs(_finite(array)), initial=0.0))


def _near(value, other, around=None, floor=1e-6):
    """Whether numbers are the same up to rounding.

    Args:
        value, other: Arrays.
        around: Array of what the two are differences of, for the size of its rounding.
        floor: Float. A difference that counts as none.
    """
    value, other = np.asarray(value, "float64"), np.asarray(other, "float64")
    if value.shape != other.shape:
        return False
    scale = tolerance() * np.maximum(np.abs(value), np.abs(other))
    if around is not None:
        scale = scale + 1e-2 * tolerance() * np.abs(np.asarray(around, "float64"))
        floor = 1e-9
    with np.errstate(invalid="ignore"):
        close = np.abs(value - other) <= scale + floor
    return bool(np.all(close | (value == other) | (np.isnan(value) & np.isnan(other))))


def _adds_up(gradient, parts, shares, largest, scaled):
    """Whether a gradient is the mean of those of the parts.

    Args:
        gradient, parts, shares: Array and arrays, `None` where there is no gradient.
        largest: Float, the largest entry among all gradients of the update: what is
            noise beside it is none.
        scaled: Bool. Whether the loss was scaled, so that a part may overflow by itself.
    """
    if gradient is None or any(part is None for part in parts):
        return gradient is None and all(part is None for part in parts)
    gradient = gradient.astype("float64")
    parts = [part.astype("float64") for part in parts]
    are_finite = [np.isfinite(array) for array in (gradient, *parts)]
    if scaled:
        counted = np.logical_and.reduce(are_finite)
    else:
        counted = are_finite[0]
        if not np.array_equal(counted, np.logical_and.reduce(are_finite[1:])):
            return False
    with np.errstate(invalid="ignore"):
        together = _mean(parts, shares)
        wrong = np.abs(gradient - together)
    size = max(_size(gradient), _size(together))
    limit = tolerance() * size + 1e-2 * tolerance() * largest
    return bool(np.all(wrong[counted] <= limit))


def _is(leaf, value):
    number = number_of(leaf)
    return number is not None and _near(number, value, floor=1e-9)


def _same_numbers(arrays, others):
    if others is None or len(arrays) != len(others):
        return False
    return all(step_state.same(a, b) for a, b in zip(arrays, others, strict=True))


def _short(number):
    if number is None:
        return "of another shape"
    return f"{float(number):.6g}" if number.ndim == 0 else np.array2string(number.ravel()[:3])


def _named(path):
    return "/".join(map(str, path)) or "the result"


def _first_line(error):
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
