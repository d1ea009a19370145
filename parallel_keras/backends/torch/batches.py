"""A batch as Keras's fit hands it over, as tensors in host memory."""

import numpy as np
import torch
from keras import tree

from parallel_keras import capabilities, keras_internals
from parallel_keras.backends.torch import forwarding
from parallel_keras.backends.torch.structures import leaves


def prepared(kind, data, strategy):
    """A batch as `(x, y, sample_weight)`, or `(x,)` to predict, of CPU tensors."""
    data = tuple(data) if isinstance(data, list) else data
    data = keras_internals.unpack(as_tensors(data, strategy))
    return data[:1] if kind == "predict" else data


def as_tensors(data, strategy):
    """A batch in its own structure, of CPU tensors."""
    return tree.map_structure(lambda leaf: _tensor(leaf, strategy), data)


def _tensor(leaf, strategy):
    """A leaf of a batch as a CPU tensor that shares its memory where it can."""
    if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
        received = "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"
        capabilities.check("ragged", strategy, "torch", received)
    if leaf is None or isinstance(leaf, torch.Tensor):
        return leaf
    try:
        return torch.as_tensor(np.asarray(leaf))
    except TypeError:
        capabilities.check(
            "row_shape",
            strategy,
            "torch",
            f"an array of type {np.asarray(leaf).dtype}, which torch does not have",
        )


def rows_of(data, strategy):
    """The number of rows of a prepared batch; raises where its arrays do not agree on one."""
    total = forwarding.row_count(data)
    if not total:
        shapes = [tuple(leaf.shape) for leaf in leaves(data) if leaf is not None]
        feature = "row_shape" if total is None else "no_rows"
        capabilities.check(feature, strategy, "torch", f"shapes {shapes}")
    return total
