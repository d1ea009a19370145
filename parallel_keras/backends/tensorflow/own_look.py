"""What happens before the first step of a model's own: building, and probing it."""

import contextlib

import tensorflow as tf
from keras import tree

from parallel_keras import features, keras_internals, probe as probing, step_probe, step_state
from parallel_keras.backends.tensorflow import variables
from parallel_keras.backends.tensorflow.inlining import inlined
from parallel_keras.backends.tensorflow.rows import total_rows
from parallel_keras.capabilities import check


class OwnLook:
    """A look at the first batches.

    Args:
        lowering: The model's `data.Lowering`.
        kind: `"train"`, `"test"` or `"predict"`.
    """

    def __init__(self, lowering, kind):
        self.lowering = lowering
        self.model = lowering.model
        self.strategy = lowering.strategy
        self.kind = kind
        self.is_built = False

    @property
    def _step(self):
        return getattr(self.model, f"{self.kind}_step")

    @property
    def is_over(self):
        """Whether no batch has to be seen any more."""
        return self.lowering.is_probed(self.kind)

    def is_needed(self, spec):
        """Whether the next batch has to be seen outside of the graph."""
        return not self.is_over

    def at(self, data):
        """Look at a batch; returns it."""
        lowering, kind = self.lowering, self.kind
        total_rows(data, self.strategy)  # refuses what cannot be cut
        lowering.prepare_random_draws()
        lowering.make_home_of_seed()
        if not self.is_built:
            if self.model.run_eagerly:
                self._run_eagerly(data)
            else:
                self._build(data)
            self.is_built = True
            # A layer that was made just now has not been checked yet.
            for feature, received in features.of_model(self.model):
                check(feature, self.strategy, "tensorflow", received)
        rows = next(leaf for leaf in tree.flatten(data) if leaf is not None).shape[0]
        # A batch of one row is exact as it is: it counts in full on one replica.
        if not lowering.is_probed(kind) and probing.is_enough(rows):
            with variables.plain(self.model, lowering.mirrored):
                found = step_probe.probe(self.model, self.strategy, kind, data)
            lowering.attach()
            lowering.step_found(kind, found)
        return data

    def _build(self, data):
        """Build what plain Keras would build in this step, and leave all else as it is."""
        parts = keras_internals.flatten_layers(self.model)
        if self.kind == "train":
            parts += keras_internals.every_optimizer(self.model)
        if keras_internals.is_built(self.model, self.kind) and all(p.built for p in parts):
            return
        with variables.plain(self.model, self.lowering.mirrored), inlined():
            # As in Keras: tracing builds, and runs nothing.
            step = tf.autograph.experimental.do_not_convert(self._step)
            tf.function(lambda: step(data)).get_concrete_function()
        self.lowering.attach()

    def _run_eagerly(self, data):
        """Run the step once, and put back what it changed."""
        with variables.plain(self.model, self.lowering.mirrored), contextlib.ExitStack() as stack:
            kept = step_state.Kept(self.model)
            stack.callback(kept.restore)
            before = step_state.numbers_of(self.model)
            with keras_internals.noting_new_variables(kept.note):
                self._step(data)
            after = step_state.numbers_of(self.model)
        self.lowering.attach()
        for label in {*before, *after}:
            one, other = before.get(label, []), after.get(label, [])
            if len(one) != len(other) or not all(map(step_state.same, one, other)):
                check("eager_attribute", self.strategy, "tensorflow", f"attribute {label}")
