"""A model's computation as a list of calls, in the order in which they run."""

import contextlib
import dataclasses
from typing import Any

import keras
from keras.src.backend.common import global_state, stateless_scope
from keras.src.layers.layer import CallContext

from parallel_keras.keras_internals.layers import (
    call_has_training,
    flatten_layers,
    graph_of,
    keras_mask,
    nodes_in_order,
    own_losses,
    set_keras_mask,
)


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer or an operation.

    Args:
        operation: The layer or operation, or the model that is entered.
        arguments: Keras's record of what it was called with.
        inputs: Tuple of the numbers of the values that it takes.
        outputs: Tuple of the numbers of the values that it gives.
        inside: Tuple of the models around it, from the outside in.
        passes_training: Bool. Whether a `training` argument of its own gives way to
            that of the step, as in Keras's functional models.
        enters: Bool. Whether it only hands a nested model its inputs.
        unmasks: Tuple of the numbers of the values from which it may take the Keras mask away:
            of `inputs`, and of those outside of a nested model that are the same tensors.
    """

    operation: Any
    arguments: Any
    inputs: tuple
    outputs: tuple
    inside: tuple = ()
    passes_training: bool = True
    enters: bool = False
    unmasks: tuple = ()

    def __call__(self, values, training):
        """Compute it.

        Args:
            values: Dict from the number of a value to a tensor. Takes the outputs.
            training: Bool.
        """
        # ops/symbolic_arguments.py, 3.15.1
        known = zip(self.arguments.keras_tensors, self.inputs, strict=True)
        args, kwargs = self.arguments.fill_in({id(x): values[n] for x, n in known})
        if self.enters:
            results = _enter(self.operation, *args, **kwargs)
        else:
            takes = getattr(self.operation, "_call_has_training_arg", False)
            if takes and self.passes_training:
                kwargs["training"] = training
            results = keras.tree.flatten(self.operation(*args, **kwargs))
        values.update(zip(self.outputs, results, strict=True))

    @property
    def variables(self):
        """The Keras variables that it is called with. ops/symbolic_arguments.py, 3.15.1."""
        return [x for x in self.arguments._flat_arguments if isinstance(x, keras.Variable)]

    @property
    def tensors(self):
        """The tensors that it is called with whatever the inputs are."""
        found = [x for x in self.arguments._flat_arguments if keras.ops.is_tensor(x)]
        return [x for x in found if not isinstance(x, keras.Variable)]


@dataclasses.dataclass
class Graph:
    """A model as calls that hand values on. A value is known by its number.

    Attributes:
        calls: List of `Call`, each after those that it needs.
        inputs: Tuple of the numbers of the model's inputs, flat.
        outputs: Tuple of the numbers of the model's outputs, flat.
        losses: Tuple of the numbers of what the model's own `call` gave `add_loss`.
        is_masked: Bool. Whether an output has a Keras mask.
        standardize: Function from the inputs as the user passes them to a flat list.
        pack: Function from a flat list of outputs to what the model returns.
    """

    calls: list
    inputs: tuple
    outputs: tuple
    losses: tuple
    is_masked: bool
    standardize: Any
    pack: Any


def graph_of_model(model, inputs, training):
    """A model's `Graph`.

    Functional models and Sequentials have one. The `call` of another is traced with
    symbolic inputs; nested functional models are opened in both.

    Args:
        model: A built Keras model.
        inputs: Symbolic inputs in the structure that the model takes. For a model
            with a graph of its own they are not needed.
        training: Bool. What a `call` is traced with.

    Returns:
        A `Graph`.
    """
    walk = _Walk()
    graph = graph_of(model)
    if graph is not None:
        numbers = walk.values(graph.inputs)
        walk.graph(graph, dict(zip(map(id, graph.inputs), numbers, strict=True)), (model,))
        walk.note_masks()
        outputs = tuple(walk.numbers[id(x)] for x in graph.outputs)
        is_masked = any(keras_mask(x) is not None for x in graph.outputs)
        pack = _packer(graph)
        return Graph(walk.calls, numbers, outputs, (), is_masked, graph._standardize_inputs, pack)
    with _traced(model, training) as losses:
        kwargs = {"training": training} if call_has_training(model) else {}
        results = type(model).call(model, inputs, **kwargs)
        flat = [*keras.tree.flatten(results), *losses]
        function = keras.Function(keras.tree.flatten(inputs), flat)
    numbers = walk.values(function.inputs)
    walk.traced = True
    walk.graph(function, dict(zip(map(id, function.inputs), numbers, strict=True)), (model,))
    walk.note_masks()
    given = tuple(walk.numbers[id(x)] for x in flat)
    count = len(keras.tree.flatten(results))
    return Graph(
        walk.calls,
        numbers,
        given[:count],
        given[count:],
        any(keras_mask(x) is not None for x in flat[:count]),
        keras.tree.flatten,
        lambda leaves: keras.tree.pack_sequence_as(results, leaves),
    )


class _Walk:
    """Lists the calls of a graph and of the graphs inside it."""

    def __init__(self):
        self.calls = []
        self.numbers: dict = {}  # by the id of a symbolic tensor of the graph that is walked
        self.traced = False
        self._next = 0
        self._attentions: list = []  # calls that may take masks away
        self._outside: dict = {}  # from a nested model's input to the same tensor around it
        self._is_masked = False

    def values(self, tensors):
        """Numbers for new values."""
        first, self._next = self._next, self._next + len(tensors)
        return tuple(range(first, self._next))

    def graph(self, graph, numbers, inside):
        before, self.numbers = self.numbers, numbers
        passes_training, self.traced = not self.traced, False
        for node in nodes_in_order(graph):
            if node.is_input:
                continue
            taken = tuple(numbers[id(x)] for x in node.input_tensors)
            inner = graph_of(node.operation)
            if inner is None:
                given = self.values(node.outputs)
                call = Call(node.operation, node.arguments, taken, given, inside, passes_training)
                if _unmasks(node.operation):
                    self._attentions.append(call)
                self.calls.append(call)
            else:
                given = self._open(node, inner, taken, inside)
            numbers.update(zip(map(id, node.outputs), given, strict=True))
            self._is_masked |= any(keras_mask(x) is not None for x in node.outputs)
        if before:
            self.numbers = before

    def note_masks(self):
        """Tell the calls that may take masks away, once all are known, whose these are.

        Where a nested model's layers hand on the mask of what it is given, its own symbolic
        tensors have none. So, where there is any mask in the model, each may have one.
        """
        for call in self._attentions if self._is_masked else ():
            found = list(call.inputs)
            for number in found:  # grows while it is read
                if number in self._outside:
                    found.append(self._outside[number])
            call.unmasks = tuple(dict.fromkeys(found))

    def _open(self, node, inner, taken, inside):
        """The calls of a nested model; returns the numbers of its outputs."""
        entered = self.values(inner.inputs)
        inside = (*inside, node.operation)
        self.calls.append(Call(inner, node.arguments, taken, entered, inside, enters=True))
        if len(entered) == len(taken):
            self._outside.update(zip(entered, taken, strict=True))
        numbers = dict(zip(map(id, inner.inputs), entered, strict=True))
        self.graph(inner, numbers, inside)
        return tuple(numbers[id(x)] for x in inner.outputs)


def _unmasks(operation):
    """Whether an operation may take the masks of its inputs away from the tensors themselves.

    layers/attention/multi_head_attention.py, 3.15.1: `call` sets them to `None`, and whatever is
    given the same tensor afterwards sees none.
    """
    return isinstance(operation, keras.Layer) and any(
        isinstance(layer, keras.layers.MultiHeadAttention) for layer in flatten_layers(operation)
    )


def _enter(graph, inputs, mask=None, **_):
    """What a nested model does with its inputs first. models/functional.py, 3.15.1."""
    inputs = graph._standardize_inputs(inputs)
    flat = keras.tree.flatten(mask) if mask is not None else ()
    for tensor, one in zip(inputs, flat, strict=False):
        if one is not None:
            set_keras_mask(tensor, one)
    return inputs


def _packer(graph):
    """models/functional.py, 3.15.1: a list of one output is that output."""

    def pack(leaves):
        packed = keras.tree.pack_sequence_as(graph._outputs_struct, leaves)
        return packed[0] if isinstance(packed, (list, tuple)) and len(packed) == 1 else packed

    return pack


@contextlib.contextmanager
def _traced(model, training):
    """Call layers on symbolic tensors, and leave no trace of it in them.

    ops/node.py, 3.15.1: each call adds a node to the layers that it joins.
    """
    layers = flatten_layers(model)
    lengths = [(x, len(x._inbound_nodes), len(x._outbound_nodes)) for x in layers]
    losses: list = []
    members = vars(model)
    # Keras's own takes tensors only.
    members["add_loss"] = lambda loss: losses.extend(keras.tree.flatten(loss))
    try:
        with calling(model, training):
            yield losses
    finally:
        del members["add_loss"]
        for layer, inbound, outbound in lengths:
            del layer._inbound_nodes[inbound:]
            del layer._outbound_nodes[outbound:]


@contextlib.contextmanager
def calling(model, training):
    """What layers see around them while a model's `call` runs. layers/layer.py, 3.15.1.

    A layer inside another takes `training` from here, and what is added by
    `add_loss` stays until it is taken.
    """
    before = global_state.get_global_attribute("current_call_ctx")
    context = CallContext(entry_layer=model)
    context.set_value("training", training)
    global_state.set_global_attribute("current_call_ctx", context)
    model._clear_losses()
    try:
        yield
    finally:
        global_state.set_global_attribute("current_call_ctx", before)


def take_losses(numbered):
    """What the last calls of some layers gave `add_loss`, and no more.

    layers/layer.py, 3.15.1.

    Args:
        numbered: Pairs of a number and a layer.

    Returns:
        A dict as `own_losses` gives it.
    """
    found = own_losses(numbered)
    if stateless_scope.in_stateless_scope():
        stateless_scope.get_stateless_scope().losses = []
    for _, layer in numbered:
        layer._losses.clear()
    return found
