"""Waiting for another rank that writes into memory which both map."""

import threading
import time

_fence = threading.Lock()


class NotSeen(TimeoutError):
    """What another rank should have written is not there in time."""


def keep_order():
    """Let what was written before be seen before what is written after.

    A processor may show another core two writes in the other order (ARM does); taking a
    lock is the barrier that Python has.
    """
    with _fence:
        pass


def look_until(condition, check, timeout, what, awake=0.0):
    """Wait for a condition: look, then look and sleep a little.

    Args:
        condition: Function without arguments that tells whether it is there.
        check: Called now and then; raises where waiting is in vain.
        timeout: Float, in seconds.
        what: String for the error: what is waited for.
        awake: Float, in seconds. How long to go on looking without any sleep: waking up
            takes longer than what is waited for, where it comes soon and a core is free.

    Raises:
        NotSeen: After `timeout` seconds.
    """
    for _ in range(100):
        if condition():
            return
    start = time.monotonic()
    looks = 0
    while not condition():
        looks += 1
        waited = time.monotonic() - start
        if waited > awake:
            time.sleep(0.00005 if waited < 0.5 else 0.001)
        if looks % 200 == 0:
            check()
            if waited > timeout:
                raise NotSeen(f"{what}: nothing within {timeout:g} s")
