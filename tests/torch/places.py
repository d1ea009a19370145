"""Devices that tell places apart on a machine without an accelerator.

A `Placed` tensor says that it is on `cpu:1` or `cpu:2` and holds its numbers in host
memory. Under `Devices`, every operation of torch, forward, backward, and of the
optimizer, runs for real and fails where its inputs are on different devices, as it
would between two GPUs; each operation is noted with the device that it ran on.
"""

import collections
import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

HOST = torch.device("cpu")


class Placed(torch.Tensor):
    """A tensor on a device that is not there."""

    @staticmethod
    def __new__(cls, numbers, device):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device,
        )

    def __init__(self, numbers, device):
        self.numbers = numbers

    def __repr__(self):
        return f"Placed({self.numbers}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        # Outside of `Devices`: the numbers are read, or the tensor is inspected.
        return _run(function, args, kwargs or {}, None)


class Devices(TorchDispatchMode):
    """Checks and notes where operations run.

    Attributes:
        ran: Counter of pairs of an operation's name and its device.
        crossed: Counter of pairs of devices between which tensors were copied.
        generators: Dict from a device to the state of its random numbers, after `seed`.
    """

    def __init__(self):
        super().__init__()
        self.ran = collections.Counter()
        self.crossed = collections.Counter()
        self.generators = {}

    def seed(self, number):
        """Give each device random numbers of its own, which all start alike, as on GPUs."""
        state = torch.Generator().manual_seed(number).get_state()
        self.generators = {torch.device("cpu", index): state for index in (1, 2)}

    @contextlib.contextmanager
    def drawing(self, name, device):
        """Inside, torch draws the numbers of a device, if it draws any."""
        if device not in self.generators or not name.startswith(_DRAWS):
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(self.generators[device])
            yield
            self.generators[device] = torch.default_generator.get_state()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {}, self)


class WrongDevice(RuntimeError):
    """What a GPU would have said."""


_COPIES = ("aten._to_copy", "aten.copy_", "aten._foreach_copy_", "aten.set_", "aten.lift")
_DRAWS = ("aten.bernoulli", "aten.native_dropout", "aten.rand", "aten.normal", "aten.uniform")


def _run(function, args, kwargs, notes):
    name = str(function).rsplit(".", 1)[0]
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    asked = kwargs.get("device")
    places = {t.device for t in tensors if t.device.index or t.ndim}
    inner_kwargs = {**kwargs, "device": HOST} if asked is not None else kwargs
    if name.startswith(_COPIES):
        source = tensors[-1].device if tensors else HOST
        target = asked or tensors[0].device
        if notes is not None and _known(source) != _known(target):
            notes.crossed[str(_known(source)), str(_known(target))] += 1
    else:
        if len({_known(place) for place in places}) > 1:
            raise WrongDevice(f"{name} on tensors of {sorted(map(str, places))}")
        target = asked or next(iter(places), HOST)
    if notes is not None:
        notes.ran[name, str(_known(target))] += 1
    plain_args, plain_kwargs = tree_map(_numbers, (args, inner_kwargs))
    with notes.drawing(name, _known(target)) if notes is not None else contextlib.nullcontext():
        result = function(*plain_args, **plain_kwargs)
    back = {id(_numbers(t)): t for t in tensors}

    def wrap(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in back:
            return back[id(leaf)]  # written in place
        return Placed(leaf, target) if _known(target) != HOST else leaf

    return tree_map(wrap, result)


def _numbers(leaf):
    return leaf.numbers if isinstance(leaf, Placed) else leaf


def _known(device):
    return torch.device("cpu", device.index) if device.index else HOST
