"""What a model's own step returns, from what it returned on each replica."""

import numpy as np
import tensorflow as tf
from keras import tree

from parallel_keras import logs


class Logs:
    """The logs of one run of a step.

    Args:
        mirrored: The `MirroredStrategy`.
        step: The step, with what `pk.reduce_logs` says of it.
    """

    def __init__(self, mirrored, step):
        self.mirrored = mirrored
        self.rules = logs.rules_of(step)
        self._returned = None  # by the first replica, with a rule or a metric for each leaf
        self._shares: list = []

    def of_replica(self, returned, results, rows):
        """The numbers of one replica's logs that are to be combined.

        Args:
            returned: What the step returned.
            results: What tells the results of metrics.
            rows: The replica's `Rows`.
        """
        self._shares.append(rows.share(tf.float64))
        self._returned = returned
        self._metrics = [results.metric_of(leaf) for leaf in tree.flatten(returned)]
        return [
            leaf
            for leaf, metric in zip(tree.flatten(returned), self._metrics, strict=True)
            if metric is None
        ]
