"""What a layer keeps for the backward pass: one rule per kind.

The table `KEPT` says what autograd saves in Keras 3.15 on torch, read off with
`torch.autograd.graph.saved_tensors_hooks`. TensorFlow keeps much the same.
A rule gets a call (see `cost_trace`) and returns `Kept`. A kind that is not
here, and has no layers inside, is taken to keep what goes in and what comes out.
"""

import dataclasses
import math
import re

INDEX = 8  # bytes of an int64, what torch keeps indices in


@dataclasses.dataclass(frozen=True)
class Kept:
    """What one call keeps: its inputs, its outputs, and bytes of its own."""

    inputs: bool = False
    outputs: bool = False
    extra: float = 0


def itemsize(dtype):
    """Bytes of one element, from the name of a dtype.

    >>> [itemsize(dtype) for dtype in ("float32", "bfloat16", "float8_e4m3fn", "bool")]
    [4, 2, 1, 1]
    """
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1


def kind(operation):
    """The class of Keras that an operation is of, also of a user's subclass of one."""
    for base in type(operation).__mro__:
        if base.__module__.startswith("keras."):
            return base.__name__
    return type(operation).__name__


def is_known(operation):
    """Whether a rule covers a layer with all that it has inside."""
    return kind(operation) in KEPT


def kept(call, trains):
    """What a call keeps for the backward pass.

    Args:
        call: `Call`.
        trains: Bool. Whether a weight of the layer is trained.
    """
    rule = KEPT.get(kind(call.operation), _everything)
    return rule(call, trains) if callable(rule) else rule


INPUTS, OUTPUTS, NOTHING = Kept(inputs=True), Kept(outputs=True), Kept()

# The derivative of these is computed from the result, of others from the
# argument; these few keep one more tensor.
FROM_RESULT = {
    *("relu", "sigmoid", "tanh", "softmax", "log_softmax", "exponential", "sparsemax"),
}
TWO_TENSORS = {"mish", "softsign", "hard_silu", "hard_swish", "hard_tanh", "squareplus"}


def _activation(function, output, in_place_of_input=False):
    """What an activation function keeps. Its argument is nobody else's tensor, inside a layer."""
    name = getattr(function, "__name__", type(function).__name__).lower()
    if function is None or name == "linear":
        return NOTHING
    if name in FROM_RESULT:
        return OUTPUTS
    copies = 2 if name in TWO_TENSORS else 1
    if in_place_of_input:
        return Kept(inputs=True, extra=(copies - 1) * output.bytes)
    return Kept(extra=copies * output.bytes)


def _everything(call, trains):
    return Kept(inputs=True, outputs=True)


def _weighted(call, trains, extra=0, kernel_copies=0):
    """Dense and convolutions: the input, where the kernel is trained, and the activation's part."""
    layer = call.operation
    part = _activation(getattr(layer, "activation", None), call.outputs[0])
    # A cast kernel is kept for the gradient of the inputs.
    casts = layer.compute_dtype != layer.variable_dtype and call.needs_input_gradient
    if casts or kernel_copies:  # a kernel in other than its own dtype or order is a copy
        kernels = sum(math.prod(w.shape) for w in layer.weights if len(w.shape) > 1)
        extra += kernels * itemsize(layer.compute_dtype)
    return Kept(inputs=trains, outputs=part.outputs, extra=part.extra + extra)


def _dense(call, trains):
    return _weighted(call, trains)


def _convolution(call, trains):
    # Kernels are (height, width, in, out) in Keras and the other way round in torch.
    return _weighted(call, trains, kernel_copies=len(call.inputs[0].shape) > 3)


def _separable(call, trains):
    between = math.prod(call.outputs[0].shape[:-1]) * call.inputs[0].shape[-1]
    if getattr(call.operation, "data_format", "") == "channels_first":
        between = call.outputs[0].size // call.outputs[0].shape[1] * call.inputs[0].shape[1]
    between *= getattr(call.operation, "depth_multiplier", 1)
    size = itemsize(call.inputs[0].dtype)
    return _weighted(call, trains, extra=between * size, kernel_copies=1)


def _batch_normalization(call, trains):
    x = call.inputs[0]
    if not trains:  # frozen: it normalizes by its moving statistics
        return Kept(extra=x.bytes)
    if itemsize(x.dtype) < 4:  # statistics are taken in float32: two copies of the input
        return Kept(extra=2 * 4 * x.size)
    return Kept(inputs=True, extra=x.bytes)


def _layer_normalization(call, trains):
    x = call.inputs[0]
    return Kept(inputs=True, extra=2 * 4 * x.size / x.shape[-1])


def _rms_normalization(call, trains):
    x = call.inputs[0]
    return Kept(inputs=True, extra=x.bytes + 4 * x.size / x.shape[-1])


def _max_pooling(call, trains):
    return Kept(inputs=True, extra=INDEX * call.outputs[0].size)


def _dropout(call, trains):
    # The mask is a factor, in the dtype of the data.
    return Kept(extra=call.outputs[0].bytes if getattr(call.operation, "rate", 1) else 0)


def _embedding(call, trains):
    return Kept(extra=INDEX * call.inputs[0].size if trains else 0)


def _activation_layer(call, trains):
    function = getattr(call.operation, "activation", None)
    return _activation(function, call.outputs[0], in_place_of_input=True)


def _product(call, trains):
    # A factor is kept for the other one's derivative.
    return INPUTS if len(call.inputs) > 1 else NOTHING


def _attention(call, trains):
    """Query, key, value, what is between softmax and values, and the heads put together."""
    layer, sizes = call.operation, attention_sizes(call)
    size = itemsize(call.outputs[0].dtype)
    query, key, value, scores, result = (sizes[n] for n in ("q", "k", "v", "scores", "result"))
    extra = (query + key + value + result) * size
    fused = len(call.outputs) == 1 and sizes["key_dim"] == sizes["value_dim"]
    if getattr(layer, "_dropout", getattr(layer, "dropout", 0)):
        extra += 3 * scores * size  # after softmax, the mask, and after dropout
    elif fused:
        extra += result * size + 4 * scores / sizes["keys"]  # one logarithm of a sum a row
    else:
        extra += scores * size
    if layer.compute_dtype != layer.variable_dtype:
        extra += sum(math.prod(w.shape) for w in layer.weights if len(w.shape) > 1) * size
    return Kept(inputs=trains, extra=extra)


def attention_sizes(call):
    """Elements of the tensors inside MultiHeadAttention or GroupQueryAttention."""
    layer = call.operation
    batch, queries = call.inputs[0].shape[0], math.prod(call.inputs[0].shape[1:-1])
    # The second tensor, where there is one of the same rank, is the value: masks are integers.
    others = [x for x in call.inputs[1:] if x.dtype.startswith(("float", "bfloat"))]
    keys = math.prod((others or call.inputs)[0].shape[1:-1])
    if hasattr(layer, "num_query_heads"):
        heads, key_dim, value_dim = layer.num_query_heads, layer.head_dim, layer.head_dim
    else:
        heads, key_dim, value_dim = layer.num_heads, layer.key_dim, layer.value_dim
    rows = batch * heads
    return {
        "q": rows * queries * key_dim,
        "k": rows * keys * key_dim,
        "v": rows * keys * value_dim,
        "scores": rows * queries * keys,
        "result": rows * queries * value_dim,
        "keys": keys,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }


def _dot_attention(call, trains):
    queries, keys = call.inputs[0], call.inputs[1]
    scores = math.prod(queries.shape[:-1]) * keys.shape[-2]
    return Kept(inputs=True, extra=scores * itemsize(queries.dtype))


# Tensors of the size of the state that one step of a cell keeps.
STATES_PER_STEP = {"LSTMCell": 7, "GRUCell": 8, "SimpleRNNCell": 1, "ConvLSTMCell": 12}


def _recurrent(call, trains):
    layer, x = call.operation, call.inputs[0]
    cells = getattr(layer.cell, "cells", [layer.cell])
    batch, steps = x.shape[:2]
    size = itemsize(call.outputs[0].dtype)
    extra = 0
    for cell in cells:
        state = batch * units(cell, call)
        extra += size * steps * state * STATES_PER_STEP.get(kind(cell), 8)
        if getattr(cell, "dropout", 0):  # the masked input, once per gate
            extra += 5 * x.bytes
        if getattr(cell, "recurrent_dropout", 0):
            extra += 5 * size * steps * state
        if kind(cell) == "ConvLSTMCell":  # the inputs of its four convolutions
            extra += 4 * x.bytes
    return Kept(inputs=True, extra=extra)


def units(cell, call):
    """Elements of the state of a recurrent cell, for one row."""
    if hasattr(cell, "units"):
        return cell.units
    state = getattr(cell, "state_size", None)
    if isinstance(state, int):
        return state
    # ConvLSTM: its state has the size of one step's output.
    output, layer = call.outputs[0], call.operation
    steps = output.shape[1] if layer.return_sequences else 1
    return output.size // (output.shape[0] * steps)


def _bidirectional(call, trains):
    parts = [kept(part, trains) for part in directions(call)]
    # The second direction reads a reversed copy of the input.
    copy = call.inputs[0].bytes if call.inputs else 0
    return Kept(inputs=True, extra=copy + sum(part.extra for part in parts))


def directions(call):
    """The calls of the two layers that Bidirectional makes of one."""
    layer = call.operation
    return [
        dataclasses.replace(call, operation=part)
        for part in (layer.forward_layer, layer.backward_layer)
    ]


def _time_distributed(call, trains):
    inner = per_step(call)
    if not is_known(inner.operation):
        return _everything(call, trains)
    part = kept(inner, trains)
    # The results of the steps are stacked into a new tensor.
    own = call.outputs[0].bytes if part.outputs else 0
    return Kept(inputs=part.inputs, extra=part.extra + own)


def per_step(call):
    """The call of the layer inside TimeDistributed, with the steps as rows."""

    def merged(tensor):
        shape = tensor.shape
        return dataclasses.replace(tensor, shape=(shape[0] * shape[1], *shape[2:]))

    return dataclasses.replace(
        call,
        operation=call.operation.layer,
        inputs=[merged(x) for x in call.inputs if len(x.shape) > 2],
        outputs=[merged(x) for x in call.outputs],
    )


KEPT = {}
for _names, _rule in (
    ("Dense EinsumDense", _dense),
    ("Conv1D Conv2D Conv3D DepthwiseConv1D DepthwiseConv2D", _convolution),
    ("Conv1DTranspose Conv2DTranspose Conv3DTranspose", _dense),
    ("SeparableConv1D SeparableConv2D", _separable),
    ("BatchNormalization", _batch_normalization),
    ("LayerNormalization GroupNormalization UnitNormalization", _layer_normalization),
    ("RMSNormalization", _rms_normalization),
    ("MaxPooling1D MaxPooling2D MaxPooling3D MaxPool", _max_pooling),
    ("AveragePooling1D AveragePooling2D AveragePooling3D AveragePool", INPUTS),
    ("GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D", NOTHING),
    ("Dropout GaussianDropout AlphaDropout", _dropout),
    ("SpatialDropout1D SpatialDropout2D SpatialDropout3D GaussianNoise", NOTHING),
    ("Embedding", _embedding),
    ("Activation", _activation_layer),
    ("ReLU Softmax", OUTPUTS),
    ("LeakyReLU ELU", INPUTS),
    ("MultiHeadAttention GroupedQueryAttention GroupQueryAttention", _attention),
    ("Attention", _dot_attention),
    ("RNN LSTM GRU SimpleRNN ConvLSTM1D ConvLSTM2D ConvLSTM3D", _recurrent),
    ("Bidirectional", _bidirectional),
    ("TimeDistributed", _time_distributed),
    # Joining: sums keep nothing, products and choices keep what they are given.
    ("Add Subtract Average Concatenate Concat Stack Negative", NOTHING),
    ("Multiply Divide TrueDivide Matmul Dot Einsum", _product),
    ("Maximum Minimum GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D", INPUTS),
    # Moving elements about.
    ("Flatten Reshape Permute RepeatVector Identity InputLayer Masking", NOTHING),
    ("Cropping1D Cropping2D Cropping3D UpSampling1D UpSampling2D UpSampling3D", NOTHING),
    ("ZeroPadding1D ZeroPadding2D ZeroPadding3D Rescaling Normalization", NOTHING),
    # Bare operations.
    ("Transpose ExpandDims Squeeze GetItem Swapaxes Moveaxis Ravel Cast Pad Tile", NOTHING),
    ("Repeat Roll Flip Split Take Slice BroadcastTo Mean Sum StopGradient", NOTHING),
    ("Relu Sigmoid Tanh Exp LogSoftmax Sqrt Rsqrt", OUTPUTS),
    ("Gelu Silu Elu Selu LeakyRelu Softplus Relu6 Square Power Log Abs Absolute", INPUTS),
    ("Sin Cos Max Min Clip Var Std", INPUTS),
):
    KEPT.update(dict.fromkeys(_names.split(), _rule))

# The result shows the memory of the input.
VIEWS = {
    *("Flatten", "Reshape", "Permute", "Identity", "Masking", "InputLayer", "Transpose"),
    *("ExpandDims", "Squeeze", "GetItem", "Swapaxes", "Moveaxis", "Ravel", "StopGradient"),
}
# torch computes images channels first, whatever the shapes that Keras shows.
# These copy what they are given into an order of their own ...
ALWAYS_COPIES = re.compile(r"^(Separable|Depthwise)?Conv(2|3)D$|^(Separable|Depthwise)Conv1D$")
# ... these unless it is in torch's order already, and ...
MAY_COPY = re.compile(r"^Conv1D$|^Conv\dDTranspose$|^(Max|Average)Pooling\dD$")
# ... these leave their result in torch's order. What follows keeps it, up to the next copy.
CHANNELS_FIRST = re.compile(r"^Conv[13]D$|^Conv\dDTranspose$|^(Max|Average)Pooling\dD$")
