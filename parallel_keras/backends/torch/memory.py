"""Memory that the caller and one worker both map.

An anonymous memory file: it needs no mount (Docker gives /dev/shm 64 MB), has no name
on disk, and is gone when both processes are, whatever ends them. The file grows as
batches do; who reads maps it anew when it has grown.
"""

import errno
import mmap
import os
import shutil
import tempfile
import threading

import torch

# The slots of batches that are sent when their step begins, and of those that a
# fit has staged ahead. A worker may be a step behind the caller, where no all-reduce
# joins them, and still read that batch: it, this one and the next have a slot each.
SLOTS = 3
AHEAD = 3
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
        start: Int. How many bytes at the beginning are not the buffer's.
    """

    def __init__(self, descriptor, start=0):
        self.descriptor = descriptor
        self.places: dict = {}  # the writer's: start and size of each slot
        self._end = _round(start, mmap.PAGESIZE)
        self._map = None
        # One thread may stage a batch while another sends one, or ends the pool.
        self._lock = threading.Lock()

    def write(self, slot, tensors):
        """Copy CPU tensors into a slot; returns the layout for `read`."""
        sizes = [_round(tensor.numel() * tensor.element_size()) for tensor in tensors]
        with self._lock:
            start, size = self.places.get(slot, (0, 0))
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
        with self._lock:
            memory = self._memory(end)
        return [_view(memory, entry) for entry in layout]

    def close(self):
        """Give the file back. What was read stays valid; nothing more can be written."""
        with self._lock:
            descriptor, self.descriptor, self._map = self.descriptor, -1, None
            os.close(descriptor)

    def _memory(self, end):
        if self.descriptor < 0:
            raise OSError(errno.EBADF, "the worker's memory was given back")
        if end and (self._map is None or len(self._map) < end):
            # The old map stays alive for as long as tensors lie in it.
            size = os.fstat(self.descriptor).st_size
            self._map = mmap.mmap(self.descriptor, size)
        return self._map


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


class SharedFile:
    """A file of zeros that only this user's processes can open.

    Args:
        size: Int, in bytes.

    Attributes:
        path: String.
    """

    def __init__(self, size):
        self._folder = None
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("parallel_keras")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._folder = tempfile.mkdtemp(prefix="parallel_keras")
            self.path = os.path.join(self._folder, "file")
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._descriptor, size)

    def close(self):
        """Leave nothing on disk. Who has opened it keeps it."""
        os.close(self._descriptor)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class Meeting:
    """An empty file for the ranks to meet in, which only this user's processes can open.

    Attributes:
        path: String.
    """

    def __init__(self):
        self._folder = None
        if hasattr(os, "memfd_create"):
            # Kept open for the life of the process: torch's store opens the path
            # again when its last holder goes, and a number that was closed may by
            # then be a file of the user's.
            self.path = f"/proc/{os.getpid()}/fd/{os.memfd_create('parallel_keras')}"
        else:
            self._folder = tempfile.mkdtemp(prefix="parallel_keras")
            self.path = os.path.join(self._folder, "meeting")

    def over(self):
        """The ranks have met: leave nothing on disk."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
