"""Values from rank to rank through memory that both map.

The ranks of one machine's CPU share its memory: a value is copied once, into the memory
of the link from its sender to its receiver, and read where it lies. The receiver looks
for the number of the next message, which is written last.
"""

import mmap
import os

import numpy as np
import torch

from parallel_keras import keras_internals
from parallel_keras.backends.torch import memory
from parallel_keras.backends.torch.channel import DTYPES, NOTHING, described
from parallel_keras.backends.torch.looking import keep_order, look_until

# A link's first bytes: how many messages have been read, then the places of messages,
# each with its number, its count of tensors, and a row for each of them.
_PLACES = 64
_ROWS = 120
_WIDTH = 16  # numbers of a row: where the tensor lies, and what `described` tells
_PLACE = 8 + _ROWS * _WIDTH
_HEAD_BYTES = 8 * (8 + _PLACES * _PLACE)


class Link:
    """The memory of what one rank sends another.

    Args:
        path: String, a file of `make_files` that both can open.
    """

    def __init__(self, path):
        self._descriptor = os.open(path, os.O_RDWR)
        head = mmap.mmap(self._descriptor, _HEAD_BYTES)
        self._numbers = np.frombuffer(head, np.int64)
        self._buffer = memory.Buffer(self._descriptor, start=_HEAD_BYTES)
        self._count = 0  # messages that this side has sent or read

    def send(self, tensors, slot, wait):
        """Copy tensors, or `None`, into the memory, and say so.

        Args:
            tensors: List.
            slot: Int. What was sent to this slot before has been used up.
            wait: Function that waits for a condition.
        """
        if len(tensors) > _ROWS:
            raise ValueError(
                f"Up to {_ROWS // 2} values pass from one stage to another. Received: "
                f"{len(tensors) // 2}. Cut the model where fewer do."
            )
        wait(lambda: self._count - self._numbers[0] < _PLACES)
        there = [t for t in tensors if t is not None]
        layout = iter(self._buffer.write(slot, there))
        place = self._place(self._count)
        for row, tensor in zip(place[8:].reshape(_ROWS, _WIDTH), tensors, strict=False):
            row[0] = 0 if tensor is None else next(layout)[0]
            facts = described(tensor)
            row[1 : 1 + len(facts)] = facts
        place[1] = len(tensors)
        self._count += 1
        keep_order()
        place[0] = self._count

    def receive(self, wait):
        """The tensors of the next message, in the memory itself, and their gradient flags."""
        place = self._place(self._count)
        wait(lambda: place[0] > self._count)
        keep_order()
        found: list = []
        for start, code, wants_gradient, dimensions, *shape in (
            place[8:].reshape(_ROWS, _WIDTH)[: place[1]].tolist()
        ):
            if code == NOTHING:
                found.append(None)
            else:
                layout = start, DTYPES[code], tuple(shape[:dimensions])
                (tensor,) = self._buffer.read([layout])
                found.append(tensor.requires_grad_() if wants_gradient else tensor)
        self._count += 1
        self._numbers[0] = self._count
        return found

    def close(self):
        """Give the file back. What was received stays valid."""
        self._buffer.close()

    def _place(self, number):
        start = 8 + number % _PLACES * _PLACE
        return self._numbers[start : start + _PLACE]


class LinkedChannel:
    """One rank's messages to and from the other ranks of a machine's CPU.

    Args:
        rank: Int.
        paths: Dict from pairs of ranks, sender first, to the paths of their links.
        timeout: Float, in seconds.
        check: Called now and then while waiting; raises where that is in vain.
    """

    def __init__(self, rank, paths, timeout, check):
        self.timeout = timeout
        self.check = check
        self._out = {b: Link(path) for (a, b), path in paths.items() if a == rank}
        self._in = {a: Link(path) for (a, b), path in paths.items() if b == rank}
        self._slots: dict = {}
        self._parity = 0

    def begin(self):
        """A step begins. Until the one after the next does, what is sent stays where it is."""
        self._parity = 1 - self._parity
        self._slots = {}

    def send(self, rank, values):
        """Send values: each a tensor, with its Keras mask, or `None`."""
        flat = []
        for value in values:
            mask = None if value is None else keras_internals.keras_mask(value)
            flat += [value, mask]
        slot = self._slots[rank] = self._slots.get(rank, -1) + 1
        self._out[rank].send(flat, 2 * slot + self._parity, self._wait)

    def receive(self, rank, count):
        """Wait for values that a rank has sent; see `Channel.receive`."""
        flat = self._in[rank].receive(self._wait)
        for value, mask in zip(flat[::2], flat[1::2], strict=True):
            if mask is not None:
                keras_internals.set_keras_mask(value, mask)
        return flat[::2]

    def flush(self):
        """What was sent is there already."""

    def close(self):
        for link in (*self._out.values(), *self._in.values()):
            link.close()

    def _wait(self, condition):
        look_until(condition, self.check, self.timeout, "waiting for another stage")


def make_files(world_size):
    """The files of the links between all ranks.

    Returns:
        A dict from pairs of ranks to the paths of their files, and a function that gives
        the files back.
    """
    pairs = [(a, b) for a in range(world_size) for b in range(world_size) if a != b]
    # Of their size from the beginning: a rank that is late would cut off what is there.
    files = {pair: memory.SharedFile(_HEAD_BYTES) for pair in pairs}

    def give_back():
        for file in files.values():
            file.close()

    return {pair: file.path for pair, file in files.items()}, give_back


def on_one_cpu(devices):
    """Whether ranks on these torch devices share memory."""
    return all(torch.device(device).type == "cpu" for device in devices)
