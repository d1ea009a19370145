"""Random draws and statistics of a batch at rest, while a step is probed.

On the rows of a part they legitimately differ from what they are on the whole: each
replica draws its own numbers, and a BatchNormalization takes the statistics of its
replica's rows. At rest each row gets what every other row gets, so that a step which
computes each row from that row alone gives the same on the whole and on its parts.
"""

import contextlib
import functools
import itertools
import threading

import keras
from keras import ops

from parallel_keras import backends, keras_internals


class Rest:
    """Draws that are the same in each run and for each row."""

    def __init__(self):
        self._seeds = itertools.count()
        self._local = threading.local()

    def begin(self):
        """A run begins, which draws what the one before it drew."""
        self._seeds = itertools.count(1729)

    def next_seed(self):
        return next(self._seeds)

    @property
    def is_awake(self):
        """Whether draws are drawn now, as for the first value of a variable."""
        return getattr(self._local, "awake", False)

    @contextlib.contextmanager
    def awake(self):
        """Inside, draws are as ever."""
        before, self._local.awake = self.is_awake, True
        try:
            yield
        finally:
            self._local.awake = before

    # ---- draws of keras.random ----

    def make(self, name, stock):
        """What draws instead of a function of Keras."""
        at_rest = getattr(self, f"_{name}", None)

        @functools.wraps(stock)
        def draw(*args, **kwargs):
            if self.is_awake:
                return stock(*args, **kwargs)
            with self.awake():  # some functions are made of others
                if at_rest is not None:
                    return at_rest(*args, **kwargs)
                return self._for_one_row(stock, *args, **kwargs)

        return draw

    def _for_one_row(self, stock, shape, *args, **kwargs):
        shape = tuple(int(size) for size in shape)
        kwargs["seed"] = self.next_seed()
        return ops.broadcast_to(stock((1, *shape[1:]) if shape else (), *args, **kwargs), shape)

    # What has arguments for each entry, and so for each row, gives its mean.

    def _categorical(self, logits, num_samples, dtype="int32", seed=None):
        best = ops.argmax(logits, axis=-1, keepdims=True)
        return ops.cast(ops.repeat(best, num_samples, axis=-1), dtype)

    def _gamma(self, shape, alpha, dtype=None, seed=None):
        return self._filled(shape, alpha, dtype)

    def _beta(self, shape, alpha, beta, dtype=None, seed=None):
        return self._filled(shape, ops.divide(alpha, ops.add(alpha, beta)), dtype)

    def _binomial(self, shape, counts, probabilities, dtype=None, seed=None):
        return self._filled(shape, ops.round(ops.multiply(counts, probabilities)), dtype)

    @staticmethod
    def _filled(shape, value, dtype):
        return ops.cast(ops.broadcast_to(value, shape), dtype or keras.config.floatx())

    def _dropout(self, inputs, rate, noise_shape=None, seed=None):
        return ops.convert_to_tensor(inputs)

    def _shuffle(self, x, axis=0, seed=None):
        return ops.flip(x, axis=axis)


@contextlib.contextmanager
def at_rest():
    """Inside, draws of Keras and of the backend are at rest, and statistics are not taken.

    Yields:
        A `Rest`.
    """
    rest = Rest()
    cls = keras.layers.BatchNormalization
    stock = cls.call

    @functools.wraps(stock)
    def call(self, inputs, training=None, mask=None):
        return stock(self, inputs, training=False, mask=mask)

    cls.call = call
    try:
        with (
            keras_internals.replacing_draws(rest.make),
            backends.room("step_scope").draws_at_rest(rest),
        ):
            yield rest
    finally:
        cls.call = stock
