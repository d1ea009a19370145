"""Layer state under micro-batches: a step changes it once.

Each micro-batch starts from the state before the step. Afterwards the moving averages
of BatchNormalization take the statistics of the whole batch, other floating-point state
the average weighted with the rows, and whole numbers have to agree.
Seeds are no state of this kind: they go on from draw to draw.
"""

import contextlib

import tensorflow as tf

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow.agreement import agreeing
from parallel_keras.backends.tensorflow.state import refuse_assigned_weights, weighted


class StageState:
    """The non-trainable state of a model's layers in one step.

    Args:
        model: A Keras model.
        rows: List of the `Rows` of each micro-batch.
        strategy: A `PipelineParallel`, for messages.
    """

    def __init__(self, model, rows, strategy):
        self.model = model
        self.rows = rows
        self.strategy = strategy
        seeds = keras_internals.seed_states(model)
        self._seeds = {id(v) for v in (*seeds, keras_internals.global_seed_state())}
        self._metrics = {id(v) for metric in model.metrics for v in metric.variables}
        self._drawn: dict = {}  # by id: a seed, and its value after the last draw
        self._values: dict = {}  # by id: a variable, and each micro-batch's part of its value
        self._moments: dict = {}  # by id: a layer, and each micro-batch's list of moments

    def draws(self):
        """Where the seeds are, for a second forward pass with the same draws."""
        return list(self._drawn.values())

    @contextlib.contextmanager
    def microbatch(self, layers, number, draws=None):
        """One micro-batch's forward pass through a stage; it assigns nothing.

        Args:
            layers: List of the stage's layers.
            number: Int, of the micro-batch.
            draws: What `draws` gave before the first forward pass, for a second one,
                which counts for nothing.
        """
        norms = [x for x in layers if keras_internals.is_batch_norm(x) and x.trainable]
        notes: list = [[] for _ in norms]
        scope = keras_internals.ObservingScope(self.draws() if draws is None else draws)
        with contextlib.ExitStack() as stack:
            for layer, noted in zip(norms, notes, strict=True):
                stack.enter_context(keras_internals.noting_moments(layer, noted.append))
            with scope:
                yield
        refuse_assigned_weights(scope, self.model, self.strategy)
        if draws is not None:
            return
        averages = set()
        for layer, noted in zip(norms, notes, strict=True):
            if noted:
                self._moments.setdefault(id(layer), (layer, []))[1].append(noted)
                averages |= {id(layer.moving_mean), id(layer.moving_variance)}
        for key, variable in scope.assigned.items():
            value = scope.assigned_value(variable)
            if key in self._seeds:
                self._drawn[key] = variable, value
            elif key not in averages | self._metrics:
                self._values.setdefault(key, (variable, []))[1].append(self._part(value, number))

    def _part(self, value, number):
        value = tf.convert_to_tensor(value)
        return value if len(self.rows) == 1 else weighted(value, self.rows[number])

    def finish(self):
        """After all forward passes: change the state, once."""
        for variable, value in self._drawn.values():
            variable.assign(value)
        for variable, parts in self._values.values():
            if parts[0].dtype.is_floating:
                variable.assign(tf.add_n(parts))
            else:
                variable.assign(agreeing(parts, self.rows, variable, "micro-batch"))
        for layer, moments in self._moments.values():
            # One that is called twice in a pass moves twice.
            for calls in zip(*moments, strict=True):
                self._move(layer, calls)

    def _move(self, layer, calls):
        """Move the averages of a BatchNormalization by the moments of all micro-batches.

        Args:
            layer: The layer.
            calls: Tuple of `(mean, variance, count)`, one for each micro-batch.
        """
        shares = self._shares([tf.cast(count, calls[0][0].dtype) for _, _, count in calls])
        mean = sum(s * m for s, (m, _, _) in zip(shares, calls, strict=True))
        # The variance of a union: the mean of the variances, and the variance of the means.
        variance = sum(
            s * (v + tf.square(m - mean)) for s, (m, v, _) in zip(shares, calls, strict=True)
        )
        for variable, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
            before = tf.cast(variable.value, value.dtype)
            variable.assign(before * layer.momentum + value * (1.0 - layer.momentum))

    def _shares(self, counts):
        """The weight of each micro-batch's moments; none for one without rows."""
        if len(counts) == 1:
            return [1.0]
        counts = [
            count * tf.cast(rows.some, count.dtype)
            for count, rows in zip(counts, self.rows, strict=True)
        ]
        total = tf.add_n(counts)
        return [tf.math.divide_no_nan(count, total) for count in counts]
