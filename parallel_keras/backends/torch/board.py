"""Numbers that a worker publishes to the caller, without a message or a collective.

A piece of memory that both map: a heartbeat, the count of commands that the worker
has begun, and a vector of float64 under the number of a step. The caller waits for
a number by looking at it, which costs microseconds where a collective costs a
fraction of a millisecond.
"""

import mmap
import os
import time

import numpy as np

_HEARTBEAT, _COMMANDS, _NUMBER, _LENGTH = range(4)
_HEAD = 8  # numbers before the vector
# Pages that nobody writes take no memory.
CAPACITY = 1 << 22
BEAT_SECONDS = 0.25


class Board:
    """One worker's numbers.

    Args:
        descriptor: Int, of an anonymous file.
    """

    def __init__(self, descriptor):
        nbytes = (_HEAD + CAPACITY) * 8
        os.ftruncate(descriptor, nbytes)
        self._numbers = np.frombuffer(mmap.mmap(descriptor, nbytes), np.float64)

    # ---- the worker's side ----

    def beat(self):
        """Show that the process runs, for ever."""
        while True:
            self._numbers[_HEARTBEAT] = time.monotonic()
            time.sleep(BEAT_SECONDS)

    def count_command(self):
        self._numbers[_COMMANDS] += 1

    def publish(self, number, vector):
        """Show a vector (or `None`) under a step's number, which is written last."""
        length = 0 if vector is None else len(vector)
        if length > CAPACITY:
            raise ValueError(
                f"The metrics' state has {length} numbers; up to {CAPACITY} can be combined."
            )
        self._numbers[_HEAD : _HEAD + length] = vector if length else 0.0
        self._numbers[_LENGTH] = length
        self._numbers[_NUMBER] = number

    # ---- the caller's side ----

    @property
    def commands(self):
        return int(self._numbers[_COMMANDS])

    @property
    def silent_seconds(self):
        """Seconds since the last heartbeat, `None` before the first."""
        last = self._numbers[_HEARTBEAT]
        return time.monotonic() - last if last else None

    def wait(self, number, check, timeout):
        """The vector under a step's number: look, then look and sleep a little.

        Args:
            number: Int.
            check: Called now and then; raises where waiting is in vain.
            timeout: Float, in seconds.
        """
        deadline = time.monotonic() + timeout
        looks = 0
        while self._numbers[_NUMBER] < number:
            looks += 1
            if looks > 50:
                time.sleep(0.00005 if looks < 2000 else 0.001)
            if looks % 200 == 0:
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no result of step {number} within {timeout:g} s")
        return self._numbers[_HEAD : _HEAD + int(self._numbers[_LENGTH])].copy()
