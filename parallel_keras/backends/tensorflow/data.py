"""DataParallel on TensorFlow: one `tf.function` over the replicas of MirroredStrategy.

The function takes whole global batches and slices their rows on each replica.
"""

import contextlib
from typing import Any

import tensorflow as tf
from keras import tree

from parallel_keras import features, keras_internals
from parallel_keras.backends.tensorflow import clock, placing, update, variables
from parallel_keras.backends.tensorflow.clock import Clock, dense
from parallel_keras.backends.tensorflow.devices import tf_device
from parallel_keras.backends.tensorflow.own_look import OwnLook
from parallel_keras.backends.tensorflow.own_step import OwnStep
from parallel_keras.backends.tensorflow.replica import Replica, with_callers_state
from parallel_keras.backends.tensorflow.rows import Rows, total_rows
from parallel_keras.backends.tensorflow.runtime import mirrored_strategy
from parallel_keras.backends.tensorflow.state import assign_combined, every_seed
from parallel_keras.backends.tensorflow.whole_batches import WholeBatches
from parallel_keras.step_probe import StepFindings
from parallel_keras.timeline import WAITING, Event


class Lowering(WholeBatches):
    """One model under `DataParallel` on TensorFlow."""

    def __init__(self, model, strategy):
        super().__init__(model, strategy)
        self.devices = strategy.devices
        self.mirrored = mirrored_strategy(self.devices)
        self._step_findings: dict = {}  # of the model's own steps, by kind
        self.home_of_seed: Any = None
        self.seeds: dict = {}  # of the process, that steps were traced with: a new one may follow
        self._times: Any = None  # of the last training step
        self._before: Any = None  # of the one right before it
        self._last: Any = None  # of the last step, if it was one of training

    def attach(self):
        variables.move(self.model, self.mirrored)

    def detach(self):
        variables.move(self.model, None)

    def prepare(self, name):
        if self._is_own("train"):
            return  # which variables its optimizers are for is the step's to say
        if name in ("fit", "train_on_batch") and self.model.compiled:
            # A callback may load the optimizer's state before the first step.
            with self.mirrored.scope():
                keras_internals.build_optimizer(self.model)
            self.attach()

    def step(self, kind):
        return OwnStep(self, kind) if self._is_own(kind) else getattr(_Steps(self, kind), kind)

    def found(self, kind, findings):
        super().found(kind, findings)
        self.note(findings.described())

    def building(self):
        return self.mirrored.scope()

    # ---- steps of the model's own ----

    def _is_own(self, kind):
        return kind in features.own_steps(self.model)

    def form(self, kind):
        return _as_it_is if self._is_own(kind) else super().form(kind)

    def look(self, kind):
        if not self._is_own(kind):
            return super().look(kind)
        self._step_findings.pop(kind, None)
        return OwnLook(self, kind)

    def what_is_known(self, kind):
        return self.is_probed(kind) if self._is_own(kind) else super().what_is_known(kind)

    def is_probed(self, kind):
        """Whether a step of the model's own has been probed."""
        return kind in self._step_findings

    def findings_of(self, kind):
        """The `step_probe.StepFindings` of a step of the model's own, as far as they are known."""
        return self._step_findings.get(kind, StepFindings())

    def step_found(self, kind, findings):
        """How what a step of the model's own does comes together is known."""
        self._step_findings[kind] = findings
        self.note_own_step(kind)

    def make_home_of_seed(self):
        """Where the seed of the draws that name none lives while a step of its own runs."""
        if self.home_of_seed is None:
            seed = keras_internals.global_seed_state()
            with self.mirrored.scope():
                self.home_of_seed = placing.made_anew(seed, tf.convert_to_tensor(seed._value))

    # ---- times ----

    @contextlib.contextmanager
    def session(self):
        self._last = None
        yield

    def finished(self, kind, result):
        if kind != "train":
            self._last = None
        if self._is_own(kind):
            if kind == "train":
                self._times = None
            return result
        if kind != "train":
            return result
        logs, times, self.trained_rows = result
        self._before, self._times = self._last, times
        self._last = times
        return logs

    def events(self):
        """What each replica did in the last training step.

        The all-reduce is the time from a replica's own gradients until it has those of all:
        waiting for a slower replica is part of it. Of all-reduce and update, what goes on
        during the backward pass does not count. Waiting for data is the time since the
        step before ended on all replicas, with Keras's callbacks and logs.

        Returns:
            List of `timeline.Event`.
        """
        if self._times is None:
            return []
        found = clock.events(self._times, self.devices, are_stages=False)
        if self._before is not None:
            before = clock.events(self._before, self.devices, are_stages=False)
            end = max(event.end for event in before)  # the next batch is asked for after all
            for device in self.devices:
                start = min(event.start for event in found if event.device == device)
                found.append(Event(device, WAITING, None, None, end, max(start, end)))
        return found


def _as_it_is(data):
    return data


class _Steps:
    """The three steps on a global batch, in cross-replica context."""

    def __init__(self, lowering, kind):
        self.lowering = lowering
        self.kind = kind
        self.model = lowering.model
        self.mirrored = lowering.mirrored

    def train(self, data):
        """Train on the batch; returns the logs, when what was done, and the rows."""
        model, mirrored = self.model, self.mirrored
        replica, total = self._replica(data)
        gradients, parts, computing = self._run(replica.train, data, total)
        with mirrored.scope():
            reduced, variables = [], model.trainable_variables
            if variables:
                reduced = update.apply(mirrored, model.optimizer, gradients, variables)
            self._assign(replica, parts, total)
            self._note(computing, reduced, variables)
            return model.get_metrics_result(), self.clock.read(), total

    def _note(self, computing, reduced, variables):
        """Take down the parts of the step, for each replica."""
        local = self.mirrored.experimental_local_results
        starts, ends = (local(times) for times in computing)
        for number, device in enumerate(self.lowering.devices):
            self.clock.note("compute", number, None, starts[number], ends[number])
            if not variables:
                continue
            with tf.device(tf_device(device)):
                gradients = dense(local(g)[number] for g in reduced)
                reduction = self.clock.mark([ends[number], *gradients])
                # Reading waits for what was assigned.
                values = [tf.convert_to_tensor(local(v._value)[number]) for v in variables]
                end = self.clock.mark([*values, reduction])
            self.clock.note("all-reduce", number, None, ends[number], reduction)
            self.clock.note("update", number, None, reduction, end)

    def test(self, data):
        replica, total = self._replica(data)
        parts = self._run(replica.test, data, total)
        with self.mirrored.scope():
            self._assign(replica, parts, total)
            return self.model.get_metrics_result()

    def predict(self, data):
        replica, total = self._replica(data)
        outputs, parts = self._run(replica.predict, data, total)
        with self.mirrored.scope():
            self._assign(replica, parts, total)
        return tree.map_structure(
            lambda leaf: tf.concat(self.mirrored.experimental_local_results(leaf), axis=0), outputs
        )

    def _assign(self, replica, parts, total):
        """Assign what the forward passes of the replicas did, in cross-replica context."""
        rows = [Rows(total, replica.replicas, number) for number in range(replica.replicas)]
        assign_combined(self.mirrored, replica.assigned, parts, rows, every_seed(self.model))

    def _replica(self, data):
        lowering = self.lowering
        self.clock = Clock(True)
        strategy, replicas = lowering.strategy, len(lowering.devices)
        findings = lowering.findings.get(self.kind)  # there are none to predict
        replica = Replica(self.model, strategy, replicas, findings, self.clock)
        return replica, total_rows(data, lowering.strategy)

    def _run(self, function, *arguments):
        return self.mirrored.run(with_callers_state(function), args=arguments)
