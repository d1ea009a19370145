"""Sums over the ranks of one machine's CPU, through memory that all of them map.

gloo sends what it adds up through sockets, within one machine too, and falls asleep between
two pieces of it. Here each rank has an area, puts its tensors there, adds up one part of all
areas, and takes the other parts from the ranks that have added those up: what gloo does as
well, without the way through the kernel.

A rank says how far it has come by counters, which are written last. It is at most one sum
ahead of the others: nothing is put where somebody still reads.
"""

import fcntl
import mmap
import os

import numpy as np
import torch

from parallel_keras.backends.torch.devices import seconds_awake
from parallel_keras.backends.torch.looking import keep_order, look_until

_HEAD = 64 * mmap.PAGESIZE  # bytes before the areas: a line of counters for each rank
_LINE = 8  # numbers in a line
_PUT, _ADDED, _TAKEN = range(3)
_ALIGN = 64


class SharedSums:
    """One rank's part in the sums.

    Args:
        path: String, a file of zeros of at least `FIRST_SIZE` bytes that all ranks can open.
        rank, world_size: Ints.
        timeout: Float, in seconds, for each wait.
        check: Called now and then while waiting; raises where that is in vain.
    """

    FIRST_SIZE = _HEAD
    _descriptor = -1

    def __init__(self, path, rank, world_size, timeout, check):
        if world_size * _LINE * 8 > _HEAD:
            raise ValueError(f"Up to {_HEAD // _LINE // 8} ranks. Received: {world_size}")
        self.rank, self.world_size = rank, world_size
        self._limits = check, timeout
        self._awake = seconds_awake(world_size)
        self._descriptor = os.open(path, os.O_RDWR)
        head = mmap.mmap(self._descriptor, _HEAD)
        self._counters = np.frombuffer(head, np.int64)[: world_size * _LINE].reshape(-1, _LINE)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._count = 0  # sums that have begun
        self._areas: list = []
        self._there: list = []  # of this sum: each tensor, and where in an area it lies
        self._end = 0  # of what lies in an area

    def __del__(self):
        if self._descriptor >= 0:
            os.close(self._descriptor)

    # ---- a sum ----

    def begin(self, nbytes):
        """A sum begins. All ranks give the same number of bytes, and the same tensors.

        Args:
            nbytes: Int. At least those of all tensors, each rounded up by `rounded`; a sum
                of such numbers.
        """
        self._wait(_TAKEN, "the gradients of the step before to be taken")
        self._count += 1
        self._there, self._end = [], 0
        self._make_room(_HEAD + self.world_size * nbytes)
        starts = range(_HEAD, _HEAD + self.world_size * nbytes, nbytes) if nbytes else ()
        self._areas = [self._bytes[start : start + nbytes] for start in starts]

    def put(self, tensor):
        """Copy a tensor of one dimension; `finish` will write the sum into it."""
        self._there.append((tensor, self._end))
        self._end += rounded(tensor.numel() * tensor.element_size())
        self._part(self.rank, len(self._there) - 1, slice(None)).copy_(tensor)

    def finish(self):
        """Write the sum over the ranks into each tensor that was put."""
        self._post(_PUT)
        self._wait(_PUT, "gradients")
        for index in range(len(self._there)):
            own = self._rows(index, self.rank)
            first, *others = (self._part(rank, index, own) for rank in range(self.world_size))
            total = first.clone()
            for other in others:
                total += other
            self._part(self.rank, index, own).copy_(total)
        self._post(_ADDED)
        self._wait(_ADDED, "the sum of the gradients")
        for index, (tensor, _) in enumerate(self._there):
            for rank in range(self.world_size):
                rows = self._rows(index, rank)
                tensor[rows].copy_(self._part(rank, index, rows))
        self._there = []
        self._post(_TAKEN)

    def _rows(self, index, rank):
        """The part of a tensor that a rank adds up."""
        count = self._there[index][0].numel()
        return slice(count * rank // self.world_size, count * (rank + 1) // self.world_size)

    def _part(self, rank, index, rows):
        tensor, start = self._there[index]
        end = start + tensor.numel() * tensor.element_size()
        return self._areas[rank][start:end].view(tensor.dtype)[rows]

    # ---- memory and counters ----

    def _make_room(self, size):
        if len(self._bytes) >= size:
            return
        # A rank that is behind would cut off what one ahead has made.
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._bytes = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)

    def _post(self, which):
        keep_order()
        self._counters[self.rank, which] = self._count

    def _wait(self, which, what):
        counters, count = self._counters[:, which], self._count
        text = f"waiting for {what} of another rank"
        look_until(lambda: (counters >= count).all(), *self._limits, text, self._awake)
        keep_order()


def rounded(nbytes):
    """Bytes that a tensor takes in an area."""
    return -(-nbytes // _ALIGN) * _ALIGN
