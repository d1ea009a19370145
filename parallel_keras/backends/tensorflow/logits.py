"""What crossentropies are computed from, beside the outputs themselves.

On this backend Keras notes on what softmax and sigmoid return what they were made of, and
computes a crossentropy from that: a probability is never rounded to nought. A copy of an
output, or outputs put together, take it along, and the gradient of an output has two
parts: its own, and that of its logits.
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
        `copy`.
    """
    found = [keras_internals.logits(tensor) for tensor in originals]
    if all(one is not None for one in found):
        keras_internals.set_logits(copy, make(found))
    return copy


def parts(values):
    """Tensors together with their logits.

    Args:
        values: Dict from a key to a tensor or `None`.

    Returns:
        Dict from a `(key, is_logits)` to a tensor, of floating point only.
    """
    found = {}
    for key, tensor in values.items():
        logits = None if tensor is None else keras_internals.logits(tensor)
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
    return keras_internals.logits(values[name]) if is_logits else values[name]


def copied(tensor):
    """A tensor on this device, with the Keras mask and the logits that it has."""
    same = tf.identity(tensor)
    mask = keras_internals.keras_mask(tensor)
    if mask is not None:
        keras_internals.set_keras_mask(same, tf.identity(mask))
    return keep(same, [tensor], lambda found: tf.identity(found[0]))
