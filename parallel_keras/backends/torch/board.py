"""Numbers that a worker publishes to the caller, without a message or a collective.

A piece of memory that both map: a vector of float64 under the number of a step.
The caller waits for a number by looking at it, which costs microseconds where a
collective costs a fraction of a millisecond.
"""

import mmap
import os

import numpy as np

from parallel_keras.backends.torch.looking import keep_order, look_until

_NUMBER, _LENGTH = range(2)
_HEAD = 8  # numbers before the vector
# Pages that nobody writes take no memory.
CAPACITY = 1 << 22


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

    def publish(self, number, vector):
        """Show a vector (or `None`) under a step's number, which is written last."""
        length = 0 if vector is None else len(vector)
        if length > CAPACITY:
            raise ValueError(
                f"The metrics' state has {length} numbers; up to {CAPACITY} can be combined."
            )
        if length:
            self._numbers[_HEAD : _HEAD + length] = vector
        self._numbers[_LENGTH] = length
        keep_order()
        self._numbers[_NUMBER] = number

    # ---- the caller's side ----

    def wait(self, number, check, timeout):
        """The vector under a step's number.

        Args:
            number: Int.
            check: Called now and then; raises where waiting is in vain.
            timeout: Float, in seconds.
        """
        what = f"waiting for the result of step {number}"
        look_until(lambda: self._numbers[_NUMBER] >= number, check, timeout, what)
        keep_order()
        return self._numbers[_HEAD : _HEAD + int(self._numbers[_LENGTH])].copy()
