"""Layers, operations and the graphs that they make."""

import contextlib
import functools

import keras
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state, masking
from keras.src.models.functional import Functional

from parallel_keras.keras_internals.patching import patch_once


def flatten_layers(model, include_self=True):
    """A model and all its layers, nested ones too. Layer._flatten_layers, 3.15.1."""
    return list(model._flatten_layers(include_self=include_self, recursive=True))


def own_losses(numbered):
    """What the last calls of some layers gave `add_loss`. layers/layer.py, 3.15.1.

    Args:
        numbered: Pairs of a number and a layer.

    Returns:
        A dict from keys to tensors. A key is the layer's number and, as it may add several,
        the number of the loss.
    """
    return {
        (number, position): loss
        for number, layer in numbered
        for position, loss in enumerate(layer._get_own_losses())
    }


def direct_layers(layer):
    """The layers inside one, one level deep, in the order of their making. layer.py, 3.15.1."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def nodes_in_order(model):
    """The nodes of a functional model in the order in which they run. function.py, 3.15.1."""
    depths = sorted(model._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in model._nodes_by_depth[depth] if node.operation]


def watch_operations(made, called):
    """Have functions called with each operation that is made, or called in a graph.

    ops/operation.py and layers/layer.py, 3.15.1: `__new__` makes every layer and
    every operation, `symbolic_call` records it in a graph. Nothing changes before
    this is called.
    """
    cls = keras.Operation
    if hasattr(cls, "_parallel_keras_watched"):
        return
    cls._parallel_keras_watched = True
    new = cls.__new__

    @functools.wraps(new)
    def watched_new(cls, *args, **kwargs):
        instance = new(cls, *args, **kwargs)
        made(instance)
        return instance

    def watched(symbolic_call):
        @functools.wraps(symbolic_call)
        def call(self, *args, **kwargs):
            called(self)
            return symbolic_call(self, *args, **kwargs)

        return call

    cls.__new__ = staticmethod(watched_new)
    for owner in (cls, keras.Layer):
        if "symbolic_call" in vars(owner):
            owner.symbolic_call = watched(vars(owner)["symbolic_call"])


def is_raw_tf_variable(value):
    """Whether a value is a `tf.Variable` and no `keras.Variable`, without loading TensorFlow."""
    # By its class: an attribute that is asked for may do things.
    return any(
        base.__module__.startswith("tensorflow.")
        and base.__name__ in ("Variable", "BaseResourceVariable")
        for base in type(value).__mro__
    )


def has_bare_operations(model):
    """Whether a functional model holds operations (`a + b`) that are no layers. function.py."""
    return any(
        not isinstance(operation, keras.Layer)
        for part in flatten_layers(model)
        if isinstance(part, Functional)
        for operation in part._operations
    )


def set_keras_mask(tensor, mask):
    """Give a tensor a mask. backend/common/masking.py, 3.15.1."""
    masking.set_keras_mask(tensor, mask)


def keras_mask(tensor):
    """The mask that Keras carries along with a tensor, or None. backend/common/masking.py."""
    return masking.get_keras_mask(tensor)


def logits(tensor):
    """What softmax or sigmoid made a tensor of, or None. backend/tensorflow/nn.py, 3.15.1.

    Crossentropies are computed from it where it is there.
    """
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor, logits):
    """Note what a tensor was made of. backend/tensorflow/nn.py, 3.15.1."""
    tensor._keras_logits = logits


def own_state(layer):
    """A layer's own non-trainable variables, without those of its sublayers. layer.py, 3.15.1."""
    seeds = {id(generator.state) for generator in layer._seed_generators}
    return [v for v in layer._non_trainable_variables if id(v) not in seeds]


def own_variables(layer):
    """All of a layer's own variables, without those of its sublayers. layer.py, 3.15.1."""
    seeds = [generator.state for generator in layer._seed_generators]
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]


def own_metrics(layer):
    """The metrics that a layer itself holds. layer.py, 3.15.1."""
    return list(layer._metrics)


def seed_generators(layer):
    """A layer's own seed generators. layer.py, 3.15.1."""
    return list(layer._seed_generators)


def seed_states(model):
    """The states of all seed generators of a model's layers."""
    layers = flatten_layers(model)
    return [generator.state for layer in layers for generator in seed_generators(layer)]


def call_has_training(model):
    """Whether a model's `call` takes `training=`. layer.py, 3.15.1."""
    return model._call_has_training_arg


def call_model(model, x, training):
    """The outputs of a model, whose own `call` may not take `training`."""
    return model(x, training=training) if call_has_training(model) else model(x)


def is_in_call():
    """Whether some layer's `call` is running. layers/layer.py, 3.15.1."""
    return global_state.get_global_attribute("current_call_ctx") is not None


def compute_output_spec(function, *args, **kwargs):
    """Traces a function with shapes only. backend/*/core.py, 3.15.1."""
    return keras_backend.compute_output_spec(function, *args, **kwargs)


def map_shapes(function, structure):
    """A function of each shape in a nested structure of shapes. tree/tree_api.py, 3.15.1."""
    return keras.tree.map_shape_structure(function, structure)


def graph_of(layer):
    """The functional model that a layer is, or that a Sequential runs; `None` for others.

    A Sequential has one once its inputs are known. models/sequential.py, 3.15.1.
    """
    if isinstance(layer, keras.Sequential):
        return layer._functional if layer.built else None
    return layer if isinstance(layer, Functional) else None


def run_graph_symbolically(model, inputs):
    """Shapes through each node of a model that is a graph, as `graph_of` tells.

    Function.compute_output_spec would answer inputs of the shapes it was made
    with from memory, and call no layer. ops/function.py, 3.15.1.
    """
    graph = graph_of(model)
    return graph._run_through_graph(inputs, operation_fn=lambda op: op.compute_output_spec)


def is_batch_norm(layer):
    """Whether a layer keeps moving averages of its batches' moments."""
    return isinstance(layer, keras.layers.BatchNormalization)


def replace_masked_moments(moments):
    """Compute the moments of a masked batch by another function, given Keras's own as `stock=`.

    layers/normalization/batch_normalization.py, 3.15.1.
    """

    @patch_once(keras.layers.BatchNormalization, "_moments")
    def _of_masked(stock):
        def compute(layer, x, mask):
            if mask is None or not layer.synchronized:
                return stock(layer, x, mask)
            return moments(layer, x, mask, stock)

        return compute


@contextlib.contextmanager
def noting_moments(layer, note):
    """Have a function see the moments that a BatchNormalization takes of each batch.

    layers/normalization/batch_normalization.py, 3.15.1.

    Args:
        layer: The layer.
        note: Called with `(mean, variance, count)`: the count is that of the rows, or
            of what the mask leaves.
    """
    stock = layer._moments

    def moments(inputs, mask):
        mean, variance = stock(inputs, mask)
        if mask is None:
            count = keras.ops.shape(inputs)[0]
        else:
            count = keras.ops.sum(keras.ops.cast(mask, mean.dtype))
        note((keras.ops.stop_gradient(mean), keras.ops.stop_gradient(variance), count))
        return mean, variance

    vars(layer)["_moments"] = moments
    try:
        yield
    finally:
        del vars(layer)["_moments"]
