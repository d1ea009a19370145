"""The pool of workers: started once, kept between fits, watched, and ended.

The caller is rank 0; rank `r` is worker `r`. A smaller world uses the first
workers, a larger one starts more; either makes a new process group. After any
trouble the whole pool is ended, since the survivors sit in a collective.
"""

import atexit
import os
import re
import secrets
import signal
import threading
import time
import weakref
from typing import Any

from parallel_keras import keras_internals
from parallel_keras.backends.torch import group as groups
from parallel_keras.backends.torch import memory
from parallel_keras.backends.torch.devices import torch_device
from parallel_keras.backends.torch.worker import Worker
from parallel_keras.errors import WorkerError

START_TIMEOUT = 180.0  # imports of torch and Keras on a busy machine
_pool = None


def pool(world_size, devices, timeout):
    """The pool of this process, with workers started for `world_size` ranks."""
    global _pool
    if _pool is None or _pool.is_foreign() or not _pool.is_healthy():
        if _pool is not None and not _pool.is_foreign():
            _pool.abort()
        _pool = Pool()
        # keras.utils.clear_session() drops Keras's global state, and this with it.
        keras_internals.tie_to_session(weakref.WeakMethod(_pool.abort))
    _pool.want(world_size, devices, timeout)
    return _pool


@atexit.register
def shutdown():
    """End the workers of this process."""
    global _pool
    if _pool is not None and not _pool.is_foreign():
        _pool.abort()
    _pool = None


class Pool:
    """The workers and their process group."""

    def __init__(self):
        self.caller = os.getpid()
        self.secret = secrets.token_bytes(32)
        self.workers = []
        self.wanted: Any = None
        self.group: Any = None
        self.generation = 0
        self.timeout = 60.0
        self.has_lookahead = False
        self._number = 0
        self._formed = None

    # ---- life ----

    def is_foreign(self):
        """Whether this is a forked copy of another process's pool."""
        return os.getpid() != self.caller

    def is_healthy(self):
        return all(worker.is_alive() for worker in self.workers)

    def want(self, world_size, devices, timeout):
        """Start the workers that are missing, without waiting for them."""
        self.wanted = (world_size, tuple(devices), timeout)
        self.timeout = timeout
        while len(self.workers) < world_size - 1:
            self.workers.append(Worker(len(self.workers) + 1, _threads(world_size)))

    def ready(self):
        """Wait for the workers and the group that `want` asked for.

        Returns:
            Int that changes whenever the workers have lost what they held.
        """
        if self.wanted == self._formed:
            return self.generation
        world_size, devices, timeout = self.wanted
        deadline = time.monotonic() + START_TIMEOUT
        for worker in self.workers[: world_size - 1]:
            worker.wait_until_up(deadline)
        self.group = None
        path = memory.meeting_file()
        threads = _threads(world_size)
        self._formed = None
        for rank in range(1, world_size):
            details = (world_size, devices[rank], timeout, self.secret, threads)
            self.send(rank, ("regroup", path, *details))
        device = torch_device(devices[0])
        self.group = groups.make(path, 0, world_size, device, timeout, self.secret)
        self._formed = self.wanted
        self.generation += 1
        return self.generation

    def abort(self):
        """End all workers at once. Never waits for one that does not answer."""
        with _uninterrupted():
            workers, self.workers = self.workers, []
            for worker in workers:
                worker.kill()
            self.group = None
            self._formed = None
            for worker in workers:
                worker.close()

    # ---- messages ----

    @property
    def active(self):
        return self.workers[: self.wanted[0] - 1]

    def next_number(self):
        self._number += 1
        return self._number

    def send(self, rank, message):
        self.workers[rank - 1].send(message)

    def broadcast_message(self, message):
        for worker in self.active:
            worker.send(message)

    def receive(self, rank):
        return self.workers[rank - 1].receive(self.timeout)

    def wait_published(self, number):
        """What each worker published under a step's number, in the order of the ranks."""
        return [w.board.wait(number, self.check, self.timeout) for w in self.active]

    def inbound(self, rank):
        return self.workers[rank - 1].inbound

    def outbound(self, rank):
        return self.workers[rank - 1].outbound

    def check(self):
        """Raise where a worker is dead or has reported an error."""
        for worker in self.active:
            worker.check()

    def drain_output(self):
        """Wait until what the workers have printed is printed here."""
        for worker in self.workers:
            worker.output.drain()

    # ---- trouble ----

    def explain(self, error):
        """Which rank is at fault for an error in the caller.

        Returns:
            A `WorkerError`, or `None` where the error is the caller's own.
        """
        if isinstance(error, WorkerError):
            return error
        if not _is_of_a_collective(error):
            return None
        # A dead peer breaks the collective before its end is known here; after
        # a time-out there is nothing more to wait for.
        late = isinstance(error, TimeoutError) or "time" in str(error).lower()
        deadline = time.monotonic() + (0.3 if late else 3.0)
        while time.monotonic() < deadline:
            try:
                self.check()
            except WorkerError as found:
                return found
            time.sleep(0.01)
        active = self.active
        for worker in active:
            reason = worker.stopped()
            if reason:
                return worker.error(reason)
        if not active:
            return None
        behind = min(active, key=lambda worker: worker.board.commands)
        return behind.error(
            f"no progress for {self.timeout:g} s (the `timeout` of the strategy)", behind.stack()
        )


def _threads(world_size):
    """A rank's share of the cores' threads."""
    return max(1, (os.cpu_count() or 1) // world_size)


_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed? ?out|broken pipe|socket|pair|peer",
    re.IGNORECASE,
)


def _is_of_a_collective(error):
    if isinstance(error, (TimeoutError, ConnectionError, EOFError)):
        return True
    return isinstance(error, RuntimeError) and bool(_COLLECTIVE.search(str(error)))


class _uninterrupted:
    """Ignores Ctrl-C for the moment that ending the workers takes."""

    def __enter__(self):
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def __exit__(self, *exception):
        if self.main:
            signal.signal(signal.SIGINT, self.before)
