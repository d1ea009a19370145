"""How many bytes an optimizer keeps for each variable that it trains.

The optimizer itself answers: a copy of it, made from its config, is built for
the one variable, with variables that have a shape but no memory. So whatever
an optimizer keeps is counted, and the user's own stays as it is.
"""

import math

import keras

from parallel_keras import keras_internals
from parallel_keras.costs.rules import itemsize


def variable_bytes(variable):
    """The bytes of a variable's values.

    >>> variable_bytes(keras.Variable([1.0, 2.0]))
    8
    """
    return math.prod(variable.shape) * itemsize(variable.dtype)


def slot_bytes(optimizer, variables):
    """The bytes that an optimizer keeps for each variable.

    Moments, averages and gradient accumulators count. What an optimizer keeps
    once for the whole model (iterations, the learning rate) does not.

    Args:
        optimizer: Keras optimizer, built or not, or `None`.
        variables: List of `keras.Variable`, all that it trains.

    Returns:
        A list of ints, one per variable.

    Raises:
        ValueError: If the optimizer can't be made again from its config and
            is not built.

    >>> kernel = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
    >>> slot_bytes(keras.optimizers.SGD(), [kernel])
    [0]
    >>> slot_bytes(keras.optimizers.Adam(), [kernel])
    [32]
    """
    if optimizer is None:
        return [0] * len(variables)
    known = {}
    sizes = []
    for variable in variables:
        inner = keras_internals.optimizer_of_variable(optimizer, variable)
        key: tuple = (id(inner), tuple(variable.shape), variable.dtype)
        if not _is_path_blind(inner):
            key = (*key, variable.path)
        try:
            if key not in known:
                known[key] = _one_variables_slots(inner, variable)
        except Exception as error:
            # The config of a user's optimizer may not make another.
            return _from_built(optimizer, variables, error)
        sizes.append(known[key])
    return sizes


def _is_path_blind(optimizer):
    """Whether an optimizer treats all variables of one shape alike: Keras's own, all but Muon."""
    ours = type(optimizer).__module__.startswith("keras.")
    return ours and not isinstance(optimizer, keras.optimizers.Muon)


def _one_variables_slots(optimizer, variable):
    slots = _built(optimizer, [variable])
    arrays = [slot for slot in slots if len(slot.shape)]
    # Numbers are kept once for all variables (Nadam has one more than the
    # others) and made first. More of them belong to this variable.
    once = sum(len(slot.shape) == 0 for slot in _built(optimizer, []))
    numbers = [slot for slot in slots if len(slot.shape) == 0][once:]
    return sum(variable_bytes(slot) for slot in arrays + numbers)


def _built(optimizer, variables):
    """The variables of a copy of an optimizer, built for some of a model's variables."""
    config = optimizer.get_config()
    # A schedule keeps nothing, and one of the user's own might not load.
    config["learning_rate"] = 0.1
    copy = type(optimizer).from_config(config)
    add_variable = copy.add_variable

    def without_memory(shape, initializer="zeros", *args, **kwargs):
        return add_variable(shape, _one_zero, *args, **kwargs)

    # Past __setattr__, which would track them.
    copy.__dict__["add_variable"] = without_memory
    copy.__dict__["assign"] = lambda variable, value: None
    copy.build(variables)
    return copy.variables


def _one_zero(shape, dtype=None, **kwargs):
    """An initializer that does not fill the shape that the variable says it has."""
    return keras.ops.zeros((), dtype=dtype)


def _from_built(optimizer, variables, error):
    """Of an optimizer that is built: what it keeps, by the size of the variables."""
    if not optimizer.built:
        raise ValueError(
            "The optimizer's state can't be counted, because the optimizer can't be made again "
            "from `get_config()`. Complete its `get_config()`, or build it first with "
            "`optimizer.build(model.trainable_variables)`. "
            f"Received: {type(optimizer).__name__}, which raised {type(error).__name__}: {error}"
        ) from error
    total = sum(variable_bytes(variable) for variable in optimizer.variables if len(variable.shape))
    weights = [variable_bytes(variable) for variable in variables]
    return [round(total * weight / max(sum(weights), 1)) for weight in weights]
