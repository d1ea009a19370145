"""Carrying a live Keras model into another process.

Pickling a Keras model goes through its saved form, which fails for classes of the
user's script and for those without `get_config`, and leaves state behind. Here the
objects go as they are, by their `__dict__`; classes and functions of the script go
by value (cloudpickle). Tensors are taken out and travel by the process group.
"""

import importlib
import io
import sys
import threading
import types
from typing import Any

import cloudpickle
import torch
from keras import tree

from parallel_keras import keras_internals
from parallel_keras.backends.torch.buffers import buffers_of
from parallel_keras.backends.torch.importing import (
    by_value_where_needed,
    inner_function,
    make_inner_function,
)
from parallel_keras.backends.torch.paths import path_to
from parallel_keras.backends.torch.reducers import finish_loading, reduce_keras
from parallel_keras.errors import UnsupportedError

# A functional graph is pickled along its edges, as deep as it is long.
_STACK_BYTES = 512 * 1024 * 1024
_RECURSION = 1_000_000


def split(thing, name="The model"):
    """A thing as bytes without numbers, and the tensors that hold the numbers.

    Args:
        thing: Usually a Keras model.
        name: String. What to call it in a message.

    Returns:
        A pair: bytes for `join`, equal for an unchanged model; and a list of
        tensors.

    Raises:
        UnsupportedError: If some object in it cannot be carried over. The
            message has the path to it.
    """
    pickler = _Pickler()
    try:
        return _with_deep_stack(lambda: pickler.split(thing))
    except Exception as error:
        culprit = pickler.last
        raise UnsupportedError(
            f"{name} cannot be sent to the worker processes, because of "
            f"{path_to(culprit, thing)} = {_short(culprit)}: {error}. Make such an object where it "
            "is used (in `call` or in a function), or keep it elsewhere. "
            f"Received: an object of type {type(culprit).__name__}"
        ) from error


def join(skeleton, tensors):
    """The inverse of `split`, in another process."""
    unpickler = _Unpickler(io.BytesIO(skeleton), tensors)
    with finish_loading():
        return unpickler.load()


def portable(structure):
    """A structure that a worker reads as it is, whose containers are of the user's classes.

    A named tuple of the script, or one that was made in a function, has no name to be
    imported by.
    """
    if _is_known_everywhere(structure):
        return structure
    skeleton, _ = split(structure, "The structure of a batch")
    return _Portable(skeleton)


class _Portable:
    def __init__(self, skeleton):
        self.skeleton = skeleton

    def __reduce__(self):
        return join, (self.skeleton, [])


def _is_known_everywhere(structure):
    if type(structure) in (list, tuple):
        return all(map(_is_known_everywhere, structure))
    if type(structure) is dict:
        return all(map(_is_known_everywhere, structure.values()))
    return isinstance(structure, (bool, type(None)))


def specs(tensors):
    """What `empty` needs to make tensors like these, views of one another included."""
    storages: dict = {}
    for t in tensors:
        storages.setdefault(t.untyped_storage().data_ptr(), []).append(t)
    return [
        (
            (t.dtype, tuple(t.shape), t.device.type),
            (isinstance(t, torch.nn.Parameter), t.requires_grad),
            _place(t, storages[t.untyped_storage().data_ptr()]),
        )
        for t in tensors
    ]


def empty(descriptions, device):
    """Tensors like those that `specs` described, with no numbers in them yet."""
    storages: dict = {}
    tensors = []
    for (dtype, shape, kind), (is_parameter, requires_grad), place in descriptions:
        # What the caller keeps in host memory stays there.
        here = device if kind == torch.device(device).type else kind
        if place == _ABSENT:
            tensor = torch.zeros((), dtype=dtype).expand(shape)
        elif place is None:
            tensor = torch.empty(shape, dtype=dtype, device=here)
        else:
            key, size, offset, strides = place
            if key not in storages:
                storages[key] = torch.empty(size, dtype=torch.uint8, device=here).untyped_storage()
            tensor = torch.empty(0, dtype=dtype, device=here)
            tensor.set_(storages[key], offset, shape, strides)
        if is_parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        tensors.append(tensor.requires_grad_(requires_grad))
    return tensors


def broadcast(tensor, group):
    """Give all ranks the numbers of rank 0. Bytes: any dtype will do."""
    if not tensor.numel():
        return
    with torch.no_grad():
        plain = tensor.detach()
        # The caller may hold another layout of the same numbers.
        flat = _bytes_of(plain)
        group.broadcast(flat, 0).wait()
        if group.rank() and flat.data_ptr() != plain.data_ptr():
            plain.copy_(flat.view(plain.dtype).view(plain.shape))


def without(descriptions, numbers):
    """Descriptions by which some tensors get their shape, and no memory for numbers."""
    return [
        (*description[:2], _ABSENT) if number in numbers else description
        for number, description in enumerate(descriptions)
    ]


_ABSENT = "absent"


def send(tensors, rank, group):
    """Send the numbers of tensors to one rank."""
    parts = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
    for work in [group.send([part], rank, 0) for part in parts]:
        work.wait()


def receive(tensors, rank, group):
    """Fill tensors with the numbers that a rank sends."""
    for tensor in tensors:
        if tensor.numel():
            part = _bytes_of(tensor)
            group.recv([part], rank, 0).wait()
            with torch.no_grad():
                tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor):
    flat = tensor.detach().contiguous().view(-1)
    if flat.stride(0) != 1:  # torch calls a single number contiguous, whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def variables_of(model):
    """The model's and its optimizers' variables, in one order on all ranks.

    Without those of metrics, which are combined and not made equal; with the buffers of
    `torch.nn` modules.
    """
    metrics = {id(v) for metric in keras_internals.every_metric(model) for v in metric.variables}
    variables = list(model.variables)
    for optimizer in keras_internals.optimizers_of(model):
        variables += keras_internals.optimizer_variables(optimizer)
    unique = {id(v): v for v in variables if id(v) not in metrics}
    return [*unique.values(), *buffers_of(model)]


class Other:
    """A tensor that comes along with a model and is none of its variables.

    It stands where others have a Keras variable: that of a `keras.Variable` which a loss or a
    penalty holds, or a function refers to, or a tensor itself.
    """

    trainable = False

    def __init__(self, tensor):
        self._value = tensor


def others(model, tensors):
    """Which of the tensors of a model are of no variable of `variables_of`, and of no metric.

    Args:
        model: The model.
        tensors: List of all its tensors, as from `split`.

    Returns:
        A list of their places in the list, which are the same on all ranks.
    """
    known = {id(v._value) for v in variables_of(model)}
    for metric in keras_internals.every_metric(model):
        known.update(id(v._value) for v in metric.variables)
    # Those of `torch.inference_mode` cannot be written.
    return [n for n, t in enumerate(tensors) if id(t) not in known and not t.is_inference()]


def to_device(data, device):
    """The arrays of a batch on the device that computes."""
    if device.type == "cpu":
        return data
    return tree.map_structure(
        lambda leaf: None if leaf is None else leaf.to(device, non_blocking=True), data
    )


def _with_deep_stack(function):
    """The result of a function that is run with room for deep recursion."""
    result: dict = {}

    def work():
        try:
            result["value"] = function()
        except BaseException as error:
            result["error"] = error

    stack, recursion = threading.stack_size(_STACK_BYTES), sys.getrecursionlimit()
    state = keras_internals.global_state_snapshot()
    sys.setrecursionlimit(_RECURSION)
    try:
        thread = threading.Thread(target=keras_internals.with_global_state(state, work))
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(recursion)
        threading.stack_size(stack)
    if "error" in result:
        raise result["error"]
    return result["value"]


class _Pickler(cloudpickle.Pickler):
    def __init__(self):
        self._file = io.BytesIO()
        super().__init__(self._file)
        self._tensors: list = []
        self._numbers: dict = {}
        self._meet: Any = None
        self.last = None  # where it stands, and after an error: where it stopped

    def split(self, thing):
        with by_value_where_needed() as self._meet:
            self.dump(thing)
        return self._file.getvalue(), self._tensors

    def persistent_id(self, obj):
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._numbers:
            self.last = obj
            _check_tensor(obj)
            self._numbers[id(obj)] = len(self._tensors)
            self._tensors.append(obj)
        return self._numbers[id(obj)]

    def reducer_override(self, obj):
        self.last = obj
        if isinstance(obj, (type, types.FunctionType)):
            self._meet(obj.__module__)
            place = isinstance(obj, types.FunctionType) and inner_function(obj)
            if place:
                return make_inner_function, place
        elif isinstance(obj, types.ModuleType):
            self._meet(obj.__name__)
            # A lazy module, which cloudpickle would take apart. It comes along with functions
            # that use `torch` and another thing called `ops`.
            if type(obj) is not types.ModuleType and sys.modules.get(obj.__name__) is obj:
                return importlib.import_module, (obj.__name__,)
        for name in ("stdout", "stderr"):  # in a notebook or a test, files of another kind
            if obj is getattr(sys, name):
                return getattr, (sys, name)
        if isinstance(obj, io.IOBase) and not isinstance(obj, (io.StringIO, io.BytesIO)):
            # cloudpickle would send a copy of what it holds.
            raise TypeError("an open file belongs to its process")
        if isinstance(obj, types.CodeType):
            # cloudpickle forgets the file, which a traceback of a worker shows.
            constructor, arguments = cloudpickle.cloudpickle._code_reduce(obj)
            return _code_of_a_file, (constructor, arguments, obj.co_filename)
        reduced = reduce_keras(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def _check_tensor(tensor):
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise TypeError("it has no shape yet; call the module once before")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError("a tensor of a class of its own, of which only torch's are supported")
    if tensor.grad_fn is not None:
        raise TypeError(
            "a tensor that was computed from a weight while the model was made, such as "
            "`ops.transpose(layer.kernel)`: let a layer of your own compute it in its `call`"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError("a tensor that is sparse, quantized or without numbers is not supported")


def _place(tensor, neighbours):
    """Where in a storage a tensor is, if others are there too: (key, bytes, offset, strides).

    In bytes that all of them cover; `None` for a tensor with a storage of its own, whose
    numbers lie in their order. Those of an orthogonal weight do not, and
    `DistributedDataParallel` adds gradients up in the order in which the numbers lie.
    """
    lone = len(neighbours) == 1 and tensor.is_contiguous()
    if lone or not tensor.numel() or any(stride == 0 for stride in tensor.stride()):
        return None
    spans = [_span(t) for t in neighbours if t.numel()]
    start = min(first for first, _ in spans) // _ALIGNMENT * _ALIGNMENT
    size = max(last for _, last in spans) - start
    offset = tensor.storage_offset() - start // tensor.element_size()
    return tensor.untyped_storage().data_ptr(), size, offset, tuple(tensor.stride())


_ALIGNMENT = 16  # bytes: the largest number, complex128


def _span(tensor):
    """The first byte of a tensor in its storage, and the one past the last."""
    first = tensor.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _short(thing):
    """A thing as text, whatever its own `__repr__` does."""
    try:
        text = repr(thing)
    except Exception:
        text = object.__repr__(thing)
    return text if len(text) < 300 else f"{text[:300]}..."


def _code_of_a_file(constructor, arguments, name):
    return constructor(*arguments).replace(co_filename=name)


class _Unpickler(cloudpickle.pickle.Unpickler):
    def __init__(self, file, tensors):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number):
        return self._tensors[number]
