"""What a step did to all rows, held against what it did to parts of them."""

import numpy as np

from parallel_keras import keras_internals, logs, step_state
from parallel_keras.probe_rows import mean_of, ways_of
from parallel_keras.step_numbers import Exact, difference, finite, short, size
from parallel_keras.step_runs import Differs

# How a leaf of the logs comes about, where it is not by one of `logs.RULES`: it is the result
# of a metric, or a variable itself, which shows what it holds once the step is over.
METRIC, VARIABLE = "metric", "variable"


class Comparison:
    """Holds the parts of one run against the whole.

    Args:
        model: A Keras model.
        step: Its step.
        whole: The `Run` on all rows.
        pieces: List of the `Run`s on the parts.
        shares: List of the parts' shares of the rows.
        numbers: `step_numbers.Exact` or `step_numbers.Coarse`.

    Each method raises `Differs` where something does not add up.
    """

    def __init__(self, model, step, whole, pieces, shares, numbers=Exact):
        self.model, self.step = model, step
        self.whole, self.pieces, self.shares = whole, pieces, shares
        self.numbers = numbers

    def _mean(self, values):
        return mean_of(values, self.shares)

    def updates(self):
        """The gradients of each update, and the weights before it."""
        whole, pieces = self.whole, self.pieces
        for piece in pieces:
            if len(piece.updates) != len(whole.updates):
                raise Differs(
                    "step_control",
                    f"{len(whole.updates)} updates on the whole, {len(piece.updates)} on a part",
                )
        for number, update in enumerate(whole.updates):
            parts = [piece.updates[number] for piece in pieces]
            largest = max((size(g) for g in update.gradients if g is not None), default=0.0)
            scaled = hasattr(update.optimizer, "inner_optimizer")
            for index, gradient in enumerate(update.gradients):
                of_parts = [part.gradients[index] for part in parts]
                if not self.numbers.adds_up(gradient, of_parts, self.shares, largest, scaled):
                    raise Differs("step_sum", self._about(update, number, index, of_parts))
                values = [part.values[index] for part in parts]
                if not all(self.numbers.near(value, update.values[index]) for value in values):
                    raise Differs(
                        "step_state",
                        f"before update {number + 1} the weight "
                        f"{self._path(update.variables[index])} depends on the rows",
                    )

    def _about(self, update, number, index, of_parts):
        def norm(gradient):
            return "none" if gradient is None else f"{np.linalg.norm(gradient):.6g}"

        together = None
        if all(part is not None for part in of_parts):
            together = self._mean(of_parts)
        return (
            f"the gradient of {self._path(update.variables[index])} in update {number + 1} "
            f"({type(update.optimizer).__name__}) has norm {norm(update.gradients[index])} on all "
            f"rows, {norm(together)} as the mean of two parts"
        )

    def _path(self, variable):
        if hasattr(variable, "path"):
            return variable.path
        for one in self.model.variables:
            if one._value is variable:
                return one.path
        return f"a tensor of shape {tuple(variable.shape)}"

    def metrics(self, known=None):
        """How the changes of each metric's state come together.

        Args:
            known: What this method returned before, of other numbers.

        Returns:
            A dict from the metric's number to what `probe_rows.ways_of` finds.
        """
        found = {}
        for number, metric in enumerate(keras_internals.every_metric(self.model)):
            changes = [
                (self.whole.metrics[key], [piece.metrics[key] for piece in self.pieces])
                for key in map(id, metric.variables)
            ]
            ways = ways_of(changes, self.shares, self.numbers.near_changes)
            if known is not None:
                ways &= known.get(number, ways)
            if not ways:
                raise Differs("step_metric", f"metric {metric.name} ({type(metric).__name__})")
            found[number] = ways
        return found

    def state(self):
        """Variables other than those of metrics.

        Returns:
            Two frozensets of ids: of the variables that were assigned the same whatever the
            rows, and of all that were assigned something.
        """
        whole, pieces = self.whole, self.pieces
        steady, assigned = set(), {key for run in (whole, *pieces) for key in run.state}
        for key in assigned:
            variable, before, after = next(
                run.state[key] for run in (whole, *pieces) if key in run.state
            )
            after = whole.state[key][2] if key in whole.state else before
            parts = [piece.state[key][2] if key in piece.state else before for piece in pieces]
            if all(step_state.same(part, after) for part in parts):
                steady.add(key)
            elif before.dtype.kind != "f" or not self.numbers.near(
                difference(after, before),
                self._mean([difference(part, before) for part in parts]),
                around=after,
            ):
                raise Differs("step_state", f"variable {variable.path}")
        return frozenset(steady), frozenset(assigned)

    def attributes(self):
        """Attributes that hold numbers: they must not depend on the rows."""
        for piece in self.pieces:
            for label in {*self.whole.attributes, *piece.attributes}:
                one, other = self.whole.attributes.get(label), piece.attributes.get(label)
                if one is None or other is None or len(one) != len(other):
                    same = False
                else:
                    same = all(
                        a.shape == b.shape and self.numbers.near(a, b)
                        for a, b in zip(one, other, strict=True)
                    )
                if not same:
                    raise Differs("step_state", f"attribute {label}, which is no keras.Variable")

    def independence(self, again):
        """The same rows after other metrics: nothing but the metrics' results may differ.

        Args:
            again: The `Run` on all rows from metrics that hold something else.
        """
        whole, near = self.whole, self.numbers.near
        for one, other in zip(whole.gradients_left, again.gradients_left, strict=False):
            if one is None or other is None:
                continue
            if not near(step_state.as_array(one), step_state.as_array(other), floor=1e-9):
                raise Differs("step_gradients", "in a second run they were added to the first")
        same = len(whole.updates) == len(again.updates)
        for one, other in zip(whole.updates, again.updates, strict=False):
            same = same and all(
                (a is None) == (b is None) and (a is None or near(finite(a), finite(b)))
                for a, b in zip(one.gradients, other.gradients, strict=True)
            )
        for key, (_, _, after) in whole.state.items():
            same = same and key in again.state and near(after, again.state[key][2])
        if not same:
            raise Differs("step_metric", "what it computes depends on what its metrics hold")

    def log_rules(self, again):
        """How each leaf of the logs comes from those of the parts.

        Args:
            again: As for `independence`.

        Returns:
            Two dicts as in `StepFindings`, `logs` and `results`.
        """
        rules: dict = {}
        results: dict = {}
        self._check_keys((*self.pieces, again))
        logs.check_keys(self.step, self.whole.result)
        for path, leaf in self.whole.result.items():
            result = self._result_of_metric(again, path)
            if result is not None:
                rules[path], results[path] = METRIC, result
                continue
            said = logs.rules_of(self.step)
            if step_state.is_live(leaf, path, said) and all(
                run.result[path] is leaf for run in (*self.pieces, again)
            ):
                rules[path] = VARIABLE
                continue
            rules[path] = logs.rule_of(path, said)
            number = self.whole.numbers[path]
            if number is None:
                if any(piece.result[path] != leaf for piece in self.pieces):
                    raise Differs(
                        "step_log", f"{_named(path)} is no number, and depends on the rows"
                    )
                continue
            if not self.numbers.near(number, again.numbers[path]):
                raise Differs(
                    "step_log",
                    f"{_named(path)} is computed from what a metric holds, and is not its result()",
                )
            self._check_leaf(path, number, rules[path])
        return rules, results

    def logs(self, rules):
        """The logs by rules that are known.

        Args:
            rules: The first of what `log_rules` gave.
        """
        self._check_keys(self.pieces)
        for path, number in self.whole.numbers.items():
            if number is not None and rules.get(path, METRIC) not in (METRIC, VARIABLE):
                self._check_leaf(path, number, rules[path])

    def _check_keys(self, runs):
        for run in runs:
            if list(run.result) != list(self.whole.result):
                text = f"keys {list(self.whole.result)} and {list(run.result)}"
                raise Differs("step_log", text)

    def _check_leaf(self, path, number, rule):
        values = [piece.numbers[path] for piece in self.pieces]
        together = None
        if all(value is not None and value.shape == number.shape for value in values):
            together = np.asarray(logs.combine(rule, values, self.shares))
        if together is None or not self.numbers.near(number, together):
            raise Differs(
                "step_log",
                f"{_named(path)} is {short(number)} on all rows, {short(together)} as the "
                f"{rule} of two parts",
            )

    def _result_of_metric(self, again, path):
        """The metric whose result a leaf is, as its number and the path in the result."""
        whole = self.whole
        metrics = keras_internals.every_metric(self.model)
        candidates = [
            key
            for key, value in whole.metric_results.items()
            if _is(whole.numbers[path], value)
            and _is(again.numbers[path], again.metric_results[key])
        ]
        metric = whole.found.metric_of(whole.result[path])
        if metric is None:
            # As a plain number, `float(metric.result())`: one that goes where the result goes.
            moved = [
                key
                for key in candidates
                if not Exact.near(whole.metric_results[key], again.metric_results[key])
            ]
            return moved[0] if moved else None
        if not candidates:
            raise Differs("step_log", f"{_named(path)} is what a metric held before its update")
        own = [key for key in candidates if metrics[key[0]] is metric]
        return (own or candidates)[0]

    def outputs(self):
        """The outputs of the parts, put together, are those of the whole."""
        for path, number in self.whole.numbers.items():
            values = [piece.numbers.get(path) for piece in self.pieces]
            if number is None and not any(value is not None for value in values):
                continue
            fits = number is not None and all(v is not None and v.ndim for v in values)
            fits = fits and np.concatenate(values).shape == number.shape
            # Part by part: beside large rows small ones would not be seen.
            cuts = list(np.cumsum([len(value) for value in values])[:-1]) if fits else []
            if not fits or not all(map(self.numbers.near, np.split(number, cuts), values)):
                raise Differs("step_output", f"output {_named(path)}")


def _is(number, value):
    return number is not None and Exact.near(number, value, floor=1e-9)


def _named(path):
    return "/".join(map(str, path)) or "the result"
