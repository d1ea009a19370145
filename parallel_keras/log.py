"""The one logger of the package, and the line that a first fit prints."""

import logging
import sys

logger = logging.getLogger("parallel_keras")


class _Stdout(logging.StreamHandler):
    """Writes to whatever `sys.stdout` is at the time: notebooks and tests swap it."""

    def __init__(self):
        super().__init__(sys.stdout)

    @property
    def stream(self):
        return sys.stdout

    @stream.setter
    def stream(self, value):
        pass


def say(text):
    """Log a line at INFO, shown also where the program has set up no logging."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = _Stdout()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    logger.info(text)
