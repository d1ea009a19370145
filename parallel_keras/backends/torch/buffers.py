"""Buffers of `torch.nn` modules: state of a model that is in no Keras variable.

A module may write a buffer in place (a counter), put another tensor in its stead
(`self.seen = self.seen + 1`), or have a kernel of torch write it, which torch's count of
writes does not show (the running statistics of a `torch.nn.BatchNorm1d`). So a buffer is
known by its module and its name, and whether it was written is told by its numbers.
"""

import contextlib
import weakref
from typing import Any

import keras
import torch

from parallel_keras import keras_internals


class Buffer:
    """One buffer, where others have a Keras variable.

    Args:
        module: The `torch.nn.Module` that holds it.
        name: String, its name there.
        path: String, for messages.
    """

    trainable = False

    def __init__(self, module, name, path):
        self._module: Any = weakref.ref(module)
        self._name = name
        self.path = path

    @property
    def _value(self):
        return self._module()._buffers[self._name]

    @property
    def dtype(self):
        return keras.backend.standardize_dtype(self._value.dtype)

    def __array__(self, dtype=None, copy=None):
        return keras.ops.convert_to_numpy(self._value)

    def assign(self, value):
        """Write its numbers in place."""
        with torch.no_grad():
            self._value.copy_(value)

    def settle(self, tensor):
        """Have the tensor that was there before hold what is there now.

        Args:
            tensor: What `_value` was. Callers and optimizers may know it.

        Returns:
            Bool. Whether it can: another shape or type cannot be made equal on all ranks.
        """
        now = self._value
        if now is tensor:
            return True
        if now is None or now.shape != tensor.shape or now.dtype != tensor.dtype:
            return False
        with torch.no_grad():
            tensor.copy_(now)
        self.put(tensor)
        return True

    def put(self, tensor):
        """Have another tensor there, or none."""
        self._module()._buffers[self._name] = tensor


# The same object each time it is asked for: variables are known by their `id`.
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def buffers_of(model):
    """All buffers of a Keras model, in one order on all ranks."""
    return [
        buffer
        for layer in keras_internals.flatten_layers(model)
        for buffer in buffers_of_layer(layer)
        if buffer._value is not None
    ]


def buffers_of_layer(layer):
    """A layer's own buffers, and those of the module that it wraps; empty ones too."""
    found = []
    for path, module in _modules(layer):
        known = _known.setdefault(module, {})
        for name in module._buffers:
            if name not in known:
                known[name] = Buffer(module, name, f"{layer.path}/{path}{name}")
            found.append(known[name])
    return found


def _modules(layer):
    yield "", layer
    if isinstance(layer, keras.layers.TorchModuleWrapper):
        for name, module in layer.module.named_modules(prefix="module"):
            yield f"{name}.", module


class Held:
    """The buffers of a model as they are, to be put back.

    Args:
        model: A Keras model.
    """

    def __init__(self, model):
        self._held = [
            (buffer, buffer._value, None if buffer._value is None else buffer._value.clone())
            for layer in keras_internals.flatten_layers(model)
            for buffer in buffers_of_layer(layer)
        ]

    def restore(self):
        """Put them back."""
        for buffer, tensor, numbers in self._held:
            buffer.put(tensor)
            if tensor is not None:
                with torch.no_grad():
                    tensor.copy_(numbers)


@contextlib.contextmanager
def as_in_training(model):
    """Inside, wrapped modules say that they are in training.

    The wrap tells its module at each call which it is: what it was told last is no
    difference between two models.
    """
    modules = [
        module
        for layer in keras_internals.flatten_layers(model)
        if isinstance(layer, keras.layers.TorchModuleWrapper)
        for module in layer.module.modules()
    ]
    flags = [module.training for module in modules]
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag


def mark(variable):
    """What a variable or a buffer is now, for `is_written`."""
    value = variable._value
    if isinstance(variable, Buffer):
        return value, value.detach().clone()
    return value._version


def is_written(variable, marked):
    """Whether it was written since it was marked."""
    if not isinstance(variable, Buffer):
        return variable._value._version != marked
    tensor, numbers = marked
    return variable._value is not tensor or not torch.equal(tensor, numbers)
