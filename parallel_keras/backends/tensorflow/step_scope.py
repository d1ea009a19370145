"""What TensorFlow adds to the run of a model's own step on plain variables."""

import contextlib
import functools

import keras
import tensorflow as tf

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow.inlining import inlined

synchronizing = keras_internals.synchronizing


@contextlib.contextmanager
def running(kind):
    """Surrounds a step, which runs eagerly."""
    with inlined():
        yield


@contextlib.contextmanager
def gradients_scaled(model, factor):
    """Have tapes give the gradients of variables times a factor.

    Of other tensors, as of the inputs for a penalty, they are what they are.
    """
    stock = tf.GradientTape.gradient

    @functools.wraps(stock)
    def gradient(self, target, sources, *args, **kwargs):
        found = stock(self, target, sources, *args, **kwargs)
        return tf.nest.map_structure(_scaled, sources, found)

    def _scaled(source, found):
        if found is None or not isinstance(source, (tf.Variable, keras.Variable)):
            return found
        if isinstance(found, tf.IndexedSlices):
            return tf.IndexedSlices(found.values * factor, found.indices, found.dense_shape)
        return found * factor

    if factor != 1:
        tf.GradientTape.gradient = gradient
    try:
        yield
    finally:
        tf.GradientTape.gradient = stock


def kept_gradient(gradient):
    """A gradient that stays what it is when the step goes on: TensorFlow's all do."""
    return gradient


def leave_gradients(model, gradients):
    """Have gradients left from a step before: there are none in TensorFlow."""


def gradients_left(model):
    """What a step has left beside the variables: nothing."""
    return []


def other_state(model):
    """State of a model that is in no Keras variable: none that is known."""
    return []


def is_variable(leaf):
    """Whether something is a variable of TensorFlow's, under a strategy or not."""
    return isinstance(leaf, (tf.Variable, tf.distribute.DistributedValues))


class Kept:
    """What TensorFlow holds of a model beside its variables, to be put back: nothing."""

    def __init__(self, model):
        pass

    def has_drawn(self):
        """Whether numbers were drawn since that a layer's own draws do not tell of."""
        return False

    def restore(self):
        """Put it back."""


def traced(model):
    """Surrounds a call for shapes only, which changes nothing here."""
    return contextlib.nullcontext()


def layers_at_rest(rest):
    """Have the draws of a framework's own layers be at rest: there are none here."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def draws_at_rest(rest):
    """Have TensorFlow's own draws, as `tf.random.normal`, be the same for each row.

    Args:
        rest: A `resting.Rest`.
    """
    with contextlib.ExitStack() as stack:
        for module, name, make in _DRAWS:
            stock = getattr(module, name)
            stack.callback(setattr, module, name, stock)
            setattr(module, name, _draw(rest, stock, make))
        yield


def _draw(rest, stock, make):
    @functools.wraps(stock)
    def draw(*args, **kwargs):
        if rest.is_awake:
            return stock(*args, **kwargs)
        with rest.awake():  # some functions are made of others
            kwargs.pop("name", None)
            return make(rest, *args, **kwargs)

    return draw


def _one_row(stateless):
    def make(rest, shape, *args, seed=None, **kwargs):
        shape = [int(size) for size in shape]
        seeds = (rest.next_seed(), 0)
        drawn = stateless([1, *shape[1:]] if shape else [], seeds, *args, **kwargs)
        return tf.broadcast_to(drawn, shape)

    return make


def _shuffle(rest, value, seed=None):
    return tf.reverse(value, axis=[0])


def _categorical(rest, logits, num_samples, dtype=None, seed=None):
    best = tf.argmax(logits, axis=-1, output_type=dtype or tf.int64)
    return tf.repeat(best[:, tf.newaxis], num_samples, axis=-1)


def _dropout(rest, x, rate=None, noise_shape=None, seed=None):
    return tf.convert_to_tensor(x)


_DRAWS = (
    (tf.random, "normal", _one_row(tf.random.stateless_normal)),
    (tf.random, "uniform", _one_row(tf.random.stateless_uniform)),
    (tf.random, "truncated_normal", _one_row(tf.random.stateless_truncated_normal)),
    (tf.random, "shuffle", _shuffle),
    (tf.random, "categorical", _categorical),
    (tf.nn, "dropout", _dropout),
)
