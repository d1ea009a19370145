"""Variables that a model's own step assigns, made equal on all ranks at its end.

Floating-point ones become the average weighted with the rows, as an average of the loss
does. What the probe found to be the same whatever the rows (a target network that follows
the weights, weights that are clipped) is not sent: two sums tell whether it is. Whole
numbers have to agree. What `optimizer.apply` changes is equal already.
"""

import torch
import torch.distributed as dist

from parallel_keras import capabilities, keras_internals
from parallel_keras.backends.torch import buffers
from parallel_keras.backends.torch.agreement import Agreement
from parallel_keras.strategies import DataParallel

# Ranks compute with different numbers of threads, so sums may differ in their last bits.
_TOLERANCE = 1e-4
_DIFFERS = "differs from replica to replica"


class StateWatch:
    """The variables of a model and its optimizers, on one rank.

    Args:
        model: A Keras model.
        group: The process group of all ranks.
        device: This rank's `torch.device`.
        world_size: Int.
        variables: List of them, in the order of all ranks.
    """

    def __init__(self, model, group, device, world_size, variables):
        self.group = group
        self.device = device
        self.world_size = world_size
        seeds = {id(state) for state in keras_internals.seed_states(model)}
        self.variables = variables
        self._watched = [
            number
            for number, v in enumerate(variables)
            if id(v) not in seeds and v._value is not None and v._value.numel()
        ]
        self._marks: dict = {}
        self._tensors: dict = {}  # of the buffers, when the step began
        self._changed: set = set()

    def begin(self):
        """A step begins."""
        self._changed = set()
        self._mark()
        self._tensors = {
            number: self.variables[number]._value
            for number in self._watched
            if isinstance(self.variables[number], buffers.Buffer)
        }

    def before_update(self):
        """What has changed until now, the step itself has changed."""
        for number, marked in self._marks.items():
            if buffers.is_written(self.variables[number], marked):
                self._changed.add(number)

    def after_update(self):
        """What has changed since, an optimizer has."""
        self._mark()

    def finish(self, share, steady):
        """Make equal what was changed on any rank.

        Args:
            share: Float, this rank's share of the rows.
            steady: Set of the numbers of variables that are equal by themselves.
        """
        self.before_update()
        for number, tensor in self._tensors.items():
            if not self.variables[number].settle(tensor):
                self._refuse(number, "has another shape or type after it")
        changed = self._changed_anywhere()
        values = {number: self.variables[number]._value for number in changed}
        fractions = [number for number in changed if values[number].is_floating_point()]
        with torch.no_grad():
            self._average([number for number in fractions if number not in steady], share)
            self._check([number for number in fractions if number in steady])
            self._agree([number for number in changed if number not in fractions], share)

    def _mark(self):
        self._marks = {n: buffers.mark(self.variables[n]) for n in self._watched}

    def _changed_anywhere(self):
        if not self._watched:
            return []
        flags = torch.tensor(
            [float(number in self._changed) for number in self._watched], device=self.device
        )
        self.group.allreduce([flags], dist.ReduceOp.MAX).wait()
        return [n for n, flag in zip(self._watched, flags.tolist(), strict=True) if flag]

    def _agree(self, numbers, share):
        if not numbers:
            return
        values = [self.variables[number]._value.detach() for number in numbers]
        agreement = Agreement(self.group, self.device, values, share > 0)
        for number, value, agreed in zip(numbers, values, agreement.each(), strict=True):
            if agreed is None:
                self._refuse(number, _DIFFERS, "whole_numbers")
            value.copy_(agreed)

    def _average(self, numbers, share):
        if not numbers:
            return
        values = [self.variables[number]._value for number in numbers]
        flat = torch.cat([value.detach().reshape(-1).double().to(self.device) for value in values])
        # Not by multiplication: no rows, no influence, of a NaN either.
        flat = flat * share if share else torch.zeros_like(flat)
        self.group.allreduce([flat]).wait()
        for value, part in zip(values, flat.split([v.numel() for v in values]), strict=True):
            value.copy_(part.view_as(value))

    def _check(self, numbers):
        if not numbers:
            return
        values = [self.variables[number]._value.detach() for number in numbers]
        sums = torch.stack([_finite(value).sum().to(self.device) for value in values])
        sizes = torch.stack([_finite(value).abs().sum().to(self.device) for value in values])
        odd = torch.stack([_odd_entries(value).to(self.device) for value in values])
        head = torch.stack([sums, -sums, odd, -odd, sizes])
        self.group.allreduce([head], dist.ReduceOp.MAX).wait()
        is_apart = head[0] + head[1] > _TOLERANCE * head[4]
        is_odd = head[2] + head[3] != 0
        for number, wrong in zip(numbers, (is_apart | is_odd).tolist(), strict=True):
            if wrong:
                self._refuse(number, _DIFFERS)

    def _refuse(self, number, what, feature="step_state"):
        received = f"variable {self.variables[number].path} {what}"
        capabilities.check(feature, DataParallel(self.world_size), "torch", received)


def _finite(value):
    return torch.nan_to_num(value.double(), nan=0.0, posinf=0.0, neginf=0.0)


def _odd_entries(value):
    """How many entries are no number, and how many are which infinity, as one number."""
    counts = torch.isnan(value).sum(), torch.isposinf(value).sum(), torch.isneginf(value).sum()
    return sum(count.double() * 2.0 ** (17 * place) for place, count in enumerate(counts))
