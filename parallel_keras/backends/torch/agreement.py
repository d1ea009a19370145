"""Whole numbers that ranks assign have to agree: there is no mean of them.

All ranks get to know which differ, and so refuse them in the same step.
"""

import torch
import torch.distributed as dist


class Agreement:
    """Asks whether all ranks have the same numbers; the answer may be waited for later.

    Args:
        group: The process group of all ranks.
        device: This rank's `torch.device`.
        tensors: List of them, in the order of all ranks; at least one.
        counts: Bool. False on a rank without rows, whose numbers may be anything.
    """

    def __init__(self, group, device, tensors, counts):
        self._tensors = tensors
        numbers = torch.cat([_as_integers(tensor).to(device) for tensor in tensors])
        # The largest, and what is largest where the number is smallest.
        self._ends = torch.cat([numbers, ~numbers])
        if not counts:
            self._ends.fill_(torch.iinfo(torch.int64).min)
        self._work = group.allreduce([self._ends], dist.ReduceOp.MAX)

    def each(self):
        """Wait for the answer.

        Returns:
            List with the numbers that all agree on for each tensor, or `None` where they
            do not.
        """
        self._work.wait()
        largest, smallest = self._ends.chunk(2)
        smallest = ~smallest
        sizes = [_as_integers(tensor).numel() for tensor in self._tensors]
        pairs = zip(largest.split(sizes), smallest.split(sizes), strict=True)
        return [
            _like(tensor, numbers) if torch.equal(numbers, others) else None
            for tensor, (numbers, others) in zip(self._tensors, pairs, strict=True)
        ]


def _as_integers(tensor):
    """A flat tensor of 64-bit integers that are the same where the numbers are."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex128)).view(torch.int64)
    return tensor.reshape(-1).long()


def _like(tensor, integers):
    """What `_as_integers` made of numbers, as a tensor like another."""
    if tensor.is_complex():
        integers = torch.view_as_complex(integers.view(torch.float64).reshape(-1, 2))
    return integers.to(tensor.device, tensor.dtype).view_as(tensor)
