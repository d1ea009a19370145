"""A model's own `train_step`, `test_step` or `predict_step` on one rank's rows.

The same code runs in the caller (rank 0) and in each worker. The step is called as Keras
calls it; wherever it updates weights, the gradients become those of the global batch
first. A rank without rows runs the step on one row of another, which counts for nothing,
and so makes the calls that the others make.
"""

import torch

from parallel_keras import capabilities, features, keras_internals
from parallel_keras.backends.torch import shipping, step_scope
from parallel_keras.backends.torch.metrics import metric_variables
from parallel_keras.backends.torch.own_gradients import UpdateReducer
from parallel_keras.backends.torch.own_state import StateWatch
from parallel_keras.step_assigns import Assigns
from parallel_keras.strategies import DataParallel


class OwnStep:
    """Runs the steps of one rank.

    Args:
        model: This rank's Keras model.
        world_size: Int.
        group: The process group of all ranks.
        device: This rank's `torch.device`.
        laps: This rank's `Laps`.
    """

    def __init__(self, model, world_size, group, device, laps):
        self.model = model
        self.world_size = world_size
        self.laps = laps
        variables = shipping.variables_of(model)
        self.reducer = UpdateReducer(group, device, world_size, variables)
        self.watch = StateWatch(model, group, device, world_size, variables)
        self.assigns = Assigns(model, self._refuse)
        self.share = 0.0
        self.kind = "train"

    def run(self, kind, data, share, steady=frozenset()):
        """One step.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            data: What the step takes, of this rank's rows, or of one row of another's.
            share: Float, this rank's share of the rows.
            steady: Set of the numbers of variables that the step leaves equal by itself.

        Returns:
            What the step returned.
        """
        self.share, self.kind = share, kind
        if kind == "train":
            self.laps.begin()
        else:
            self.laps.interrupt()
        self.watch.begin()
        with (
            step_scope.synchronizing(self._update),
            step_scope.running(kind),
            self.assigns.watched(),
        ):
            result = getattr(self.model, f"{kind}_step")(data)
        self.laps.lap("compute")
        self.reducer.end()
        self.watch.finish(share, steady)
        self.laps.lap("all-reduce")
        if kind == "train":
            self.laps.end()
        else:
            self.laps.interrupt()
        return result

    def _update(self, optimizer, gradients, variables, apply):
        self.laps.lap("compute")
        self.assigns.check_update(variables)
        self.watch.before_update()
        gradients = self.reducer.reduce(gradients, variables, self.share)
        self.laps.lap("all-reduce")
        with torch.no_grad():
            apply(gradients)
        self.watch.after_update()
        self.laps.lap("update")

    def _refuse(self, variable):
        received = f"{type(self.model).__name__}.{self.kind}_step: variable {variable.path}"
        capabilities.check("foreign_variable", DataParallel(self.world_size), "torch", received)


class Numbered:
    """What the probe found of a kind of step, in numbers that all ranks understand.

    Args:
        model: A Keras model.
        found: `step_probe.StepFindings`.
    """

    def __init__(self, model, found):
        of_metrics = enumerate(metric_variables(model))
        self.averaged = tuple(n for n, v in of_metrics if id(v) in found.averaged)
        variables = enumerate(shipping.variables_of(model))
        self.steady = frozenset(n for n, v in variables if id(v) in found.steady)

    def as_news(self):
        return self.averaged, self.steady


def trains_by_itself(model):
    """Whether the training step is the model's own.

    Its optimizers then accumulate global gradients, equal on all ranks.
    """
    return "train" in features.own_steps(model)


def is_complete(model):
    """Whether all optimizers have their variables: the first step makes what is missing."""
    return all(optimizer.built for optimizer in keras_internals.optimizers_of(model))
