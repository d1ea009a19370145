"""Layer state under micro-batches: a step changes it once.

Each micro-batch starts from the state before the step. Afterwards the moving averages
of BatchNormalization take the statistics of the whole batch, other floating-point state
the average weighted with the rows, and whole numbers have to agree.
Seeds are no state of this kind: they go on from draw to draw.
"""

import contextlib

import torch

from parallel_keras import capabilities, keras_internals


class StageState:
    """The non-trainable state of one stage's layers.

    Args:
        layers: List of Keras layers whose forward pass runs several times in a step.
        strategy: A `PipelineParallel`, for messages.
    """

    def __init__(self, layers, strategy):
        self.strategy = strategy
        self.norms = [x for x in layers if keras_internals.is_batch_norm(x) and x.trainable]
        averaged = {id(v) for layer in self.norms for v in keras_internals.own_state(layer)}
        found = [v for layer in layers for v in keras_internals.own_state(layer)]
        self.others = [v for v in found if id(v) not in averaged]
        self._kept = {id(v): _Kept(v._value) for v in found}
        self._changes: dict = {}  # by id of a variable of `others` of floating-point numbers
        self._wholes: dict = {}  # by id: one of whole numbers, and what is in it afterwards
        self._moments: dict = {id(layer): [] for layer in self.norms}
        weights = [v for layer in layers for v in layer.trainable_variables]
        self._weights = list({id(v): v for v in weights}.values())
        self._assigned: dict = {}  # by id of a weight: what the first micro-batch has made of it

    @contextlib.contextmanager
    def microbatch(self, share, counts=True):
        """One micro-batch's forward pass.

        Args:
            share: Float, its share of the rows.
            counts: Bool. False where a forward pass is computed a second time.
        """
        notes: list = [[] for _ in self.norms]
        versions = [v._value._version for v in self._weights]
        try:
            with contextlib.ExitStack() as stack:
                for layer, noted in zip(self.norms, notes, strict=True):
                    stack.enter_context(keras_internals.noting_moments(layer, noted.append))
                yield
            if counts:
                for layer, noted in zip(self.norms, notes, strict=True):
                    self._moments[id(layer)].append(noted)
                for variable in self.others:
                    self._note(variable, share)
                for variable, version in zip(self._weights, versions, strict=True):
                    if variable._value._version != version:
                        self._note_assigned(variable)
        finally:
            # torch ends a second pass by an exception, when it has what it needs.
            for kept in self._kept.values():
                kept.restore()

    def _note(self, variable, share):
        kept = self._kept[id(variable)]
        value = variable._value.detach()
        if not value.is_floating_point():
            self._note_whole(variable, value.clone() if kept.has_changed() else kept.value)
            return
        if not kept.has_changed():
            return
        change = (value.double() - kept.value.double()) * share
        known = self._changes.get(id(variable))
        self._changes[id(variable)] = change if known is None else known + change

    def _note_whole(self, variable, value):
        _, known = self._wholes.setdefault(id(variable), (variable, value))
        if known is not value and not torch.equal(known, value):
            received = f"variable {variable.path} differs from micro-batch to micro-batch"
            capabilities.check("whole_numbers", self.strategy, "torch", received)

    def _note_assigned(self, variable):
        """A weight that a call keeps within bounds is the same after each; others move on."""
        value = variable._value.detach()
        known = self._assigned.setdefault(id(variable), value.clone())
        if not torch.allclose(known, value, rtol=1e-4, atol=1e-6):
            capabilities.check("moving_weight", self.strategy, "torch", f"variable {variable.path}")

    def finish(self):
        """After all forward passes: change the state, once."""
        with torch.no_grad():
            for variable in self.others:
                if id(variable) in self._changes:
                    variable._value.copy_(variable._value + self._changes[id(variable)])
            for variable, whole in self._wholes.values():
                if whole is not self._kept[id(variable)].value:
                    variable._value.copy_(whole)
            for layer in self.norms:
                # One that is called twice in a pass moves twice.
                for calls in zip(*self._moments[id(layer)], strict=True):
                    _move(layer, calls)


class _Kept:
    """A tensor's numbers before a step.

    It is written only where it has changed: a backward pass may need it as it is.
    """

    def __init__(self, tensor):
        self.tensor = tensor
        self.value = tensor.detach().clone()
        self.version = tensor._version

    def has_changed(self):
        return self.tensor._version != self.version

    def restore(self):
        if self.has_changed():
            with torch.no_grad():
                self.tensor.copy_(self.value)
            self.version = self.tensor._version


def _move(layer, calls):
    """Move the averages of a BatchNormalization by the moments of all micro-batches.

    Args:
        calls: List of `(mean, variance, count)`, one for each micro-batch.
    """
    total = sum(count for _, _, count in calls)
    shares = [count / total for _, _, count in calls]
    mean = sum(s * m for s, (m, _, _) in zip(shares, calls, strict=True))
    # The variance of a union: the mean of the variances, and the variance of the means.
    variance = sum(s * (v + (m - mean) ** 2) for s, (m, v, _) in zip(shares, calls, strict=True))
    for variable, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        tensor = variable._value
        tensor.copy_(tensor * layer.momentum + value * (1.0 - layer.momentum))
