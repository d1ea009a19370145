"""One worker process, seen from the caller: starting, talking, watching, ending."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import psutil

from parallel_keras.backends.torch import board, memory
from parallel_keras.backends.torch.output import Output
from parallel_keras.errors import WorkerError

MAIN = "parallel_keras.backends.torch.worker_main"
SERVER = "parallel_keras.backends.torch.server:Server"


class Worker:
    """A process that serves one rank.

    It talks over an inherited pair of sockets, so nothing listens, and is told by
    an inherited pipe when the caller has gone.

    Args:
        rank: Int, from 1 up.
        threads: Int. Its share of the cores' threads.
        server: String, `"module:class"` of what serves the messages.
    """

    def __init__(self, rank, threads, server=SERVER):
        self.rank = rank
        self.up = False
        self._reported = None
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self._files = {
            name: memory.anonymous_file() for name in ("board", "inbound", "outbound", "stack")
        }
        self.board = board.Board(self._files["board"])
        self.inbound = memory.Buffer(self._files["inbound"])
        self.outbound = memory.Buffer(self._files["outbound"])
        options = {
            "rank": rank,
            "server": server,
            "channel": theirs.fileno(),
            "lifeline": lifeline,
            "caller": os.getpid(),
            # The kernel's signal comes when the thread that starts us ends.
            "die_with_parent": threading.current_thread() is threading.main_thread(),
            **self._files,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", MAIN, json.dumps(options)],
            pass_fds=[theirs.fileno(), lifeline, *self._files.values()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Not in the terminal's group: Ctrl-C is for the caller.
            start_new_session=True,
            env=_environment(threads),
        )
        theirs.close()
        os.close(lifeline)
        self.channel = Connection(ours.detach())
        self.output = Output(rank, self.process.stdout, self.process.stderr)

    # ---- talking ----

    def wait_until_up(self, deadline):
        """Wait for the process to have imported what it needs."""
        if not self.up:
            self.receive(max(0.0, deadline - time.monotonic()))
            self.up = True

    def send(self, message):
        try:
            self.channel.send(message)
        except OSError as error:
            self._raise_if_dead(patience=2.0)
            raise WorkerError(
                f"Rank {self.rank} cannot be reached: {error}", self.rank, "unreachable"
            ) from error

    def receive(self, timeout):
        """The next message, or a WorkerError."""
        deadline = time.monotonic() + timeout
        while not self.channel.poll(0.05):
            self.check()
            if time.monotonic() > deadline:
                raise self.error(self.stopped() or f"no answer within {timeout:g} s", self.stack())
        return self._take()

    def _take(self):
        try:
            message = self.channel.recv()
        except (EOFError, OSError):
            self._raise_if_dead(patience=2.0)
            raise self.error("closed its connection") from None
        if message[0] == "error":
            self._reported = message
            self.check()
        return message

    # ---- watching ----

    def is_alive(self):
        return self._reported is None and self.process.poll() is None

    def check(self):
        """Raise where the worker is dead or has reported an error."""
        if self._reported is None and self.process.poll() is not None and self.channel.poll(0):
            # What it said before its end.
            try:
                while self.channel.poll(0):
                    message = self.channel.recv()
                    if message[0] == "error":
                        self._reported = message
            except (EOFError, OSError):
                pass
        if self._reported is not None:
            _, kind, text, trace = self._reported
            raise self.error(f"raised {kind}: {text}", trace)
        self._raise_if_dead()

    def _raise_if_dead(self, patience=0.0):
        deadline = time.monotonic() + patience
        while self.process.poll() is None:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.01)
        code = self.process.returncode
        if code < 0:
            raise self.error(f"killed by signal {-code} ({signal.Signals(-code).name})")
        raise self.error(f"ended with exit code {code}")

    def stopped(self):
        """A reason if the process does not run at all, else `None`."""
        try:
            status = psutil.Process(self.process.pid).status()
        except psutil.Error:
            return "is gone"
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return "stopped (SIGSTOP or a debugger)"
        return None

    def stack(self):
        """Where the worker's threads are, as text."""
        descriptor = self._files["stack"]
        before = os.fstat(descriptor).st_size
        self.process.send_signal(signal.SIGUSR1)
        size, deadline = before, time.monotonic() + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = os.fstat(descriptor).st_size
            if now > before and now == size:
                break
            size = now
        return os.pread(descriptor, max(0, size - before), before).decode(errors="replace")

    def error(self, reason, trace=""):
        """A WorkerError about this worker."""
        self.output.drain()
        text = f"Rank {self.rank} (process {self.process.pid}) failed: {reason}."
        if trace:
            text += f"\n\nIn rank {self.rank}:\n{trace.rstrip()}"
        return WorkerError(text, self.rank, reason)

    # ---- ending ----

    def kill(self):
        """End the process at once."""
        if self.process.poll() is None:
            self.process.kill()  # also ends a stopped process

    def close(self):
        """After `kill`: reap the process and give back what it held."""
        self.process.wait()
        self.output.close()
        self.channel.close()
        os.close(self._lifeline)
        for descriptor in self._files.values():
            os.close(descriptor)


def _environment(threads):
    """The caller's environment, with this package and the share of the cores."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "KERAS_BACKEND": "torch",
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
