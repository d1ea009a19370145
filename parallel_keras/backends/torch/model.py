"""ModelParallel on torch: one process, each layer's tensors on its device.

Keras brings every tensor that it computes with to the current device, so a layer
computes on another one inside a device scope. What a model's `call` does between
its layers follows the layer before it.
"""

import contextlib

import keras
import torch
from keras import tree

from parallel_keras import devices as device_names, keras_internals
from parallel_keras.backends import laid_out
from parallel_keras.backends.torch import buffers, generators
from parallel_keras.backends.torch.devices import by_device, torch_device
from parallel_keras.backends.torch.optimizers import PlacedOptimizer


class Lowering(laid_out.LaidOut):
    """One model under `ModelParallel` on torch."""

    def changed_devices(self):
        self.places = [place_of(name) for name in self.devices]
        self.several = len(set(self.places)) > 1

    def _wrap(self, unit):
        if self.several:  # the parts of one CPU are one device: nothing moves
            super()._wrap(unit)

    @contextlib.contextmanager
    def computing(self, number):
        if not self.several:
            yield
            return
        before = _go_to(self.places[number])
        try:
            yield
        finally:
            _go_to(before)

    def bring(self, structure, number):
        if not self.several:
            return structure
        return tree.map_structure(lambda leaf: moved(leaf, self.places[number]), structure)

    def brought(self, given, taken):
        if self.several:
            tree.map_structure(_unmask_too, given, taken)

    def stay(self, number):
        if self.several:
            _go_to(self.places[number])

    @contextlib.contextmanager
    def stepping(self):
        if not self.several:
            yield
            return
        before = _go_to(self.places[0])
        try:
            with _Together():
                yield
        finally:
            _go_to(before)

    def is_symbolic(self):
        return keras_internals.torch_device() == "meta"

    def move(self, variable, number):
        target = torch.device(
            keras_internals.default_torch_device() if number is None else self.places[number]
        )
        tensor = variable._value
        if tensor.device != target:
            tensor.grad = None
            tensor.data = tensor.data.to(target)
        return False  # the same parameter

    def detach(self):
        super().detach()
        self._move_buffers(lambda layer: keras_internals.default_torch_device())

    def _settle(self):
        super()._settle()
        self._move_buffers(lambda layer: self.places[self.numbers.get(id(layer), 0)])

    def _move_buffers(self, place_of_layer):
        for layer in keras_internals.flatten_layers(self.model):
            for buffer in buffers.buffers_of_layer(layer):
                tensor, target = buffer._value, torch.device(place_of_layer(layer))
                if tensor is not None and tensor.device != target:
                    buffer.put(tensor.to(target))

    def tune_optimizer(self, optimizer):
        if not self.several:
            return {}
        return PlacedOptimizer(optimizer, lambda v: self.places[self.home(v)]).methods()


def _go_to(place):
    """Make a device the current one, `None` for the default; returns what was current."""
    last = keras_internals.torch_device()
    before = keras_internals.set_torch_device(place)
    generators.go_on(last, keras_internals.torch_device())
    return before


class _Together(torch.overrides.TorchFunctionMode):
    """Lets an operation on tensors of several devices run on the current one.

    As `head(x) + x` in a model's `call` does. Operations within one device are
    left alone.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name.startswith(_OF_THEIR_OWN):
            return function(*args, **kwargs)
        if name.startswith("_foreach"):
            return _by_devices(function, *args, **kwargs)
        leaves = [_tensor(leaf) for leaf in tree.flatten((args, kwargs))]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Numbers in host memory go with any device.
        if len({leaf.device for leaf in tensors if leaf.ndim or leaf.device != _HOST}) > 1:
            # What is written in place stays where it is.
            written = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
            device = tensors[0].device if written else keras_internals.torch_device()
            args, kwargs = tree.map_structure(
                lambda leaf: moved(_tensor(leaf), device), (args, kwargs)
            )
        return function(*args, **kwargs)


_HOST = torch.device("cpu")


def _tensor(leaf):
    """The tensor inside a Keras variable; anything else as it is."""
    return leaf.value if isinstance(leaf, keras.Variable) else leaf


def _by_devices(function, tensors, *args, **kwargs):
    """One of torch's functions of lists of tensors, called once for each device.

    Args:
        function: The function.
        tensors: List of tensors: each is computed with where it is.
        *args, **kwargs: Lists as long, and what goes with all of `tensors`.
    """
    devices = [tensor.device for tensor in tensors]
    if len(set(devices)) == 1:
        return function(tensors, *args, **kwargs)
    results = [None] * len(devices)
    for device, numbers in by_device(devices):

        def chosen(value, numbers=numbers, device=device):
            if isinstance(value, (list, tuple)) and len(value) == len(devices):
                value = [value[number] for number in numbers]
            return tree.map_structure(lambda leaf: moved(leaf, device), value)

        found = function(
            chosen(tensors),
            *map(chosen, args),
            **{name: chosen(value) for name, value in kwargs.items()},
        )
        for number, result in zip(numbers, found or (), strict=False):
            results[number] = result
    return None if getattr(function, "__name__", "").endswith("_") else results


# What may be given several devices.
_OF_THEIR_OWN = ("copy_", "to", "__set__", "set_")
_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")


def moved(leaf, device):
    """A tensor on a device, with its mask; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or leaf.device == torch.device(device):
        return leaf
    result = leaf.to(device, non_blocking=True)
    mask = keras_internals.keras_mask(leaf)
    if mask is not None:
        keras_internals.set_keras_mask(result, mask.to(device, non_blocking=True))
    return result


def _unmask_too(given, taken):
    """Take a mask away that a layer has taken away from the copy on its device.

    layers/attention/multi_head_attention.py, 3.15.1: what is computed afterwards sees none.
    """
    if taken is not given and keras_internals.keras_mask(taken) is None:
        keras_internals.set_keras_mask(given, None)


def place_of(name):
    """What Keras calls a device. The parts of one CPU are one device to torch."""
    return "cpu" if device_names.kind_of(name) == "cpu" else str(torch_device(name))
