"""Which layer of a model without places goes to which device."""

from parallel_keras import balance, costs, placement, stages

# What a layer's time is estimated from: computing, or moving its bytes, whichever
# takes longer, on a device that computes this many operations while it moves a byte.
_OPERATIONS_PER_BYTE = 10
# The split hardly depends on it: everything but the parameters grows with it.
_BATCH_SIZE = 32
# And so it does on the length of sequences, where the model leaves it open.
_OPEN_SIZE = 128


class Split:
    """The split of one model, remembered until the model has changed.

    To estimate what its layers cost takes longer than a small step.
    """

    def __init__(self, model, strategy):
        self.model = model
        self.strategy = strategy
        self._numbers: dict = {}
        self._parts: list = []

    def numbers(self, devices):
        """As `split`."""
        if not _is_to_split(self.model, devices):
            return {}
        parts = _parts(self.model)
        if list(map(id, parts)) != list(map(id, self._parts)):
            self._numbers = split(self.model, self.strategy, devices)
            self._parts = parts
        return self._numbers

    def check(self, devices):
        """Raise where the strategy lists layers that the model has not."""
        if isinstance(self.strategy.balance, tuple):
            split(self.model, self.strategy, devices)


def _parts(model):
    """What the costs of a model follow from. As long as the list lives, so do their ids."""
    return [
        *placement.units(model),
        *model.weights,
        *model.trainable_weights,
        getattr(model, "optimizer", None),
    ]


def split(model, strategy, devices, pairs=None):
    """The numbers of the devices of a model that has no place at all.

    Args:
        model: A Keras model.
        strategy: A `ModelParallel`.
        devices: Tuple of device names.
        pairs: What `costs.operations_and_costs` gives, where it is known already.

    Returns:
        Dict from the id of a layer or an operation to an int. Empty where the
        model has places, has one device, or is not built yet.
    """
    if not _is_to_split(model, devices):
        return {}
    if pairs is None:
        pairs = estimated(model)
    return _numbers(pairs, strategy.balance, len(devices))


def estimated(model):
    """Pairs of a layer or operation and its `LayerCost`, to split a model by."""
    return costs.operations_and_costs(model, _BATCH_SIZE, open_size=_OPEN_SIZE)


def _is_to_split(model, devices):
    return len(devices) > 1 and all(
        placement.own_place(unit) is None and getattr(unit, "built", True)
        for unit in placement.units(model)
    )


def _numbers(pairs, how, count):
    """Dict from a unit's id to its number.

    Args:
        pairs: List of pairs of a layer or operation and its `LayerCost`, in the
            order in which they run.
        how: A `balance` of `ModelParallel`.
        count: Int. The number of devices.
    """
    weights: dict = {}
    for operation, cost in pairs:  # one that is called several times has several costs
        weights[id(operation)] = weights.get(id(operation), 0) + cost_of(cost, how)
    if isinstance(how, tuple):
        if len(how) > count:
            raise ValueError(
                f"`balance` lists the number of layers on each of {count} devices. "
                f"Received: balance={list(how)}, which is of {len(how)}"
            )
        names = {id(operation): operation.name for operation, _ in pairs}
        stages.check_counts(how, list(names.values()), "each device")
        counts = list(how)
    elif not weights:
        return {}  # a model without layers computes on the first device
    else:
        counts = balance.split(list(weights.values()), min(count, len(weights)))
    numbers = [number for number, size in enumerate(counts) for _ in range(size)]
    return dict(zip(weights, numbers, strict=True))


def cost_of(cost, how):
    """A layer's cost, by a `balance` that is a name."""
    if how == "memory":
        return cost.bytes
    if how == "flops":
        return cost.flops
    return max(cost.flops, _OPERATIONS_PER_BYTE * (cost.parameters + cost.activations))
