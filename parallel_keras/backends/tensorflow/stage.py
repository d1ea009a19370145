"""One stage in the graph of a step: its micro-batches, forward and backward, in order.

Each piece of work is held back, at its entry only, until the stage's last one has ended:
so the stages keep to the schedule, and do not wait for one another except where one
needs what another makes. Every forward pass has a gradient tape of its own, which is
asked for gradients under the stage's device: `tf.GradientTape` remembers no devices.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from parallel_keras import keras_internals, schedule
from parallel_keras.backends.tensorflow import logits, placing
from parallel_keras.backends.tensorflow.clock import dense
from parallel_keras.backends.tensorflow.entries import add_up
from parallel_keras.backends.tensorflow.ordering import Order
from parallel_keras.stages import BATCH


class Stage:
    """A stage of one step.

    Args:
        step: The `pipeline_step.Step` that it is part of.
        computed: The `ComputedStage`.
        device: TensorFlow's name of its device.
        learning: Set of the numbers of the taken values that get a gradient.
    """

    def __init__(self, step, computed, device, learning):
        self.step = step
        self.computed = computed
        self.device = placing.full_name("/device:" + device.strip("/"))
        self.learning = learning
        self.trainable = [v for v in computed.used if v.trainable] if step.is_training else []
        self.learns = bool(self.trainable or learning)
        self.is_last = computed.number == len(step.cut.stages) - 1
        self._order = Order()
        self.end = None  # the mark at the end of the last piece of work
        self._passes: dict = {}  # by micro-batch: what its backward pass needs

    @contextlib.contextmanager
    def computing(self):
        """A scope in which everything computes on the stage's device, loops too."""
        on_device = placing.device_function(lambda operation: operation.device or self.device)
        with on_device, self._order.kept():
            yield

    # ---- forward ----

    def forward(self, number):
        """Add a micro-batch's forward pass to the graph."""
        step = self.step
        draws = step.state.draws()
        with self.computing():
            start, taken = self._begin(self._taken(number))
            # Attention takes masks away from what it is given.
            again = {n: _copied(x) for n, x in taken.items()} if step.recompute else {}
            first = _Pass(self, number, taken, records=self.learns and not step.recompute)
            made = first.compute()
            values = first.values
            step.values[number].update((n, values[n]) for n in self.computed.part.gives)
            if self.is_last:
                step.outputs.append([values[n] for n in step.cut.graph.outputs])
                made += step.outputs[-1]
            step.added += first.added
            made += [values[n] for n in self.computed.part.gives]
            self._finish(schedule.FORWARD, number, start, made or list(values.values()))
            if self.learns:
                kept = first if not step.recompute else _Pass(self, number, again, True, draws)
                self._passes[number] = kept

    def _taken(self, number):
        """The values that the stage takes, by their numbers."""
        step, takes = self.step, self.computed.part.takes
        values = dict(step.values[number])
        if self.computed.takes_batch:
            x = step.batches.take(step.batches.data[0], number)
            values.update(step.cut.standardize(x))
        return {n: values[n] for n in takes}

    # ---- backward ----

    def backward(self, number):
        """Add a micro-batch's backward pass to the graph."""
        if not self.learns:
            return
        step = self.step
        with self.computing():
            one = self._passes.pop(number)
            gradients = step.gradients[number]
            # What it has taken itself and gives on gets the gradients of both in one.
            incoming = {
                key: add_up(gradients.pop(key)) for key in list(gradients) if key[0] in self._gives
            }
            if self.is_last and not step.by_parts:
                incoming.update(step.gradients_of_outputs(number))
            # Of the stage's own part of the loss.
            incoming[_LOSS] = tf.ones([])
            start, incoming = self._begin(incoming)
            if step.recompute:
                with tf.control_dependencies([x for x in incoming.values() if x is not None]):
                    one.taken = {n: _copied(x) for n, x in one.taken.items()}
                one.compute()
            found = one.gradients(incoming)
            for key, gradient in found.of_taken.items():
                step.gradients[number].setdefault(key, []).append(gradient)
            rows, data = step.batches.part(number)
            for variable, gradient in found.of_variables:
                step.sums.add(self, variable, gradient, rows, data)
            self._finish(schedule.BACKWARD, number, start, found.tensors())

    @property
    def _gives(self):
        return self.computed.part.gives

    def regularize(self):
        """Add the regularizers of the stage's variables to the loss, once a step."""
        step = self.step
        variables = [v for v in self.computed.variables if v.trainable]
        with self.computing():
            with tf.GradientTape() as tape:
                losses = self.computed.regularization()
                total = step.scale(_total(losses)) if losses else None
            step.added += losses
            if losses and step.is_training:
                values = [keras_internals.tf_variable(v) for v in variables]
                for variable, gradient in zip(variables, tape.gradient(total, values), strict=True):
                    step.sums.add("regularizers", variable, gradient)

    # ---- order ----

    def after_all(self, outputs):
        """Lists of tensors, held back until the stage has no more work of this step."""
        return [[_held(x, [self.end]) for x in tensors] for tensors in outputs]

    def _begin(self, inputs):
        """Hold the inputs of a piece of work back until the one before has ended.

        Args:
            inputs: Dict to tensors, `None` among them.

        Returns:
            The mark of the start, and the same dict.
        """
        after = [] if self.end is None else [self.end]
        clock = self.step.clock
        if not clock.is_on:
            return None, {key: _held(x, after) for key, x in inputs.items()}
        inputs = {key: _copied(x) for key, x in inputs.items()}
        start = clock.mark([*after, *(x for x in inputs.values() if x is not None)])
        return start, {key: _held(x, [start]) for key, x in inputs.items()}

    def _finish(self, kind, number, start, made):
        self.end = self.step.clock.mark(x for x in made if x is not None)
        self.step.clock.note(kind, self.computed.number, number, start, self.end)


class _Pass:
    """One forward pass of a micro-batch through a stage, and its gradients.

    Args:
        stage: The `Stage`.
        number: Int, of the micro-batch.
        taken: Dict from the number of a value that the stage takes to a tensor.
        records: Bool. Whether gradients will be asked for.
        draws: Where the seeds were, where it is computed a second time.

    Attributes:
        values: Dict from the number of a value to a tensor.
        added: List of scalars, what layers added to the loss of the batch for these rows.
    """

    def __init__(self, stage, number, taken, records, draws=None):
        self.stage = stage
        self.number = number
        self.taken = taken
        self.records = records
        self.draws = draws

    def compute(self):
        """Compute; returns a list of the scalars that it ends with."""
        stage, step = self.stage, self.stage.step
        self.values = dict(self.taken)
        self.tape: Any = tf.GradientTape() if self.records else None
        with (
            step.state.microbatch(stage.computed.layers, self.number, self.draws),
            self.tape or contextlib.nullcontext(),
        ):
            if self.tape is not None:
                self.tape.watch(list(self._learning().values()))
            self.added = [
                step.batches.weighted(loss, self.number, key in step.summed)
                for key, loss in stage.computed.forward(self.values).items()
            ]
            losses = list(self.added)
            if self.records and stage.is_last and step.by_parts:
                losses += step.loss_of_part(self.number, self.values)
            self.loss = step.scale(_total(losses)) if self.records and losses else None
        return [*self.added, *([] if self.loss is None else [self.loss])]

    def _learning(self):
        return logits.parts({n: self.taken[n] for n in self.stage.learning})

    def gradients(self, incoming):
        """Gradients from those of the values that the stage gives.

        Args:
            incoming: Dict from a key of `logits.parts`, or `_LOSS`, to its gradient or `None`.

        Returns:
            A `_Gradients`.
        """
        incoming = dict(incoming)
        one = incoming.pop(_LOSS)
        pairs = [(logits.part(self.values, key), g) for key, g in incoming.items() if g is not None]
        if self.loss is not None:
            pairs.append((self.loss, tf.cast(one, self.loss.dtype)))
        learning, trainable = self._learning(), self.stage.trainable
        variables = [keras_internals.tf_variable(v) for v in trainable]
        found = [None] * (len(learning) + len(variables))
        if pairs:
            found = self.tape.gradient(
                [value for value, _ in pairs],
                [*learning.values(), *variables],
                output_gradients=[gradient for _, gradient in pairs],
            )
        del self.tape
        of_taken = {
            key: tf.convert_to_tensor(gradient)
            for key, gradient in zip(learning, found, strict=False)
            if gradient is not None
        }
        return _Gradients(of_taken, list(zip(trainable, found[len(learning) :], strict=True)))


class _Gradients:
    """What a backward pass gives: by the key of a value, and pairs with variables."""

    def __init__(self, of_taken, of_variables):
        self.of_taken = of_taken
        self.of_variables = of_variables

    def tensors(self):
        return dense([*self.of_taken.values(), *(g for _, g in self.of_variables)])


_LOSS = "loss", False  # among the keys of values: the stage's own part of the loss


def learning_values(cut):
    """The numbers of the values that each stage takes and that need a gradient.

    Nothing before a value trains, nothing needs its gradient.

    Args:
        cut: A `Staged`.

    Returns:
        A list of sets.
    """
    found, learns = [], {BATCH: False}
    for stage in cut.stages:
        learning = {n for n, source in stage.part.takes.items() if learns[source]}
        learns[stage.number] = bool(learning) or any(v.trainable for v in stage.used)
        found.append(learning)
    return found


def _total(losses):
    total = losses[0]
    for loss in losses[1:]:
        total = keras.ops.add(total, loss)
    return total


def _held(tensor, after):
    """The same tensor, not before others are there."""
    with tf.control_dependencies(after):
        return _copied(tensor)


def _copied(tensor):
    return None if tensor is None else logits.copied(tensor)
