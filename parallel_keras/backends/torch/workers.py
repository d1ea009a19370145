"""The pool of workers: started once, kept between fits, watched, and ended.

The caller is rank 0; rank `r` is worker `r`. A smaller world uses the first
workers, a larger one starts more; either makes a new process group. After any
trouble the whole pool is ended, since the survivors sit in a collective.
"""

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import re
import secrets
import signal
import threading
import time
import weakref
from typing import Any

import torch

from parallel_keras import devices as device_names, keras_internals
from parallel_keras.backends.torch import group as groups, links, memory
from parallel_keras.backends.torch.devices import available_cores, torch_device
from parallel_keras.backends.torch.shared_sums import SharedSums
from parallel_keras.backends.torch.worker import SERVER, Worker, is_of_a_collective
from parallel_keras.errors import WorkerError

START_TIMEOUT = 180.0  # imports of torch and Keras on a busy machine
END_TIMEOUT = 10.0  # of all workers together
_pool = None
_generations = itertools.count(1)  # never the same twice, whichever pool


def pool(world_size, devices, timeout):
    """The pool of this process, with workers started for `world_size` ranks."""
    global _pool
    if _pool is None:
        _pool = Pool()
    if not _pool.is_healthy():
        _pool.abort()
    _pool.want(world_size, devices, timeout)
    return _pool


def shutdown():
    """End the workers of this process."""
    if _pool is not None:
        _pool.end()


@atexit.register
def _leave():
    if _pool is not None:
        _pool.abort()


def threads_of_a_rank(world_size):
    """A rank's share of the cores' threads."""
    return max(1, available_cores() // world_size)


@contextlib.contextmanager
def as_a_rank(devices):
    """Compute with the threads of one of the ranks on these devices; the caller's come back."""
    threads = torch.get_num_threads()
    if device_names.is_simulated(devices):
        torch.set_num_threads(threads_of_a_rank(len(devices)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Pool:
    """The workers and their process group.

    Args:
        server: String, `"module:class"` of what serves messages in the workers.

    Attributes:
        group: The process group of the current world, in which the caller is rank 0.
        generation: Int that changes whenever the workers have lost what they held;
            zero while there is no group.
    """

    def __init__(self, server=SERVER):
        self.server = server
        self.secret = secrets.token_bytes(32)
        self.workers = []
        self.wanted: tuple = (1, (), 60.0)
        self.group: Any = None
        self.generation = 0
        self.timeout = 60.0
        self.configured: tuple | None = None  # what data.py has sent of the caller's settings
        self.has_lookahead = False  # see lookahead.py
        self._number = 0
        self._formed: tuple | None = None
        self._lenders: weakref.WeakSet = weakref.WeakSet()

    # ---- life ----

    def is_healthy(self):
        return all(worker.is_alive() for worker in self.workers)

    def want(self, world_size, devices, timeout):
        """Start the workers that are missing, without waiting for them."""
        wanted = (world_size, tuple(devices), timeout)
        if wanted != self.wanted:
            self._bring_home()
        self.wanted = wanted
        self.timeout = timeout
        if not self.workers and threading.current_thread() is threading.main_thread():
            # keras.utils.clear_session() drops Keras's global state, and this with
            # it. The state is the thread's, and ends with one that is not the main.
            keras_internals.tie_to_session(weakref.WeakMethod(self.end))
        threads = threads_of_a_rank(world_size)
        while len(self.workers) < world_size - 1:
            with _uninterrupted():
                self.workers.append(Worker(len(self.workers) + 1, threads, self.server))

    def ready(self):
        """Wait for the workers and the group that `want` asked for.

        Returns:
            The pool's `generation`.
        """
        if self.wanted == self._formed:
            return self.generation
        self.want(*self.wanted)  # anew, where they were ended meanwhile
        world_size, devices, timeout = self.wanted
        deadline = time.monotonic() + START_TIMEOUT
        for worker in self.active:
            worker.wait_until_up(deadline)
        self.group = self._formed = None
        meeting = memory.Meeting()
        ours = [torch_device(name) for name in devices]
        sums = memory.SharedFile(SharedSums.FIRST_SIZE) if links.on_one_cpu(ours) else None
        paths = meeting.path, None if sums is None else sums.path
        threads = threads_of_a_rank(world_size)
        for worker in self.active:
            details = (world_size, devices[worker.rank], timeout, self.secret, threads)
            self.send(worker.rank, ("regroup", paths, *details))
        # Not the pool itself, which would keep the group and be kept by it.
        check = functools.partial(Pool.check, weakref.proxy(self))
        try:
            self.group = groups.make(paths, 0, world_size, ours[0], timeout, self.secret, check)
        finally:
            meeting.over()
            if sums is not None:
                sums.close()
        self._formed = self.wanted
        self.generation = next(_generations)
        return self.generation

    def lend(self, lender):
        """Let something know before the workers forget what it has left with them.

        Args:
            lender: Has a method `collect`, which brings that to the caller.
        """
        self._lenders.add(lender)

    def _bring_home(self):
        lenders = list(self._lenders)
        self._lenders.clear()
        if self.group is None or not self.is_healthy():
            return  # each finds out when somebody looks
        trouble = None
        for lender in lenders:
            try:
                lender.collect()
            except Exception as error:  # of one model, which takes no other's numbers with it
                trouble = trouble or error
        if trouble is not None:
            raise trouble

    def end(self):
        """End all workers, of which nobody needs anything any more."""
        try:
            self._bring_home()
        finally:
            self.abort()

    def abort(self):
        """End all workers at once. Never waits for one that does not answer."""
        with _uninterrupted():
            workers, self.workers = self.workers, []
            for worker in workers:
                worker.kill()
            self.group = self._formed = None
            self.generation = 0
            deadline = time.monotonic() + END_TIMEOUT
            for worker in workers:
                worker.close(deadline)

    def disown(self):
        """In a forked child: the workers and the group are the parent's."""
        # The group's end would wait for threads that the child does not have.
        _keep_for_ever(self.group)
        for worker in self.workers:
            _keep_for_ever(worker)
        self.workers, self.group, self._formed, self.generation = [], None, None, 0

    # ---- messages ----

    @property
    def active(self):
        """The workers of the current world."""
        return self.workers[: self.wanted[0] - 1]

    def next_number(self):
        """The number of a new step."""
        self._number += 1
        return self._number

    def send(self, rank, message):
        self.workers[rank - 1].send(message, self.timeout, self.check)

    def broadcast_message(self, message):
        for worker in self.active:
            self.send(worker.rank, message)

    def receive(self, rank):
        return self.workers[rank - 1].receive(self.timeout, self.check)

    def wait_published(self, number):
        """What each worker published under a step's number, in the order of the ranks."""
        return [w.board.wait(number, self.check, self.timeout) for w in self.active]

    def events_of(self, key, own):
        """What each rank took down of a model's last training step, in the order of the ranks.

        Args:
            key: The model's.
            own: What the caller took down.
        """
        self.broadcast_message(("events", key))
        return [own, *(self.receive(worker.rank)[1] for worker in self.active)]

    def inbound(self, rank):
        return self.workers[rank - 1].inbound

    def outbound(self, rank):
        return self.workers[rank - 1].outbound

    def drain_output(self):
        """Wait until what the workers have printed is printed here."""
        for worker in self.workers:
            worker.output.drain()

    # ---- trouble ----

    def check(self):
        """Raise where a worker is dead or has reported an error."""
        found = self._found()
        if found is None:
            return
        # One that only saw another leave a collective: the cause is soon known too.
        deadline = time.monotonic() + 2.0
        while found[0].is_victim() and time.monotonic() < deadline:
            time.sleep(0.01)
            found = self._found()
        worker, trouble = found
        raise (self._hanging() if worker.is_victim() else None) or trouble

    def _found(self):
        found = [(worker, worker.trouble()) for worker in self.active]
        found = [(worker, trouble) for worker, trouble in found if trouble is not None]
        return min(found, key=lambda pair: pair[0].is_victim(), default=None)

    def explain(self, error):
        """Which rank is at fault for an error in the caller.

        Returns:
            A `WorkerError`, or `None` where the error is the caller's own.
        """
        if isinstance(error, WorkerError):
            return error
        if not self.active or not is_of_a_collective(type(error).__name__, str(error)):
            return None
        late = bool(re.search(r"time|NotSeen", f"{type(error).__name__} {error}", re.I))
        # A dead peer breaks the collective before its end is known here; after
        # a time-out there is nothing more to wait for.
        deadline = time.monotonic() + (0.3 if late else 3.0)
        while time.monotonic() < deadline:
            try:
                self.check()
            except WorkerError as found:
                return found
            time.sleep(0.01)
        return (self._hanging() if late else None) or WorkerError(
            f"The ranks lost one another, and no worker is at fault: {error}", None, str(error)
        )

    def _hanging(self):
        """A WorkerError about the running worker that keeps the others waiting, or `None`."""
        running = [worker for worker in self.active if worker.is_alive()]
        for worker in running:
            reason = worker.stopped()
            if reason:
                return worker.error(reason)
        stacks = {worker: worker.stack() for worker in running}
        suspects = [worker for worker in running if not _waits(stacks[worker])]
        reason = f"no progress for {self.timeout:g} s (the `timeout` of the strategy)"
        if len(suspects) == 1 or len(self.active) == len(running) == 1:
            worker = (suspects or running)[0]
            return worker.error(reason, stacks[worker])
        if not running:
            return None
        texts = [f"In rank {worker.rank}:\n{stack.rstrip()}" for worker, stack in stacks.items()]
        return WorkerError("\n\n".join([f"The workers made {reason}.", *texts]), None, reason)


# The innermost Python call of a rank that waits for the others: the package's own
# collectives, DistributedDataParallel's, or for the caller's next message.
_WAITING = re.compile(
    r"parallel_keras/backends/torch/|torch/autograd/|torch/nn/parallel/|multiprocessing/connection"
)


def _waits(stack):
    frames = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    return bool(frames) and bool(_WAITING.search(frames[0].replace(os.sep, "/")))


class _uninterrupted:
    """Puts Ctrl-C off for the moment that starting or ending the workers takes."""

    def __enter__(self):
        self.before, self.came = None, False
        if threading.current_thread() is threading.main_thread():
            self.before = signal.getsignal(signal.SIGINT)
        if self.before is not None:  # which it is where C code has set it
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number, frame):
        self.came = True

    def __exit__(self, *exception):
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
        if self.came:
            signal.raise_signal(signal.SIGINT)


def _keep_for_ever(thing):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _forget_in_forked_child():
    global _pool
    if _pool is not None:
        _pool.disown()
        _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_forked_child)
