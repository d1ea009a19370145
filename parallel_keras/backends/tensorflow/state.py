"""Variables that a forward pass assigns, captured on each replica and combined.

Inside a replica nothing is assigned: under a stateless scope the new values are
kept. After the replicas have run, floating-point state becomes the average weighted
with the rows, and whole numbers have to agree. Each replica draws its random numbers
from a seed of its own; the stored seed goes on as the first's.
"""

import tensorflow as tf

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow.agreement import agreeing
from parallel_keras.capabilities import check


def capture(model, replica):
    """A scope for one replica's forward pass, with seeds of its own."""
    moved = [(seed, keras_internals.moved_seed(seed, replica)) for seed in every_seed(model)]
    # The first replica draws what one device would draw.
    return keras_internals.ObservingScope(moved if replica else None)


def every_seed(model):
    """The variables that a model's random draws start from, with that of the process."""
    seeds = keras_internals.seed_states(model)
    of_process = keras_internals.global_seed_state()
    return seeds if of_process is None else [*seeds, of_process]


def refuse_assigned_weights(scope, model, strategy):
    """A weight that a forward pass assigned, and that trains, has another gradient here.

    Plain Keras takes it with respect to the new value. Here that is a value of the scope,
    computed from the old one.
    """
    for variable in model.trainable_variables:
        if id(variable) in scope.assigned:
            check("assigned_weight", strategy, "tensorflow", f"variable {variable.path}")


def new_values(scope, exclude):
    """The variables that were assigned, without some, and their new values."""
    variables = [v for key, v in scope.assigned.items() if key not in exclude]
    return variables, [scope.assigned_value(v) for v in variables]


def weighted(value, rows):
    """A replica's part of the average of a state variable."""
    if not value.dtype.is_floating:
        return value
    part = value * rows.share(value.dtype)
    # What a replica computed without rows may be anything, NaN too.
    return tf.where(rows.some, part, tf.zeros_like(part)) if rows.may_be_none else part


def assign_combined(strategy, variables, parts, rows, seeds):
    """Assign the combination of the replicas' parts, in cross-replica context.

    Args:
        strategy: The `MirroredStrategy`.
        variables: List of Keras variables.
        parts: List of their values by replica, as of `weighted`.
        rows: List of the replicas' `Rows`.
        seeds: List of the variables that random draws start from.
    """
    drawn_from = set(map(id, seeds))
    for variable, part in zip(variables, parts, strict=True):
        if variable._value.dtype.is_floating:
            variable.assign(strategy.reduce(tf.distribute.ReduceOp.SUM, part, axis=None))
        else:
            values = strategy.experimental_local_results(part)
            is_seed = id(variable) in drawn_from
            variable.assign(values[0] if is_seed else agreeing(values, rows, variable, "replica"))
