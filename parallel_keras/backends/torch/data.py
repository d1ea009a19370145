"""DataParallel on torch: the caller is rank 0, live workers serve its steps.

Keras's own fit loop runs in the caller and hands each global batch to one of
the three functions made here. The function sends every worker its rows and what
the program has changed since the last step, computes the caller's own rows as
rank 0, and returns the logs of the global batch.
"""

import contextlib
import itertools
from typing import Any, NamedTuple

import torch
from keras import tree

from parallel_keras import (
    batch,
    capabilities,
    features,
    keras_internals,
    probe as probing,
    probe_rows,
)
from parallel_keras.backends import lowering
from parallel_keras.backends.torch import (
    batches,
    forwarding,
    memory,
    remote,
    shipping,
    workers,
)
from parallel_keras.backends.torch.devices import torch_device
from parallel_keras.backends.torch.lookahead import Lookahead, can_look_ahead, looking_ahead
from parallel_keras.backends.torch.metrics import CallerMetrics, metric_variables
from parallel_keras.backends.torch.own_caller import OwnSteps
from parallel_keras.backends.torch.own_step import OwnStep, is_complete
from parallel_keras.backends.torch.replica import Replica, fold_accumulators
from parallel_keras.backends.torch.shipment import Shipment
from parallel_keras.backends.torch.structures import fill, leaves
from parallel_keras.backends.torch.whole_loss import refuse_other_rows
from parallel_keras.timeline import Event

_keys = itertools.count()


class Lowering(lowering.Lowering):
    """One model under `DataParallel` on torch."""

    def __init__(self, model, strategy):
        super().__init__(model, strategy)
        self.devices = strategy.devices
        self.world_size = len(self.devices)
        self.key = next(_keys)
        self.device = torch_device(self.devices[0])
        self.ship = _Replicas(self)
        self.pool: Any = None
        self._method = ""
        self._staged: dict = {}  # by the id of a batch that is to come
        self._ahead = itertools.count()
        self._lookahead: Lookahead | None = None
        self._known: dict = {}  # by kind of step, once it has been probed
        self.own: Any = set()  # kinds of step that are the model's own
        self.own_steps = OwnSteps(self)
        self._parts: list = []  # accumulators, where the workers hold the rest of each

    def attach(self):
        """Have the workers started; the first step waits for them."""
        self.own = features.own_steps(self.model)
        self.pool = workers.pool(self.world_size, self.devices, self.strategy.timeout)

    def prepare(self, name):
        self._method = name

    def detach(self):
        """Let the workers forget the model."""
        self.ship.drop()

    def make_function(self, kind):
        if kind == "train" and self.model.steps_per_execution > 1:
            capabilities.check("steps_per_execution", self.strategy, "torch")
        # What is compiled may have changed since the last one was made.
        self._known.pop(kind, None)

        def function(data):
            with self.ship.whole_or_ended():
                return self._step(kind, data[0])

        return function

    @contextlib.contextmanager
    def session(self):
        self.ship.stale = self.ship.reseed = True
        if self.ship.replica is not None:
            self.ship.replica.laps.interrupt()
        members = vars(self.model)
        members["reset_metrics"] = self._reset_metrics
        try:
            try:
                with workers.as_a_rank(self.devices), looking_ahead(self.pool) as may_look:
                    if may_look and self._method == "fit":
                        members["_symbolic_build"] = self._symbolic_build
                    yield
            finally:
                self.fold()
        finally:
            self._look_no_further()
            members.pop("_symbolic_build", None)
            members.pop("reset_metrics", None)
            if self.pool is not None:
                self.pool.drain_output()

    def _reset_metrics(self):
        """Keras calls this at the border of an epoch: a time to compare the models whole."""
        type(self.model).reset_metrics(self.model)
        if features.has_user_code(self.model):
            self.ship.stale = True

    # ---- looking ahead ----

    def _symbolic_build(self, *args, **kwargs):
        """Keras's fit calls this first of all, with the iterator of its batches."""
        vars(self.model).pop("_symbolic_build")
        keras_internals.stock_symbolic_build(self.model, *args, **kwargs)
        iterator = kwargs.get("iterator")
        if iterator is not None and can_look_ahead(iterator.data_adapter):
            keras_internals.wrap_batches(iterator, self._look_ahead)

    def _look_ahead(self, batches):
        self._look_no_further()
        self._lookahead = Lookahead(batches, self._stage)
        return self._lookahead

    def _look_no_further(self):
        if self._lookahead is not None:
            self._lookahead.close()
        self._lookahead = None
        self._staged.clear()

    def fetch_next(self):
        if self._lookahead is not None:
            self._lookahead.go_on()

    def _stage(self, batch):
        """Put the workers' rows of a batch into their memory. Runs in a thread."""
        with contextlib.suppress(IndexError, OSError):  # the workers have gone meanwhile
            data = self._prepared("train", batch)
            total = forwarding.row_count(data)
            if total:
                slot = memory.SLOTS + next(self._ahead) % memory.AHEAD
                # The batch itself is kept, so that its id stays its own.
                self._staged[id(batch)] = batch, data, self._write(slot, data, total)

    def _write(self, slot, data, total):
        """Copy each worker's rows; returns the layouts, in the order of the ranks."""
        arrays = [leaf for leaf in leaves(data) if leaf is not None]
        rows = batch.some_rows(total, self.world_size)
        return [
            self.pool.inbound(rank).write(slot, [array[rows[rank]] for array in arrays])
            for rank in range(1, self.world_size)
        ]

    # ---- a step ----

    def _step(self, kind, data):
        _, prepared, layouts = self._staged.pop(id(data), (None, None, None))
        data = self._prepared(kind, data) if prepared is None else prepared
        total = batches.rows_of(data, self.strategy)
        self._probe(kind, data, total)
        self.ship.ensure()
        if self.ship.has_woken():
            self._known.clear()
            self.own_steps.forget()
            self._probe(kind, data, total)
        number = self.pool.next_number()
        if layouts is None:
            layouts = self._write(number % memory.SLOTS, data, total)
        counts = batch.row_counts(total, self.world_size)
        self._send(number, kind, data, layouts, counts)
        if kind in self.own:
            return self._run_own(kind, number, data, counts)
        own = self._own(kind, data, slice(0, counts[0]))
        if kind == "predict":
            return self._predict(number, own, counts)
        return self._compute(kind, number, own, counts, total)

    def _prepared(self, kind, data):
        if kind in self.own:
            return batches.as_tensors(data, self.strategy)
        return batches.prepared(kind, data, self.strategy)

    def _own(self, kind, data, rows):
        """What rank 0 needs of a batch: its rows, and all targets for a loss of the batch."""
        x, *targets = data
        if not self._known.get(kind, _UNKNOWN).of_the_batch:
            targets = probe_rows.take(targets, rows)
        return (probe_rows.take(x, rows), *targets)

    def _send(self, number, kind, data, layouts, counts):
        structure = shipping.portable(tree.map_structure(lambda leaf: leaf is not None, data))
        news = *self._known.get(kind, _UNKNOWN), self.own_steps.news()
        changes = self.ship.changes(news)
        name = "own_step" if kind in self.own else "step"
        for rank, layout in enumerate(layouts, start=1):
            work = (structure, layout, counts[rank], sum(counts), counts[-1] > 0)
            self.pool.send(rank, (name, self.key, number, kind, work, changes))
        self.ship.send_values(changes[0])

    def _compute(self, kind, number, own, counts, total):
        metrics, replica = self.ship.metrics, self.ship.replica
        own = shipping.to_device(own, self.device)
        averaged, replica.summed, replica.of_the_batch = self._known.get(kind, _UNKNOWN)
        before = metrics.before(averaged)
        if kind == "train":
            self._go_on_with_own_parts()
            replica.train(own, counts[0], total, counts[-1] > 0, self.fetch_next)
            self.ship.events = []
            self.trained_rows = total
        else:
            replica.laps.interrupt()
            with torch.no_grad():
                replica.test(own, counts[0], total)
        metrics.weigh(before, counts[0] / total)
        metrics.add(self.pool.wait_published(number))
        self.ship.forwarder.taken()
        if kind == "train":
            self._show_whole_accumulators()
        return self.model.get_metrics_result()

    def _run_own(self, kind, number, data, counts):
        own = shipping.to_device(probe_rows.take(data, slice(0, counts[0])), self.device)
        result = self.own_steps.run(kind, number, own, counts)
        self.ship.after_own_step()
        if kind == "predict":
            return self._together(result, counts)
        if kind == "train":
            self.ship.events = []
            self.trained_rows = sum(counts)
        return result

    def _predict(self, number, own, counts):
        self.ship.replica.laps.interrupt()
        with torch.no_grad():
            x = shipping.to_device(own, self.device)[0]
            outputs = self.ship.replica.predict(x, counts[0], sum(counts))
        self.ship.forwarder.taken()
        return self._together(outputs, counts)

    def _together(self, outputs, counts):
        """The outputs of all ranks in the order of the rows."""
        parts = [leaves(outputs)]
        for rank in range(1, self.world_size):
            if counts[rank]:
                _, _, layout = self.pool.receive(rank)
                parts.append(self.pool.outbound(rank).read(layout))
        refuse_other_rows(parts[0], counts[0], self.strategy)
        whole = [
            torch.cat([leaf.to(parts[0][index].device) for leaf in pieces])
            for index, pieces in enumerate(zip(*parts, strict=True))
        ]
        return fill(outputs, whole)

    def _probe(self, kind, data, total):
        """Before the first step: do the user's own losses and metrics add up?"""
        if kind in self.own:
            self.own_steps.probe(kind, data, total)
            return
        if kind in self._known or kind == "predict" or not probing.is_enough(total):
            return
        found = probing.probe(self.model, self.strategy, *shipping.to_device(data, self.device))
        found.check(kind, self.strategy)
        variables = enumerate(metric_variables(self.model))
        averaged = tuple(number for number, v in variables if id(v) in found.averaged)
        self._known[kind] = _Known(averaged, found.summed, bool(found.of_the_batch))
        self.note(found.described())

    def events(self):
        """What each replica did in the last training step.

        Of the all-reduce that goes on during the backward pass, what is not hidden by it
        counts. Waiting for data is the time since the step before; in the caller Keras's
        callbacks and logs are part of it.

        Returns:
            List of `timeline.Event`.
        """
        if self.ship.events or not self.ship.is_current():
            return self.ship.events
        with self.ship.whole_or_ended():
            found = self.pool.events_of(self.key, self.ship.replica.laps.read())
        return [
            Event(self.devices[rank], kind, None, None, start, end)
            for rank, events in enumerate(found)
            for kind, start, end in events
        ]

    def _show_whole_accumulators(self):
        """Whoever looks between two steps, as a file that is written does, sees the sum."""
        if self.ship.accumulates():
            held = keras_internals.accumulators(self.model.optimizer)
            self._parts = [v._value for v in held]
            remote.make_remote(self._parts, self.fold)

    def _go_on_with_own_parts(self):
        remote.make_local(self._parts)
        self._parts = []

    def fold(self):
        """Fetch what the workers have accumulated since the last update."""
        self._go_on_with_own_parts()
        if self.ship.is_current() and self.ship.accumulates():
            with self.ship.whole_or_ended():
                self.pool.broadcast_message(("fold", self.key))
                fold_accumulators(self.model.optimizer, 0, self.pool.group)
                held = keras_internals.accumulators(self.model.optimizer)
                self.ship.forwarder.taken_of(held)


class _Known(NamedTuple):
    """What a probe has found out about a kind of step, as the workers are told it."""

    averaged: tuple  # numbers of metric variables whose change counts with the rows' share
    summed: frozenset  # keys of what layers add to the loss as a sum over the rows
    of_the_batch: bool  # whether loss and metrics are computed on the whole batch


_UNKNOWN = _Known((), frozenset(), False)  # of a batch of one row, which is exact as it is


class _Replicas(Shipment):
    """A replica of the model on each rank."""

    def lost(self):
        super().lost()
        self.replica: Any = None
        self.own: Any = None
        self.metrics: Any = None

    def deliver(self, skeleton, tensors, others):
        lowering = self.lowering
        self.has_user_layers = features.has_user_layers(lowering.model)
        specs = shipping.specs(tensors)
        message = ("ship", lowering.key, skeleton, specs, others, self.has_user_layers)
        lowering.pool.broadcast_message(message)
        for tensor in tensors:
            shipping.broadcast(tensor, lowering.pool.group)

    def delivered(self):
        lowering = self.lowering
        self.metrics = CallerMetrics(lowering.model)
        ranks = 0, lowering.world_size, lowering.pool.group
        self.replica = Replica(lowering.model, *ranks, lowering.device, self.has_user_layers)
        self.own = OwnStep(lowering.model, *ranks[1:], lowering.device, self.replica.laps)
        self._is_complete = is_complete(lowering.model)

    def after_own_step(self):
        """All ranks hold what the caller holds; what the step has made has to be shipped."""
        self.forwarder.taken()
        if not self._is_complete:
            self.stale = True

    def collect(self):
        self.lowering.fold()

    def refresh(self):
        self.replica.refresh()

    def send_values(self, numbers):
        forwarding.send_values(self.forwarder.variables, numbers, self.lowering.pool.group)

    def accumulates(self):
        optimizer = keras_internals.compiled_optimizer(self.lowering.model)
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        return bool(steps) and "train" not in self.lowering.own
