"""DataParallel on TensorFlow: one `tf.function` over the replicas of MirroredStrategy.

The function takes whole global batches and slices their rows on each replica.
"""

import tensorflow as tf
from keras import tree

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow import update, variables
from parallel_keras.backends.tensorflow.replica import Replica, with_callers_state
from parallel_keras.backends.tensorflow.rows import total_rows
from parallel_keras.backends.tensorflow.runtime import mirrored_strategy
from parallel_keras.backends.tensorflow.state import assign_combined
from parallel_keras.backends.tensorflow.whole_batches import WholeBatches


class Lowering(WholeBatches):
    """One model under `DataParallel` on TensorFlow."""

    def __init__(self, model, strategy):
        super().__init__(model, strategy)
        self.devices = strategy.devices
        self.mirrored = mirrored_strategy(self.devices)

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

    def step(self, kind):
        return getattr(_Steps(self), kind)

    def building(self):
        return self.mirrored.scope()


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
