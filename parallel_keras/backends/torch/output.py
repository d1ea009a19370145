"""What a worker prints reaches the caller's own stdout and stderr, line by line."""

import array
import fcntl
import os
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
        self._threads = [
            threading.Thread(target=self._forward, args=(pipe, name), daemon=True)
            for pipe, name in ((stdout, "stdout"), (stderr, "stderr"))
        ]
        for thread in self._threads:
            thread.start()

    def _forward(self, pipe, name):
        rest = b""
        while True:
            try:
                chunk = os.read(pipe.fileno(), 65536)
            except (OSError, ValueError):
                break
            with self._busy:
                *lines, rest = (rest + chunk).split(b"\n")
                if not chunk and rest:
                    lines, rest = [rest], b""
                for line in lines:
                    self._print(line, name)
            if not chunk:
                break

    def _print(self, line, name):
        stream = getattr(sys, name)
        if stream is not None:
            stream.write(f"[rank {self.rank}] {line.decode(errors='replace')}\n")
            stream.flush()

    def drain(self, limit=2.0):
        """Wait until what has been printed so far is shown."""
        deadline = time.monotonic() + limit
        while any(map(_waiting, self._pipes)) and time.monotonic() < deadline:
            time.sleep(0.001)
        with self._busy:
            pass

    def close(self):
        """After the process has ended."""
        for thread in self._threads:
            thread.join(timeout=2.0)
        for pipe in self._pipes:
            pipe.close()


def _waiting(pipe):
    """Bytes that wait in a pipe."""
    count = array.array("i", [0])
    try:
        fcntl.ioctl(pipe.fileno(), termios.FIONREAD, count)
    except (OSError, ValueError):
        return 0
    return count[0]
