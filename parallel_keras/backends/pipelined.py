"""PipelineParallel, as far as it is the same on both backends: what is cut, and how.

A backend adds how the stages compute and what carries values between them.
"""

import functools
from typing import Any

from keras import tree

from parallel_keras import backends, capabilities, features, keras_internals, placement, schedule
from parallel_keras.backends import staged
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
        self._first: Any = None  # of these: it decides where variables live
        self._places: Any = None  # as they were when the model was cut

    def check(self):
        self._refuse_synchronized()
        self.cut()

    def _refuse_synchronized(self):
        for layer in keras_internals.flatten_layers(self.model):
            if self.strategy.microbatches != 1 and getattr(layer, "synchronized", False):
                capabilities.check(
                    "synchronized_batch_norm", self.strategy, backends.name(), f"layer {layer.name}"
                )

    def cut(self, inputs=None):
        """The model's stages for training, or `None` where its inputs are not known yet.

        Args:
            inputs: Inputs as a batch's were, for a model without a graph of its own.
        """
        if not keras_internals.is_built(self.model, "predict"):
            return None
        graph = keras_internals.graph_of(self.model)
        if graph is not None:
            inputs = list(graph.inputs)
        return None if inputs is None else self.staged(inputs, training=True)

    def staged(self, x, training):
        """The model's stages, for inputs like these.

        Args:
            x: Inputs as the model takes them: tensors, or their specs.
            training: Bool.

        Returns:
            A `Staged`; the same one until `forget`.
        """
        # On the way of each step: symbols are made only where the model is cut anew.
        key = tuple(_spec(leaf) for leaf in tree.flatten(x)), training
        if key not in self._staged:
            self._refuse_synchronized()
            symbols = tree.map_structure(_symbol, x)
            choose = self._chooser(x, training)
            self._staged[key] = Staged(
                self.model, self.strategy, symbols, training, choose, self._first
            )
            self._first = self._first or self._staged[key]
        return self._staged[key]

    def _chooser(self, x, training):
        """A function of a model's calls: the stage of each."""
        if training:
            count = len(self.devices)
            return lambda calls: staged.numbers_of(self.model, self.strategy, count, calls)
        # What trains decides where the variables live.
        return functools.partial(staged.numbers_like, self.staged(x, True))

    def notice_places(self):
        """Forget the cut where layers have been placed since.

        Returns:
            Bool. Whether they have.
        """
        places = placement.places_of(self.model), len(placement.units(self.model))
        if places == self._places:
            return False
        self._places = places
        self.forget()
        return True

    def forget(self):
        """Cut the model anew when it runs next: it may have changed."""
        self._staged, self._first = {}, None

    def refuse_split_sums(self, findings, x):
        """Of a layer that adds to the loss on two stages, which term is a sum is not known."""
        numbers = {number for number, _ in findings.summed}
        if not numbers:
            return  # without a cut for training, which an evaluation does not need
        cut = self.staged(x, training=True)
        layers = keras_internals.flatten_layers(self.model)
        for layer in (layers[number] for number in sorted(numbers)):
            if sum(any(layer is one for one in stage.layers) for stage in cut.stages) > 1:
                received = f"layer {layer.name} ({type(layer).__name__}), which is called on two"
                capabilities.check("split_sum", self.strategy, backends.name(), received)

    @property
    def cuts_batches(self):
        """Whether a batch may be computed in parts."""
        return self.strategy.microbatches != 1

    def loss_of_parts(self, cut):
        """Whether each micro-batch's loss is known by itself."""
        return staged.is_loss_of_parts(self.model, cut.graph)

    def remark(self):
        cut = self.cut()
        # A model without a graph of its own has only its loss to tell before the first batch.
        by_parts = features.adds_up_by_rows(self.model) if cut is None else self.loss_of_parts(cut)
        if by_parts or self.strategy.schedule == "gpipe":
            return ""
        return "the loss needs all rows at once, so the order of work is that of 'gpipe'"

    def schedule(self, cut):
        """The name of the schedule of a training step."""
        return staged.schedule_of(self.model, self.strategy, cut.graph)

    def orders(self, cut, microbatches):
        """The order of work of each stage for a training step."""
        return schedule.order(self.schedule(cut), len(cut.stages), microbatches)


def _spec(leaf):
    """What tells one kind of input from another: all but the number of rows."""
    return None if leaf is None else (tuple(leaf.shape[1:]), str(leaf.dtype))


def _symbol(leaf):
    return None if leaf is None else staged.symbol(tuple(leaf.shape), leaf.dtype)
