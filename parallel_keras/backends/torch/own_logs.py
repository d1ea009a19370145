"""The logs of a step of the model's own, from those of the ranks.

A rank publishes its numbers, in the order of the logs, beside what its rows added to the
metrics. Rank 0 puts the logs of the global batch together.
"""

import zlib

import numpy as np
import torch

from parallel_keras import capabilities, logs
from parallel_keras.step_compare import METRIC, VARIABLE
from parallel_keras.step_numbers import number_of


def as_vector(result):
    """A rank's numbers as one float64 vector, which begins with a number of their structure."""
    arrays = _arrays(result)
    shapes = [(path, array.shape) for path, array in arrays.items()]
    head = np.array([float(zlib.crc32(repr(shapes).encode()))])
    return np.concatenate([head, *(array.reshape(-1) for array in arrays.values())])


def _arrays(result):
    numbers = {path: number_of(leaf) for path, leaf in logs.leaves_by_path(result).items()}
    return {path: array for path, array in numbers.items() if array is not None}


def combined(result, vectors, shares, rules, metric_value, refuse):
    """The logs of the global batch.

    Args:
        result: Rank 0's logs.
        vectors: List of the vectors of all ranks.
        shares: List of floats, the ranks' shares of the rows.
        rules: Function of a path: `"metric"`, `"variable"` or one of `logs.RULES`.
        metric_value: Function of a path and a leaf: the result of the metric behind it.
        refuse: Function of a sentence.
    """
    if any(len(v) != len(vectors[0]) or v[0] != vectors[0][0] for v in vectors):
        refuse("the replicas returned different keys")
    arrays, start, found = _arrays(result), 1, {}
    for path, leaf in logs.leaves_by_path(result).items():
        found[path] = leaf
        if path not in arrays:
            continue
        array, rule = arrays[path], rules(path, leaf)
        parts = [v[start : start + array.size].reshape(array.shape) for v in vectors]
        start += array.size
        if rule == VARIABLE:
            continue  # as in plain Keras it is rank 0's own, which everyone may go on to read
        if rule == METRIC:
            found[path] = like(leaf, metric_value(path, leaf))
        else:
            found[path] = like(leaf, logs.combine(rule, parts, shares))
    return logs.with_leaves(result, found)


def like(leaf, value):
    """A number as what the user's step returned."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if isinstance(leaf, torch.Tensor):
            return value
        value = value.cpu().numpy()
    if isinstance(leaf, torch.Tensor):
        value = torch.as_tensor(np.asarray(value), device=leaf.device)
        whole = not leaf.dtype.is_floating_point
        return (value.round() if whole else value).to(leaf.dtype)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(value).astype(leaf.dtype)[()]
    value = float(value)
    return int(value) if isinstance(leaf, int) and value == int(value) else value


def refusal(step, strategy):
    """A function that refuses logs, with a sentence."""

    def refuse(text):
        capabilities.check("step_log", strategy, "torch", f"{step}: {text}")

    return refuse
