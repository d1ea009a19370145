"""One worker process, seen from the caller: starting, talking, watching, ending."""

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import psutil

from parallel_keras.backends.torch import board, memory, worker_main
from parallel_keras.backends.torch.output import Output
from parallel_keras.backends.torch.sending import send_bytes
from parallel_keras.errors import UnsupportedError, WorkerError

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
        self._held = contextlib.ExitStack()  # what `close` gives back
        try:
            with contextlib.ExitStack() as handed_down:
                self._start(threads, server, handed_down)
        except BaseException:
            self._held.close()
            raise

    def _start(self, threads, server, handed_down):
        ours, theirs = socket.socketpair()
        self._outgoing = self._held.enter_context(ours)
        handed_down.enter_context(theirs)
        # A Connection and a socket close their descriptor, each its own.
        self.channel = self._held.enter_context(Connection(os.dup(ours.fileno()), writable=False))
        lifeline, our_end = os.pipe()
        self._held.callback(os.close, our_end)
        handed_down.callback(os.close, lifeline)
        self._files = {
            name: memory.anonymous_file() for name in ("board", "inbound", "outbound", "stack")
        }
        self.inbound = memory.Buffer(self._files["inbound"])
        self.outbound = memory.Buffer(self._files["outbound"])
        for give_back in (self.inbound.close, self.outbound.close):
            self._held.callback(give_back)
        for name in ("board", "stack"):
            self._held.callback(os.close, self._files[name])
        self.board = board.Board(self._files["board"])
        options = {
            "rank": self.rank,
            "server": server,
            "channel": theirs.fileno(),
            "lifeline": lifeline,
            "caller": os.getpid(),
            # The kernel's signal comes when the thread that starts us ends.
            "die_with_parent": threading.current_thread() is threading.main_thread(),
            "import_path": [entry for entry in sys.path if isinstance(entry, str)],
            **self._files,
        }
        self.process = subprocess.Popen(
            # -P: no folder of the package or of the user's comes before the
            # standard library.
            [sys.executable, "-P", "-u", worker_main.__file__, json.dumps(options)],
            pass_fds=[theirs.fileno(), lifeline, *self._files.values()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Not in the terminal's group: Ctrl-C is for the caller.
            start_new_session=True,
            env={
                **os.environ,
                "KERAS_BACKEND": "torch",
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
            },
        )
        self.output = Output(self.rank, self.process.stdout, self.process.stderr)

    # ---- talking ----

    def wait_until_up(self, deadline):
        """Wait for the process to have imported what it needs."""
        if not self.up:
            self.receive(max(0.0, deadline - time.monotonic()), self.check)
            self.up = True

    def send(self, message, timeout, check):
        """Hand over a message, or raise a WorkerError.

        Args:
            message: Tuple, a name and what else the server takes.
            timeout: Float, in seconds.
            check: Called now and then; raises where waiting is in vain.
        """
        # Not the Connection's: its pickler, made for what this sends nothing of, is in Python.
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            send_bytes(self._outgoing, payload, timeout, check)
        except TimeoutError:
            reason = self.stopped() or f"takes no message within {timeout:g} s"
            error = self.error(reason, self.stack())
            self.kill()  # what it has of the message no other can follow
            raise error from None
        except OSError as error:
            self._wait_for_its_end()
            self.check()
            raise self.error(f"cannot be reached: {error}") from error

    def receive(self, timeout, check):
        """The next message, or a WorkerError.

        Args:
            timeout: Float, in seconds.
            check: Called now and then; raises where waiting is in vain.
        """
        deadline = time.monotonic() + timeout
        while not self.channel.poll(0.05):
            check()
            if time.monotonic() > deadline:
                raise self.error(self.stopped() or f"no answer within {timeout:g} s", self.stack())
        try:
            message = self.channel.recv()
        except (EOFError, OSError):
            self._wait_for_its_end()
            self.check()
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
        trouble = self.trouble()
        if trouble is not None:
            raise trouble

    def trouble(self):
        """A WorkerError if the worker is dead or has reported an error, else `None`."""
        code = self.process.poll()
        if code is not None and self._reported is None:
            self._read_last_words()
        if self._reported is not None:
            _, kind, text, trace = self._reported
            refusal = text if kind == UnsupportedError.__name__ else ""
            return self.error(f"raised {kind}: {text}", trace, refusal)
        if code is None:
            return None
        return self.error(_how_it_ended(code))

    def is_victim(self):
        """Whether all that it reported is that another rank has left a collective."""
        return self._reported is not None and is_of_a_collective(*self._reported[1:3])

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
        """Where the worker's main thread is, as text; the innermost call comes first."""
        descriptor = self._files["stack"]
        before = os.fstat(descriptor).st_size
        try:
            self.process.send_signal(signal.SIGUSR1)
        except OSError:
            return ""
        size, deadline = before, time.monotonic() + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = os.fstat(descriptor).st_size
            if now > before and now == size:
                break
            size = now
        text = os.pread(descriptor, max(0, size - before), before).decode(errors="replace")
        threads = text.split("\n\n")
        main = [thread for thread in threads if f'"{worker_main.__file__}"' in thread]
        return next((thread for thread in main if " in main" in thread), text)

    def error(self, reason, trace="", refusal=""):
        """A WorkerError about this worker."""
        self.output.drain()
        text = f"Rank {self.rank} (process {self.process.pid}) failed: {reason}."
        if trace:
            text += f"\n\nIn rank {self.rank}:\n{trace.rstrip()}"
        return WorkerError(text, self.rank, reason, refusal)

    def _read_last_words(self):
        try:
            while self.channel.poll(0):
                message = self.channel.recv()
                if message[0] == "error":
                    self._reported = message
        except (EOFError, OSError):
            pass

    def _wait_for_its_end(self):
        """Its side of the channel is closed: the process ends, or has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2.0)

    # ---- ending ----

    def kill(self):
        """End the process at once, with those that it has started."""
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)  # also ends a stopped process
            except OSError:
                self.process.kill()

    def close(self, deadline):
        """After `kill`: reap the process and give back what it held.

        Args:
            deadline: Float, of `time.monotonic()`.
        """
        # One inside the kernel, where no signal reaches it, ends when it returns.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        self.output.close(deadline)
        self._held.close()


# Not all of gloo's and of the store's errors name their place.
_COLLECTIVE = re.compile(
    r"gloo|nccl|pair closure|closed by peer|^wait timeout|^timeout waiting for key", re.IGNORECASE
)


def is_of_a_collective(kind, text):
    """Whether an error, given by its class's name and its text, comes from a collective."""
    if kind in (
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "NotSeen",
    ):
        return True
    return kind == "RuntimeError" and bool(_COLLECTIVE.search(text))


def _how_it_ended(code):
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a real-time signal"
    hint = ", which the system sends when memory runs out" if name == "SIGKILL" else ""
    return f"killed by signal {-code} ({name}{hint})"
