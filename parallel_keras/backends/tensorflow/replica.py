"""One replica's part of a step, inside `strategy.run`: forward, loss, gradient, metrics.

Nothing here waits for the other replicas, except what a layer asks for itself
(`BatchNormalization(synchronized=True)`). The step in `data.py` combines the parts.
"""

import tensorflow as tf
from keras import tree

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow import entries
from parallel_keras.backends.tensorflow.clock import dense
from parallel_keras.backends.tensorflow.differences import difference
from parallel_keras.backends.tensorflow.moments import counting
from parallel_keras.backends.tensorflow.rows import Rows
from parallel_keras.backends.tensorflow.state import (
    capture,
    new_values,
    refuse_assigned_weights,
    weighted,
)
from parallel_keras.backends.tensorflow.whole_loss import WholeLoss


class Replica:
    """The steps of one model on one replica's rows.

    Args:
        model: The Keras model, its variables under the strategy.
        strategy: Our `DataParallel`, for messages.
        replicas: Int.
        findings: `probe.Findings`: how losses and metrics come together.
        clock: The step's `Clock`.
    """

    def __init__(self, model, strategy, replicas, findings, clock):
        self.model = model
        self.strategy = strategy
        self.replicas = replicas
        self.findings = findings
        self.clock = clock

    def train(self, data, total):
        """Weighted gradients, what the forward pass assigned, and the times of both ends."""
        model, rows = self.model, self._rows(total)
        start = self.clock.mark(leaf for leaf in tree.flatten(data) if leaf is not None)
        with tf.control_dependencies([start]):  # so that nothing is computed before it
            x, y, sample_weight = rows.take(data)
        trainable = [v._value for v in model.trainable_variables]
        with capture(model, self._number) as scope, counting(rows.some):
            with tf.GradientTape() as tape:
                y_pred, losses = self._forward(x, y, sample_weight, rows, training=True)
                scaled = [model.optimizer.scale_loss(loss) for loss in losses]
                shared = [loss * rows.share(loss.dtype) for loss in scaled]
            pairs = [(loss, tf.ones_like(loss)) for loss in shared]
            if self.findings.of_the_batch:
                pairs += self._of_the_batch(data, total, y_pred, losses, bool(trainable))
            targets, own = [target for target, _ in pairs], [gradient for _, gradient in pairs]
            gradients = tape.gradient(targets, trainable, own) if trainable else []
        refuse_assigned_weights(scope, model, self.strategy)
        leaves = [leaf for leaf in tree.flatten((x, y, sample_weight)) if leaf is not None]
        uses = [None if g is None else self._uses(g, leaves, rows) for g in gradients]
        self._update_metrics(scope, rows, y, y_pred, sample_weight, losses)
        parts = self._parts_of_state(scope, rows)
        times = start, self.clock.mark([start, *dense([*gradients, *losses])])
        return uses, parts, times

    def _uses(self, gradient, leaves, rows):
        """A gradient as the replicas add it up: a list of `Entries`.

        Those that are side by side travel as `tf.IndexedSlices`.
        """
        if self.replicas == 1:
            return [entries.Entries(gradient, None, is_shared=True)]
        uses = entries.split(gradient, leaves, self.strategy)
        uses = [entries.of_rows(one, rows) for one in uses]
        return [one if one.is_shared else entries.side_by_side(one, gradient) for one in uses]

    def test(self, data, total):
        """Update the metrics; what the forward pass assigned."""
        rows = self._rows(total)
        x, y, sample_weight = rows.take(data)
        with capture(self.model, self._number) as scope:
            y_pred, losses = self._forward(x, y, sample_weight, rows, training=False)
            if self.findings.of_the_batch:
                self._of_the_batch(data, total, y_pred, losses, differentiate=False)
        self._update_metrics(scope, rows, y, y_pred, sample_weight, losses)
        return self._parts_of_state(scope, rows)

    def predict(self, data, total):
        """Outputs for this replica's rows, and what the forward pass assigned."""
        rows = self._rows(total)
        (x,) = rows.take(data)
        with capture(self.model, self._number) as scope:
            y_pred = keras_internals.call_model(self.model, x, training=False)
        outputs = tree.map_structure(lambda leaf: rows.own(leaf, self.strategy), y_pred)
        return outputs, self._parts_of_state(scope, rows)

    def _parts_of_state(self, scope, rows):
        """This replica's parts of the variables that were assigned, named in `assigned`."""
        self.assigned, values = new_values(scope, exclude=self._metric_variables())
        return [weighted(tf.convert_to_tensor(v), rows) for v in values]

    def _rows(self, total):
        return Rows(total, self.replicas, self._number)

    @property
    def _number(self):
        return tf.distribute.get_replica_context()._replica_id

    def _forward(self, x, y, sample_weight, rows, training):
        """Outputs, and a list of losses that count with the share of the rows."""
        y_pred = keras_internals.call_model(self.model, x, training)
        if self.findings.of_the_batch:
            losses = keras_internals.added_losses(self.model)
        else:
            losses = [
                keras_internals.compute_loss(
                    self.model, x, y, y_pred, sample_weight, training=training
                )
            ]
        return y_pred, [*losses, *self._completed(rows)]

    def _completed(self, rows):
        """What is missing where sums over the rows count with the share, not in full."""
        if not self.findings.summed:
            return []
        added = keras_internals.added_by_layers(self.model)
        chosen = [added[key] for key in sorted(self.findings.summed & added.keys())]
        return [tf.math.divide_no_nan(loss, rows.share(loss.dtype)) - loss for loss in chosen]

    def _of_the_batch(self, data, total, y_pred, added, differentiate):
        """Have the compiled loss and metrics computed on the whole batch."""
        whole = WholeLoss(self.model, self.strategy, self.replicas, data, total)
        return whole.compute(y_pred, added, differentiate)

    # ---- metrics ----

    def _update_metrics(self, scope, rows, y, y_pred, sample_weight, losses):
        """Add this replica's rows."""
        model, variables = self.model, self._metric_variables()
        averaged = self._averaged(y_pred) & variables.keys()
        before = {key: tf.identity(variables[key].value) for key in averaged}

        def update():
            # Those that a layer, or the loss of several outputs, has updated
            # inside of the forward pass.
            for key in scope.assigned.keys() & variables.keys():
                variables[key].assign(scope.assigned_value(variables[key]))
            if not self.findings.of_the_batch:
                count = tf.cast(rows.count, "float32")
                loss = keras_internals.add_up_losses(losses)
                keras_internals.update_metrics(model, (y, sample_weight), y_pred, loss, count)
            for key, value in before.items():
                change = difference(variables[key].value, value)
                variables[key].assign(value + change * rows.share(value.dtype))
            return tf.constant(0)

        if not rows.may_be_none or self.replicas == 1:
            update()
        elif not isinstance(rows.count, int):
            tf.cond(rows.some, update, lambda: tf.constant(0))

    def _metric_variables(self):
        """By id; they are no state of the layers."""
        return {id(v): v for metric in self.model.metrics for v in metric.variables}

    def _averaged(self, y_pred):
        """Ids of the metric variables whose change counts with the share of the rows.

        Those of single outputs' losses are among them where Keras does not weight with the rows.
        compile_utils.py, 3.15.1: it does where the traced shape has their number.
        """
        if self.findings.of_the_batch:
            return set()
        known = tree.flatten(y_pred)[0].shape[0] is not None
        metrics = [] if known else keras_internals.output_loss_metrics(self.model)
        return self.findings.averaged | {id(v) for metric in metrics for v in metric.variables}


def with_callers_state(function):
    """Run a replica's function under Keras's global attributes of the caller's thread.

    And under its control dependencies: tf.distribute runs each replica in a thread of its
    own, where a graph has none (framework/ops.py, TensorFlow 2.21).
    """
    state = keras_internals.global_state_snapshot()
    graph = tf.compat.v1.get_default_graph()
    awaited = [] if tf.executing_eagerly() else graph._current_control_dependencies()

    def run(*arguments):
        result = []

        def in_order():
            with tf.control_dependencies(list(awaited)):
                result.append(function(*arguments))

        keras_internals.with_global_state(state, in_order)()
        return result[0]

    return run
