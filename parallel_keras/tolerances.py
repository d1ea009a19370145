"""When two numbers of a probe are the same."""

import contextlib
import contextvars

import keras
import numpy as np

from parallel_keras import keras_internals

_TOLERANCE = {"float16": 2e-2, "bfloat16": 5e-2}


@contextlib.contextmanager
def tolerance_of(model):
    """Compare as exactly as the coarsest type in which a model computes allows."""
    types = {layer.compute_dtype for layer in keras_internals.flatten_layers(model)}
    types.add(keras.config.floatx())
    token = _tolerance.set(max(_TOLERANCE.get(one, 1e-4) for one in types))
    try:
        yield
    finally:
        _tolerance.reset(token)


_tolerance = contextvars.ContextVar("tolerance", default=1e-4)


def tolerance():
    """By how much two results may differ, relative to their size, that are the same."""
    return _tolerance.get()


def coarse():
    """The same for numbers that were made large, which carry large rounding."""
    return max(1e-2, 2 * tolerance())


def nudge():
    """A relative change of numbers that is as large as their rounding, and no smaller."""
    return 5e-2 * tolerance()


def close(value, other, around=None, floor=1e-6):
    """Whether two results are the same up to rounding, entry by entry.

    Args:
        value, other: Arrays.
        around: Array of what the two are differences of, for the size of its rounding.
        floor: Float. A difference that counts as none.
    """
    if np.shape(value) != np.shape(other):
        return False
    scale = tolerance() * np.maximum(np.abs(value), np.abs(other))
    if around is not None:
        scale = scale + 1e-2 * tolerance() * np.abs(around)
        floor = 1e-9
    with np.errstate(invalid="ignore"):
        near = np.abs(value - other) <= scale + floor
    near &= np.isfinite(value) & np.isfinite(other)  # else the scale itself is infinite
    return bool(np.all(near | (value == other) | (np.isnan(value) & np.isnan(other))))


def close_changes(value, other):
    """As `close`, of what a state went up by.

    One that is not finite tells nothing: infinity is the sum of itself and of whatever else.
    """
    return bool(np.all(np.isfinite(value))) and close(value, other)


def roughly(value, other, floor=1e-6):
    """Whether two results are not grossly apart, beside the largest entry.

    Where one of them is no number, nothing is said.
    """
    value, other = np.asarray(value, "float64"), np.asarray(other, "float64")
    if value.shape != other.shape:
        return False
    counted = np.isfinite(value) & np.isfinite(other)
    value, other = value[counted], other[counted]
    largest = max(np.max(np.abs(one), initial=0.0) for one in (value, other))
    return bool(np.all(np.abs(value - other) <= coarse() * largest + floor))
