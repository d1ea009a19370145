"""From a model and a strategy to the predicted timeline of a training step.

What a layer costs (`costs`) and how fast a device is (`rates`) give the time of each
stage's passes, and the schedule gives when each of them can go on. After a training step
under the same strategy its measured times correct those.
"""

import dataclasses
import itertools
from typing import NamedTuple

from parallel_keras import batch, costs, layout, placement, rates, schedule
from parallel_keras.backends import staged
from parallel_keras.costs.times import LayerTime, layer_times, output_bytes
from parallel_keras.plan import parse_devices
from parallel_keras.strategies import SingleDevice
from parallel_keras.timeline import WAITING, Event, Timeline, human_seconds


class LastStep(NamedTuple):
    """A training step that was measured: its strategy, rows and events."""

    strategy: object
    rows: int
    events: list


def make(model, strategy, batch_size, devices=None, input_shape=None, last=None):
    """The predicted `Timeline` of a training step.

    Args:
        model: A Keras model.
        strategy: A `Strategy`.
        batch_size: Int. The rows of a global batch.
        devices: As for `planning.make`; devices that are not there count as fast as
            those of this machine.
        input_shape: As for `model.build`, where the model does not know it.
        last: `LastStep` or `None`.
    """
    if devices is None:
        names = strategy.devices_for(placement.devices_needed(model))
    else:
        names, _ = parse_devices(devices)
    step = _Prediction(model, strategy, batch_size, tuple(names), input_shape)
    return _TIMELINES[strategy.lowering](step, last)


class _Prediction:
    """What is predicted, and with what."""

    def __init__(self, model, strategy, batch_size, names, input_shape):
        self.model = model
        self.strategy = strategy
        self.batch_size = batch_size
        self.names = names
        self.input_shape = input_shape

    def costs_and_times(self, rows):
        """Pairs of operations and costs for so many rows, the time of each, and the rates."""
        pairs = costs.operations_and_costs(self.model, rows, self.input_shape)
        optimizer = getattr(self.model, "optimizer", None)
        found = rates.of(self.names, self.model.compute_dtype, optimizer)
        recompute = getattr(self.strategy, "recompute", False)
        return pairs, layer_times([cost for _, cost in pairs], found, recompute), found

    def timeline(self, events, note, unknown=()):
        title = f"{self.strategy!r}, {self.batch_size} rows"
        return Timeline(events, self.names, title, True, unknown, note)


# ---- pipeline ----


@dataclasses.dataclass
class _Stages:
    """Times of the stages of a pipeline, a list with each stage's for each kind of work."""

    forward: list
    backward: list
    update: list
    transfer: float = 0.0
    together: float | None = None


def _pipeline(step, last):
    stages, microbatches, order = _stages(step)
    note = "From layer costs, and rates measured on this machine."
    if last is not None and last.strategy.lowering == "pipeline":
        _correct(step, stages, last)
        note = "From layer costs, and the times of the last training step."
    orders = schedule.order(order, len(stages.forward), microbatches)
    events = [
        Event(
            step.names[work.stage],
            work.kind,
            work.stage,
            None if work.microbatch < 0 else work.microbatch,
            *times,
        )
        for work, *times in schedule.simulate(orders, **vars(stages))
    ]
    return step.timeline(events, f"{note}{_warning(step, events)}")


def _warning(step, events):
    """A sentence where one device is predicted to be as fast."""
    takes = max(event.end for event in events)
    alone = _Prediction(
        step.model, SingleDevice(), step.batch_size, step.names[:1], step.input_shape
    )
    one = _one_after_the_other(alone, None).step_time
    if takes < one:
        return ""
    return (
        f" Warning: one device is predicted to take {human_seconds(one)}, the pipeline "
        f"{human_seconds(takes)}. Its stages have too little to compute for a batch of "
        f"{step.batch_size} rows."
    )


def _stages(step):
    """The modelled `_Stages`, the number of micro-batches, and the name of their schedule."""
    microbatches = step.strategy.microbatches_of(step.batch_size, len(step.names))
    rows = batch.row_counts(step.batch_size, microbatches)[0]
    pairs, times, found = step.costs_and_times(rows)
    inputs = costs.symbolic_inputs(step.model, rows, step.input_shape)
    operations = [operation for operation, _ in pairs]
    numbers, order = staged.planned(step.model, step.strategy, len(step.names), inputs, operations)
    totals = _sums(times, numbers, max(numbers) + 1)
    borders = [
        output_bytes(cost)
        for (_, cost), (number, after) in zip(pairs, itertools.pairwise(numbers), strict=False)
        if number != after
    ]
    # What crosses a border is written there and read on the other side.
    transfer = 2 * max(borders, default=0) / found.bytes
    modelled = _Stages(
        [t.forward for t in totals],
        [t.backward for t in totals],
        [t.update for t in totals],
        transfer,
        found.together,
    )
    return modelled, microbatches, order


def _correct(step, stages, last):
    """Scale modelled times by what the last step took for what was modelled of it."""
    names = tuple(dict.fromkeys(e.device for e in sorted(last.events, key=lambda e: e.stage)))
    then, _, _ = _stages(_Prediction(step.model, last.strategy, last.rows, names, step.input_shape))
    for kind in ("forward", "backward", "update"):
        measured: dict = {}
        for event in last.events:
            if event.kind == kind:
                measured.setdefault(event.stage, []).append(event.seconds)
        means = [_mean(measured.get(stage, [])) for stage in range(len(names))]
        modelled, now = getattr(then, kind), getattr(stages, kind)
        if len(now) == len(modelled) == len(means):
            pairs = list(zip(means, modelled, strict=True))
        else:
            pairs = [(sum(means), sum(modelled))] * len(now)
        factors = [mean / model if model else 1.0 for mean, model in pairs]
        setattr(stages, kind, [time * factor for time, factor in zip(now, factors, strict=True)])
    # That they share a machine is in the measured times.
    stages.together = None


def _mean(values):
    return sum(values) / len(values) if values else 0.0


def _sums(times, numbers, count):
    """The `LayerTime` of each of so many groups of layers."""
    totals = []
    for wanted in range(count):
        own = [t for t, number in zip(times, numbers, strict=True) if number == wanted]
        parts = (sum(getattr(t, kind) for t in own) for kind in ("forward", "backward", "update"))
        totals.append(LayerTime(*parts))
    return totals


# ---- replicas ----


def _replicas(step, last):
    events = []
    count = len(step.names)
    for device, rows in zip(step.names, batch.row_counts(step.batch_size, count), strict=True):
        pairs, times, found = step.costs_and_times(max(rows, 1))
        slower = max(1.0, count / (found.together or count))
        compute = sum(t.forward + t.backward for t in times) * slower if rows else 0.0
        gradients = sum(cost.gradients for _, cost in pairs)
        # Each byte is read, added and written as often as in a ring over the devices.
        reduce = 3 * 2 * (count - 1) / count * gradients / found.bytes * slower
        update = sum(t.update for t in times) * slower
        events.append((device, compute, reduce, update))
    computed = max(compute for _, compute, _, _ in events)
    found_events = []
    for device, compute, reduce, update in events:
        reduced = computed + reduce
        found_events += [
            Event(device, "compute", None, None, 0.0, compute),
            Event(device, "all-reduce", None, None, compute, reduced),
            Event(device, "update", None, None, reduced, reduced + update),
        ]
    note = (
        "From layer costs, and rates measured on this machine. Of the all-reduce nothing is "
        "taken to be hidden by the backward pass."
    )
    return step.timeline(found_events, note, unknown=(WAITING,))


# ---- one device at a time ----


def _one_after_the_other(step, last):
    pairs, times, _ = step.costs_and_times(step.batch_size)
    numbers = [0] * len(pairs)
    if step.strategy.lowering == "model":
        default = layout.split(step.model, step.strategy, step.names, pairs)
        assigned = placement.assign(step.model, step.names, default)
        numbers = [assigned.numbers.get(id(operation), 0) for operation, _ in pairs]
    events, now = [], 0.0
    updates = _sums(times, numbers, len(step.names))
    by_number = itertools.groupby(zip(numbers, times, strict=True), lambda pair: pair[0])
    segments = [(number, list(own)) for number, own in by_number]
    for kind, some in (("forward", segments), ("backward", reversed(segments))):
        for number, own in some:
            seconds = sum(getattr(t, kind) for _, t in own)
            events.append(Event(step.names[number], kind, None, None, now, now + seconds))
            now += seconds
    for name, total in zip(step.names, updates, strict=True):
        if total.update:
            events.append(Event(name, "update", None, None, now, now + total.update))
            now += total.update
    return step.timeline(events, "From layer costs, and rates measured on this machine.")


_TIMELINES = {
    "single": _one_after_the_other,
    "data": _replicas,
    "model": _one_after_the_other,
    "pipeline": _pipeline,
}
