"""Rows of nested arrays, and numbers out of them."""

import numpy as np
from keras import ops, tree

# Ways in which numbers of parts come together.
MEAN, SUM = "mean", "sum"


def sum_rows(parts):
    """The number of rows in a list of slices."""
    return parts[-1].stop


def take(structure, rows):
    return tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], structure)


def mean_of(values, shares):
    return sum(share * value for share, value in zip(shares, values, strict=True))


def as_array(value):
    return np.asarray(ops.convert_to_numpy(ops.cast(value, "float64")))


def name_of(thing):
    return getattr(thing, "name", None) or getattr(thing, "__name__", None) or repr(thing)
