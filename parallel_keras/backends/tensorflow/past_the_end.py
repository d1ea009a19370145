"""What a step does where there is no batch for it: at the end of data of unknown size.

There Keras asks for one more batch, in the graph of the step. It is not there, and the step
fails; but what needs nothing of it (the optimizer's count of steps, its weight decay) can be
done at once, and has been when the step fails. Strictly that is a race, which several devices
would end in different ways. So here a step waits for its batch with everything, and what
needs none of it is done when the end is known.
"""

import functools
import weakref

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow import specs

_graphs: weakref.WeakSet = weakref.WeakSet()  # of steps that have no batch
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}


def going_past(function, model, without):
    """A train function that does what Keras does where the iterator has ended.

    Args:
        function: Function of an iterator, which does nothing where that has ended.
        model: The model that it trains.
        without: Function of the iterator, as `without_batch` gives it.
    """

    @functools.wraps(function)
    def run(iterator):
        try:
            return function(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            if isinstance(iterator, tf.data.Iterator) and _is_done_by_keras(model):
                without(iterator)
            raise

    return run


def _is_done_by_keras(model):
    """Whether a training step without a batch does anything where there is no strategy."""
    if model.steps_per_execution > 1 or model.run_eagerly:
        return False
    # XLA does all of a step or nothing.
    return not vars(model)[keras_internals.STATE].is_xla_without_strategy


def has_no_batch():
    """Whether what is traced now is a step for which there is no batch."""
    return tf.compat.v1.get_default_graph() in _graphs


def waiting(step):
    """A step that does nothing as long as its batch is not there.

    Args:
        step: Function of a batch, to be traced.
    """

    @functools.wraps(step)
    def wait(*data, **options):
        if has_no_batch():
            return step(*data, **options)
        leaves = tf.nest.flatten((data, options), expand_composites=True)
        with tf.control_dependencies([leaf for leaf in leaves if tf.is_tensor(leaf)]):
            return step(*data, **options)

    return wait


def without_batch(step):
    """A function that does what a step does without its batch.

    Args:
        step: Function of a batch, to be traced.

    Returns:
        Function of an iterator that has ended.
    """

    @tf.autograph.experimental.do_not_convert
    def on_nothing(optional):
        graph = tf.compat.v1.get_default_graph()
        count = len(graph.get_operations())
        data = specs.without_optionals(optional.get_value())
        asked = next(o for o in graph.get_operations()[count:] if o.type == "OptionalGetValue")
        _graphs.add(graph)
        step(data)
        asked._add_control_inputs(_independent_effects(asked))

    traced = tf.function(on_nothing, reduce_retracing=True)

    def run(iterator):
        # Not from the iterator itself: the end may be that of other data, read in the step.
        try:
            traced(tf.experimental.Optional.empty(iterator.element_spec))
        except tf.errors.InvalidArgumentError as error:
            if "optional" not in str(error).lower():
                raise

    return run


def _independent_effects(asked):
    """What was made after an operation, changes something, and does not wait for it."""
    operations = asked.graph.get_operations()
    later = operations[operations.index(asked) + 1 :]
    dependent = _dependent(asked, later)
    return [
        operation
        for operation in later
        if operation not in dependent
        and operation.type not in _READS
        and auto_control_deps.op_is_stateful(operation)
    ]


def _dependent(first, later):
    """The operations that wait for the first one.

    Those among them that a `tf.function` will order when it is complete: two with the same
    resource, one of which writes, and any two with side effects and no resource.

    Args:
        first: An operation.
        later: List of the operations that were made after it, in their order.
    """
    dependent = {first}
    read: set = set()
    written: set = set()
    for operation in later:
        resources: set = {id(t) for t in operation.inputs if t.dtype == tf.resource}
        if not resources and auto_control_deps.op_is_stateful(operation):
            resources = {None}
        reads = operation.type in _READS
        if (
            any(tensor.op in dependent for tensor in operation.inputs)
            or any(other in dependent for other in operation.control_inputs)
            or resources & written
            or (not reads and resources & read)
        ):
            dependent.add(operation)
            (read if reads else written).update(resources)
    return dependent
