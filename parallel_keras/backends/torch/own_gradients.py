"""The gradients of a global batch, at each update that a model's own step makes.

All ranks have to come to the same updates in the same order. Each update, and the end of
the step, begins with a few numbers that say which it is; a rank that came to another one
is so found out on all ranks, where it would hang or mix up gradients.
"""

import zlib

import torch
import torch.distributed as dist

from parallel_keras import capabilities
from parallel_keras.strategies import DataParallel

_END = 0


class UpdateReducer:
    """Sums of gradients over the ranks, each weighted with the rank's share of the rows.

    Args:
        group: The process group of all ranks.
        device: This rank's `torch.device`.
        world_size: Int.
        variables: List of the model's and its optimizers' variables, in the order of all
            ranks.
    """

    def __init__(self, group, device, world_size, variables):
        self.group = group
        self.device = device
        self.world_size = world_size
        self._numbers = {id(v): number for number, v in enumerate(variables)}
        self._numbers |= {id(v._value): number for number, v in enumerate(variables)}
        self._codes: dict = {}

    def reduce(self, gradients, variables, share):
        """The gradients of the global batch, `None` where no rank has one.

        Args:
            gradients: List of this rank's gradients, `None` among them.
            variables: List of Keras variables, or of torch parameters.
            share: Float. A rank without rows adds nothing, whatever its gradients.
        """
        present = [gradient is not None for gradient in gradients]
        if not self._agree(self._code(variables), _code_of(present)):
            present = self._present_anywhere(present)
        values = [getattr(v, "value", v) for v in variables]
        result = [None] * len(gradients)
        for dtype in dict.fromkeys(value.dtype for value in values):
            chosen = [n for n, v in enumerate(values) if v.dtype == dtype and present[n]]
            if chosen:
                parts = self._sum([(gradients[n], values[n]) for n in chosen], share)
                for number, part in zip(chosen, parts, strict=True):
                    result[number] = part
        return result

    def end(self):
        """Every rank has come to the end of its step."""
        self._agree(_END, 0)

    def _sum(self, pairs, share):
        with torch.no_grad():
            flat = torch.cat(
                [
                    (torch.zeros_like(v) if g is None or not share else g.detach())
                    .to(device=v.device, dtype=v.dtype)
                    .reshape(-1)
                    for g, v in pairs
                ]
            )
            flat.mul_(share)
            self.group.add_up(flat)
            parts = flat.split([v.numel() for _, v in pairs])
            return [
                part.view(v.shape).to(v.dtype if g is None else g.dtype)
                for part, (g, v) in zip(parts, pairs, strict=True)
            ]

    def _agree(self, code, pattern):
        """Whether all ranks have gradients for the same variables; raises if they differ more."""
        head = torch.tensor(
            [code, -code, pattern, -pattern], dtype=torch.float64, device=self.device
        )
        self.group.allreduce([head], dist.ReduceOp.MAX).wait()
        largest, smallest, of_patterns, other = head.tolist()
        if largest != -smallest:
            capabilities.check(
                "step_control",
                DataParallel(self.world_size),
                "torch",
                "one replica had come to the end of its step, or to another optimizer or other "
                "variables, where another had not",
            )
        return of_patterns == -other

    def _present_anywhere(self, present):
        flags = torch.tensor(present, dtype=torch.float32, device=self.device)
        self.group.allreduce([flags], dist.ReduceOp.MAX).wait()
        return (flags > 0).tolist()

    def _code(self, variables):
        key = tuple(map(id, variables))
        if key not in self._codes:
            numbers = [(self._numbers.get(id(v), -1), tuple(v.shape)) for v in variables]
            self._codes[key] = _code_of(numbers)
        return self._codes[key]


def _code_of(thing):
    """A number from 1 up that tells one thing from another."""
    return zlib.crc32(repr(thing).encode()) + 1
