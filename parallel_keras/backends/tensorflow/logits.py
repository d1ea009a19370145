"""What crossentropies are computed from, beside the outputs themselves.

On this backend Keras notes on what its softmax and sigmoid return what they were made of,
and computes a crossentropy from that: a probability is never rounded to nought. On what
TensorFlow's own return nothing is noted. There it looks at the operation, and a crossentropy
asks for the one that goes with it. A copy of an output, or outputs put together, take
either along, and the gradient of an output has two parts: its own, and that of its logits.
"""

import tensorflow as tf

from parallel_keras import keras_internals


def keep(copy, originals, make):
    """Give a tensor that was made of others the logits that go with it.

    Args:
        copy: The tensor.
        originals: List of the tensors.
        make: Function that makes of a list of logits what was made of the tensors.

    Returns:
        `copy`, or the same computed by the operation that made the originals.
    """
    found = [_logits(tensor) for tensor in originals]
    if any(one is None for one in found):
        return copy
    makers = {_maker(tensor) for tensor in originals}
    if makers == {None}:
        keras_internals.set_logits(copy, make(found))
        return copy
    return _MAKERS[makers.pop()](make(found)) if len(makers) == 1 else copy


# By the type of the operation. backend/tensorflow/nn.py, 3.15.1: _get_logits.
_MAKERS = {
    "Softmax": lambda logits: tf.raw_ops.Softmax(logits=logits),
    "Sigmoid": lambda logits: tf.raw_ops.Sigmoid(x=logits),
}


def _maker(tensor):
    """The type of the operation by which Keras knows a tensor, `None` where it has a note."""
    is_noted = keras_internals.logits(tensor) is not None
    if is_noted or not tf.is_symbolic_tensor(tensor) or tensor.op.type not in _MAKERS:
        return None
    return tensor.op.type


def _logits(tensor):
    return keras_internals.logits(tensor) if _maker(tensor) is None else tensor.op.inputs[0]


def parts(values):
    """Tensors together with their logits.

    Args:
        values: Dict from a key to a tensor or `None`.

    Returns:
        Dict from a `(key, is_logits)` to a tensor, of floating point only.
    """
    found = {}
    for key, tensor in values.items():
        logits = None if tensor is None else _logits(tensor)
        for is_logits, one in ((False, tensor), (True, logits)):
            if one is not None and one.dtype.is_floating:
                found[key, is_logits] = one
    return found


def parts_of(tensors):
    """The same as a list, for a list of tensors."""
    return list(parts(dict(enumerate(tensors))).values())


def part(values, key):
    """The tensor that a key of `parts` stands for."""
    name, is_logits = key
    return _logits(values[name]) if is_logits else values[name]


def copied(tensor):
    """A tensor on this device, with the Keras mask and the logits that it has."""
    same = keep(tf.identity(tensor), [tensor], lambda found: tf.identity(found[0]))
    mask = keras_internals.keras_mask(tensor)
    if mask is not None:
        keras_internals.set_keras_mask(same, tf.identity(mask))
    return same
