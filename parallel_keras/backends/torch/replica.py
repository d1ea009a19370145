"""One rank's copy of the model: the stock step on its rows of a global batch.

The same code runs in the caller (rank 0) and in each worker. A step ends with
equal weights, optimizer state and layer state on all ranks; the metrics' state
is what this rank's rows added, for the caller to sum.
"""

import contextlib

import torch

from parallel_keras import features, keras_internals
from parallel_keras.backends.torch.gradients import GradientReducer
from parallel_keras.backends.torch.laps import Laps
from parallel_keras.backends.torch.moments import SharedMoments
from parallel_keras.backends.torch.state import StateAverager
from parallel_keras.backends.torch.structures import leaves
from parallel_keras.backends.torch.whole_loss import WholeLoss, backward


class Replica:
    """A model on one rank.

    Args:
        model: This rank's Keras model, built and compiled.
        rank: Int.
        world_size: Int.
        group: The process group of all ranks.
        device: This rank's `torch.device`.
        has_user_layers: Bool. Whether some layer's `call` is not Keras's own,
            and so may leave other weights out from step to step.

    Attributes:
        of_the_batch: Bool. Whether loss and metrics are computed on the whole batch, by
            rank 0. The data of its steps then hold its own rows of x only, and all others.
        summed: Frozenset of the keys of what layers add to the loss as a sum over the rows.
    """

    def __init__(self, model, rank, world_size, group, device, has_user_layers):
        self.model = model
        self.rank = rank
        self.reducer = GradientReducer(rank, world_size, group, dynamic=has_user_layers)
        self.averager = StateAverager(model, group, dynamic=has_user_layers)
        # What a layer changes in inference too is less, as a rule: none of Keras's own has any.
        self.averager_of_inference = StateAverager(model, group, dynamic=has_user_layers)
        self.whole_loss = WholeLoss(model, rank, world_size, group, device)
        self.moments = SharedMoments(model, group)
        self.dynamic = has_user_layers
        self.assigns = has_user_layers or features.assigns_weights(model)
        self.of_the_batch = False
        self.summed: frozenset = frozenset()
        self.share = 0.0  # of this rank's rows, in the step that goes on
        self.laps = Laps(device)
        self.trainable = None
        self.refresh()

    def refresh(self):
        """Read anew which variables train. Called when a `trainable` flag has changed."""
        trainable = list(self.model.trainable_variables)
        if self.trainable is None or list(map(id, trainable)) != list(map(id, self.trainable)):
            self.trainable = trainable
            self.reducer.bind([v._value for v in trainable], self._forward)

    # ---- train ----

    def train(self, data, rows, total, all_have_rows, publish):
        """One training step.

        Args:
            data: `(x, y, sample_weight)` of this rank's rows, or of one of another.
            rows: Int. This rank's rows, zero for none.
            total: Int. Rows of the global batch.
            all_have_rows: Bool. Whether every rank has rows in this batch.
            publish: Called without arguments when this rank's metrics are up
                to date, which is before the gradients are.
        """
        self.laps.begin()
        optimizer = self.model.optimizer
        share = self.share = rows / total
        accumulator = _Accumulator.of(optimizer)
        self.reducer.forget_gradients()
        self.averager.begin()
        overlapped = all_have_rows and accumulator is None and not self.of_the_batch
        # Where the ranks may go different ways, DDP's reductions would meet the moments'.
        overlapped = overlapped and not (self.dynamic and self.moments.wanted)
        with self.moments.counting(rows):
            if not (rows or self.moments.wanted):
                if self.assigns:
                    self._assign(data[0], training=True)
                publish()
                self._computed()
                work = self.averager.start(0.0)
            elif self.of_the_batch:
                work = self._train_of_the_batch(data, share, total, publish)
            else:
                work = self._train_by_rows(data, rows, share, overlapped, publish)
        if not rows:
            self.reducer.forget_gradients()
        with torch.no_grad():
            if self.trainable:
                self._apply(optimizer, accumulator, overlapped)
            self.averager.finish(work)
        self.laps.lap("update")
        self.laps.end()

    def _train_by_rows(self, data, rows, share, overlapped, publish):
        loss, y_pred = self.reducer.forward(data, overlapped)
        work = self.averager.start(share)
        with torch.no_grad():
            keras_internals.update_metrics(self.model, data[1:], y_pred, loss.detach(), rows)
        publish()
        if self.trainable:
            scaled = self.model.optimizer.scale_loss(loss)
            self.reducer.backward(scaled, share, overlapped, self._computed)
        else:
            self._computed()
        return work

    def _train_of_the_batch(self, data, share, total, publish):
        """The gradients of the compiled loss add up; what a forward pass adds has its share."""
        x, *targets = data
        y_pred, added = self._outputs(x, training=True)
        work = self.averager.start(share)
        publish()
        differentiate = bool(self.trainable)
        gradients = self.whole_loss.compute(
            y_pred, added, targets, total, differentiate, self.moments.wanted
        )
        if differentiate:
            scaled = self.model.optimizer.scale_loss(added) * share
            backward([(scaled, None), *zip(leaves(y_pred), gradients, strict=True)])
        self._computed()
        return work

    def _assign(self, x, training):
        """Do to the weights what a forward pass does, whichever rows it sees."""
        with torch.no_grad():
            keras_internals.call_model(self.model, x, training)

    def _computed(self):
        self.laps.lap("compute")

    def _forward(self, x, y, sample_weight):
        """Loss and outputs on this rank's rows; what DDP wraps."""
        y_pred = keras_internals.call_model(self.model, x, training=True)
        return self._loss(x, y, y_pred, sample_weight, training=True), y_pred

    def _loss(self, x, y, y_pred, sample_weight, training):
        """The loss on this rank's rows, which counts with their share."""
        loss = keras_internals.compute_loss(
            self.model, x, y, y_pred, sample_weight, training=training
        )
        return loss + self._completed() if self.summed else loss

    def _completed(self):
        """What is missing where sums over the rows count with the share, not in full."""
        if not self.share:
            return 0.0
        added = keras_internals.added_by_layers(self.model)
        return sum(added[key] for key in self.summed & added.keys()) * (1 / self.share - 1)

    def _outputs(self, x, training):
        """Outputs for this rank's rows, and what the forward pass adds to the loss."""
        y_pred = keras_internals.call_model(self.model, x, training)
        added = keras_internals.added_losses(self.model)
        nothing = torch.zeros((), device=leaves(y_pred)[0].device)
        total = sum(added, start=nothing)
        return y_pred, total + self._completed() if self.summed else total

    def _apply(self, optimizer, accumulator, overlapped):
        if accumulator is None:
            gradients = self.reducer.gradients(reduced=overlapped)
            self.laps.lap("all-reduce")
        elif accumulator.is_update_step():
            # What the ranks have accumulated is reduced here, once.
            held = accumulator.held(self.trainable)
            gradients = self.reducer.gradients(reduced=False, held=held)
            accumulator.clear()
            self.laps.lap("all-reduce")
        else:
            gradients = self.reducer.local_gradients()
        optimizer.apply(gradients, self.trainable)

    # ---- test and predict ----

    def test(self, data, rows, total):
        """One evaluation step on this rank's rows."""
        share = self.share = rows / total
        x, *targets = data
        with self._inference(share):
            if self.of_the_batch and rows:
                with self.moments.counting(rows):
                    y_pred, added = self._outputs(x, training=False)
            else:
                y_pred = self._infer(x, rows)
        if not rows:
            return
        if self.of_the_batch:
            self.whole_loss.compute(y_pred, added, targets, total, False, False)
            return
        loss = self._loss(x, targets[0], y_pred, targets[1], training=False)
        keras_internals.update_metrics(self.model, targets, y_pred, loss, rows)

    def predict(self, x, rows, total):
        """Outputs for this rank's rows, `None` where it has none and nobody needs it."""
        with self._inference(rows / total):
            return self._infer(x, rows)

    def _infer(self, x, rows):
        if rows or self.moments.wanted:
            with self.moments.counting(rows):
                return keras_internals.call_model(self.model, x, training=False)
        if self.assigns:
            self._assign(x, training=False)
        return None

    @contextlib.contextmanager
    def _inference(self, share):
        """Surrounds a forward pass: what it assigns becomes equal on all ranks."""
        self.averager_of_inference.begin()
        yield
        self.averager_of_inference.finish(self.averager_of_inference.start(share))


class _Accumulator:
    """Keras's gradient accumulation, with each rank's part left where it is.

    Between updates a rank's accumulators hold the weighted gradients of its
    own rows; their sum over the ranks is what one device would hold.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @classmethod
    def of(cls, optimizer):
        if not getattr(optimizer, "gradient_accumulation_steps", None):
            return None
        # A loss-scaling optimizer checks each step's gradient for overflow, and one of the
        # user's own may look at it: that needs the global one, and nothing is saved.
        if hasattr(optimizer, "inner_optimizer") or features.own_methods(optimizer):
            return None
        return cls(optimizer)

    def is_update_step(self):
        steps = self.optimizer.gradient_accumulation_steps
        return (int(keras_internals.raw_iterations(self.optimizer)) + 1) % steps == 0

    def tensors(self):
        accumulators = keras_internals.accumulated_gradients(self.optimizer)
        return [v._value for v in accumulators if v is not None]

    def held(self, variables):
        accumulators = keras_internals.accumulated_gradients(self.optimizer)
        chosen = [
            accumulators[keras_internals.optimizer_index(self.optimizer, v)] for v in variables
        ]
        return [None if v is None else v._value for v in chosen]

    def clear(self):
        torch._foreach_zero_(self.tensors())


def forget_accumulated(optimizer):
    """In a worker: what was accumulated before is with rank 0 alone."""
    accumulator = _Accumulator.of(optimizer)
    if accumulator is not None:
        with torch.no_grad():
            for tensor in accumulator.tensors():
                tensor.zero_()


def fold_accumulators(optimizer, rank, group):
    """Bring what the ranks have accumulated to rank 0, so that it can be read there."""
    accumulator = _Accumulator.of(optimizer)
    if accumulator is None or not optimizer.built:
        return
    with torch.no_grad():
        for tensor in accumulator.tensors():
            group.allreduce([tensor]).wait()
            if rank:
                tensor.zero_()
