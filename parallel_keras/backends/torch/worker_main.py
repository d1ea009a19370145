"""The program of a worker: `python -m parallel_keras.backends.torch.worker_main`.

Started by `workers.py` with everything it needs as inherited descriptors: it
listens on nothing, re-imports no script of the user's, and ends with its caller.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1


def main():
    options = json.loads(sys.argv[1])
    _end_with_the_caller(options)
    faulthandler.register(
        signal.SIGUSR1, file=os.fdopen(options["stack"], "wb", buffering=0), all_threads=True
    )
    channel = Connection(options["channel"])
    # Slow from here on: torch and Keras.
    from parallel_keras.backends.torch import board, memory

    own_board = board.Board(options["board"])
    threading.Thread(target=own_board.beat, daemon=True).start()
    context = Context(options["rank"], channel, own_board)
    context.inbound = memory.Buffer(options["inbound"])
    context.outbound = memory.Buffer(options["outbound"])
    try:
        module, _, name = options["server"].partition(":")
        server = getattr(importlib.import_module(module), name)(context)
        channel.send(("hello",))
        while True:
            message = channel.recv()
            own_board.count_command()
            if message[0] == "regroup":
                context.regroup(*message[1:])
            else:
                server.handle(message)
    except EOFError:
        os._exit(0)
    except BaseException as error:
        # The caller may sit in a collective with this rank: ending the process
        # ends that too.
        text = "".join(traceback.format_exception(error))
        channel.send(("error", type(error).__name__, str(error), text))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class Context:
    """What a server is given: its rank, its group, and the ways to the caller."""

    def __init__(self, rank, channel, board):
        self.rank = rank
        self.channel = channel
        self.board = board
        self.world_size = 1
        self.group: Any = None
        self.device: Any = None
        self.inbound: Any = None
        self.outbound: Any = None

    def send(self, message):
        self.channel.send(message)

    def regroup(self, path, world_size, device_name, timeout, secret, threads):
        """Take part in a new process group."""
        import torch

        from parallel_keras.backends.torch import devices, group

        self.group = None
        self.world_size = world_size
        self.device = devices.torch_device(device_name)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(threads)
        self.group = group.make(path, self.rank, world_size, self.device, timeout, secret)


def _end_with_the_caller(options):
    def watch():
        os.read(options["lifeline"], 1)  # returns when the caller's end is closed
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    if options["die_with_parent"] and sys.platform == "linux":
        # Also ends a stopped process, in which no thread runs. The signal comes
        # when the thread that started us ends, so only for the main thread.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != options["caller"]:
            os._exit(0)


if __name__ == "__main__":
    main()
