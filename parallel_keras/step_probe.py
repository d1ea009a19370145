"""Does a model's own step add up over the rows? Asked of the first batch.

The step is run on some rows at once, as one device would, and on two uneven parts of
them, as two replicas would (`step_runs`). So the gradients of each update, the metrics'
state, other variables and the logs of the parts can be held against those of the whole
(`step_compare`), then once more where numbers are large (`stress`). What does not add up is
refused by name, before anything trains.

Everything that a step may change is put back (`step_state`), and random draws and
statistics of the batch are at rest (`resting`).
"""

import contextlib
from typing import NamedTuple

import numpy as np

from parallel_keras import backends, capabilities, keras_internals, resting, step_state, stress
from parallel_keras.errors import UnsupportedError
from parallel_keras.probe import MAX_ROWS
from parallel_keras.probe_rows import SUM, rows_of, take
from parallel_keras.step_compare import Comparison
from parallel_keras.step_numbers import Coarse
from parallel_keras.step_runs import Differs, Runs
from parallel_keras.tolerances import nudge, tolerance_of


class StepFindings(NamedTuple):
    """How the outcome of a step on a batch comes from those on its parts.

    Attributes:
        averaged: Frozenset of the ids of the metrics' variables whose change counts with
            the part's share of the rows. The changes of all others are summed.
        updated: Frozenset of the ids of the variables of the metrics that the step updated.
        logs: Dict from a leaf's path in the logs to `"metric"`, `"variable"` or one of
            `logs.RULES`.
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
    scope = backends.room("step_scope")
    with contextlib.ExitStack() as stack:
        kept = step_state.Kept(model)
        stack.callback(kept.restore)
        stack.enter_context(tolerance_of(model))
        rest = stack.enter_context(resting.at_rest())
        stack.enter_context(keras_internals.noting_new_variables(kept.note, rest.awake))
        try:
            return _Probe(Runs(model, kind, kept, rest, scope), data).findings()
        except Differs as difference:
            received = f"{type(model).__name__}.{kind}_step on {difference.received}"
            capabilities.check(difference.feature, strategy, backends.name(), received)
            raise


class _Probe:
    def __init__(self, runs, data):
        self.runs, self.model, self.kind = runs, runs.model, runs.kind
        self.data = data
        self.rows = min(MAX_ROWS, rows_of(data))
        self.cut = max(1, self.rows // 3)
        self.parts = (slice(0, self.cut), slice(self.cut, self.rows))
        self.shares = [self.cut / self.rows, (self.rows - self.cut) / self.rows]

    def findings(self):
        try:
            found, levels, ways = self._as_they_are()
        except Differs as difference:
            raise Differs(
                difference.feature, f"the first batch: {difference.received}"
            ) from difference
        for level in levels:
            found, ways = self._under(level, found, ways)
        if self.kind == "predict":
            return found
        return found._replace(averaged=self._averaged(ways))

    def _as_they_are(self):
        """The rows as they came: findings, what to look at then, how metrics come together."""
        whole = self.runs.whole(self.data, self.rows)
        pieces = [self.runs.part(take(self.data, part), whole) for part in self.parts]
        comparison = self._comparison(whole, pieces, self.shares)
        if self.kind == "predict":
            comparison.outputs()
            return StepFindings(), stress.LEVELS, {}
        comparison.updates()
        ways = comparison.metrics()
        steady, _ = comparison.state()
        comparison.attributes()
        again = self.runs.run(take(self.data, slice(0, self.rows)), before=whole)
        comparison.independence(again)
        rules, results = comparison.log_rules(again)
        updated = {id(v) for metric in whole.found.updated for v in metric.variables}
        found = StepFindings(frozenset(), frozenset(updated), rules, results, steady)
        levels = stress.LEVELS_OF_TRAINING if self.kind == "train" else stress.LEVELS
        changed = (*stress.counting(self.model, whole, steady), *stress.opening(self.model))
        return found, (*changed, *levels), ways

    def _comparison(self, whole, pieces, shares, *numbers):
        return Comparison(self.model, self.runs.step, whole, pieces, shares, *numbers)

    def _averaged(self, ways):
        """The variables of the metrics whose changes are no sums."""
        metrics = enumerate(keras_internals.every_metric(self.model))
        return frozenset(
            id(variable)
            for number, metric in metrics
            if SUM not in ways.get(number, {SUM})
            for variable in metric.variables
        )

    # ---- larger numbers ----

    def _under(self, level, found, ways):
        """The same with larger numbers; it says nothing where a step has no answer to them."""
        rows = level.of_data(take(self.data, slice(0, self.rows)), self.cut, self.model)
        whole = self._run(rows, level)
        if whole is None:
            return found, ways
        try:
            pieces = [self._run(take(rows, part), level, whole) for part in self.parts]
            if any(piece is None for piece in pieces):
                return found, ways
            return self._compare(whole, pieces, self.shares, found, ways)
        except Differs as difference:
            if self._is_rounding(rows, level, whole, found, ways):
                return found, ways
            raise Differs(
                difference.feature,
                f"the first batch with larger numbers ({level.said}): {difference.received}",
            ) from difference

    def _run(self, rows, level, whole=None):
        """A run, or `None` where it raises or has no numbers."""
        try:
            run = self.runs.run(rows, whole=whole, stress=level)
        except (UnsupportedError, Differs):
            raise
        except Exception:
            return None
        numbers = run.numbers.values()
        if self.kind != "predict" and any(
            number is not None and not np.all(np.isfinite(number)) for number in numbers
        ):
            return None
        return run

    def _compare(self, whole, pieces, shares, found, ways):
        comparison = self._comparison(whole, pieces, shares, Coarse)
        if self.kind == "predict":
            comparison.outputs()
            return found, ways
        comparison.updates()
        comparison.attributes()
        ways = comparison.metrics(ways)
        steady, assigned = comparison.state()
        comparison.logs(found.logs)
        return found._replace(steady=found.steady - (assigned - steady)), ways

    def _is_rounding(self, rows, level, whole, found, ways):
        """Whether all rows alone differ as much once the weights are rounded otherwise."""
        try:
            other = self._run(rows, level.nudged(nudge()), whole)
            if other is not None:
                self._compare(whole, [other], [1.0], found, ways)
        except Differs:
            return True
        return other is None
