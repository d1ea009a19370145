"""What lives as long as the process: the pool of workers."""

import sys

from parallel_keras.backends.torch import moments


def prepare():
    """Called when the package is imported: let Keras make what it can do with the package."""
    moments.install()


def shutdown():
    """End the workers, if any were ever started."""
    workers = sys.modules.get("parallel_keras.backends.torch.workers")
    if workers is not None:
        workers.shutdown()
