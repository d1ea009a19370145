"""What lives as long as the process: the pool of workers."""

import sys


def shutdown():
    """End the workers, if any were ever started."""
    workers = sys.modules.get("parallel_keras.backends.torch.workers")
    if workers is not None:
        workers.shutdown()
