"""Carrying a live Keras model into another process.

Pickling a Keras model goes through its saved form, which fails for classes of the
user's script and for those without `get_config`, and leaves state behind. Here the
objects go as they are, by their `__dict__`; classes and functions of the script go
by value (cloudpickle). Tensors are taken out and travel by the process group.
"""

import io
import sys
import threading
import types

import cloudpickle
import keras
import torch
from keras import tree

from parallel_keras import keras_internals
from parallel_keras.backends.torch.reducers import BOOKKEEPING, finish_loading, reduce_keras
from parallel_keras.errors import UnsupportedError

# A functional graph is pickled along its edges, as deep as it is long.
_STACK_BYTES = 512 * 1024 * 1024
_RECURSION = 1_000_000


def split(thing):
    """A thing as bytes without numbers, and the tensors that hold the numbers.

    Args:
        thing: Usually a Keras model.

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
            "The model cannot be sent to the worker processes, because of "
            f"{_path_to(culprit, thing)} = {culprit!r}: {error}. Make such an object where it is "
            "used (in `call` or in a function), or keep it outside of the model. "
            f"Received: an object of type {type(culprit).__name__}"
        ) from error


def join(skeleton, tensors):
    """The inverse of `split`, in another process."""
    unpickler = _Unpickler(io.BytesIO(skeleton), tensors)
    with finish_loading():
        return unpickler.load()


def specs(tensors):
    """What `empty` needs to make tensors like these."""
    return [
        (t.dtype, tuple(t.shape), isinstance(t, torch.nn.Parameter), t.requires_grad)
        for t in tensors
    ]


def empty(descriptions, device):
    """Tensors like those that `specs` described, with no numbers in them yet."""
    tensors = []
    for dtype, shape, is_parameter, requires_grad in descriptions:
        tensor = torch.empty(shape, dtype=dtype, device=device)
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
        flat = plain.contiguous().view(-1).view(torch.uint8)
        group.broadcast(flat, 0).wait()
        if not plain.is_contiguous():
            plain.copy_(flat.view(plain.dtype).view(plain.shape))


def variables_of(model):
    """The model's and its optimizer's variables, in one order on all ranks.

    Without those of metrics, which are combined and not made equal.
    """
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    variables = list(model.variables)
    if model.compiled and model.optimizer is not None:
        variables += keras_internals.optimizer_variables(model.optimizer)
    unique = {id(v): v for v in variables if id(v) not in metrics}
    return list(unique.values())


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
        self.last = None  # where it stands, and after an error: where it stopped

    def split(self, thing):
        self.dump(thing)
        return self._file.getvalue(), self._tensors

    def persistent_id(self, obj):
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self._tensors)
            self._tensors.append(obj)
        return self._numbers[id(obj)]

    def reducer_override(self, obj):
        self.last = obj
        if isinstance(obj, types.CodeType):
            # cloudpickle forgets the file, which a traceback of a worker shows.
            constructor, arguments = cloudpickle.cloudpickle._code_reduce(obj)
            return _code_of_a_file, (constructor, arguments, obj.co_filename)
        reduced = reduce_keras(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def _code_of_a_file(constructor, arguments, name):
    return constructor(*arguments).replace(co_filename=name)


class _Unpickler(cloudpickle.pickle.Unpickler):
    def __init__(self, file, tensors):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number):
        return self._tensors[number]


def _path_to(culprit, thing):
    """The shortest way from a thing to an object in it, as an expression."""
    waiting, seen = [(type(thing).__name__, thing)], {id(thing)}
    for path, part in waiting:  # grows as it goes: breadth first
        if part is culprit:
            return path
        for name, inner in _parts(part):
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.append((path + name, inner))
    return "an object that it refers to"


def _parts(thing):
    if isinstance(thing, dict):
        return [(f"[{key!r}]", value) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, set)):
        return [(f"[{number}]", value) for number, value in enumerate(thing)]
    if isinstance(thing, keras.Model):
        layers = [(f".layers[{n}]", layer) for n, layer in enumerate(thing.layers)]
    else:
        layers = []
    if isinstance(thing, type):
        return []
    closure = getattr(thing, "__closure__", None) or ()
    cells = [(f" (closure {number})", cell.cell_contents) for number, cell in enumerate(closure)]
    members = getattr(thing, "__dict__", {}).items()
    return layers + cells + [(f".{key}", value) for key, value in members if key not in BOOKKEEPING]
