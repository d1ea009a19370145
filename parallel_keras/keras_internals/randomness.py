"""Seeds of random draws."""

import contextlib
import random

import keras
import numpy as np
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

# The streams of two ranks start this far apart in the first word of the seed.
_SEED_STRIDE = 0x9E3779B1


def offset_seed(state, rank):
    """Move a seed generator's state, (seed, counter), to another stream. 3.15.1."""
    seed, counter = (int(word) for word in keras.ops.convert_to_numpy(state.value))
    moved = (seed + rank * _SEED_STRIDE) % 2**31
    state.assign(np.array([moved, counter], dtype="int64"))


def global_seed():
    """The state of the random draws that name no seed, or None. seed_generator.py, 3.15.1."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else keras.ops.convert_to_numpy(generator.state.value).tolist()


def set_global_seed(state, rank):
    """Give a worker the caller's stream of such draws, moved by its rank."""
    if state is not None:
        generator = global_seed_generator()
        generator.state.assign(np.array(state))
        offset_seed(generator.state, rank)


def global_seed_state():
    """The state of the random draws that name no seed, as a variable, or None. 3.15.1."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def is_seed_state(variable):
    """Whether a variable is the state of a seed generator, anybody's. seed_generator.py, 3.15.1."""
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


def ensure_global_seed():
    """Make that state now, outside of any graph, where the first draw would be inside.

    It is the state that a first draw would make, and Python's own random numbers go on
    as if it had not been made.
    """
    import tensorflow as tf

    if global_seed_state() is None:
        stream = random.getstate()
        with tf.init_scope():
            global_seed_generator()
        random.setstate(stream)


def moved_seed(state, replica):
    """The value of a seed generator's state in the stream of another replica."""
    value = keras.ops.convert_to_tensor(state.value)
    offset = np.array([replica * _SEED_STRIDE % 2**31, 0])
    return (value + keras.ops.cast(offset, value.dtype)) % 2**31


@contextlib.contextmanager
def replacing_draws(make):
    """Have other functions draw Keras's random numbers. backend/*/random.py, 3.15.1.

    Args:
        make: Makes a function from a name, such as `"normal"`, and Keras's own function.
    """
    module = keras_backend.random
    stock = {name: getattr(module, name) for name in DRAWS}
    try:
        for name, function in stock.items():
            setattr(module, name, make(name, function))
        yield
    finally:
        for name, function in stock.items():
            setattr(module, name, function)


DRAWS = (
    "normal",
    "uniform",
    "truncated_normal",
    "randint",
    "categorical",
    "gamma",
    "beta",
    "binomial",
    "dropout",
    "shuffle",
)
