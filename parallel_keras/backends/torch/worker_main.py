"""The program of a worker, which `worker.py` starts.

Everything it needs it has as inherited descriptors: it listens on nothing, re-imports
no script of the user's, and ends with its caller.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
# A reader waits for the whole message: it has to fit into the pipe to a caller
# that may sit in a collective.
_LONGEST_TEXT = 20_000


def main():
    options = json.loads(sys.argv[1])
    # The caller's, so that the very same packages are found.
    sys.path[:] = options["import_path"]
    _end_with_the_caller(options)
    faulthandler.enable()  # a crash in native code prints where
    faulthandler.register(
        signal.SIGUSR1, file=os.fdopen(options["stack"], "wb", buffering=0), all_threads=True
    )
    channel = Connection(options["channel"])
    try:
        # Slow: torch and Keras.
        from parallel_keras.backends.torch import board, memory

        context = Context(options["rank"], channel, board.Board(options["board"]))
        context.inbound = memory.Buffer(options["inbound"])
        context.outbound = memory.Buffer(options["outbound"])
        module, _, name = options["server"].partition(":")
        server = getattr(importlib.import_module(module), name)(context)
        channel.send(("hello",))
        while True:
            try:
                message = _next_message(channel, context.awake)
            except (EOFError, ConnectionError):
                os._exit(0)  # the caller has gone
            if message[0] == "regroup":
                context.regroup(*message[1:])
            else:
                server.handle(message)
    except BaseException as error:
        _report(channel, error)
    finally:
        # At once, also where the user's code called sys.exit(): the caller may
        # sit in a collective with this rank, which the end of the process ends.
        os._exit(1)


def _next_message(channel, awake):
    """Wait for the caller, so many seconds without sleeping."""
    awake_until = time.perf_counter() + awake
    while time.perf_counter() < awake_until and not channel.poll(0):
        pass
    return channel.recv()


class Context:
    """What a server is given: its rank, its group, and the ways to the caller."""

    def __init__(self, rank, channel, board):
        self.rank = rank
        self.channel = channel
        self.board = board
        self.world_size = 1
        self.awake = 0.0  # seconds without sleep while it waits for the caller
        self.group: Any = None
        self.device: Any = None
        self.inbound: Any = None
        self.outbound: Any = None

    def send(self, message):
        self.channel.send(message)

    def regroup(self, paths, world_size, device_name, timeout, secret, threads):
        """Take part in a new process group."""
        import torch

        from parallel_keras.backends.torch import devices, group

        self.group = None
        self.world_size = world_size
        self.awake = devices.seconds_awake(world_size)
        self.device = devices.torch_device(device_name)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(threads)
        # What goes wrong elsewhere the caller finds out, and ends all workers.
        meeting = paths, self.rank, world_size, self.device, timeout, secret
        self.group = group.make(*meeting, check=lambda: None)


def _report(channel, error):
    text = "".join(traceback.format_exception(error))
    if len(text) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    try:
        channel.send(("error", type(error).__name__, str(error)[:2000], text))
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        pass  # the caller has gone


def _end_with_the_caller(options):
    caller, lifeline = options["caller"], options["lifeline"]

    def watch():
        # The pipe's end tells at once. Where the caller's forked children hold
        # the pipe open, the change of the parent tells.
        while os.getppid() == caller and not select.select([lifeline], [], [], 0.5)[0]:
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    if options["die_with_parent"] and sys.platform == "linux":
        # Also ends a stopped process, in which no thread runs. The signal comes
        # when the thread that started us ends, so only for the main thread.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != caller:
            os._exit(0)


if __name__ == "__main__":
    main()
