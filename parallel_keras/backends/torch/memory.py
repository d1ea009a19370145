"""Memory that the caller and one worker both map.

An anonymous memory file: it needs no mount (Docker gives /dev/shm 64 MB), has no name
on disk, and is gone when both processes are, whatever ends them. The file grows as
batches do; who reads maps it anew when it has grown.
"""

import mmap
import os
import tempfile

import torch

# The slots of batches that are sent when their step begins, and of those that a
# fit has staged ahead.
SLOTS = 3
AHEAD = 2
_ALIGN = 64


def anonymous_file():
    """A file descriptor of a file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("parallel_keras")
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    os.set_inheritable(descriptor, True)
    return descriptor


class Buffer:
    """Slots for the arrays of a few batches.

    A slot's place and size travel with each layout, so that a slot can grow:
    it then moves to the end of the file.

    Args:
        descriptor: Int. A descriptor of `anonymous_file()`.
    """

    def __init__(self, descriptor):
        self.descriptor = descriptor
        self.places = [(0, 0)] * (SLOTS + AHEAD)  # the writer's: start and size of each slot
        self._end = 0
        self._map = None

    def write(self, slot, tensors):
        """Copy CPU tensors into a slot; returns the layout for `read`."""
        sizes = [_round(tensor.numel() * tensor.element_size()) for tensor in tensors]
        start, size = self.places[slot]
        if sum(sizes) > size:
            start, size = self._end, _round(sum(sizes) * 5 // 4, mmap.PAGESIZE)
            self._end = start + size
            self.places[slot] = (start, size)
            os.ftruncate(self.descriptor, self._end)
        memory, layout = self._memory(start + size), []
        for tensor, nbytes in zip(tensors, sizes, strict=True):
            layout.append((start, tensor.dtype, tuple(tensor.shape)))
            if tensor.numel():
                _view(memory, layout[-1]).copy_(tensor.detach())
            start += nbytes
        return layout

    def read(self, layout):
        """The tensors of a layout, in the shared memory itself."""
        end = max((start + _nbytes(dtype, shape) for start, dtype, shape in layout), default=0)
        memory = self._memory(end)
        return [_view(memory, entry) for entry in layout]

    def _memory(self, end):
        if end and (self._map is None or len(self._map) < end):
            # The old map stays alive for as long as tensors lie in it.
            size = os.fstat(self.descriptor).st_size
            self._map = mmap.mmap(self.descriptor, size)
        return self._map

    def close(self):
        self._map = None
        os.close(self.descriptor)


def _round(nbytes, unit=_ALIGN):
    return -(-nbytes // unit) * unit


def _nbytes(dtype, shape):
    return torch.Size(shape).numel() * dtype.itemsize


def _view(memory, entry):
    start, dtype, shape = entry
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def meeting_file():
    """The path of an empty file for the ranks to meet in."""
    if not hasattr(os, "memfd_create"):
        return os.path.join(tempfile.mkdtemp(prefix="parallel_keras"), "meeting")
    # Kept open for the life of the process: torch's store opens the path again
    # when its last holder goes, and a number that was closed may by then be a
    # file of the user's.
    descriptor = os.memfd_create("parallel_keras")
    # Only processes of the same user may open another process's descriptors.
    return f"/proc/{os.getpid()}/fd/{descriptor}"
