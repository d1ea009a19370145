"""FLOPs of the forward pass: one rule per kind of layer.

A multiply-add counts as two. Matrix products and convolutions count with all
their multiply-adds and without their bias and activation, any other kind with
one per element of its output, what only moves elements with none.
"""

import math

from parallel_keras.costs.rules import VIEWS, attention_sizes, directions, kind, per_step, units


def flops(call):
    """The FLOPs of one forward call (see `cost_trace.Call`)."""
    rule = FLOPS.get(kind(call.operation), _one_per_output)
    return int(rule(call))


def _one_per_output(call):
    return sum(tensor.size for tensor in call.outputs)


def _none(call):
    return 0


def _dense_flops(call):
    return 2 * call.outputs[0].size * call.inputs[0].shape[-1]


def _einsum_flops(call):
    layer = call.operation
    operands, result = layer.equation.replace(" ", "").replace("...", "").split("->")
    letters = operands.split(",")[1]
    summed = [s for s, n in zip(letters, layer.kernel.shape, strict=False) if s not in result]
    sizes = dict(zip(letters, layer.kernel.shape, strict=False))
    return 2 * call.outputs[0].size * math.prod(sizes[letter] for letter in summed)


def _places(call, tensor):
    """Places of an image that a kernel is applied at, over the whole batch."""
    first = call.operation.data_format == "channels_first"
    return tensor.size // tensor.shape[1 if first else -1]


def _kernel_sizes(layer):
    return sum(math.prod(weight.shape) for weight in layer.weights if len(weight.shape) > 1)


def _convolution_flops(call):
    transposed = kind(call.operation).endswith("Transpose")
    places = _places(call, (call.inputs if transposed else call.outputs)[0])
    return 2 * places * _kernel_sizes(call.operation)


def _pooling_flops(call):
    return call.outputs[0].size * math.prod(call.operation.pool_size)


def _attention_flops(call):
    sizes = attention_sizes(call)
    queries = call.inputs[0].size // call.inputs[0].shape[-1]
    rows = call.inputs[0].shape[0] * sizes["keys"]
    total = 2 * sizes["scores"] * (sizes["key_dim"] + sizes["value_dim"])
    for weight in call.operation.weights:
        if len(weight.shape) > 2:
            reads_keys = "key" in weight.path.split("/")[-2:] or "value" in weight.path.split("/")
            total += 2 * math.prod(weight.shape) * (rows if reads_keys else queries)
    return total


def _dot_attention_flops(call):
    queries, keys = call.inputs[0], call.inputs[1]
    return 4 * queries.size * keys.shape[-2]


def _recurrent_flops(call):
    batch, steps = call.inputs[0].shape[:2]
    places = 1
    if kind(call.operation).startswith("ConvLSTM"):
        output = call.outputs[0]
        channels = output.shape[-1]
        places = units(call.operation.cell, call) // channels
    return 2 * batch * steps * places * _kernel_sizes(call.operation)


def _bidirectional_flops(call):
    return sum(flops(part) for part in directions(call))


def _time_distributed_flops(call):
    return flops(per_step(call))


FLOPS = {}
for _names, _rule in (
    ("Dense", _dense_flops),
    ("EinsumDense", _einsum_flops),
    ("Conv1D Conv2D Conv3D DepthwiseConv1D DepthwiseConv2D", _convolution_flops),
    ("Conv1DTranspose Conv2DTranspose Conv3DTranspose", _convolution_flops),
    ("SeparableConv1D SeparableConv2D", _convolution_flops),
    ("MaxPooling1D MaxPooling2D MaxPooling3D", _pooling_flops),
    ("AveragePooling1D AveragePooling2D AveragePooling3D", _pooling_flops),
    ("MultiHeadAttention GroupedQueryAttention GroupQueryAttention", _attention_flops),
    ("Attention", _dot_attention_flops),
    ("RNN LSTM GRU SimpleRNN ConvLSTM1D ConvLSTM2D ConvLSTM3D", _recurrent_flops),
    ("Bidirectional", _bidirectional_flops),
    ("TimeDistributed", _time_distributed_flops),
    ("Embedding InputLayer Cast RepeatVector Concatenate Stack", _none),
    (" ".join(sorted(VIEWS)), _none),
):
    FLOPS.update(dict.fromkeys(_names.split(), _rule))
