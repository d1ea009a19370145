"""What is known of a batch before it is there, and batches as tensors."""

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from parallel_keras import keras_internals


def symbol(spec):
    """A symbolic input for the spec of a tensor."""
    return keras.KerasTensor(tuple(spec.shape), keras.backend.standardize_dtype(spec.dtype))


def unpacked(data):
    """A batch as `(x, y, sample_weight)`, as Keras's own steps take it apart."""
    return tuple(keras_internals.unpack(data))


def spec_of(iterator, arrange=unpacked):
    """The batches of an iterator as specs, or None where it does not tell.

    Args:
        iterator: Iterator of a `tf.data.Dataset`.
        arrange: Function that gives a batch the form that is wanted.
    """
    spec = tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, iterator.element_spec
    )
    spec = arrange(spec)
    leaves = [leaf for leaf in tree.flatten(spec) if leaf is not None]
    told = all(isinstance(leaf, tf.TensorSpec) and leaf.shape.rank is not None for leaf in leaves)
    return spec if told else None


def batch_of(data, arrange=unpacked):
    """A batch of an iterator with its arrays as tensors."""
    return arrays(arrange(without_optionals(data)))


def without_optionals(data):
    """A batch of an iterator with `None` where there is nothing: Keras hands over optionals."""
    return tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )


def arrays(data):
    """A batch with its arrays as tensors."""
    return tree.map_structure(_tensor, data)


def _tensor(leaf):
    if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(np.asarray(leaf))
