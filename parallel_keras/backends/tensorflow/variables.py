"""Moving a model's variables to the devices of a strategy, in place.

A Keras variable stays the same object; the `tf.Variable` inside is made anew under
the strategy with the same value. References such as `layer.kernel` stay valid, and
nothing has to be cloned or built under a scope.
"""

import tensorflow as tf

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow import placing


def move(model, strategy):
    """Move all variables of a model, its metrics and its optimizer.

    Cheap for those that are there already.

    Args:
        model: A Keras model.
        strategy: A `tf.distribute.MirroredStrategy`, or `None` for plain
            variables on the default device.
    """
    moved = [v for v in _variables(model) if v._value is not None and _home(v) is not strategy]
    for variable in moved:
        _move_variable(variable, strategy)
    if moved:
        placing.tell(moved)
    for optimizer in _optimizers(model):
        keras_internals.set_optimizer_strategy(optimizer, strategy or tf.distribute.get_strategy())


def _variables(model):
    found = list(model.variables)
    found += [v for metric in model.metrics for v in metric.variables]
    for optimizer in _optimizers(model):
        found += keras_internals.optimizer_variables(optimizer)
        found += keras_internals.untracked_variables(optimizer)
    return list({id(v): v for v in found}.values())


def _optimizers(model):
    """The optimizer, and those that it wraps; inner ones first."""
    if not model.compiled or model.optimizer is None:
        return []
    found = [model.optimizer]
    for optimizer in found:  # grows while it is read
        found += keras_internals.inner_optimizers(optimizer)
    return found[::-1]


def _home(variable):
    """The strategy of a variable, `None` for a plain one."""
    return getattr(variable._value, "_distribute_strategy", None)


def _move_variable(variable, strategy):
    old = variable._value
    value = tf.convert_to_tensor(old)
    arguments = {
        "dtype": old.dtype,
        "trainable": variable.trainable,
        "name": variable.name,
        "aggregation": variable._map_aggregation(variable.aggregation),
        "synchronization": variable._map_synchronization(variable.synchronization),
    }
    if strategy is None:
        variable._value = tf.Variable(value, **arguments)
        return
    with strategy.scope():
        variable._value = tf.Variable(value, **arguments)
    if variable.synchronization == "on_read" and variable.aggregation == "sum":
        # The state is the sum over the replicas: the first one holds all of it.
        for component in strategy.experimental_local_results(variable._value)[1:]:
            component.assign(tf.zeros_like(component))
