"""Layer state that a training step changes, made equal on all ranks.

Running statistics and the like start a step equal on all ranks and are moved by
each rank's rows. Floating-point state becomes the average weighted with the
rows; whole numbers have to agree. Seed states differ on purpose.
"""

import torch

from parallel_keras import keras_internals


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
        self.variables = [v for v in variables.values() if v._value.numel()]
        # Frozen tables are state too and never change: only what a step has
        # been seen to change on some rank is sent.
        self.active: list | None = None
        self._versions: list = []

    def begin(self):
        """Called before the forward pass."""
        if self._looks():
            self._versions = [v._value._version for v in self.variables]

    def start(self, share):
        """Begin to average, while the backward pass goes on."""
        if self._looks():
            self.active = self._changed_anywhere()
        if not self.active:
            return None
        with torch.no_grad():
            flat = torch.cat([v._value.detach().reshape(-1).double() for v in self.active])
            # What a rank without rows has computed may be anything, NaN too.
            flat = flat.mul_(share) if share else torch.zeros_like(flat)
        return flat, self.group.allreduce([flat]), self.active

    def finish(self, pending):
        """Wait for the average and take it over."""
        if pending is None:
            return
        flat, work, variables = pending
        work.wait()
        sizes = [v._value.numel() for v in variables]
        for variable, part in zip(variables, flat.split(sizes), strict=True):
            value = part.view_as(variable._value)
            if not variable._value.is_floating_point():
                value = value.round()
            variable._value.copy_(value)

    def _looks(self):
        return bool(self.variables) and (self.dynamic or self.active is None)

    def _changed_anywhere(self):
        changed = torch.tensor(
            [
                float(v._value._version != version)
                for v, version in zip(self.variables, self._versions, strict=True)
            ],
            device=self.variables[0]._value.device,
        )
        self.group.allreduce([changed]).wait()
        return [v for v, flag in zip(self.variables, changed.tolist(), strict=True) if flag]
