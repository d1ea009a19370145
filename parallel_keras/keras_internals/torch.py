"""What differs on the torch backend."""

import inspect

import keras

from parallel_keras.keras_internals.patching import patch_once


def allow_synchronized_batch_norm():
    """Let `BatchNormalization(synchronized=True)` be made.

    layers/normalization/batch_normalization.py, 3.15.1: refused in `__init__`, and used in
    `_moments` only.
    """

    @patch_once(keras.layers.BatchNormalization, "__init__")
    def _with_synchronized(stock):
        signature = inspect.signature(stock)

        def __init__(self, *args, **kwargs):
            bound = signature.bind(self, *args, **kwargs)
            synchronized = bound.arguments.pop("synchronized", False)
            stock(*bound.args, **bound.kwargs)
            self.synchronized = synchronized

        # operation.py, 3.15.1: Keras reads the names of the arguments off the function.
        vars(__init__)["__signature__"] = signature
        return __init__


def replace_torch_moments(moments):
    """Compute synchronized moments by another function, given Keras's own as `stock=`.

    backend/torch/nn.py, 3.15.1: refused there.
    """
    from keras.src.backend.torch import nn

    @patch_once(nn, "moments")
    def _with_synchronized(stock):
        def compute(x, axes, keepdims=False, synchronized=False):
            if not synchronized:
                return stock(x, axes, keepdims)
            return moments(x, axes, keepdims, stock)

        return compute
