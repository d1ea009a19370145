"""DataParallel on TensorFlow: one `tf.function` over the replicas of MirroredStrategy.

The model's own `distribute_strategy` stays unset, so that Keras's fit hands over
whole global batches; the function slices their rows on each replica. That is exact
for every batch size, for generators, and for the on_batch methods alike.
"""

import numpy as np
import tensorflow as tf
from keras import tree

from parallel_keras import capabilities, features, keras_internals
from parallel_keras import probe as probing
from parallel_keras.backends import lowering
from parallel_keras.backends.tensorflow import update, variables
from parallel_keras.backends.tensorflow.replica import Replica, to_spec, with_callers_state
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
        self.averaged = frozenset()

    def attach(self):
        variables.move(self.model, self.mirrored)

    def detach(self):
        variables.move(self.model, None)

    def make_function(self, kind):
        self.probed = False
        step = getattr(_Steps(self), kind)
        step_on_data, step_on_iterator = self._compile(step)
        if kind == "predict":
            return lambda data: step_on_data(self._built(_arrays(keras_internals.unpack(data[0])[:1])))

        def function(iterator):
            if not isinstance(iterator, tf.data.Iterator):
                return step_on_data(self._ready(_batch(next(iter(iterator)))))
            if self._needs_a_look(iterator):
                return step_on_data(self._ready(_batch(next(iterator))))
            return step_on_iterator(iterator)

        return function

    def _compile(self, step):
        """The step on a batch at hand, and on the next one of an iterator."""

        @tf.autograph.experimental.do_not_convert
        def on_data(data):
            return step(data)

        @tf.autograph.experimental.do_not_convert
        def on_iterator(iterator):
            return step(_batch(iterator.get_next()))

        if self.model.run_eagerly:
            return on_data, on_iterator
        return (
            tf.function(on_data, reduce_retracing=True),
            tf.function(on_iterator, reduce_retracing=True),
        )

    # ---- before the first step ----

    def _needs_a_look(self, iterator):
        """Whether the next batch has to be seen outside of the graph."""
        specs = [s for s in tree.flatten(iterator.element_spec) if hasattr(s, "shape")]
        if any(spec.shape.rank is None for spec in specs):
            return True
        self._built(keras_internals.unpack(tree.map_structure(to_spec, iterator.element_spec)))
        return not self.probed and probing.needs_probe(self.model)

    def _built(self, data):
        """Build what is not built, without consuming a batch; returns the batch."""
        if not self._is_built():
            with self.mirrored.scope():
                keras_internals.symbolic_build(self.model, data)
            self.attach()
            # What was built here may be refused: a layer made in `build`.
            for feature, received in features.of_model(self.model):
                capabilities.check(feature, self.strategy, "tensorflow", received)
        return data

    def _is_built(self):
        return keras_internals.is_built(self.model)

    def _ready(self, data):
        """A batch at hand: build with it, and probe with it where that is needed."""
        data = self._built(data)
        leaf = next(leaf for leaf in tree.flatten(data) if leaf is not None)
        if not self.probed and probing.is_enough(leaf.shape[0]):
            if probing.needs_probe(self.model):
                rules = probing.probe(self.model, self.strategy, *data)
                self.averaged = frozenset(rules)
            self.probed = True
        return data


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


def _batch(data):
    """A batch of an iterator as `(x, y, sample_weight)` of tensors."""
    data = tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )
    return _arrays(keras_internals.unpack(data))


def _arrays(data):
    return tree.map_structure(_tensor, tuple(data))


def _tensor(leaf):
    if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(np.asarray(leaf))
