"""Which layer of a model without places goes to which device."""

import keras

from parallel_keras import balance, costs, placement

# What a layer's time is estimated from: computing, or moving its bytes, whichever
# takes longer, on a device that computes this many operations while it moves a byte.
_OPERATIONS_PER_BYTE = 10
# The split hardly depends on it: everything but the parameters grows with it.
BATCH_SIZE = 32


def split(model, strategy, devices):
    """The numbers of the devices of a model that has no place at all.

    Args:
        model: A Keras model.
        strategy: A `ModelParallel`.
        devices: Tuple of device names.

    Returns:
        Dict from the id of a layer or an operation to an int. Empty where the
        model has places, has one device, or is not built yet.
    """
    is_built = all(
        layer.built for layer in placement.units(model) if isinstance(layer, keras.Layer)
    )
    if len(devices) == 1 or not is_built or placement.has_places(model):
        return {}
    pairs = costs.operations_and_costs(model, BATCH_SIZE)
    return dict(numbered(pairs, strategy.balance, len(devices)))


def numbered(pairs, how, count):
    """Pairs of a unit's id and its number.

    Args:
        pairs: List of pairs of a layer or operation and its `LayerCost`, in the
            order in which they run.
        how: A `balance` of `ModelParallel`.
        count: Int. The number of devices.
    """
    units: dict = {}
    for operation, cost in pairs:
        units.setdefault(id(operation), []).append(cost)
    weights = [sum(_cost(cost, how) for cost in several) for several in units.values()]
    if isinstance(how, tuple):
        if sum(how) != len(units) or len(how) > count:
            raise ValueError(
                f"`balance` lists the number of layers on each of {count} devices, and the model "
                f"has {len(units)} layers and operations. Received: balance={list(how)}"
            )
        counts = list(how)
    else:
        counts = balance.split(weights, min(count, len(units)))
    numbers = [number for number, size in enumerate(counts) for _ in range(size)]
    return zip(units, numbers, strict=True)


def _cost(cost, how):
    memory = cost.parameters + cost.gradients + cost.slots + cost.activations
    if how == "memory":
        return memory
    if how == "flops":
        return cost.flops
    return max(cost.flops, _OPERATIONS_PER_BYTE * (cost.parameters + cost.activations))
