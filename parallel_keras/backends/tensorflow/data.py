"""DataParallel on TensorFlow: one `tf.function` over the replicas of MirroredStrategy.

The model's own `distribute_strategy` stays unset, so that Keras's fit hands over
whole global batches; the function slices their rows on each replica. That is exact
for every batch size, for generators, and for the on_batch methods alike.
"""

import keras
import tensorflow as tf
from keras import tree

from parallel_keras import capabilities, features, keras_internals
from parallel_keras import probe as probing
from parallel_keras.backends import lowering
from parallel_keras.backends.tensorflow import specs, update, variables
from parallel_keras.backends.tensorflow.replica import Replica, with_callers_state
from parallel_keras.backends.tensorflow.rows import total_rows
from parallel_keras.backends.tensorflow.runtime import mirrored_strategy
from parallel_keras.backends.tensorflow.state import assign_combined


class Lowering(lowering.Lowering):
    """One model under `DataParallel` on TensorFlow."""

    def __init__(self, model, strategy):
        super().__init__(model, strategy)
        self.devices = strategy.devices
        self.mirrored = mirrored_strategy(self.devices)
        self.probed = False
        self.averaged: frozenset = frozenset()

    def attach(self):
        variables.move(self.model, self.mirrored)

    def detach(self):
        variables.move(self.model, None)

    def prepare(self, name):
        if name in ("fit", "train_on_batch") and self.model.compiled and self.model.built:
            # A callback may load the optimizer's state before the first step.
            with self.mirrored.scope():
                keras_internals.build_optimizer(self.model)
            self.attach()

    def prepare_random_draws(self):
        """Make the state of draws without a seed where it can live: outside of the replicas."""
        layers = keras_internals.flatten_layers(self.model)
        is_lambda = (isinstance(layer, keras.layers.Lambda) for layer in layers)
        if any(is_lambda) or features.has_user_code(self.model):
            keras_internals.ensure_global_seed()

    def make_function(self, kind):
        # What is compiled may have changed since the last one was made.
        self.probed = False
        step = getattr(_Steps(self), kind)
        look = _Look(self, kind)
        made: dict = {}

        def functions():
            # A step is traced with what the probe has found: one that was traced
            # for a batch too small to probe does not know it.
            if self.averaged not in made:
                made[self.averaged] = self._compile(step)
            return made[self.averaged]

        def at_hand(data, spec=None):
            data = look.at(data)
            on_data, _ = functions()
            if spec is not None and not self.model.run_eagerly:
                # For batches of any size: the step is then traced once, as in
                # Keras, and not for the size of this batch and again for others.
                on_data.get_concrete_function(spec)
            return on_data(data)

        def function(iterator):
            if not isinstance(iterator, tf.data.Iterator):
                return at_hand(specs.arrays(keras_internals.unpack(next(iter(iterator)))))
            if not look.is_over:
                spec = specs.spec_of(iterator)
                if look.is_needed(spec):
                    return at_hand(specs.batch_of(next(iterator)), spec)
            return functions()[1](iterator)

        if kind == "predict":
            return lambda data: at_hand(specs.arrays(keras_internals.unpack(data[0])[:1]))
        return function

    def _compile(self, step):
        """The step on a batch at hand, and on the next one of an iterator."""

        @tf.autograph.experimental.do_not_convert
        def on_data(data):
            self.prepare_random_draws()
            return step(data)

        if not self.model.run_eagerly:
            on_data = tf.function(on_data, reduce_retracing=True)

        @tf.autograph.experimental.do_not_convert
        def on_iterator(iterator):
            return on_data(specs.batch_of(iterator.get_next()))

        if not self.model.run_eagerly:
            on_iterator = tf.function(on_iterator, reduce_retracing=True)
        return on_data, on_iterator


class _Look:
    """What has to happen before the first step: building, and probing the user's code.

    Args:
        lowering: The model's `Lowering`.
        kind: `"train"`, `"test"` or `"predict"`.
    """

    def __init__(self, lowering, kind):
        self.lowering = lowering
        self.model = lowering.model
        self.kind = kind
        self.is_over = False

    def is_needed(self, spec):
        """Whether the next batch has to be seen outside of the graph."""
        if spec is None:
            return True
        self._build(tree.map_structure(lambda s: None if s is None else specs.symbol(s), spec))
        self.is_over = self.lowering.probed or not probing.needs_probe(self.model)
        return not self.is_over

    def at(self, data):
        """Look at a batch; returns it."""
        lowering = self.lowering
        leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
        total_rows(data, lowering.strategy)  # refuses what cannot be cut
        self._build(data)
        if self.kind == "predict" or lowering.probed or not probing.is_enough(leaves[0].shape[0]):
            return data
        if probing.needs_probe(self.model):
            lowering.averaged = frozenset(probing.probe(self.model, lowering.strategy, *data))
        lowering.probed = True
        return data

    def _build(self, data):
        """Build what is not built, without consuming a batch."""
        if keras_internals.is_built(self.model, self.kind):
            return
        self.lowering.prepare_random_draws()
        with self.lowering.mirrored.scope():
            keras_internals.symbolic_build(self.model, data, self.kind)
        self.lowering.attach()
        # A layer that was made in `build` has not been checked yet.
        for feature, received in features.of_model(self.model):
            capabilities.check(feature, self.lowering.strategy, "tensorflow", received)


class _Steps:
    """The three steps on a global batch, in cross-replica context."""

    def __init__(self, lowering):
        self.lowering = lowering
        self.model = lowering.model
        self.mirrored = lowering.mirrored

    def train(self, data):
        model, mirrored = self.model, self.mirrored
        replica, total = self._replica(data)
        gradients, parts = self._run(replica.train, data, total)
        with mirrored.scope():
            if model.trainable_variables:
                update.apply(mirrored, model.optimizer, gradients, model.trainable_variables)
            assign_combined(mirrored, replica.assigned, parts)
            return model.get_metrics_result()

    def test(self, data):
        replica, total = self._replica(data)
        self._run(replica.test, data, total)
        with self.mirrored.scope():
            return self.model.get_metrics_result()

    def predict(self, data):
        replica, total = self._replica(data)
        outputs = self._run(replica.predict, data, total)
        return tree.map_structure(
            lambda leaf: tf.concat(self.mirrored.experimental_local_results(leaf), axis=0), outputs
        )

    def _replica(self, data):
        lowering = self.lowering
        replica = Replica(self.model, lowering.strategy, len(lowering.devices), lowering.averaged)
        return replica, total_rows(data, lowering.strategy)

    def _run(self, function, *arguments):
        return self.mirrored.run(with_callers_state(function), args=arguments)
