"""A model's own step: each replica calls the user's `train_step` on its rows.

The replicas meet at `optimizer.apply`, where gradients become those of the global batch,
and at the end, where what the step assigned and what it returned come together.
"""

from typing import Any

import tensorflow as tf
from keras import tree

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow import entries, own_state, update
from parallel_keras.backends.tensorflow.inlining import inlined
from parallel_keras.backends.tensorflow.moments import counting
from parallel_keras.backends.tensorflow.own_logs import Logs
from parallel_keras.backends.tensorflow.replica import with_callers_state
from parallel_keras.backends.tensorflow.rows import Rows, total_rows
from parallel_keras.backends.tensorflow.state import every_seed
from parallel_keras.capabilities import check


class OwnStep:
    """One kind of step of a model, in cross-replica context.

    Args:
        lowering: The model's `data.Lowering`.
        kind: `"train"`, `"test"` or `"predict"`.
    """

    def __init__(self, lowering, kind):
        self.lowering = lowering
        self.model = lowering.model
        self.strategy = lowering.strategy
        self.mirrored = lowering.mirrored
        self.kind = kind

    def __call__(self, data):
        """Run the step; returns what it returns for the whole batch."""
        total = total_rows(data, self.strategy)
        seed, home = keras_internals.global_seed_state(), self.lowering.home_of_seed
        self.lowering.seeds[id(seed)] = seed
        with self.mirrored.scope(), own_state.lent(seed, home, self.mirrored):
            run = _Run(self)
            with keras_internals.results_of_metrics(self.model) as run.results:
                found = self.mirrored.run(with_callers_state(run.replica), args=(data, total))
            run.copies.combine()
            if self.kind == "predict":
                return self._outputs(found)
            return run.logs.combined(found)

    def _outputs(self, outputs):
        local = self.mirrored.experimental_local_results
        return tree.map_structure(lambda leaf: tf.concat(local(leaf), axis=0), outputs)


class _Run:
    """One run of a step on all replicas, traced or eager."""

    def __init__(self, step):
        self.step = step
        self.model = step.model
        self.strategy = step.strategy
        self.mirrored = step.mirrored
        self.replicas = len(step.lowering.devices)
        self.findings = step.lowering.findings_of(step.kind)
        self.copies = own_state.Copies(self.strategy, self.mirrored, self.model)
        self.logs = Logs(self.model, self.mirrored, self.function, self.findings)
        self.results: Any = None  # of metrics, while the replicas run
        self.graph = tf.compat.v1.get_default_graph()

    @property
    def function(self):
        """The step, of the user's own or Keras's that calls what is."""
        return getattr(self.model, f"{self.step.kind}_step")

    def replica(self, data, total):
        """Call the step on this replica's rows."""
        number = tf.distribute.get_replica_context()._replica_id
        rows = Rows(total, self.replicas, number)
        own = rows.take(data)

        def synchronize(optimizer, gradients, variables, apply):
            self._synchronize(optimizer, gradients, variables, rows, own)

        with (
            self.copies.assigning(number, rows, self._averaged(rows)),
            counting(rows.some, rows.share(tf.float32)),
            inlined(),
            keras_internals.synchronizing(synchronize),
        ):
            self.copies.start_streams(every_seed(self.model), number)
            returned = self.function(own)
        if self.step.kind == "predict":
            return tree.map_structure(lambda leaf: rows.own(leaf, self.strategy), returned)
        return self.logs.of_replica(returned, self.results, rows)

    def _averaged(self, rows):
        """Ids of the metric variables whose change counts with the share of the rows.

        Those of single outputs' losses are among them where Keras does not weight with the rows.
        compile_utils.py, 3.15.1: it does where the traced shape has their number.
        """
        if isinstance(rows.size, int):
            return self.findings.averaged
        metrics = keras_internals.output_loss_metrics(self.model)
        return self.findings.averaged | {id(v) for metric in metrics for v in metric.variables}

    # ---- updates ----

    def _synchronize(self, optimizer, gradients, variables, rows, data):
        """Apply the global batch's gradients, in the place of `optimizer.apply`."""
        if tf.compat.v1.get_default_graph() is not self.graph:
            check("branched_apply", self.strategy, "tensorflow", f"optimizer {optimizer.name}")
        leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
        uses = [None if g is None else self._uses(g, leaves, rows) for g in gradients]

        def across(strategy, uses):
            if not optimizer.built:
                with tf.init_scope(), strategy.scope():
                    optimizer.build(variables)
            update.apply(strategy, optimizer, uses, variables)

        tf.distribute.get_replica_context().merge_call(across, args=(uses,))

    def _uses(self, gradient, leaves, rows):
        """A gradient by its share of the rows, as the replicas add it up: a list of `Entries`."""
        if not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        if entries.hides_uses(gradient, leaves):
            check("changed_entries", self.strategy, "tensorflow")
        share = rows.share(gradient.dtype)
        uses = entries.split(gradient, leaves, self.strategy)
        uses = [entries.of_rows(one._replace(values=one.values * share), rows) for one in uses]
        return [one if one.is_shared else entries.side_by_side(one, gradient) for one in uses]
