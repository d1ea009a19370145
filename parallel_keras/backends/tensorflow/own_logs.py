"""What a model's own step returns, from what it returned on each replica."""

import tensorflow as tf

from parallel_keras import keras_internals, logs, step_state
from parallel_keras.backends.tensorflow.differences import deviation


class Logs:
    """The logs of one run of a step.

    Args:
        model: The Keras model.
        mirrored: The `MirroredStrategy`.
        step: The step, with what `pk.reduce_logs` says of it.
        findings: `step_probe.StepFindings`.
    """

    def __init__(self, model, mirrored, step, findings):
        self.mirrored = mirrored
        self.step = step
        self.metrics = keras_internals.every_metric(model)
        self.known = findings.results
        self._returned = None  # by the replica that ran last: all are alike
        self._rows: list = []

    def of_replica(self, returned, results, rows):
        """What one replica's logs bring into those of all.

        Args:
            returned: What the step returned.
            results: `keras_internals.Results`.
            rows: The replica's `Rows`.

        Returns:
            Dict with a tensor for each number that is no metric's result and no variable, by
            its path.
        """
        self._returned, self._results = returned, results
        self._rows.append(rows)
        found = logs.leaves_by_path(returned)
        logs.check_keys(self.step, found)
        numbers = {}
        for path, leaf in found.items():
            of_metric = path in self.known or results.metric_of(leaf) is not None
            if of_metric or self._is_live(leaf, path):
                continue
            if leaf is not None and not isinstance(leaf, (str, bytes)):
                numbers[path] = tf.convert_to_tensor(leaf)
        return numbers

    def combined(self, numbers):
        """The logs of the batch, in cross-replica context, after the state came together."""
        leaves = {}
        for path, leaf in logs.leaves_by_path(self._returned).items():
            if path in self.known:
                number, inside = self.known[path]
                leaves[path] = logs.leaves_by_path(self.metrics[number].result())[inside]
            elif self._results.metric_of(leaf) is not None:
                leaves[path] = self._results.again(leaf)
            elif self._is_live(leaf, path):
                leaves[path] = tf.convert_to_tensor(leaf)
            elif path in numbers:
                rule = logs.rule_of(path, logs.rules_of(self.step))
                values = self.mirrored.experimental_local_results(numbers[path])
                leaves[path] = _combined(rule, values, self._rows)
            else:
                leaves[path] = leaf
        return logs.with_leaves(self._returned, leaves)

    def _is_live(self, leaf, path):
        return step_state.is_live(leaf, path, logs.rules_of(self.step))


def _combined(rule, values, rows):
    """One number from those of the replicas; one without rows does not count."""
    first, *others = values
    if rule == logs.MEAN:
        total = first
        for value, of_value in zip(others, rows[1:], strict=True):
            # Differences from the first: numbers that are equal stay as they are.
            change = tf.cast(deviation(value, first), _floating(first.dtype))
            part = change * of_value.share(change.dtype)
            total += tf.cast(_if_some(of_value, part, tf.zeros_like(part)), first.dtype)
        return total
    combine = {logs.SUM: tf.add, logs.MAX: tf.maximum, logs.MIN: tf.minimum}[rule]
    total = first
    for value, of_value in zip(others, rows[1:], strict=True):
        total = _if_some(of_value, combine(total, value), total)
    return total


def _floating(dtype):
    return dtype if dtype.is_floating else tf.float64


def _if_some(rows, value, otherwise):
    return tf.where(rows.some, value, otherwise) if rows.may_be_none else value
