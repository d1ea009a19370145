"""What each layer of a Keras model costs, found without running it."""

import dataclasses

import keras

from parallel_keras import backends, keras_internals
from parallel_keras.costs import rules as cost_rules, trace as cost_trace
from parallel_keras.costs.flops import flops
from parallel_keras.costs.slots import slot_bytes, variable_bytes
from parallel_keras.plan import LayerCost

symbolic_inputs = cost_trace.symbolic_inputs

__all__ = ["LayerCost", "layer_costs", "operations_and_costs", "symbolic_inputs"]


def layer_costs(model, batch_size, input_shape=None):
    """What each layer of a model costs, in the order in which the layers run.

    Nested models are opened, and a bare operation such as `x + y` between
    layers is a line, too. A layer with layers inside (`MultiHeadAttention`,
    `Bidirectional`, a user's own block) is one line. A layer that is called
    several times has a line per call; its variables stand at the first.
    Variables that no layer of the model called are added at the end.

    Activations are what the backward pass needs of the forward pass: inputs
    that a layer's weights are derived from, outputs that an activation
    function is derived from, masks of dropouts, states of each step of a
    recurrent layer, queries, keys, values of an attention. Each tensor counts
    once, at the layer that made it; the batch itself at the first layer that
    keeps it. Nothing counts below the first layer that trains. The rules are
    those of Keras on torch (`rules.KEPT`). What a user's own `call`
    computes between its layers is not seen, and neither are the loss, the
    casts of recurrent layers in mixed precision, the gradients of activations, the
    workspace of kernels and, on TensorFlow, what the graph optimizer recomputes or
    fuses.

    Args:
        model: Keras model, compiled or not.
        batch_size: Int. Rows of the batch that activations and FLOPs are for.
        input_shape: Shape of the inputs as for `model.build()`, for a model
            that was not built with one. The batch's entry is ignored. The
            model is built where it was not.

    Returns:
        A list of `LayerCost`.

    Raises:
        ValueError: If the shape of the inputs is unknown.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="head")])
    >>> model.compile("adam", "mse")
    >>> cost, = layer_costs(model, batch_size=8)
    >>> cost.kind, cost.parameters, cost.slots, cost.flops, cost.output_shape
    ('Dense', 60, 120, 192, (8, 3))
    """
    return [cost for _, cost in operations_and_costs(model, batch_size, input_shape)]


def operations_and_costs(model, batch_size, input_shape=None, open_size=None):
    """Pairs of a layer or operation of a model and its `LayerCost`; see `layer_costs`.

    Args:
        model, batch_size, input_shape: As there.
        open_size: Int or `None`. As what a dimension counts that the model leaves open, such
            as the length of its sequences.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(
            f"`batch_size` is an integer of one or more. Received: batch_size={batch_size!r}"
        )
    with backends.room("step_scope").traced(model):
        lines = cost_trace.trace(model, batch_size, input_shape, open_size)
    trained = model.trainable_variables
    slots = slot_bytes(getattr(model, "optimizer", None), trained)
    slots = {id(variable): size for variable, size in zip(trained, slots, strict=True)}
    activations = _activations(lines, set(slots))

    lines = lines + _never_called(model, lines)
    seen: set = set()
    pairs = []
    for index, line in enumerate(lines):
        weights = [w for w in getattr(line.operation, "weights", []) if id(w) not in seen]
        seen.update(id(weight) for weight in weights)
        training = [weight for weight in weights if id(weight) in slots]
        shapes = tuple(tensor.shape for tensor in line.outputs)
        cost = LayerCost(
            path=getattr(line.operation, "path", None) or line.operation.name,
            kind=type(line.operation).__name__,
            parameters=sum(variable_bytes(weight) for weight in weights),
            gradients=sum(variable_bytes(weight) for weight in training),
            slots=sum(slots[id(weight)] for weight in training),
            activations=activations[index] if index < len(activations) else 0,
            flops=sum(flops(call) for call in line.calls),
            output_shape=shapes[0] if len(shapes) == 1 else shapes,
        )
        pairs.append((line.operation, cost))
    return pairs


def _never_called(model, lines):
    """Lines for weights that no call reached: unused layers, and a model's own."""
    reached = {id(w) for line in lines for w in getattr(line.operation, "weights", [])}
    missing = []
    # Models last, so that each layer's own variables stand at the layer.
    layers = keras_internals.flatten_layers(model)
    for layer in sorted(layers, key=lambda layer: isinstance(layer, keras.Model)):
        if any(id(weight) not in reached for weight in layer.weights):
            reached.update(id(weight) for weight in layer.weights)
            missing.append(cost_trace.Line(layer))
    return missing


class _Memory:
    """Which tensors of a model are the same memory, and in which order they lie."""

    def __init__(self):
        self._shown = {}  # key of a view: the key of what it shows
        self._channels_first = set()
        self._images = keras.config.backend() == "torch"

    def pass_through(self, call):
        """The floating-point tensors that a call gets and gives, as pairs of key and tensor."""
        name = cost_rules.kind(call.operation)
        inputs = [
            (self._shown.get(x.key, x.key), x)
            for x in call.inputs
            if x.dtype.startswith(("float", "bfloat"))
        ]
        if not inputs or not call.outputs:
            return inputs, [(y.key, y) for y in call.outputs]
        (key, x), y = inputs[0], call.outputs[0]
        moved = key in self._channels_first
        if name in cost_rules.VIEWS:
            # Flattening an image that lies channels first is a copy.
            flattened = moved and len(y.shape) < len(x.shape) and min(x.shape[1:]) > 1
            if not flattened:
                self._shown[y.key] = key
        elif self._images and self._leaves_moved(name, call, moved, x, y):
            self._channels_first.add(y.key)
        return inputs, [(self._shown.get(y.key, y.key), y) for y in call.outputs]

    def copies(self, call, key):
        """Whether a layer of images keeps its input as a copy in another order."""
        name = cost_rules.kind(call.operation)
        if not self._images or getattr(call.operation, "data_format", "") != "channels_last":
            return False
        if cost_rules.MAY_COPY.match(name):
            return key not in self._channels_first
        return bool(cost_rules.ALWAYS_COPIES.match(name))

    def _leaves_moved(self, name, call, moved, x, y):
        if getattr(call.operation, "data_format", "") == "channels_last":
            if cost_rules.CHANNELS_FIRST.match(name):
                return True
            if cost_rules.ALWAYS_COPIES.match(name):
                return False
        # Elementwise layers keep the order; a matrix product does not.
        return moved and x.shape == y.shape and name not in ("Dense", "EinsumDense")


def _cast_bytes(operation, tensor):
    """The bytes of a floating-point tensor after a layer has cast it."""
    keeps_both = isinstance(operation, (keras.layers.RNN, keras.layers.Bidirectional))
    if keeps_both or not getattr(operation, "autocast", False):
        return tensor.bytes
    return tensor.size * cost_rules.itemsize(operation.compute_dtype)


def _activations(lines, trained):
    """Bytes kept for the backward pass, per line."""
    totals = [0.0] * len(lines)
    memory = _Memory()
    maker: dict = {}  # key of a tensor: the line that made it
    live: set = set()  # keys of the tensors that a gradient flows to
    counted: set = set()
    for index, line in enumerate(lines):
        for call in line.calls:
            trains = any(id(w) in trained for w in getattr(call.operation, "weights", []))
            inputs, outputs = memory.pass_through(call)
            for key, _ in outputs:
                maker.setdefault(key, index)
            flows = any(key in live for key, _ in inputs)
            if not trains and not flows:
                continue
            call = dataclasses.replace(call, needs_input_gradient=flows)
            kept = cost_rules.kept(call, trains)
            totals[index] += kept.extra
            for key, tensor in inputs * kept.inputs:
                if memory.copies(call, key):
                    totals[index] += tensor.bytes
                elif key not in counted:
                    counted.add(key)
                    # A batch is kept in the type in which the layer computes.
                    size = tensor.bytes if key in maker else _cast_bytes(call.operation, tensor)
                    totals[maker.get(key, index)] += size
            live.update(key for key, _ in outputs)
            for key, tensor in outputs * kept.outputs:
                if key not in counted:
                    counted.add(key)
                    totals[index] += tensor.bytes
    return [round(total) for total in totals]
