"""Numbers of a model's own step: what they are, and when two of them are the same."""

import numpy as np
from keras import ops

from parallel_keras import step_state
from parallel_keras.probe_rows import mean_of
from parallel_keras.tolerances import close, close_changes, coarse, roughly, tolerance


def number_of(leaf):
    """A leaf's numbers in float64, `None` where it has none."""
    if leaf is None or isinstance(leaf, (str, bytes)):
        return None
    try:
        return np.asarray(ops.convert_to_numpy(leaf)).astype("float64")
    except (TypeError, ValueError):
        return None


def difference(value, before):
    """What a value went up by; infinity that stays is no change."""
    value, before = value.astype("float64"), before.astype("float64")
    with np.errstate(invalid="ignore"):
        return np.where(value == before, 0.0, value - before)


def finite(array):
    """An array with zeros where it has no number."""
    return np.nan_to_num(array.astype("float64"), nan=0.0, posinf=0.0, neginf=0.0)


def size(array):
    """The largest entry of an array that is a number."""
    return float(np.max(np.abs(finite(array)), initial=0.0))


class Exact:
    """Numbers are the same up to the rounding of the type that the model computes in."""

    @staticmethod
    def near(value, other, around=None, floor=1e-6):
        """As `tolerances.close`, of numbers of any type."""
        value, other = np.asarray(value, "float64"), np.asarray(other, "float64")
        return close(value, other, around, floor)

    @staticmethod
    def near_changes(value, other):
        """As `tolerances.close_changes`."""
        return close_changes(value, other)

    @staticmethod
    def adds_up(gradient, parts, shares, largest, scaled):
        """Whether a gradient is the mean of those of the parts.

        Args:
            gradient, parts, shares: Array and arrays, `None` where there is no gradient.
            largest: Float, the largest entry among all gradients of the update: what is
                noise beside it is none.
            scaled: Bool. Whether the loss was scaled, so that a part may overflow by itself.
        """
        if gradient is None or any(part is None for part in parts):
            return gradient is None and all(part is None for part in parts)
        gradient = gradient.astype("float64")
        parts = [part.astype("float64") for part in parts]
        are_finite = [np.isfinite(array) for array in (gradient, *parts)]
        if scaled:
            counted = np.logical_and.reduce(are_finite)
        else:
            counted = are_finite[0]
            if not np.array_equal(counted, np.logical_and.reduce(are_finite[1:])):
                return False
        with np.errstate(invalid="ignore"):
            together = mean_of(parts, shares)
            wrong = np.abs(gradient - together)
        largest_here = max(size(gradient), size(together))
        limit = tolerance() * largest_here + 1e-2 * tolerance() * largest
        return bool(np.all(wrong[counted] <= limit))


class Coarse:
    """Numbers that are not grossly apart, for those that were made large.

    Large numbers carry large rounding: what is held against each other is relative to the
    largest entry, and where there is no number nothing is said.
    """

    @staticmethod
    def near(value, other, around=None, floor=1e-6):
        """As `Exact.near`."""
        if around is not None:
            floor += 1e-2 * coarse() * size(np.asarray(around))
        return roughly(value, other, floor)

    @staticmethod
    def near_changes(value, other):
        """As `Exact.near_changes`."""
        return roughly(value, other)

    @staticmethod
    def adds_up(gradient, parts, shares, largest, scaled):
        """As `Exact.adds_up`."""
        if gradient is None or any(part is None for part in parts):
            return gradient is None and all(part is None for part in parts)
        together = mean_of([part.astype("float64") for part in parts], shares)
        return roughly(gradient, together, floor=1e-2 * coarse() * largest)


def same_numbers(arrays, others):
    """Whether two lists of arrays hold the same numbers."""
    if others is None or len(arrays) != len(others):
        return False
    return all(step_state.same(a, b) for a, b in zip(arrays, others, strict=True))


def short(number):
    """An array in a message."""
    if number is None:
        return "of another shape"
    return f"{float(number):.6g}" if number.ndim == 0 else np.array2string(number.ravel()[:3])
