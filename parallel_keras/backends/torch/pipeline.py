"""PipelineParallel on torch: the caller is the first stage, live workers are the others.

Keras's own fit loop runs in the caller and hands each global batch to one of the three
functions made here. The function tells every worker what the program has changed and
which micro-batches come, computes the first stage as rank 0, and takes the outputs of
the whole batch from the last stage: loss and metrics are computed from them as on one
device. The weights of the other stages stay where they are trained; the caller's
parameters fetch them when somebody looks.
"""

import contextlib
import itertools
from typing import Any

import torch
from keras import tree

from parallel_keras import capabilities, features, keras_internals, probe as probing
from parallel_keras.backends.pipelined import Pipelined
from parallel_keras.backends.torch import (
    batches,
    links,
    memory,
    remote,
    shipping,
    workers,
)
from parallel_keras.backends.torch.channel import Channel
from parallel_keras.backends.torch.devices import torch_device
from parallel_keras.backends.torch.links import LinkedChannel
from parallel_keras.backends.torch.shipment import Shipment
from parallel_keras.backends.torch.stage import StageRank
from parallel_keras.backends.torch.stage_homes import Homes
from parallel_keras.backends.torch.structures import leaves
from parallel_keras.errors import WorkerError
from parallel_keras.timeline import Event

_keys = itertools.count()


class Lowering(Pipelined):
    """One model under `PipelineParallel` on torch."""

    def __init__(self, model, strategy):
        super().__init__(model, strategy)
        self.world_size = len(self.devices)
        self.key = f"pipeline {next(_keys)}"
        self.device = torch_device(self.devices[0])
        self.ship = _Stages(self)
        self.pool: Any = None
        self._summed: dict = {}  # by kind of step, once it has been probed: keys of what is added
        self._fits = False

    def prepare(self, name):
        self._fits = name == "fit"

    def attach(self):
        """Have the workers started; the first step waits for them."""
        if self.notice_places():
            self.ship.drop()
        self.pool = workers.pool(self.world_size, self.devices, self.strategy.timeout)

    def detach(self):
        """Let the workers forget the model."""
        self.ship.drop()

    def make_function(self, kind):
        self._summed.pop(kind, None)

        def function(data):
            data, total = self._ready(kind, data[0])
            with self.ship.whole_or_ended():
                return self._step(kind, data, total)

        return function

    @contextlib.contextmanager
    def session(self):
        self.ship.stale = self.ship.reseed = True
        members = vars(self.model)
        members["reset_metrics"] = self._reset_metrics
        try:
            with workers.as_a_rank(self.devices):
                yield
                if self._fits:
                    # Nobody may look before the workers do something else, or die.
                    self.ship.collect()
        finally:
            members.pop("reset_metrics", None)
            if self.pool is not None:
                self.pool.drain_output()

    def _reset_metrics(self):
        """Keras calls this at the border of an epoch."""
        type(self.model).reset_metrics(self.model)
        if features.has_user_code(self.model):
            self.ship.stale = True
        # So that a worker that dies takes no more than an epoch with it.
        self.ship.collect()

    # ---- a step ----

    def _ready(self, kind, data):
        """A batch as the step takes it, and its rows; raises where there can be no step."""
        data = batches.prepared(kind, data, self.strategy)
        total = batches.rows_of(data, self.strategy)
        if not keras_internals.is_built(self.model, "predict"):
            keras_internals.symbolic_build(self.model, data, kind)
        if kind == "train":  # a callback may have put another optimizer there
            keras_internals.build_optimizer(self.model)
        self._probe(kind, data, total)
        self.staged(data[0], training=True)
        return data, total

    def _step(self, kind, data, total):
        self.ship.ensure_cut(data[0])
        if self.ship.has_woken():
            self._summed.clear()
            self._probe(kind, data, total)
        cut = self.staged(data[0], training=kind == "train")
        if kind != "train" and cut.stages[0].borrowed:
            self.ship.collect()  # later the workers are in the step
        microbatches = self.strategy.microbatches_of(total, self.world_size)
        number = self.pool.next_number()
        self._send(number, kind, data, cut, total, microbatches)
        own = shipping.to_device(data, self.device)
        own = (*own, None, None)[:3]
        rank, summed = self.ship.rank, self._summed.get(kind, frozenset())
        if kind == "predict":
            with torch.no_grad():
                rank.infer(cut, own, total, microbatches, summed)
            outputs, _, assigning = self._result(number)
            self.ship.inferred(assigning)
            return cut.graph.pack(outputs)
        if kind == "train":
            self.ship.begin_training()
            order = self.orders(cut, microbatches)[0]

            def see(added, _):
                # The last stage is ahead: its results are there before they are waited for.
                self._log(number, own, cut, total, added)

            by_parts = self.loss_of_parts(cut)
            rank.train(cut, own, total, microbatches, summed, order, by_parts, see)
            self.ship.trained()
            self.ship.events = []
            self.trained_rows = total
        else:
            added, _ = rank.infer(cut, own, total, microbatches, summed)
            self.ship.inferred(self._log(number, own, cut, total, added))
        return self.model.get_metrics_result()

    def _send(self, number, kind, data, cut, total, microbatches):
        """Tell each worker of the step, with the arrays that its stage needs."""
        changes = self.ship.changes()
        if kind == "train":
            self.ship.check_optimizer()
        summed = self._summed.get(kind, frozenset())
        how = microbatches, summed, self.schedule(cut), self.loss_of_parts(cut)
        for rank in range(1, self.world_size):
            needed = self._needed_by(cut, rank, data)
            structure = shipping.portable(tree.map_structure(lambda leaf: leaf is not None, needed))
            arrays = [leaf for leaf in leaves(needed) if leaf is not None]
            layout = self.pool.inbound(rank).write(number % memory.SLOTS, arrays)
            work = (self.ship.cut_number(cut), structure, layout, total, *how)
            self.pool.send(rank, ("step", self.key, number, kind, work, changes))
            values = self.ship.homes.chosen(changes[0], rank)
            shipping.send(values, rank, self.pool.group)

    def _needed_by(self, cut, rank, data):
        x, *rest = data
        if not cut.stages[rank].takes_batch:
            x = tree.map_structure(lambda _: None, x)
        if rank != self.world_size - 1:
            rest = tree.map_structure(lambda _: None, rest)
        return (x, *rest)

    def _result(self, number):
        """The outputs of the whole batch, and what came of it in the workers.

        Returns:
            The outputs, flat, what the workers added to the loss, and a list of the ranks
            whose layers assigned state in inference.
        """
        last = self.world_size - 1
        _, _, layout, has_mask = self.pool.receive(last)
        tensors = iter([t.to(self.device) for t in self.pool.outbound(last).read(layout)])
        # They lie in memory that the next step writes to.
        outputs = [next(tensors).clone() for _ in has_mask]
        for output, has in zip(outputs, has_mask, strict=True):
            if has:
                keras_internals.set_keras_mask(output, next(tensors).clone())
        published = self.pool.wait_published(number)
        assigning = [rank for rank, (_, assigned) in enumerate(published, start=1) if assigned]
        return outputs, sum(float(added) for added, _ in published), assigning

    def _log(self, number, data, cut, total, added):
        """Loss and metrics of the whole batch, as Keras computes them on one device.

        Returns:
            The last of what `_result` returns.
        """
        outputs, of_workers, assigning = self._result(number)
        y_pred = cut.graph.pack(outputs)
        with torch.no_grad():
            losses = keras_internals.compiled_loss(self.model, data[1:], y_pred)
            loss = sum(losses, start=torch.tensor(added + of_workers, device=self.device))
            keras_internals.update_metrics(self.model, data[1:], y_pred, loss, total)
        return assigning

    def _probe(self, kind, data, total):
        """Before the first step: do the user's own losses and layers add up?"""
        if kind in self._summed or kind == "predict" or not probing.is_enough(total):
            return
        summed: frozenset = frozenset()
        if self.cuts_batches:
            on_device = shipping.to_device(data, self.device)
            findings = probing.probe(self.model, self.strategy, *on_device)
            findings.check(kind, self.strategy)
            self.refuse_split_sums(findings, data[0])
            summed = findings.summed
        self._summed[kind] = summed

    def check_update(self):
        """Refuse an optimizer that needs more than a stage has; it has been built by now."""
        if self.model.compiled:
            for received in features.own_updates(self.model.optimizer):
                capabilities.check("own_update", self.strategy, "torch", received)

    def events(self):
        if self.ship.events or not self.ship.is_current():
            return self.ship.events
        with self.ship.whole_or_ended():
            found = self.pool.events_of(self.key, self.ship.rank.events)
        return [
            Event(self.devices[stage], kind, stage, microbatch, start, end)
            for stage, events in enumerate(found)
            for kind, microbatch, start, end in events
        ]


class _Stages(Shipment):
    """One stage of the model on each rank, with the numbers of its own variables only."""

    _paths: dict = {}
    _give_back: Any = None
    _channel: Any = None

    def lost(self):
        super().lost()
        self._close_links()
        self.rank: Any = None
        self.homes: Any = None
        self._cuts: list = []
        self._is_checked = False  # the optimizer, against the variables that train
        self._remote: list = []  # variables whose numbers are with the workers
        self._before: list | None = None  # the caller's own, as old as those that it has of others

    def ensure_cut(self, x):
        """Have the workers hold the model, cut for inputs like these."""
        self._x = x
        self.ensure()
        if self._attributes and keras_internals.graph_of(self.lowering.model) is None:
            # A `call` that was traced may have read what the program has changed since.
            self.lowering.forget()
            self._cuts.clear()
        cuts = self._cuts_for(x)
        if not all(self.homes.suit(cut) for cut in cuts):
            # Another rank computes with a variable now.
            self.drop()
            self.ensure()
            cuts = self._cuts_for(x)
        for cut in cuts:
            self._tell(cut)

    def _cuts_for(self, x):
        return [self.lowering.staged(x, training) for training in (True, False)]

    def cut_number(self, cut):
        return next(i for i, known in enumerate(self._cuts) if known is cut)

    def _tell(self, cut):
        if not any(known is cut for known in self._cuts):
            self._cuts.append(cut)
            message = ("cut", self.lowering.key, self._attributes, *self._described(cut))
            self.lowering.pool.broadcast_message(message)

    def _described(self, cut):
        structure = shipping.portable(tree.map_structure(lambda leaf: leaf is not None, self._x))
        specs = [
            (tuple(t.shape), str(t.dtype).split(".")[-1]) for t in leaves(self._x) if t is not None
        ]
        number = next(i for i, known in enumerate(self._cuts) if known is cut)
        return number, structure, specs, cut.training, cut.numbers

    def deliver(self, skeleton, tensors, others):
        lowering = self.lowering
        lowering.check_update()
        lowering.forget()
        model, pool = lowering.model, lowering.pool
        self._cuts = self._cuts_for(self._x)
        variables = [
            *shipping.variables_of(model),
            *(shipping.Other(tensors[number]) for number in others),
        ]
        self.homes = Homes(model, self._cuts, variables)
        ranks = {id(v._value): self.homes.ranks(v) for v in variables}
        specs = shipping.specs(tensors)
        self._close_links()
        if links.on_one_cpu([torch_device(name) for name in lowering.devices]):
            self._paths, self._give_back = links.make_files(lowering.world_size)
        cuts = lowering.strategy, [self._described(cut) for cut in self._cuts], self._paths
        for rank in range(1, lowering.world_size):
            held = [ranks.get(id(t)) for t in tensors]
            absent = {i for i, some in enumerate(held) if some is not None and rank not in some}
            present = [i for i in range(len(tensors)) if i not in absent]
            of_rank = shipping.without(specs, absent)
            message = ("ship_stage", lowering.key, skeleton, of_rank, present, others, cuts)
            pool.send(rank, message)
            shipping.send([tensors[i] for i in present], rank, pool.group)

    def delivered(self):
        lowering = self.lowering
        pool, strategy = lowering.pool, lowering.strategy
        if self._paths:
            self._channel = LinkedChannel(0, self._paths, strategy.timeout, pool.check)
        else:
            self._channel = Channel(pool.group, lowering.device)
        self.rank = StageRank(
            lowering.model, 0, pool.group, lowering.device, self._channel, strategy
        )

    def refresh(self):
        self.rank.refresh()
        self._is_checked = False

    def check_optimizer(self):
        """Refuse variables that the optimizer was not built for, as Keras does."""
        model = self.lowering.model
        if self._is_checked or not model.optimizer.built:
            return
        optimizer = keras_internals.compiled_optimizer(model)
        try:
            keras_internals.check_variables_are_known(optimizer, model.trainable_variables)
        except ValueError:
            self.collect()  # the workers are ended
            raise
        self._is_checked = True

    def _close_links(self):
        if isinstance(self._channel, LinkedChannel):
            self._channel.close()
        if self._give_back is not None:
            self._give_back()
        self._paths, self._give_back, self._channel = {}, None, None

    # ---- numbers that are with the workers ----

    def begin_training(self):
        """Keep what a crash of a worker would leave behind the others."""
        if self._before is None and not self._remote:
            own = [*self.homes.of(0), *self.homes.of_all()]
            # What a loss has of another model, say, is not trained.
            own = [v for v in own if not isinstance(v, shipping.Other)]
            self._before = [(v, v._value.detach().clone()) for v in own]

    def trained(self):
        """A training step has changed the workers' variables."""
        if not self._remote:
            self._remote = [v for v in self.homes.variables if self.homes.owner(v)]
            remote.make_remote([v._value for v in self._remote], self.collect)
            self.lowering.pool.lend(self)
        self.forwarder.taken()

    def collect(self):
        """Fetch the numbers of all variables that the workers have changed."""
        if not self._remote:
            return
        if not self.is_current():
            note = self.restore()
            gone = "The workers that held the model have ended meanwhile."
            raise WorkerError(gone, None, gone).for_the_caller(note)
        with self.whole_or_ended():
            variables, self._remote = self._remote, []
            try:
                self._fetch_all()
            except BaseException:
                self._remote = variables
                raise
        remote.make_local([v._value for v in variables])
        self.forwarder.taken_of(variables)
        self._before = None

    def _fetch_all(self):
        for rank in range(1, self.lowering.world_size):
            self._fetch(rank, self.homes.of(rank), of_inference=False)

    def _fetch(self, rank, variables, of_inference):
        lowering = self.lowering
        lowering.pool.send(rank, ("collect", lowering.key, of_inference))
        with torch._C.DisableTorchFunctionSubclass():
            shipping.receive([v._value for v in variables], rank, lowering.pool.group)

    def inferred(self, assigning):
        """An inference step is over.

        Args:
            assigning: List of the workers' ranks whose layers have assigned state in it.
        """
        # After a training step whoever looks fetches all; before one there is little to fetch.
        if not self._remote:
            for rank in assigning:
                self._fetch(rank, self.homes.state_of(rank), of_inference=True)
        self.forwarder.taken()

    def restore(self):
        variables, before = self._remote, self._before
        remote.make_local([v._value for v in variables])
        with torch.no_grad():
            for variable, value in before or ():
                variable._value.copy_(value)
        self.lost()
        if not variables and not before:
            return ""
        return "The model's weights and its optimizer's state are those of the epoch's beginning."

    def drop(self):
        with contextlib.suppress(WorkerError):
            self.collect()
        super().drop()
