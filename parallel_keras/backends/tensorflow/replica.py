"""One replica's part of a step, inside `strategy.run`: forward, loss, gradient, metrics.

Nothing here waits for the other replicas, except what a layer asks for itself
(`BatchNormalization(synchronized=True)`). The step in `data.py` combines the parts.
"""

import tensorflow as tf
from keras import tree

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow import entries
from parallel_keras.backends.tensorflow.clock import dense
from parallel_keras.backends.tensorflow.moments import counting
from parallel_keras.backends.tensorflow.rows import Rows
from parallel_keras.backends.tensorflow.state import (
    capture,
    new_values,
    refuse_assigned_weights,
    weighted,
)
from parallel_keras.capabilities import check


class Replica:
    """The steps of one model on one replica's rows.

    Args:
        model: The Keras model, its variables under the strategy.
        strategy: Our `DataParallel`, for messages.
        replicas: Int.
        averaged: Set of ids of the metric variables that count with the rows'
            share.
        clock: The step's `Clock`.
    """

    def __init__(self, model, strategy, replicas, averaged, clock):
        self.model = model
        self.strategy = strategy
        self.replicas = replicas
        self.averaged = averaged
        self.clock = clock

    def train(self, data, total):
        """Weighted gradients, what the forward pass assigned, and the times of both ends."""
        model, rows = self.model, self._rows(total)
        start = self.clock.mark(leaf for leaf in tree.flatten(data) if leaf is not None)
        x, y, sample_weight = rows.take(data)
        trainable = [v._value for v in model.trainable_variables]
        with capture(model, self._number) as scope, counting(rows.some):
            with tf.GradientTape() as tape:
                y_pred, loss = self._forward(x, y, sample_weight, training=True)
                scaled = model.optimizer.scale_loss(loss)
                scaled = scaled * rows.share(scaled.dtype)
            gradients = tape.gradient(scaled, trainable) if trainable else []
        refuse_assigned_weights(scope, model, self.strategy)
        leaves = [leaf for leaf in tree.flatten((x, y, sample_weight)) if leaf is not None]
        uses = [None if g is None else self._uses(g, leaves, rows) for g in gradients]
        metric_ids = self._update_metrics(scope, rows, y, y_pred, sample_weight, loss)
        variables, values = new_values(scope, exclude=metric_ids)
        self.assigned = variables
        times = start, self.clock.mark([start, *dense([*gradients, loss])])
        return uses, [weighted(tf.convert_to_tensor(v), rows) for v in values], times

    def _uses(self, gradient, leaves, rows):
        """A gradient as the replicas add it up: a list of `Entries`.

        Those that are side by side travel as `tf.IndexedSlices`.
        """
        if self.replicas == 1:
            return [entries.Entries(gradient, None, is_shared=True)]
        uses = entries.split(gradient, leaves, self.strategy)
        uses = [entries.of_rows(one, rows) for one in uses]
        return [one if one.is_shared else _side_by_side(one, gradient) for one in uses]

    def test(self, data, total):
        """Update the metrics."""
        rows = self._rows(total)
        x, y, sample_weight = rows.take(data)
        with capture(self.model, self._number) as scope:
            y_pred, loss = self._forward(x, y, sample_weight, training=False)
        self._update_metrics(scope, rows, y, y_pred, sample_weight, loss)

    def predict(self, data, total):
        """Outputs for this replica's rows."""
        rows = self._rows(total)
        (x,) = rows.take(data)
        with capture(self.model, self._number):
            y_pred = self._call(x, training=False)
        return tree.map_structure(lambda leaf: rows.own(leaf, self.strategy), y_pred)

    def _rows(self, total):
        return Rows(total, self.replicas, self._number)

    @property
    def _number(self):
        return tf.distribute.get_replica_context()._replica_id

    def _call(self, x, training):
        if keras_internals.call_has_training(self.model):
            return self.model(x, training=training)
        return self.model(x)

    def _forward(self, x, y, sample_weight, training):
        y_pred = self._call(x, training)
        if any(keras_internals.keras_mask(leaf) is not None for leaf in tree.flatten(y_pred)):
            check("masked_loss", self.strategy, "tensorflow", "an output with a Keras mask")
        loss = keras_internals.compute_loss(
            self.model, x, y, y_pred, sample_weight, training=training
        )
        return y_pred, loss

    # ---- metrics ----

    def _update_metrics(self, scope, rows, y, y_pred, sample_weight, loss):
        """Add this replica's rows; returns the ids of all metric variables."""
        model = self.model
        variables = {id(v): v for metric in model.metrics for v in metric.variables}
        averaged = (self.averaged & variables.keys()) | self._losses_of_outputs(y_pred)
        before = {key: tf.identity(variables[key].value) for key in averaged}

        def update():
            # Those that a layer, or the loss of several outputs, has updated
            # inside of the forward pass.
            for key in scope.assigned.keys() & variables.keys():
                variables[key].assign(scope.assigned_value(variables[key]))
            count = tf.cast(rows.count, "float32")
            keras_internals.loss_tracker(model).update_state(loss, sample_weight=count)
            metrics = keras_internals.compile_metrics_of(model)
            if metrics is not None:
                metrics.update_state(y, y_pred, sample_weight)
            for key, value in before.items():
                change = variables[key].value - value
                variables[key].assign(value + change * rows.share(value.dtype))
            return tf.constant(0)

        if not rows.may_be_none or self.replicas == 1:
            update()
        elif not isinstance(rows.count, int):
            tf.cond(rows.some, update, lambda: tf.constant(0))
        return variables.keys()

    def _losses_of_outputs(self, y_pred):
        """Metrics of single outputs' losses that Keras does not weight with the rows.

        compile_utils.py, 3.15.1: it does where the traced shape has their number.
        """
        known = tree.flatten(y_pred)[0].shape[0] is not None
        metrics = [] if known else keras_internals.output_loss_metrics(self.model)
        return {id(v) for metric in metrics for v in metric.variables}


def _side_by_side(one, gradient):
    values = tf.IndexedSlices(one.values, one.indices, gradient.dense_shape)
    return one._replace(values=values, indices=None)


def with_callers_state(function):
    """Run a replica's function under Keras's global attributes of the caller's thread.

    tf.distribute runs each replica in a thread of its own.
    """
    state = keras_internals.global_state_snapshot()

    def run(*arguments):
        result = []
        keras_internals.with_global_state(state, lambda: result.append(function(*arguments)))()
        return result[0]

    return run
