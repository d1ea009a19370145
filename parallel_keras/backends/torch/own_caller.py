"""A model's own steps, seen from the caller: probing, and what comes back."""

from typing import NamedTuple

import numpy as np
import torch

from parallel_keras import capabilities, keras_internals, logs, probe, step_probe, step_state
from parallel_keras.backends.torch import own_logs, shipping
from parallel_keras.backends.torch.own_step import Numbered
from parallel_keras.step_compare import METRIC, VARIABLE
from parallel_keras.step_probe import StepFindings


class _Probed(NamedTuple):
    compiled: object
    found: StepFindings
    numbered: Numbered


class OwnSteps:
    """The steps of one model that are its own, in the caller.

    Args:
        lowering: The model's `data.Lowering`.
    """

    def __init__(self, lowering):
        self.lowering = lowering
        self.model = lowering.model
        self._probed: dict = {}

    def probe(self, kind, data, total):
        """Before the first step of a kind: does it add up over the rows?"""
        compiled = keras_internals.loss_tracker(self.model)  # another after each compile
        known = self._probed.get(kind)
        if (known is not None and known.compiled is compiled) or not probe.is_enough(total):
            return
        lowering = self.lowering
        here = shipping.to_device(data, lowering.device)
        found = step_probe.probe(self.model, lowering.strategy, kind, here)
        self._probed[kind] = _Probed(compiled, found, Numbered(self.model, found))
        lowering.note_own_step(kind)

    def forget(self):
        """Let each kind be probed anew before its next step."""
        self._probed.clear()

    def news(self):
        """What the workers have to know of the probes."""
        return {kind: probed.numbered.as_news() for kind, probed in self._probed.items()}

    def run(self, kind, number, own, counts):
        """Rank 0's part of a step, and the logs of the global batch."""
        lowering = self.lowering
        averaged, steady = self.news().get(kind, ((), frozenset()))
        metrics = lowering.ship.metrics
        before = metrics.before(averaged)
        lowering.fetch_next()
        shares = [count / sum(counts) for count in counts]
        with keras_internals.results_of_metrics(self.model) as results:
            result = lowering.ship.own.run(kind, own, shares[0], steady)
        if kind == "predict":
            return result
        self._check_metrics(kind, results)
        metrics.weigh(before, shares[0])
        published = lowering.pool.wait_published(number)
        metrics.add([vector[: metrics.size] for vector in published])
        vectors = [own_logs.as_vector(result), *(vector[metrics.size :] for vector in published)]
        return self._logs(kind, result, results, vectors, shares)

    def _logs(self, kind, result, results, vectors, shares):
        step = getattr(self.model, f"{kind}_step")
        refuse = own_logs.refusal(
            f"{type(self.model).__name__}.{kind}_step", self.lowering.strategy
        )
        probed = self._probed.get(kind)
        said = logs.rules_of(step)
        metrics = keras_internals.every_metric(self.model)

        def rule(path, leaf):
            if results.metric_of(leaf) is not None:
                return METRIC
            if probed is None:
                is_live = step_state.is_live(leaf, path, said)
                return VARIABLE if is_live else logs.rule_of(path, said)
            if path not in probed.found.logs:
                refuse(f"it returned {'/'.join(map(str, path))}, and did not in the first batch")
            return probed.found.logs[path]

        def metric_value(path, leaf):
            if results.metric_of(leaf) is not None:
                return results.again(leaf)
            assert probed is not None, "the rule of this leaf is one of the probe's"
            number, inner = probed.found.results[path]
            return logs.leaves_by_path(metrics[number].result())[inner]

        with torch.no_grad():
            return own_logs.combined(result, vectors, shares, rule, metric_value, refuse)

    def _check_metrics(self, kind, results):
        """A metric that is updated for the first time now has not been probed."""
        probed = self._probed.get(kind)
        if probed is None:
            return
        for metric in results.updated:
            if any(id(v) not in probed.found.updated for v in metric.variables):
                capabilities.check(
                    "step_metric",
                    self.lowering.strategy,
                    "torch",
                    f"metric {metric.name}, which was not updated in the first batch",
                )


def publish(board, number, change, result):
    """A worker's side: what its rows added to the metrics, and its logs."""
    change = np.zeros(0) if change is None else change
    board.publish(number, np.concatenate([change, own_logs.as_vector(result)]))
