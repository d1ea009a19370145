"""Moments of the rows of all ranks, for `BatchNormalization(synchronized=True)`.

Keras on torch refuses synchronized moments. Here they are those of the tensor, and in a
replica's pass those of its rows and the others' rows: one sum over the ranks, whose
gradient is a sum over the ranks again. A rank without rows has to take part in both; it
computes on a row of another, which does not count.
"""

import contextlib
from typing import Any

import keras
import torch

from parallel_keras import capabilities, keras_internals
from parallel_keras.strategies import DataParallel

# The pass that goes on, if any. Not by thread: what is computed anew during a backward
# pass is computed in torch's threads.
_pass: Any = None


def install():
    """Let synchronized layers be made and run."""
    keras_internals.allow_synchronized_batch_norm()
    keras_internals.replace_torch_moments(_moments)
    keras_internals.replace_masked_moments(_masked_moments)


class SharedMoments:
    """The moments of one model's passes on all ranks.

    Args:
        model: This rank's Keras model.
        group: The process group of all ranks.
    """

    def __init__(self, model, group):
        self._group = group
        self._layers = [
            layer
            for layer in keras_internals.flatten_layers(model)
            if "synchronized" in vars(layer)
        ]
        self._counts = False

    @property
    def wanted(self):
        """Whether a rank without rows has to take part in the others' passes."""
        return any(layer.synchronized for layer in self._layers)

    @contextlib.contextmanager
    def counting(self, rows):
        """Surrounds a rank's pass forward, and the one backward.

        Args:
            rows: Int. This rank's rows; with zero, what it computes does not count.
        """
        global _pass
        self._counts = rows > 0
        _pass = self
        try:
            yield
        finally:
            _pass = None

    def sum(self, *parts):
        """The sum of tensors over the ranks, in one reduction.

        Args:
            parts: Tensors of one type. They add up in float64.

        Returns:
            A list of float64 tensors of the same shapes.
        """
        if not self.wanted:
            capabilities.check(
                "synchronized_moments",
                DataParallel(self._group.size()),
                "torch",
                "moments(synchronized=True) in a model without a layer that is `synchronized`",
            )
        flat = torch.cat([part.double().reshape(-1) for part in parts])
        total = _SumOverRanks.apply(flat, self._group, self._counts)
        pieces = total.split([part.numel() for part in parts])
        return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]


class _SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' parts, on each of them."""

    @staticmethod
    def forward(ctx, part, group, counts):
        ctx.group, ctx.counts = group, counts
        # What does not count may be anything, NaN too.
        total = part.clone() if counts else torch.zeros_like(part)
        group.allreduce([total]).wait()
        return total

    @staticmethod
    def backward(ctx, gradient):
        return _SumOverRanks.apply(gradient, ctx.group, ctx.counts), None, None


def _moments(x, axes, keepdims, stock):
    """Mean and variance over the rows of all ranks. Keras's formula."""
    x = keras.ops.convert_to_tensor(x)
    if _pass is None or x.device.type == "meta":
        return stock(x, axes, keepdims)
    values = x.float() if x.dtype == torch.float16 else x
    means = [torch.mean(v, dim=axes, keepdim=True) for v in (values, torch.square(values))]
    means = [mean.double() for mean in means]
    count = torch.full_like(means[0], values.numel() / means[0].numel())
    total, squares, count = _pass.sum(*(mean * count for mean in means), count)
    mean = total / count
    variance = squares / count - torch.square(mean)
    if not keepdims:
        mean, variance = torch.squeeze(mean, axes), torch.squeeze(variance, axes)
    return tuple(_rounded(value, x.dtype) for value in (mean, variance))


def _rounded(value, dtype):
    if dtype == torch.float16:
        limits = torch.finfo(dtype)
        value = torch.clip(value, limits.min, limits.max)
    return value.to(dtype)


def _masked_moments(layer, x, mask, stock):
    """Mean and variance over the entries of all ranks that are not masked. Keras's formula."""
    if _pass is None or x.device.type == "meta":
        return stock(layer, x, mask)
    axes = layer._reduction_axes
    kept = mask.bool().unsqueeze(-1).expand(x.shape)
    count = torch.sum(kept.to(x.dtype), dim=axes, keepdim=True)
    total = torch.sum(torch.where(kept, x, 0), dim=axes, keepdim=True)
    total, count = _pass.sum(total, count)
    count = count + keras.config.epsilon()
    mean = total / count
    difference = torch.where(kept, x - mean.to(x.dtype), 0)
    (squares,) = _pass.sum(torch.sum(torch.square(difference), dim=axes, keepdim=True))
    variance = squares / count
    return tuple(torch.squeeze(value).to(x.dtype) for value in (mean, variance))
