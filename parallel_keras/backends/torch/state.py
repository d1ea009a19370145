"""Layer state that a training step changes, made equal on all ranks.

Running statistics and the like start a step equal on all ranks and are moved by
each rank's rows. Floating-point state becomes the average weighted with the
rows; whole numbers have to agree. Seed states differ on purpose. Buffers of
`torch.nn` modules are state as well.
"""

import torch

from parallel_keras import capabilities, keras_internals
from parallel_keras.backends.torch import buffers
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
        with torch.no_grad():
            values = [v._value.detach() for v in self.active]
            whole = [v.clone() for v in values if share and not v.is_floating_point()]
            flat = torch.cat([v.reshape(-1).double() for v in values])
            # What a rank without rows has computed may be anything, NaN too.
            flat = flat.mul_(share) if share else torch.zeros_like(flat)
        return flat, self.group.allreduce([flat]), self.active, whole

    def finish(self, pending):
        """Wait for the average and take it over."""
        if pending is None:
            return
        flat, work, variables, whole = pending
        work.wait()
        sizes = [v._value.numel() for v in variables]
        own = iter(whole)
        for variable, part in zip(variables, flat.split(sizes), strict=True):
            value = part.view_as(variable._value)
            if not variable._value.is_floating_point():
                value = value.round()
                self._check_agreement(variable, value, next(own, None))
            variable._value.copy_(value)
        self._settle_buffers()

    def _check_agreement(self, variable, average, own):
        if own is not None and not torch.equal(average, own.double()):
            self._refuse(f"variable {variable.path} differs from replica to replica")

    def _settle_buffers(self):
        for variable, marked in zip(self.variables, self._marks, strict=True):
            if isinstance(variable, buffers.Buffer) and not variable.settle(marked[0]):
                self._refuse(f"buffer {variable.path} has another shape or type after a step")

    def _refuse(self, received):
        capabilities.check("batch_state", DataParallel(self.group.size()), "torch", received)

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
