"""The steps of a pipeline on one global batch, unrolled in the graph of a `tf.function`.

The graph's executor runs what can run: the stages work at the same time as far as their
devices do. Loss and metrics in the logs are computed once, from the outputs of the whole
batch, by Keras itself; the optimizer runs once, on the whole gradient.
"""

from typing import Any

import tensorflow as tf

from parallel_keras import keras_internals, schedule
from parallel_keras.backends.tensorflow import logits, whole_loss
from parallel_keras.backends.tensorflow.clock import Clock
from parallel_keras.backends.tensorflow.gradient_sums import GradientSums
from parallel_keras.backends.tensorflow.microbatches import Microbatches
from parallel_keras.backends.tensorflow.stage import Stage, learning_values
from parallel_keras.backends.tensorflow.stage_state import StageState


class Step:
    """One step, while it is traced.

    Args:
        lowering: The model's `pipeline.Lowering`.
        cut: The `Staged` to compute.
        data: `(x, y, sample_weight)` of tensors; `(x,)` to predict.
        summed: Frozenset of the keys of what layers add to the loss as a sum over the rows.

    Attributes:
        values: For each micro-batch a dict from the number of a value to a tensor:
            what crosses from stage to stage.
        gradients: The same with lists of gradients, to be added up, by keys of
            `logits.parts`.
        outputs: List of each micro-batch's outputs, flat.
        added: List of scalars that count in the loss beside the compiled one.
    """

    def __init__(self, lowering, cut, data, summed):
        self.lowering = lowering
        self.model = lowering.model
        self.cut = cut
        self.summed = summed
        self.is_training = cut.training
        self.recompute = self.is_training and lowering.strategy.recompute
        self.by_parts = lowering.loss_of_parts(cut)
        self.batches = Microbatches(data, lowering.strategy, len(cut.stages))
        self.state = StageState(self.model, self.batches.rows, lowering.strategy)
        self.sums = GradientSums(lowering.strategy)
        self.clock = Clock(self.is_training)
        self.values: list = [{} for _ in self.batches.rows]
        self.gradients: list = [{} for _ in self.batches.rows]
        self.outputs: list = []
        self.added: list = []
        self._loss = None
        self._gradients_of_outputs: Any = None
        learning = learning_values(cut) if self.is_training else [set() for _ in cut.stages]
        self.stages = [
            Stage(self, computed, lowering.homes.device(computed.number), numbers)
            for computed, numbers in zip(cut.stages, learning, strict=True)
        ]

    # ---- the three steps ----

    def train(self):
        """Train on the batch; returns the logs, when what was computed, and the rows."""
        orders = self.lowering.orders(self.cut, len(self.batches))
        for stage in self.stages:
            stage.regularize()
        for work in schedule.merged(orders):
            stage = self.stages[work.stage]
            if work.kind == schedule.FORWARD:
                stage.forward(work.microbatch)
            else:
                stage.backward(work.microbatch)
        self._log()
        self._update()
        self.state.finish()
        return self.model.get_metrics_result(), self.clock.read(), self.batches.total

    def test(self):
        """Update the metrics; returns the logs."""
        for stage in self.stages:
            stage.regularize()
        self._forward()
        self._log()
        self.state.finish()
        return self.model.get_metrics_result()

    def predict(self):
        """The outputs, rows in order."""
        self._forward()
        self.state.finish()
        return self.cut.graph.pack(self._whole_outputs())

    def _forward(self):
        for number in range(len(self.batches)):
            for stage in self.stages:
                stage.forward(number)

    # ---- loss ----

    def scale(self, loss):
        """A loss as gradients are taken of it."""
        return self.model.optimizer.scale_loss(loss) if self.is_training else loss

    def loss_of_part(self, number, values):
        """A list with the compiled loss of one micro-batch's rows, as a part of the whole."""
        targets = self.batches.take(self.batches.data[1:], number)
        y_pred = self.cut.graph.pack([values[n] for n in self.cut.graph.outputs])
        losses = keras_internals.compiled_loss(self.model, targets, y_pred)
        return [self.batches.weighted(loss, number) for loss in losses]

    def gradients_of_outputs(self, number):
        """The gradient of the whole batch's loss, for one micro-batch's outputs.

        Returns:
            Dict from a key of `logits.parts` to a gradient or `None`.
        """
        if self._gradients_of_outputs is None:
            whole = self._whole_outputs()
            parts = logits.parts(dict(zip(self.cut.graph.outputs, whole, strict=True)))
            self._loss, gradients = whole_loss.with_gradients(
                lambda: self._loss_of(whole), list(parts.values()), self.scale
            )
            self._gradients_of_outputs = dict(zip(parts, gradients, strict=True))
        return {
            key: None if g is None else self.batches.part_of_gradient(g, number)
            for key, g in self._gradients_of_outputs.items()
        }

    def _whole_outputs(self):
        """The outputs of the whole batch, flat; what is returned twice is one tensor."""
        found: dict = {}
        for number, parts in zip(
            self.cut.graph.outputs, zip(*self.outputs, strict=True), strict=True
        ):
            if number not in found:
                found[number] = self.batches.together(parts)
        return [found[number] for number in self.cut.graph.outputs]

    def _loss_of(self, outputs):
        y_pred = self.cut.graph.pack(outputs)
        return keras_internals.compiled_loss(self.model, self.batches.data[1:], y_pred)

    # ---- logs and update ----

    def _log(self):
        """Update the metrics from the outputs of the whole batch, as on one device.

        That can wait until the last stage has nothing else to do.
        """
        last = self.stages[-1]
        with last.computing():
            self.outputs = last.after_all(self.outputs)
            whole = self._whole_outputs()
            losses = self._loss_of(whole) if self._loss is None else self._loss
            loss = keras_internals.add_up_losses([*losses, *self.added])
            y_pred, targets = self.cut.graph.pack(whole), self.batches.data[1:]
            keras_internals.update_metrics(self.model, targets, y_pred, loss, self.batches.total)

    def _update(self):
        variables = self.model.trainable_variables
        if not variables:
            return
        gradients = [self.sums.total(variable) for variable in variables]
        starts = self._marks_of_stages(zip(variables, gradients, strict=True))
        self.model.optimizer.apply(gradients, variables)
        if self.clock.is_on:
            # Reading waits for what was assigned.
            ends = self._marks_of_stages((v, v.value) for v in variables)
            for number, start in starts.items():
                self.clock.note("update", number, None, start, ends[number])

    def _marks_of_stages(self, pairs):
        """A mark for each stage when tensors of its variables are there."""
        if not self.clock.is_on:
            return {}
        tensors: dict = {}
        for variable, tensor in pairs:
            if tensor is not None:
                number = self.lowering.homes.home(variable)
                tensors.setdefault(number, []).append(_dense(tensor))
        marks = {}
        for number, found in tensors.items():
            with self.stages[number].computing():
                marks[number] = self.clock.mark(found)
        return marks


def _dense(tensor):
    if isinstance(tensor, tf.IndexedSlices):
        return tensor.values
    return tf.convert_to_tensor(tensor)
