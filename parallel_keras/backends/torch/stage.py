"""One rank's stage of a pipeline: its micro-batches, forward and backward, in order.

The same code runs in the caller (rank 0, the first stage) and in each worker. Activations
go straight to the ranks that take them and gradients come back the same way, so that
the stages wait for one another only where one needs what another makes.
"""

import contextlib
import time
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from parallel_keras import batch, capabilities, keras_internals, probe_rows, schedule
from parallel_keras.backends.torch.stage_optimizer import StageOptimizer
from parallel_keras.backends.torch.stage_state import StageState
from parallel_keras.backends.torch.whole_loss import backward, together, with_gradients
from parallel_keras.stages import BATCH


class StageRank:
    """A model's stage on one rank.

    Args:
        model: This rank's Keras model, built.
        rank: Int, also the number of the stage.
        group: The process group of all ranks.
        device: This rank's `torch.device`.
        channel: What carries values to and from the other ranks.
        strategy: A `PipelineParallel`.

    Attributes:
        events: List of `(kind, microbatch, start, end)` of the last training step, with
            times in seconds of the machine's monotonic clock.
        has_assigned: Bool. Whether layers assigned state of their own in the last step, where
            that was no training step.
    """

    def __init__(self, model, rank, group, device, channel, strategy):
        self.model = model
        self.rank = rank
        self.group = group
        self.device = device
        self.strategy = strategy
        self.channel = channel
        self.events: list = []
        self.has_assigned = False
        self._notes: list = []  # the events of the step that goes on
        self._optimizer: Any = None
        self._current: list = []  # the `Staged` whose borrowed variables are up to date

    def refresh(self):
        """Find out anew which variables train."""
        self._optimizer = None

    # ---- steps ----

    def train(self, staged, data, total, microbatches, summed, order, by_parts, see):
        """One training step.

        Args:
            staged: A `Staged` for training.
            data: `(x, y, sample_weight)` of the whole batch; parts that this stage does
                not need may be `None`.
            total: Int. The rows of the batch.
            microbatches: Int.
            summed: Frozenset of the keys of what layers add to the loss as a sum over the rows.
            order: List of `schedule.Step`: this stage's work.
            by_parts: Bool. Whether the loss of each micro-batch is known by itself.
            see: Called with the added losses (a float) and, on the last rank, the outputs
                of the whole batch (a list of tensors, or else `None`), before the last
                backward pass.
        """
        run = _Run(self, staged, data, total, microbatches, summed)
        run.scale = self.model.optimizer.scale_loss
        stage = staged.stages[self.rank]
        trainable = [v for v in stage.used if v.trainable]
        for variable in trainable:
            variable._value.grad = None
        self.events = self._notes = []
        self.has_assigned = False
        self._current.clear()
        last = max(i for i, step in enumerate(order) if step.kind == schedule.BACKWARD)
        run.regularize(stage)
        for i, step in enumerate(order):
            if step.kind == schedule.FORWARD:
                run.forward(step.microbatch)
            else:
                if i == last:
                    see(run.added, run.outputs())
                run.backward(step.microbatch, by_parts)
        self._update(staged, stage)
        run.state.finish()
        self.channel.flush()

    def infer(self, staged, data, total, microbatches, summed):
        """Forward passes only, as `evaluate` and `predict` need them.

        Returns:
            The added losses, a float, and on the last rank the outputs, as in `train`.
        """
        self._notes = []  # these are no part of a training step
        run = _Run(self, staged, data, total, microbatches, summed)
        stage = staged.stages[self.rank]
        with torch.no_grad():
            self._borrow(staged)
            state = [v for layer in stage.layers for v in keras_internals.own_state(layer)]
            before = [v._value._version for v in state]
            run.regularize(stage)
            for microbatch in range(microbatches):
                run.forward(microbatch)
            outputs = run.outputs()
        assigned = [v for v, seen in zip(state, before, strict=True) if v._value._version != seen]
        self._refuse_borrowed(stage, assigned)
        run.state.finish()
        self.has_assigned = bool(assigned)
        self.channel.flush()
        return run.added, outputs

    def _refuse_borrowed(self, stage, assigned):
        """State that lives on another stage, where a training step changes it."""
        borrowed = set(map(id, stage.borrowed))
        for variable in assigned:
            if id(variable) in borrowed:
                received = f"variable {variable.path}, which is assigned in inference"
                capabilities.check("shared_state", self.strategy, "torch", received)

    # ---- the update ----

    def _update(self, staged, stage):
        with self.noting("update", None), torch.no_grad():
            self._bring_gradients_home(staged, stage)
            own = [v for v in stage.variables if v.trainable]
            if self._optimizer is None:
                ranks = self.rank, self.group, self.channel
                self._optimizer = StageOptimizer(self.model.optimizer, own, *ranks)
            self._optimizer.apply([v._value.grad for v in own])
            self._take_shared(staged, stage, _trains)

    def _borrow(self, staged):
        """Bring what inference uses on another stage than training does up to date."""
        if not any(one is staged for one in self._current):
            self._take_shared(staged, staged.stages[self.rank], lambda variable: True)
            self._current.append(staged)

    def _bring_gradients_home(self, staged, stage):
        """Gradients of a variable that several stages use add up with its owner."""
        for other, variables in _borrowed_from(staged, self.rank, _trains):
            self.channel.send(other, [v._value.grad for v in variables])
        for other, variables in _lent_to(staged, stage, _trains):
            for variable, gradient in zip(
                variables, self.channel.receive(other, len(variables)), strict=True
            ):
                parameter = variable._value
                if gradient is not None:
                    parameter.grad = (
                        gradient if parameter.grad is None else parameter.grad + gradient
                    )

    def _take_shared(self, staged, stage, concerns):
        """Those who borrow a variable get its new numbers."""
        for other, variables in _lent_to(staged, stage, concerns):
            self.channel.send(other, [v._value for v in variables])
        for other, variables in _borrowed_from(staged, self.rank, concerns):
            for variable, value in zip(
                variables, self.channel.receive(other, len(variables)), strict=True
            ):
                variable._value.copy_(value)

    @contextlib.contextmanager
    def noting(self, kind, microbatch):
        """Take down when a piece of work begins and ends."""
        start = time.monotonic()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._notes.append((kind, microbatch, start, time.monotonic()))


class _Run:
    """One step's micro-batches on one rank."""

    def __init__(self, rank, staged, data, total, microbatches, summed):
        self.rank = rank
        self.staged = staged
        self.stage = staged.stages[rank.rank]
        self.channel = rank.channel
        self.channel.begin()
        self.x, self.y, self.sample_weight = data
        self.rows = batch.row_slices(total, microbatches)
        self.shares = batch.shares(total, microbatches)
        self.summed = summed
        is_cut = microbatches > 1 or (staged.training and rank.strategy.recompute)
        self.state = StageState(self.stage.layers if is_cut else [], rank.strategy)
        self.is_last = rank.rank == len(staged.stages) - 1
        self.added = 0.0
        self.scale: Any = None
        self._kept: dict = {}  # by micro-batch: what the backward pass needs
        self._finished: list = []  # on the last rank: the outputs of each micro-batch
        self._loss_gradients: Any = None
        self._sources = _grouped(self.stage.part.takes)
        self._targets = _by_target(self.stage.part.gives)

    def regularize(self, stage):
        """Add the regularizers of the stage's variables to the loss, once a step."""
        losses = stage.regularization()
        if losses:
            total = torch.stack([loss.reshape(()) for loss in losses]).sum()
            self.added += float(total.detach())
            if total.requires_grad:
                self.scale(total).backward()

    # ---- forward ----

    def forward(self, microbatch):
        values: dict = {}
        if BATCH in self._sources:
            part = probe_rows.take(self.x, self.rows[microbatch])
            of_batch = self.staged.standardize(part)
            values.update((number, of_batch[number]) for number in self._sources[BATCH])
        for source, numbers in self._sources.items():
            if source != BATCH:
                values.update(zip(numbers, self.channel.receive(source, len(numbers)), strict=True))
        with self.rank.noting(schedule.FORWARD, microbatch):
            taken = dict(values)
            losses = self._compute(values, self.shares[microbatch])
        for target, numbers in self._targets.items():
            self.channel.send(target, [values[number] for number in numbers])
        for key, loss in losses.items():
            self.added += self._weight(key, microbatch) * float(loss.detach())
        if self.is_last:
            outputs = [values[number] for number in self.staged.graph.outputs]
            self._finished.append([_detached(output) for output in outputs])
        if torch.is_grad_enabled():
            given = {number: values[number] for number in self.stage.part.gives}
            kept = outputs if self.is_last else None
            self._kept[microbatch] = taken, given, losses, kept

    def _compute(self, values, share):
        """The stage's forward pass; changes `values` and returns the added losses."""
        if not (self.rank.strategy.recompute and torch.is_grad_enabled()):
            with self.state.microbatch(share):
                return self.stage.forward(values)
        taken = dict(values)
        seeds = [
            g.state._value for x in self.stage.layers for g in keras_internals.seed_generators(x)
        ]
        before = [seed.detach().clone() for seed in seeds]
        # Attention takes masks away from what it is given.
        masked = [(x, keras_internals.keras_mask(x)) for x in taken.values() if x is not None]
        is_first = True

        def compute():
            nonlocal is_first
            mine = dict(taken)
            if is_first:
                is_first = False
                with self.state.microbatch(share):
                    return mine, self.stage.forward(mine)
            after = [seed.detach().clone() for seed in seeds]
            _assign(seeds, before)
            for tensor, mask in masked:
                keras_internals.set_keras_mask(tensor, mask)
            try:
                with self.state.microbatch(share, counts=False):
                    return mine, self.stage.forward(mine)
            finally:  # the draws have been made already
                _assign(seeds, after)

        made, losses = checkpoint(compute, use_reentrant=False)
        values.update(made)
        return losses

    def outputs(self):
        """On the last rank: the model's outputs for the whole batch, flat; else `None`."""
        return [together(parts) for parts in zip(*self._finished, strict=True)] or None

    # ---- backward ----

    def backward(self, microbatch, by_parts):
        gradients: dict = {}
        for target, numbers in self._targets.items():
            for number, gradient in zip(
                numbers, self.channel.receive(target, len(numbers)), strict=True
            ):
                if gradient is not None:
                    known = gradients.get(number)
                    gradients[number] = gradient if known is None else known + gradient
        with self.rank.noting(schedule.BACKWARD, microbatch):
            taken, given, losses, outputs = self._kept.pop(microbatch)
            pairs = [(given[number], gradient) for number, gradient in gradients.items()]
            share = self.shares[microbatch]
            pairs += [
                (self.scale(loss) * self._weight(key, microbatch), None)
                for key, loss in losses.items()
            ]
            if self.is_last and keras_internals.compile_loss_of(self.rank.model) is not None:
                if by_parts:
                    pairs.append(
                        (self.scale(self._loss_of_part(microbatch, outputs)) * share, None)
                    )
                else:
                    pairs += zip(outputs, self._parts_of_whole(microbatch), strict=True)
            backward(pairs)
        for source, numbers in self._sources.items():
            if source != BATCH:
                self.channel.send(source, [_gradient(taken[number]) for number in numbers])

    def _weight(self, key, microbatch):
        """With what a term that a layer adds for a micro-batch counts in the loss."""
        return 1.0 if key in self.summed else self.shares[microbatch]

    def _loss_of_part(self, microbatch, outputs):
        rows = self.rows[microbatch]
        y, weight = (probe_rows.take(thing, rows) for thing in (self.y, self.sample_weight))
        return self._loss(y, self.staged.graph.pack(outputs), weight)

    def _parts_of_whole(self, microbatch):
        """The gradient of the whole batch's loss, for one micro-batch's outputs."""
        if self._loss_gradients is None:
            whole = self.outputs()
            y_pred = self.staged.graph.pack(whole)
            _, self._loss_gradients = with_gradients(
                lambda: [self._loss(self.y, y_pred, self.sample_weight)], whole, self.scale
            )
        rows = self.rows[microbatch]
        return [None if g is None else g[rows] for g in self._loss_gradients]

    def _loss(self, y, y_pred, sample_weight):
        (loss,) = keras_internals.compiled_loss(self.rank.model, (y, sample_weight), y_pred)
        return loss


# ---- small things -----------------------------------------------------------


def _grouped(takes):
    """Numbers of values by the stage that makes them, both in order."""
    found: dict = {}
    for number, source in sorted(takes.items()):
        found.setdefault(source, []).append(number)
    return dict(sorted(found.items()))


def _by_target(gives):
    """Numbers of values by the stage that takes them, both in order."""
    found: dict = {}
    for number, targets in sorted(gives.items()):
        for target in targets:
            found.setdefault(target, []).append(number)
    return dict(sorted(found.items()))


def _trains(variable):
    return variable.trainable


def _borrowed_from(staged, rank, concerns):
    """Pairs of an owner's rank and the variables, of those of concern, that it lends this one."""
    borrowed = {id(v) for v in staged.stages[rank].borrowed if concerns(v)}
    found = []
    for other in staged.stages:
        variables = [v for v in other.variables if id(v) in borrowed]
        if variables:
            found.append((other.number, variables))
    return found


def _lent_to(staged, stage, concerns):
    """Pairs of another rank and the variables, of those of concern, that it borrows here."""
    found = []
    for other in staged.stages:
        borrowed = {id(v) for v in other.borrowed if concerns(v)}
        variables = [v for v in stage.variables if id(v) in borrowed]
        if variables:
            found.append((other.number, variables))
    return found


def _assign(tensors, values):
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def _gradient(tensor):
    return None if tensor is None or not tensor.requires_grad else tensor.grad


def _detached(tensor):
    mask = keras_internals.keras_mask(tensor)
    tensor = tensor.detach()
    if mask is not None:
        keras_internals.set_keras_mask(tensor, mask)
    return tensor
