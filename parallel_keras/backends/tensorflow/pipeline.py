"""PipelineParallel on TensorFlow: one `tf.function`, stages on devices, micro-batches.

Keras's own fit hands whole global batches to the functions made here. Their graph holds
every micro-batch's pass through every stage (pipeline_step.py and stage.py), and the
graph executor overlaps them.
"""

from typing import Any

import tensorflow as tf

from parallel_keras import keras_internals
from parallel_keras.backends.pipelined import Pipelined
from parallel_keras.backends.tensorflow import clock
from parallel_keras.backends.tensorflow.pipeline_step import Step
from parallel_keras.backends.tensorflow.stage_homes import StageHomes
from parallel_keras.backends.tensorflow.whole_batches import WholeBatches


class Lowering(WholeBatches, Pipelined):
    """One model under `PipelineParallel` on TensorFlow."""

    def __init__(self, model, strategy):
        super().__init__(model, strategy)
        self.homes = StageHomes(model, strategy, self.devices)
        self._inputs: Any = None  # as a batch's were, for a model without a graph of its own
        self._times: Any = None  # of the last training step

    # ---- life ----

    def chosen(self):
        self.attach()

    def attach(self):
        if self.notice_places():
            self._made = {kind: {} for kind in self._made}
        cut = self.cut(self._inputs)
        if cut is not None:
            self.homes.settle(cut)

    def prepare(self, name):
        if name in ("fit", "train_on_batch") and self.model.compiled:
            # A callback may load the optimizer's state before the first step.
            keras_internals.build_optimizer(self.model)
            self.attach()

    def detach(self):
        self.homes.detach()

    # ---- steps ----

    def needs_probe(self):
        return self.cuts_batches and super().needs_probe()

    def staged(self, x, training):
        # Costs are worked out with numbers, also where a cut is first needed in a graph.
        with tf.init_scope():
            return super().staged(x, training)

    def will_run_on(self, x):
        self._inputs = x
        self.homes.settle(self.staged(x, training=True))
        self.staged(x, training=False)

    def found(self, kind, findings):
        super().found(kind, findings)
        self.refuse_split_sums(findings, self._inputs)

    def step(self, kind):
        def step(data):
            cut = self.staged(data[0], training=kind == "train")
            summed = self.findings[kind].summed if kind in self.findings else frozenset()
            with self.homes.stepping():
                return getattr(Step(self, cut, data, summed), kind)()

        return step

    def finished(self, kind, result):
        if kind != "train":
            return result
        logs, self._times, self.trained_rows = result
        return logs

    def events(self):
        return (
            [] if self._times is None else clock.events(self._times, self.devices, are_stages=True)
        )
