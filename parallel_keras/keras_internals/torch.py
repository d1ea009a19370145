"""What differs on the torch backend."""

import functools
import inspect

import keras


def allow_synchronized_batch_norm():
    """Let `BatchNormalization(synchronized=True)` be made.

    layers/normalization/batch_normalization.py, 3.15.1: refused in `__init__`, and used in
    `_moments` only.
    """
    stock = keras.layers.BatchNormalization.__init__
    if hasattr(stock, "is_of_parallel_keras"):
        return
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def __init__(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        synchronized = bound.arguments.pop("synchronized", False)
        stock(*bound.args, **bound.kwargs)
        self.synchronized = synchronized

    # operation.py, 3.15.1: Keras reads the names of the arguments off the function.
    vars(__init__).update(__signature__=signature, is_of_parallel_keras=True)
    keras.layers.BatchNormalization.__init__ = __init__


def replace_torch_moments(moments):
    """Compute synchronized moments by another function, given Keras's own as `stock=`.

    backend/torch/nn.py, 3.15.1: refused there.
    """
    from keras.src.backend.torch import nn

    stock = nn.moments
    if hasattr(stock, "is_of_parallel_keras"):
        return

    @functools.wraps(stock)
    def compute(x, axes, keepdims=False, synchronized=False):
        if not synchronized:
            return stock(x, axes, keepdims)
        return moments(x, axes, keepdims, stock)

    vars(compute)["is_of_parallel_keras"] = True
    nn.moments = compute
