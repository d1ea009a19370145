"""Arrays that a step may write in place, as they are held by objects of the user's own."""

import numpy as np
import torch


def is_array(value):
    """Whether a value is one."""
    return isinstance(value, (np.ndarray, torch.Tensor))


def copied(array):
    """Its numbers."""
    return array.copy() if isinstance(array, np.ndarray) else array.detach().clone()


def is_same(array, numbers):
    """Whether it holds these numbers."""
    if isinstance(array, np.ndarray):
        return np.array_equal(array, numbers)
    return array.shape == numbers.shape and bool(torch.all(array.detach() == numbers))


def write(array, numbers):
    """Have it hold these numbers again."""
    if isinstance(array, np.ndarray):
        array[...] = numbers
    else:
        with torch.no_grad():
            array.copy_(numbers)
