"""PipelineParallel, as far as it is the same on both backends: what is cut, and how.

A backend adds how the stages compute and what carries values between them.
"""

import keras
from keras import tree

from parallel_keras import backends, capabilities, features, keras_internals, placement, schedule
from parallel_keras.backends.lowering import Lowering
from parallel_keras.backends.staged import Staged


class Pipelined(Lowering):
    """One model under `PipelineParallel`.

    Attributes:
        devices: Tuple of device names, one for each stage.
    """

    def __init__(self, model, strategy):
        super().__init__(model, strategy)
        self.devices = strategy.devices_for(placement.devices_needed(model))
        self._staged: dict = {}

    def check(self):
        if self.strategy.microbatches == 1:
            return
        for layer in keras_internals.flatten_layers(self.model):
            if getattr(layer, "synchronized", False):
                capabilities.check(
                    "synchronized_batch_norm", self.strategy, backends.name(), f"layer {layer.name}"
                )

    def staged(self, x, training):
        """The model's stages, for inputs like these.

        Args:
            x: Inputs as the model takes them: tensors, or their specs.
            training: Bool.

        Returns:
            A `Staged`; the same one until `forget`.
        """
        symbols = tree.map_structure(_symbol, x)
        leaves = [leaf for leaf in tree.flatten(symbols) if leaf is not None]
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (shapes, training)
        if key not in self._staged:
            # What trains decides where the variables live.
            like = None if training else self.staged(x, True)
            self._staged[key] = Staged(
                self.model, self.strategy, len(self.devices), symbols, training, like
            )
        return self._staged[key]

    def forget(self):
        """Cut the model anew when it runs next: it may have changed."""
        self._staged = {}

    def loss_of_parts(self, staged):
        """Whether each micro-batch's loss is known by itself."""
        return features.adds_up_by_rows(self.model) and not staged.graph.is_masked

    def orders(self, staged, microbatches):
        """The order of work of each stage for a training step.

        A loss that needs all micro-batches at once, such as a mean over unmasked steps,
        comes between all forward passes and all backward passes, as in GPipe.
        """
        name = self.strategy.schedule if self.loss_of_parts(staged) else "gpipe"
        return schedule.order(name, len(staged.stages), microbatches)


def _symbol(leaf):
    """A symbolic input for a tensor of any number of rows."""
    if leaf is None:
        return None
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor((None, *tuple(leaf.shape)[1:]), dtype)
