"""From a model and a strategy to the plan of what lies where."""

import dataclasses

from parallel_keras import batch, costs, layout, placement, schedule
from parallel_keras.backends import staged
from parallel_keras.plan import Plan, parse_devices


def make(model, strategy, batch_size=32, devices=None, input_shape=None):
    """The `Plan` of a model under a strategy.

    Args:
        model: A Keras model.
        strategy: A `Strategy`.
        batch_size: Int. The rows of a global batch.
        devices: String such as `"4x80GB"` for devices that are not there, or `None`.
        input_shape: As for `model.build`, where the model does not know it.
    """
    if devices is None:
        names, capacity = strategy.devices_for(placement.devices_needed(model)), None
    else:
        names, capacity = parse_devices(devices)
    lines, numbers = _LINES[strategy.lowering](model, strategy, batch_size, input_shape, names)
    return Plan(lines, numbers, list(names), capacity, title=repr(strategy))


def _on_one(model, strategy, batch_size, input_shape, names):
    lines = costs.layer_costs(model, batch_size, input_shape)
    return lines, [0] * len(lines)


def _replicas(model, strategy, batch_size, input_shape, names):
    """Everything on each device, with the activations of its rows."""
    lines, numbers = [], []
    for number, rows in enumerate(batch.row_counts(batch_size, len(names))):
        # A replica without rows has its weights all the same.
        of_replica = costs.layer_costs(model, max(rows, 1), input_shape)
        lines += of_replica
        numbers += [number] * len(of_replica)
    return lines, numbers


def _laid_out(model, strategy, batch_size, input_shape, names):
    pairs = costs.operations_and_costs(model, batch_size, input_shape)
    default = layout.split(model, strategy, names, pairs)
    assigned = placement.assign(model, tuple(names), default)
    numbers = [assigned.numbers.get(id(operation), 0) for operation, _ in pairs]
    return [cost for _, cost in pairs], numbers


def _staged(model, strategy, batch_size, input_shape, names):
    """Of the activations, those of the micro-batches that are alive at the same time."""
    count = strategy.microbatches_of(batch_size, len(names))
    pairs = costs.operations_and_costs(model, batch_size, input_shape)
    rows = batch.row_counts(batch_size, count)[0]
    of_part = costs.layer_costs(model, rows, input_shape)
    inputs = costs.symbolic_inputs(model, rows, input_shape)
    numbers, order = staged.planned(
        model, strategy, len(names), inputs, [operation for operation, _ in pairs]
    )
    orders = schedule.order(order, max(numbers) + 1, count)
    alive = [schedule.alive(order) for order in orders]
    lines = [
        dataclasses.replace(cost, activations=part.activations * alive[number])
        for (_, cost), part, number in zip(pairs, of_part, numbers, strict=True)
    ]
    return lines, numbers


_LINES = {"single": _on_one, "data": _replicas, "model": _laid_out, "pipeline": _staged}
