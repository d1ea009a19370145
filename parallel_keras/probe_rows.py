"""Rows of nested arrays, and how the numbers of parts of them come together."""

import numpy as np
from keras import ops, tree

# Ways in which numbers of parts come together.
MEAN, SUM = "mean", "sum"


def rows_of(data):
    """The rows of a batch."""
    return int(next(leaf for leaf in tree.flatten(data) if leaf is not None).shape[0])


def take(data, rows):
    """Some rows of each array of a batch."""
    return tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], data)


def sum_rows(parts):
    """The number of rows in a list of slices."""
    return parts[-1].stop


def mean_of(values, shares):
    """The mean of the parts' values, weighted with their shares of the rows."""
    with np.errstate(invalid="ignore"):
        return sum(share * value for share, value in zip(shares, values, strict=True))


def sum_of(values):
    """The sum of the parts' values."""
    with np.errstate(invalid="ignore"):
        return sum(values)


def ways_of(changes, shares, near):
    """The ways in which what parts of the rows gave comes to what all of them gave.

    Args:
        changes: List of pairs: the number of all rows, and a list of those of the parts.
        shares: The parts' shares of the rows.
        near: Function that tells whether two numbers are the same.

    Returns:
        A set of `SUM` and `MEAN`. What is zero would do as either.
    """
    fits = {
        SUM: all(near(whole, sum_of(parts)) for whole, parts in changes),
        MEAN: all(near(whole, mean_of(parts, shares)) for whole, parts in changes),
    }
    return {way for way, is_it in fits.items() if is_it}


def as_array(value):
    return np.asarray(ops.convert_to_numpy(ops.cast(value, "float64")))


def name_of(thing):
    return getattr(thing, "name", None) or getattr(thing, "__name__", None) or repr(thing)
