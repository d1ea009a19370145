"""What a worker prints reaches the caller's own stdout and stderr, line by line."""

import array
import fcntl
import os
import select
import sys
import termios
import threading
import time


class Output:
    """Reads two pipes of a worker and prints their lines, marked with its rank."""

    def __init__(self, rank, stdout, stderr):
        self.rank = rank
        self._pipes = (stdout, stderr)
        self._busy = threading.Lock()
        self._ended = False
        self._threads = [
            threading.Thread(target=self._forward, args=(pipe, name), daemon=True)
            for pipe, name in ((stdout, "stdout"), (stderr, "stderr"))
        ]
        for thread in self._threads:
            thread.start()

    def drain(self, limit=2.0):
        """Wait until the whole lines that were printed so far are shown.

        Args:
            limit: Float, in seconds: the caller's own stdout may be blocked.
        """
        deadline = time.monotonic() + limit
        while any(map(_waiting, self._pipes)) and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._busy.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._busy.release()

    def close(self, deadline):
        """After the process has ended: show what is left.

        Args:
            deadline: Float, of `time.monotonic()`.
        """
        self.drain(min(2.0, deadline - time.monotonic()))
        # Not by the pipe's end alone: a process that the worker has started may
        # hold it open.
        self._ended = True
        for thread in self._threads:
            thread.join(timeout=max(0.0, min(2.0, deadline - time.monotonic())))

    def _forward(self, pipe, name):
        with pipe:
            self._print_lines(pipe, name)

    def _print_lines(self, pipe, name):
        rest = b""
        poll = select.poll()  # select() knows no descriptors above 1023
        poll.register(pipe.fileno(), select.POLLIN)
        while True:
            if not poll.poll(200):
                if self._ended:
                    break
                continue
            # Reads under the lock, so that `drain` sees a line either in the
            # pipe or printed.
            with self._busy:
                chunk = os.read(pipe.fileno(), 65536)
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._print(line, name)
            if not chunk:
                break
        if rest:
            self._print(rest, name)

    def _print(self, line, name):
        stream = getattr(sys, name)
        text = f"[rank {self.rank}] {line.decode(errors='replace')}\n"
        try:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except (AttributeError, OSError, ValueError):
            # The caller has no such stream (None, closed, a broken pipe). To go on
            # reading is what matters: a full pipe would hang the worker.
            pass


def _waiting(pipe):
    """Bytes that wait in a pipe."""
    count = array.array("i", [0])
    try:
        fcntl.ioctl(pipe.fileno(), termios.FIONREAD, count)
    except (OSError, ValueError):
        return 0
    return count[0]
