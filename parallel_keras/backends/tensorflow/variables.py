"""Moving a model's variables to the devices of a strategy, in place.

A Keras variable stays the same object; the `tf.Variable` inside is made anew under
the strategy with the same value. References such as `layer.kernel` stay valid, and
nothing has to be cloned or built under a scope.
"""

import contextlib

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
    found = keras_internals.every_variable(model)
    _hold_keras_variables(model, found)
    moved = [v for v in found if not is_under(v, strategy)]
    for variable in moved:
        _move_variable(variable, strategy)
    if moved:
        placing.tell(moved)
    for optimizer in keras_internals.every_optimizer(model):
        keras_internals.set_optimizer_strategy(optimizer, strategy or tf.distribute.get_strategy())


def assign_whole(variable, value, strategy):
    """Assign what is computed once, in cross-replica context.

    TensorFlow would give each copy of a metric's state a part of it, rounded.
    """
    first, *others = strategy.experimental_local_results(variable._value)
    first.assign(value)
    for component in others:
        component.assign(tf.zeros_like(component) if is_summed(variable) else value)


@contextlib.contextmanager
def plain(model, strategy):
    """Inside, a model's variables are plain ones with the values that they have.

    What is assigned inside is forgotten, and what was traced before stays as it is.
    Variables that are made inside stay plain.

    Args:
        model: A Keras model.
        strategy: The `tf.distribute.MirroredStrategy` that its variables live under.
    """
    held = [(v, v._value) for v in keras_internals.every_variable(model)]
    optimizers = keras_internals.every_optimizer(model)
    for variable, value in held:
        if is_under(variable, strategy):
            variable._value = placing.made_anew(variable, tf.convert_to_tensor(value))
    for optimizer in optimizers:
        keras_internals.set_optimizer_strategy(optimizer, tf.distribute.get_strategy())
    try:
        yield
    finally:
        _hold_keras_variables(model, keras_internals.every_variable(model))
        for variable, value in held:
            variable._value = value
        for optimizer in optimizers:
            keras_internals.set_optimizer_strategy(optimizer, strategy)


def _hold_keras_variables(model, found):
    """Have optimizers hold what stays when what is inside of it is made anew."""
    by_value = {id(v._value): v for v in found}
    for optimizer in keras_internals.every_optimizer(model):
        keras_internals.hold_keras_variables(optimizer, by_value)


def is_under(variable, strategy):
    """Whether a Keras variable lives under a strategy."""
    return _home(variable) is strategy


def _home(variable):
    """The strategy of a variable, `None` for a plain one."""
    return getattr(variable._value, "_distribute_strategy", None)


def _move_variable(variable, strategy):
    old = variable._value
    value = tf.convert_to_tensor(old)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        variable._value = placing.made_anew(variable, value)
    placing.give_up(old)
    if strategy is not None and is_summed(variable):
        # The state is the sum over the replicas: the first one holds all of it.
        for component in strategy.experimental_local_results(variable._value)[1:]:
            component.assign(tf.zeros_like(component))


def is_summed(variable):
    """Whether the value of a Keras variable is the sum over the replicas."""
    return variable.synchronization == "on_read" and variable.aggregation == "sum"
