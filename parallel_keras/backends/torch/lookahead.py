"""The next batch travels while this one is computed.

In a fit on arrays, or on a DataLoader with workers of its own, a thread gets the
next batch and puts the workers' rows into their memory. Other inputs are left
alone: a generator or a data set that draws random numbers has to be asked when
plain Keras would ask it.
"""

import concurrent.futures
import contextlib

import torch

from parallel_keras import keras_internals


def can_look_ahead(adapter):
    """Whether asking for a batch early changes nothing but the time.

    Args:
        adapter: Keras's data adapter of a fit.
    """
    if keras_internals.is_array_adapter(adapter):
        # Shuffled batches draw a permutation each.
        return keras_internals.shuffle_of(adapter) != "batch"
    loader = keras_internals.loader_of(adapter)
    return isinstance(loader, torch.utils.data.DataLoader) and loader.num_workers > 0


class Lookahead:
    """An iterator over batches that is one batch ahead.

    The thread starts on the next batch when `go_on` is called, from inside the step:
    Python runs one thread at a time, and a step that began together with it would
    wait for it, and all ranks for that step.

    Args:
        batches: Iterable of batches.
        stage: Function of a batch, called in a thread: puts it where the
            workers can read it.
    """

    def __init__(self, batches, stage):
        self._batches = iter(batches)
        self._stage = stage
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "parallel_keras_lookahead")
        self._next = None
        self._is_asked = False
        self._state = keras_internals.global_state_snapshot()

    def __iter__(self):
        return self

    def __next__(self):
        # The first one is got in the caller's thread: a shuffle draws its order now. So is
        # one that the last step did not ask for.
        batch = next(self._batches, _END) if self._next is None else self._next.result()
        if batch is _END:
            self.close()
            raise StopIteration
        self._next, self._is_asked = None, True
        return batch

    def go_on(self):
        """Get the next batch meanwhile: the caller now computes outside of Python."""
        if self._is_asked:
            self._is_asked = False
            self._next = self._executor.submit(self._fetch)

    def close(self):
        """Let the thread end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _fetch(self):
        result = []

        def work():
            batch = next(self._batches, _END)
            if batch is not _END:
                self._stage(batch)
            result.append(batch)

        keras_internals.with_global_state(self._state, work)()
        return result[0]


_END = object()


@contextlib.contextmanager
def looking_ahead(pool):
    """One fit at a time looks ahead: its slots in the workers' memory are its own."""
    mine = not pool.has_lookahead
    pool.has_lookahead = True
    try:
        yield mine
    finally:
        if mine:
            pool.has_lookahead = False
