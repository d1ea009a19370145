"""In which order a model calls its layers, and with which shapes.

Nothing is run: the model is traced with shapes only, the way Keras itself
builds a model. While it is traced, each layer's `call` and
`compute_output_spec` are replaced on the instance by ones that take notes.
"""

import contextlib
import dataclasses
import functools
import math

import keras

from parallel_keras import keras_internals
from parallel_keras.costs.rules import is_known, itemsize


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that was passed. Two with the same key are the same memory."""

    key: int
    shape: tuple
    dtype: str

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def bytes(self):
        return self.size * itemsize(self.dtype)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer or operation that is costed by a rule of its own."""

    operation: object
    inputs: list
    outputs: list
    needs_input_gradient: bool = True


@dataclasses.dataclass
class Line:
    """One line of the plan: a layer as the user wrote it, with the calls inside it."""

    operation: object
    calls: list = dataclasses.field(default_factory=list)
    outputs: list = dataclasses.field(default_factory=list)


def trace(model, batch_size, input_shape=None, open_size=None):
    """The lines of a model in order of execution.

    Args:
        model: Keras model.
        batch_size: Int. Rows of the batch.
        input_shape: Shape of the inputs as for `model.build()`, where the
            model does not know it. Its first entry is ignored.
        open_size: Int or `None`. As what a dimension counts that the model leaves open.

    Returns:
        A list of `Line`.
    """
    inputs = symbolic_inputs(model, batch_size, input_shape, open_size)
    if not all(layer.built for layer in keras_internals.flatten_layers(model)):
        keras_internals.compute_output_spec(functools.partial(model, training=True), inputs)
    recorder = _Recorder()
    with contextlib.ExitStack() as stack:
        recorder.watch_model(model, stack)
        if keras_internals.graph_of(model) is not None:
            keras_internals.run_graph_symbolically(model, inputs)
        else:
            keras_internals.compute_output_spec(functools.partial(model, training=True), inputs)
    return recorder.lines


def symbolic_inputs(model, batch_size, input_shape, open_size=None):
    """KerasTensors of a whole batch, in the structure that the model takes."""
    shapes: object
    known = list(model.inputs) if keras_internals.graph_of(model) is not None else []
    if input_shape is None and known:
        shapes = [tensor.shape for tensor in known]
    elif input_shape is None:
        config = model.get_build_config() if model.built else None
        config = config or {}
        shapes = config.get("input_shape") or config.get("shapes_dict")
        if not shapes:
            raise ValueError(
                f"What the layers of {model.name!r} cost depends on the shape of its inputs, "
                "and the model was not built with one. Pass `input_shape=`, as for "
                "`model.build()`, or call the model on a batch first. "
                f"Received: a {type(model).__name__} with built={model.built}, input_shape=None"
            )
        if isinstance(shapes, dict) and len(shapes) == 1:
            (shapes,) = shapes.values()
    else:
        shapes = input_shape
    dtypes = iter([tensor.dtype for tensor in known])

    def tensor(shape):
        shape = [open_size if size is None else size for size in shape]
        if None in shape[1:]:
            raise ValueError(
                f"The inputs of {model.name!r} have dimensions of unknown size. Pass "
                "`input_shape=` with numbers for all but the batch. "
                f"Received: a shape of {(None, *shape[1:])}"
            )
        dtype = next(dtypes, keras.config.floatx())
        return keras.KerasTensor((batch_size, *shape[1:]), dtype=dtype)

    return keras_internals.map_shapes(tensor, shapes)


def tensors(structure):
    """The tensors in a nested structure, flat."""
    return [
        leaf
        for leaf in keras.tree.flatten(structure)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        if not isinstance(leaf, keras.Variable)
    ]


class _Recorder:
    def __init__(self):
        self.lines = []
        self._line: Line | None = None  # the line that is open
        self._muted = False  # inside a layer whose rule covers what it does inside
        self._active = set()
        self._watched = set()
        self._same = {}  # id of a tensor: the key of the memory that it shows
        self._alive = []  # an id means something only while its object lives

    def watch_model(self, model, stack):
        """Watches a model that is opened: its layers get lines, it gets none."""
        self._replace(model, stack, self._model)
        functional = isinstance(model, keras_internals.Functional)
        for part in model.operations if functional else model.layers:
            if isinstance(part, keras.Model):
                self.watch_model(part, stack)
            elif not isinstance(part, keras.layers.InputLayer):
                self._watch(part, stack)

    def _watch(self, operation, stack):
        inner = []
        if isinstance(operation, keras.Layer) and not is_known(operation):
            inner = keras_internals.flatten_layers(operation, include_self=False)
        self._replace(operation, stack, self._composite if inner else self._leaf)
        for layer in inner:
            sublayers = keras_internals.flatten_layers(layer, include_self=False)
            composite = sublayers and not is_known(layer)
            self._replace(layer, stack, self._composite if composite else self._leaf)

    def _replace(self, operation, stack, around):
        if id(operation) in self._watched:
            return
        self._watched.add(id(operation))
        for name in ("call", "quantized_call", "compute_output_spec"):
            original = getattr(operation, name, None)
            if original is None:
                continue
            # The instance's __dict__, past __setattr__: Keras, torch and
            # TensorFlow all track what is set the ordinary way.
            previous = operation.__dict__.get(name)
            operation.__dict__[name] = self._replacement(operation, original, around)
            stack.callback(_restore, operation, name, previous)

    def _replacement(self, operation, original, around):
        symbolic = original.__name__ == "compute_output_spec"

        @functools.wraps(original)
        def replacement(*args, **kwargs):
            # A layer whose compute_output_spec calls its own call is one call.
            if self._muted or id(operation) in self._active:
                return original(*args, **kwargs)
            self._active.add(id(operation))
            try:
                return around(operation, original, symbolic, args, kwargs)
            finally:
                self._active.discard(id(operation))

        return replacement

    def _leaf(self, operation, original, symbolic, args, kwargs):
        self._muted = True
        try:
            outputs = original(*args, **kwargs)
        finally:
            self._muted = False
        with self._open(operation, outputs) as line:
            self._note(line, operation, (args, kwargs), outputs)
        return outputs

    def _composite(self, operation, original, symbolic, args, kwargs):
        with self._open(operation) as line:
            before = len(line.calls)
            outputs = self._inside(operation, original, symbolic, args, kwargs)
            if len(line.calls) == before:
                self._note(line, operation, (args, kwargs), outputs)
            if line.operation is operation:
                line.outputs = self._tensors(outputs)
        return outputs

    def _model(self, model, original, symbolic, args, kwargs):
        return self._inside(model, original, symbolic, args, kwargs)

    def _inside(self, operation, original, symbolic, args, kwargs):
        """Traces what an opened layer does, whatever shape rule it declares."""
        if not symbolic:
            return original(*args, **kwargs)
        if keras_internals.graph_of(operation) is not None:
            inputs = args[0] if args else kwargs["inputs"]
            return keras_internals.run_graph_symbolically(operation, inputs)
        inner: list = []

        def body(*inner_args, **inner_kwargs):
            self._link(tensors((inner_args, inner_kwargs)), tensors((args, kwargs)))
            # The whole __call__, which casts the inputs and passes `training` on.
            outputs = operation(*inner_args, **{"training": True, **inner_kwargs})
            inner[:] = tensors(outputs)
            return outputs

        # `body` comes back to this object's `call`, which is active: no second line.
        outputs = keras_internals.compute_output_spec(body, *args, **kwargs)
        self._link(tensors(outputs), inner)
        return outputs

    @contextlib.contextmanager
    def _open(self, operation, outputs=None):
        if self._line is not None:
            yield self._line
            return
        self._line = line = Line(operation)
        if outputs is not None:
            line.outputs = self._tensors(outputs)
        self.lines.append(line)
        try:
            yield line
        finally:
            self._line = None

    def _note(self, line, operation, arguments, outputs):
        call = Call(operation, self._tensors(arguments), self._tensors(outputs))
        line.calls.append(call)

    def _tensors(self, structure):
        return [self._tensor(tensor) for tensor in tensors(structure)]

    def _tensor(self, tensor):
        self._alive.append(tensor)
        return Tensor(
            self._same.get(id(tensor), id(tensor)),
            # TensorFlow may not know a size inside a layer: it counts as one.
            tuple(1 if size is None else int(size) for size in tensor.shape),
            keras.backend.standardize_dtype(tensor.dtype),
        )

    def _link(self, new, old):
        for a, b in zip(new, old, strict=False):
            self._alive += [a, b]
            self._same[id(a)] = self._same.get(id(b), id(b))


def _restore(operation, name, previous):
    if previous is None:
        operation.__dict__.pop(name, None)
    else:
        operation.__dict__[name] = previous
