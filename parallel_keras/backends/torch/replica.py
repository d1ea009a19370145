"""One rank's copy of the model: the stock step on its rows of a global batch.

The same code runs in the caller (rank 0) and in each worker. A step ends with
equal weights, optimizer state and layer state on all ranks; the metrics' state
is what this rank's rows added, for the caller to sum.
"""

import torch
from keras import tree

from parallel_keras import keras_internals
from parallel_keras.backends.torch.gradients import GradientReducer
from parallel_keras.backends.torch.laps import Laps
from parallel_keras.backends.torch.state import StateAverager
from parallel_keras.capabilities import check
from parallel_keras.strategies import DataParallel


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
    """

    def __init__(self, model, rank, world_size, group, device, has_user_layers):
        self.model = model
        self.rank = rank
        self.reducer = GradientReducer(rank, world_size, group, dynamic=has_user_layers)
        self.averager = StateAverager(model, group, dynamic=has_user_layers)
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
            data: `(x, y, sample_weight)` of this rank's rows.
            rows: Int. This rank's rows, zero for none.
            total: Int. Rows of the global batch.
            all_have_rows: Bool. Whether every rank has rows in this batch.
            publish: Called without arguments when this rank's metrics are up
                to date, which is before the gradients are.
        """
        self.laps.begin()
        optimizer, share = self.model.optimizer, rows / total
        accumulator = _Accumulator.of(optimizer)
        for parameter in self.reducer.parameters:
            parameter.grad = None
        self.averager.begin()
        if rows:
            overlapped = all_have_rows and accumulator is None
            loss, y_pred = self.reducer.forward(data, overlapped)
            work = self.averager.start(share)
            with torch.no_grad():
                self._update_metrics(data, y_pred, loss, rows)
            publish()
            if self.trainable:
                scaled = optimizer.scale_loss(loss)
                self.reducer.backward(scaled, share, overlapped, self._computed)
            else:
                self._computed()
        else:
            publish()
            self._computed()
            overlapped, work = False, self.averager.start(0.0)
        with torch.no_grad():
            if self.trainable:
                self._apply(optimizer, accumulator, overlapped)
            self.averager.finish(work)
        self.laps.lap("update")
        self.laps.end()

    def _computed(self):
        self.laps.lap("compute")

    def _forward(self, x, y, sample_weight):
        """Loss and outputs on this rank's rows; what DDP wraps."""
        model = self.model
        y_pred = model(x, training=True) if keras_internals.call_has_training(model) else model(x)
        refuse_mask(y_pred)
        loss = keras_internals.compute_loss(model, x, y, y_pred, sample_weight, training=True)
        return loss, y_pred

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

    def test(self, data, rows):
        """One evaluation step on this rank's rows."""
        if not rows:
            return
        x, y, sample_weight = data
        y_pred = self.predict(x)
        refuse_mask(y_pred)
        loss = keras_internals.compute_loss(self.model, x, y, y_pred, sample_weight, training=False)
        self._update_metrics(data, y_pred, loss, rows)

    def predict(self, x):
        """Outputs for this rank's rows."""
        if keras_internals.call_has_training(self.model):
            return self.model(x, training=False)
        return self.model(x)

    def _update_metrics(self, data, y_pred, loss, rows):
        _, y, sample_weight = data
        keras_internals.loss_tracker(self.model).update_state(loss.detach(), sample_weight=rows)
        metrics = keras_internals.compile_metrics_of(self.model)
        if metrics is not None:
            metrics.update_state(y, y_pred, sample_weight)


class _Accumulator:
    """Keras's gradient accumulation, with each rank's part left where it is.

    Between updates a rank's accumulators hold the weighted gradients of its
    own rows; their sum over the ranks is what one device would hold.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @classmethod
    def of(cls, optimizer):
        # A loss-scaling optimizer checks each step's gradient for overflow,
        # which needs the global one: there nothing is saved.
        if getattr(optimizer, "gradient_accumulation_steps", None) and not hasattr(
            optimizer, "inner_optimizer"
        ):
            return cls(optimizer)
        return None

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


def refuse_mask(y_pred):
    """A loss would average over unmasked steps, whose number differs by rank."""
    if any(keras_internals.keras_mask(leaf) is not None for leaf in tree.flatten(y_pred)):
        check("masked_loss", DataParallel(), "torch", "an output with a Keras mask")


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
