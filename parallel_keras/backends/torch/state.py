"""Layer state that a step changes, made equal on all ranks.

Running statistics and the like start a step equal on all ranks and are moved by
each rank's rows. Floating-point state becomes the average weighted with the
rows; whole numbers have to agree. Seed states differ on purpose. Buffers of
`torch.nn` modules are state as well.
"""

import torch

from parallel_keras import capabilities, keras_internals
from parallel_keras.backends.torch import buffers
from parallel_keras.backends.torch.agreement import Agreement
from parallel_keras.strategies import DataParallel


class StateAverager:
    """The non-trainable state of a model's layers.

    Args:
        model: A built Keras model.
        group: The process group of all ranks.
        dynamic: Bool. Whether the state that a step changes may differ from
            step to step, as in layers of the user's own.
    """

    def __init__(self, model, group, dynamic):
        self.group = group
        self.dynamic = dynamic
        metric_ids = {id(v) for metric in model.metrics for v in metric.variables}
        variables = {
            id(v): v
            for layer in keras_internals.flatten_layers(model)
            for v in keras_internals.own_state(layer)
            if id(v) not in metric_ids
        }
        state = [*variables.values(), *buffers.buffers_of(model)]
        self.variables = [v for v in state if v._value.numel()]
        # Frozen tables are state too and never change: only what a step has
        # been seen to change on some rank is sent.
        self.active: list | None = None
        self._marks: list = []

    def begin(self):
        """Called before the forward pass."""
        if self._looks():
            self._marks = [buffers.mark(v) for v in self.variables]

    def start(self, share):
        """Begin to average, while the backward pass goes on."""
        if self._looks():
            self.active = self._changed_anywhere()
        if not self.active:
            return None
        averaged = [v for v in self.active if v._value.is_floating_point()]
        agreed = [v for v in self.active if not v._value.is_floating_point()]
        with torch.no_grad():
            average = _Average(self.group, averaged, share) if averaged else None
            values = [v._value.detach() for v in agreed]
            device = values[0].device if values else None
            agreement = Agreement(self.group, device, values, share > 0) if values else None
        return average, agreed, agreement

    def finish(self, pending):
        """Wait for the other ranks' state and take it over."""
        if pending is None:
            return
        average, agreed, agreement = pending
        if average is not None:
            average.take_over()
        if agreement is not None:
            for variable, value in zip(agreed, agreement.each(), strict=True):
                if value is None:
                    received = f"variable {variable.path} differs from replica to replica"
                    self._refuse("whole_numbers", received)
                variable._value.copy_(value)
        self._settle_buffers()

    def _settle_buffers(self):
        for variable, marked in zip(self.variables, self._marks, strict=True):
            if isinstance(variable, buffers.Buffer) and not variable.settle(marked[0]):
                received = f"buffer {variable.path} has another shape or type after a step"
                self._refuse("batch_state", received)

    def _refuse(self, feature, received):
        capabilities.check(feature, DataParallel(self.group.size()), "torch", received)

    def _looks(self):
        return bool(self.variables) and (self.dynamic or self.active is None)

    def _changed_anywhere(self):
        changed = torch.tensor(
            [
                float(buffers.is_written(v, marked))
                for v, marked in zip(self.variables, self._marks, strict=True)
            ],
            device=self.variables[0]._value.device,
        )
        self.group.allreduce([changed]).wait()
        return [v for v, flag in zip(self.variables, changed.tolist(), strict=True) if flag]


class _Average:
    """The average of variables over the ranks, while it is computed.

    Args:
        group: The process group of all ranks.
        variables: List of them, of floating-point numbers; at least one.
        share: Float, this rank's share of the rows.
    """

    def __init__(self, group, variables, share):
        self._variables = variables
        flat = torch.cat([v._value.detach().reshape(-1).double() for v in variables])
        # What a rank without rows has computed may be anything, NaN too.
        self._flat = flat.mul_(share) if share else torch.zeros_like(flat)
        self._work = group.allreduce([self._flat])

    def take_over(self):
        """Wait for it, and write it into the variables."""
        self._work.wait()
        sizes = [v._value.numel() for v in self._variables]
        for variable, part in zip(self._variables, self._flat.split(sizes), strict=True):
            variable._value.copy_(part.view_as(variable._value))
