"""When the parts of a rank's training step ended, one after the other."""

import time
from typing import Any

import torch

from parallel_keras.timeline import WAITING


class Laps:
    """The parts of one rank's last training step.

    A GPU is told what to do ahead of time: there a mark is an event in its stream, and
    nothing waits for it until the times are read.

    Args:
        device: This rank's `torch.device`.
    """

    def __init__(self, device):
        self.device = torch.device(device)
        self._laps: list = []
        self._now: Any = None  # the end of the last part
        self._is_between_steps = False

    def begin(self):
        """A training step begins; since the one before its data was waited for."""
        before, self._laps = self._now, []
        self._now = self._mark()
        if self._is_between_steps:
            self._laps.append((WAITING, before, self._now))
        self._is_between_steps = False

    def lap(self, kind):
        """A part of the step, of this kind, ends."""
        before, self._now = self._now, self._mark()
        self._laps.append((kind, before, self._now))

    def end(self):
        """The step ends."""
        self._is_between_steps = True

    def interrupt(self):
        """Something else than training steps goes on."""
        self._is_between_steps = False

    def read(self):
        """List of `(kind, start, end)`, in seconds of the machine's monotonic clock."""
        if self.device.type != "cuda":
            return list(self._laps)
        now = self._mark()
        torch.cuda.synchronize(self.device)
        end = time.monotonic()

        def seconds(mark):
            return end - mark.elapsed_time(now) / 1000

        return [(kind, seconds(start), seconds(stop)) for kind, start, stop in self._laps]

    def _mark(self):
        if self.device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
