"""The metrics' state: what each rank's rows add to it, and the sum in the caller.

A worker's metrics start each step from their reset state; what they have gone
up by is published and added to the caller's, which so hold global values at all
times. Sums are taken in float64: whole numbers stay whole.
"""

import torch

from parallel_keras import keras_internals


def metric_variables(model):
    """The state of all metrics of a model, in one order on all ranks."""
    variables = [v for metric in keras_internals.every_metric(model) for v in metric.variables]
    return list({id(v): v for v in variables}.values())


class WorkerMetrics:
    """A worker's side: start from the reset state, publish the difference."""

    def __init__(self, model):
        with torch.no_grad():
            for metric in keras_internals.every_metric(model):
                metric.reset_state()
        self.tensors = [v._value for v in metric_variables(model)]
        self.reset_values = [tensor.detach().clone() for tensor in self.tensors]

    def reset(self):
        """Called before a step."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors, self.reset_values, strict=True):
                tensor.copy_(value)

    def change(self, averaged, share):
        """What the step added, as one float64 vector.

        Args:
            averaged: List of numbers of variables that count with the share of
                the rows instead of in full.
            share: Float, this rank's share of the rows. Without rows nothing counts.
        """
        parts = []
        with torch.no_grad():
            for number, (tensor, value) in enumerate(
                zip(self.tensors, self.reset_values, strict=True)
            ):
                part = _difference(tensor.double(), value.double()).reshape(-1)
                if not share or (number in averaged and not tensor.is_floating_point()):
                    part.zero_()  # a count of steps is the caller's
                parts.append(part * share if number in averaged else part)
        return torch.cat(parts).cpu().numpy() if parts else None


class CallerMetrics:
    """The caller's side: its variables hold the state of the global batches."""

    def __init__(self, model):
        self.tensors = [v._value for v in metric_variables(model)]
        self.size = sum(tensor.numel() for tensor in self.tensors)

    def before(self, averaged):
        """Remember what the step's own rows shall count in part only."""
        return {number: self.tensors[number].detach().clone() for number in averaged}

    def weigh(self, before, share):
        """Let this rank's own change of these variables count with its share."""
        with torch.no_grad():
            for number, value in before.items():
                tensor = self.tensors[number]
                if tensor.is_floating_point():
                    tensor.copy_(value + _difference(tensor, value) * share)

    def add(self, changes):
        """Add what the workers have published, a list of float64 vectors."""
        if not self.size or not changes:
            return
        total = torch.from_numpy(sum(changes))
        with torch.no_grad():
            start = 0
            for tensor in self.tensors:
                part = total[start : start + tensor.numel()].view_as(tensor)
                tensor.add_(part.to(device=tensor.device, dtype=tensor.dtype))
                start += tensor.numel()


def _difference(tensor, before):
    """What a tensor went up by; infinity that stays is no change."""
    return torch.where(tensor == before, 0, tensor - before)
