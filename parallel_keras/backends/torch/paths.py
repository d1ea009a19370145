"""The way to an object inside of a model, for messages.

What cannot be pickled is often not in the model but in what the model's functions
and classes refer to, which cloudpickle sends along where they cannot be imported.
"""

import types

import keras
import torch

from parallel_keras import keras_internals, references
from parallel_keras.backends.torch.importing import is_importable
from parallel_keras.backends.torch.reducers import BOOKKEEPING


def path_to(culprit, thing):
    """The shortest way from a thing to an object in it, as an expression.

    Args:
        culprit: The object to find, by identity.
        thing: Where to start, usually a Keras model.

    Returns:
        A string such as `"Sequential.layers[2].handle"`.
    """
    for part, way in references.walk(thing, _references):
        if part is culprit:
            return type(thing).__name__ + references.expression(way)
    return "an object that it refers to"


def _references(thing):
    if isinstance(thing, torch.Tensor):
        return []
    if isinstance(thing, (types.FunctionType, type)) and is_importable(thing):
        return []
    found = references.of(thing)
    if isinstance(thing, torch.nn.Module):
        for store in ("_buffers", "_parameters", "_modules"):  # attributes, to who wrote them
            kept = vars(thing).get(store, {}).items()
            found = [*((references.ATTRIBUTE, key, value) for key, value in kept), *found]
    if isinstance(thing, keras.Model):
        found = [*((".layers[{}]", n, layer) for n, layer in enumerate(thing.layers)), *found]
    if isinstance(thing, keras_internals.KerasSaveable):
        found = [one for one in found if one[1] not in BOOKKEEPING]
    return found
