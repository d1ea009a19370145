"""Variables that a model's own step assigns: each replica assigns its own copy.

So what a step assigns can be read again within it, between two updates and in branches
and loops, as on one device. After the replicas have run, the copies come together: of a
metric's state the changes are added up, of other floating-point state the average by rows
goes on, and whole numbers have to agree. Of the seeds of random draws, which differ on
purpose, those of the first replica go on.
"""

import contextlib
import threading

import tensorflow as tf

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow import variables
from parallel_keras.backends.tensorflow.agreement import agreeing
from parallel_keras.backends.tensorflow.differences import deviation, difference
from parallel_keras.backends.tensorflow.runtime import per_replica
from parallel_keras.capabilities import check

_here = threading.local()


class Copies:
    """The replicas' copies of all variables during one step.

    Args:
        strategy: Our `DataParallel`, for messages.
        mirrored: Its `MirroredStrategy`.
        model: The Keras model.
    """

    def __init__(self, strategy, mirrored, model):
        self.strategy = strategy
        self.mirrored = mirrored
        metrics = keras_internals.every_metric(model)
        self._of_metrics = {id(v): v for metric in metrics for v in metric.variables}
        self._averaged: frozenset = frozenset()
        self._starts: dict = {}  # what a metric's variable was, by id and replica
        self._rows: dict = {}  # by replica
        self._seeds: set = set()  # ids
        self.assigned: dict = {}  # Keras variables by id

    # ---- in a replica ----

    @contextlib.contextmanager
    def assigning(self, number, rows, averaged):
        """Inside, in this replica's thread, an assign goes to the replica's own copy.

        Args:
            number: Int, the replica's.
            rows: Its `Rows`.
            averaged: Set of the ids of the metrics' variables whose change counts with the
                share of the rows. That of all others counts in full.
        """
        keras_internals.replace_assign(_assign)
        self._rows[number] = rows
        self._averaged = averaged
        for key, variable in self._of_metrics.items():
            self._starts[key, number] = tf.identity(self._copy(variable, number))
        _here.copies, _here.number = self, number
        try:
            yield
        finally:
            del _here.copies, _here.number

    def assign(self, variable, value, number):
        """Assign a Keras variable on one replica."""
        if not variables.is_under(variable, self.mirrored):
            check("foreign_variable", self.strategy, "tensorflow", f"variable {variable.path}")
        self.assigned[id(variable)] = variable
        copy = self._copy(variable, number)
        copy.assign(tf.cast(value, copy.dtype))

    def start_streams(self, seeds, number):
        """Have a replica draw from streams of its own; the first draws what one device would."""
        self._seeds.update(map(id, seeds))
        for seed in seeds if number else ():
            self.assign(seed, keras_internals.moved_seed(seed, number), number)

    # ---- across the replicas ----

    def combine(self):
        """Bring the copies together, in cross-replica context."""
        added = []
        for key, variable in self.assigned.items():
            if key in self._of_metrics:
                starts = [self._starts[key, number] for number in self._numbers]
                changes = self._each(lambda n, v=variable, k=key: self._change(v, k, n))
                if variables.is_summed(variable):
                    self._assign_each(variable, starts, changes)
                else:
                    added.append((variable, starts, changes))
            elif self._copy(variable, 0).dtype.is_floating:
                # Differences from the first: copies that are equal stay as they are.
                firsts = self._each(lambda n, v=variable: tf.identity(self._copy(v, 0)))
                changes = self._each(lambda n, v=variable, f=firsts: self._part(v, f[n], n))
                added.append((variable, firsts, changes))
            else:
                first = self._whole_number(variable)
                for number in self._numbers[1:]:
                    self._copy(variable, number).assign(first)
        self._add_up(added)

    def _change(self, variable, key, number):
        """What a replica adds to a metric's variable."""
        rows, start = self._rows[number], self._starts[key, number]
        change = difference(self._copy(variable, number), start)
        if key in self._averaged:
            if change.dtype.is_floating:
                change *= rows.share(change.dtype)
            elif number:
                change = tf.zeros_like(change)  # a count of steps
        return _if_some(rows, change)

    def _part(self, variable, first, number):
        rows = self._rows[number]
        change = deviation(self._copy(variable, number), first)
        return _if_some(rows, change * rows.share(change.dtype))

    def _whole_number(self, variable):
        values = self._each(lambda n: tf.identity(self._copy(variable, n)))
        if id(variable) in self._seeds:
            return values[0]
        rows = [self._rows[number] for number in self._numbers]
        return agreeing(values, rows, variable, "replica")

    def _add_up(self, added):
        """Add the changes on all replicas to a value, for each variable."""
        if not added:
            return
        pairs = [(per_replica(changes), variable._value) for variable, _, changes in added]
        sums = self.mirrored.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
        for (variable, bases, _), total in zip(added, sums, strict=True):
            totals = self.mirrored.experimental_local_results(total)
            self._assign_each(variable, bases, totals)

    def _assign_each(self, variable, bases, changes):
        self._each(lambda n: self._copy(variable, n).assign(bases[n] + changes[n]))

    def _copy(self, variable, number):
        return self.mirrored.experimental_local_results(variable._value)[number]

    @property
    def _numbers(self):
        return range(len(self.mirrored.extended.worker_devices))

    def _each(self, function):
        """The results of a function of the replica's number, each on its device."""
        found = []
        for number, device in enumerate(self.mirrored.extended.worker_devices):
            with tf.device(device):
                found.append(function(number))
        return found


def _if_some(rows, change):
    """A change, or none from a replica without rows: that may be anything, NaN too."""
    return tf.where(rows.some, change, tf.zeros_like(change)) if rows.may_be_none else change


def _assign(variable, value, stock):
    copies = getattr(_here, "copies", None)
    if copies is None:
        stock(variable, value)
    else:
        copies.assign(variable, value, _here.number)


@contextlib.contextmanager
def lent(variable, home, strategy):
    """Have a plain Keras variable live under the strategy for the length of a step.

    Args:
        variable: A Keras variable, or `None`.
        home: A `tf.Variable` like it under the strategy.
        strategy: The `MirroredStrategy`, in cross-replica context.
    """
    if variable is None:
        yield
        return
    plain = variable._value
    home.assign(plain)
    variable._value = home
    try:
        yield
    finally:
        variable._value = plain
    plain.assign(strategy.experimental_local_results(home)[0])
