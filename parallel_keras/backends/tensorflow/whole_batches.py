"""Step functions that take whole global batches, and what happens before the first one.

The model's own `distribute_strategy` stays unset, so that Keras's fit hands over whole
batches; how a batch is cut is decided in the graph of the step. That is exact for every
batch size, for generators, and for the on_batch methods alike.
"""

import contextlib
import itertools
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from parallel_keras import capabilities, features, keras_internals, probe as probing
from parallel_keras.backends.lowering import Lowering
from parallel_keras.backends.tensorflow import agreement, past_the_end, specs
from parallel_keras.backends.tensorflow.entries import NeedsAnySize
from parallel_keras.backends.tensorflow.rows import total_rows


class WholeBatches(Lowering):
    """A lowering to functions of one global batch.

    Attributes:
        probed: Set of the kinds of step for which the user's own code has been probed.
        findings: Dict from kinds of step to `probe.Findings`, as far as they are known.
            Training and testing may get batches of different forms.
        for_any_size: Bool. Whether steps are traced for batches of any number of rows,
            even where all are known to have the same.
    """

    def __init__(self, model, strategy):
        super().__init__(model, strategy)
        self.probed: set = set()
        self.findings: dict = {}
        self.for_any_size = False
        self._made: dict = {}  # by kind: the compiled functions, by what the probe found

    # ---- what a lowering adds ----

    def step(self, kind):
        """The function of a batch, in the form of the kind, that is traced."""
        raise NotImplementedError

    def form(self, kind):
        """A function that gives a batch the form in which the step of a kind takes it."""
        return _inputs if kind == "predict" else specs.unpacked

    def look(self, kind):
        """What happens before the first step, by `is_needed(spec)` and `at(batch)`."""
        # What is compiled may have changed since the last one was made.
        self.probed.discard(kind)
        if kind != "predict":
            self.found(kind, probing.known(self.model))
        return _Look(self, kind)

    def what_is_known(self, kind):
        """What a step of a kind is traced with, to be told from what was known before."""
        return self.findings.get(kind)

    def building(self):
        """A scope in which variables are made where they belong."""
        return contextlib.nullcontext()

    def found(self, kind, findings):
        """How losses and metrics come together in steps of a kind is known."""
        self.findings[kind] = findings

    def needs_probe(self):
        """Whether it has to be found out how losses, metrics and layers come together."""
        return probing.needs_probe(self.model)

    def will_run_on(self, x):
        """Called before a step is traced, with the inputs or their specs."""

    def finished(self, kind, result):
        """What Keras gets of what the traced step gave."""
        return result

    # ---- the functions ----

    def make_function(self, kind):
        self._made[kind] = {}
        look, arrange = self.look(kind), self.form(kind)

        def at_hand(data, spec=None):
            data = look.at(data)
            if spec is not None and not self.model.run_eagerly:
                # For batches of any size: the step is then traced once, as in
                # Keras, and not for the size of this batch and again for others.
                self._traced(kind, lambda made: made.on_data.get_concrete_function(spec))
            return self.finished(kind, self._traced(kind, lambda made: made.on_data(data)))

        def function(iterator):
            if not isinstance(iterator, tf.data.Iterator):
                batches = (specs.batch_of(data, arrange) for data in iterator)
                return _last(at_hand(data) for data in self._of_an_execution(batches))
            if not look.is_over:
                spec = specs.spec_of(iterator, arrange)
                if look.is_needed(spec):
                    batches = (specs.batch_of(data, arrange) for data in iterator)
                    return _last(at_hand(data, spec) for data in self._of_an_execution(batches))
            return self.finished(kind, self._traced(kind, lambda made: made.on_iterator(iterator)))

        def predict(batches):
            data = (specs.batch_of(one, arrange) for one in batches)
            return _together([at_hand(one) for one in data])

        if kind == "train":
            return past_the_end.going_past(function, self.model, self._do_without_batch)
        return predict if kind == "predict" else function

    def _of_an_execution(self, batches):
        """The next batches of an iterator: as many as Keras takes between two callbacks."""
        return itertools.islice(batches, self.model.steps_per_execution)

    def _do_without_batch(self, iterator):
        if self._made["train"]:
            self._traced("train", lambda made: made.on_nothing(iterator))

    def _traced(self, kind, use):
        """Use the functions of a kind, traced anew where their graph knew too much."""
        with agreement.refused(self.strategy):
            try:
                return use(self._functions(kind))
            except NeedsAnySize:
                self.for_any_size = True
                self._made[kind] = {}
                return use(self._functions(kind))

    def _functions(self, kind):
        # A step is traced with what the probe has found: one that was traced
        # for a batch too small to probe does not know it.
        made, known = self._made[kind], self.what_is_known(kind)
        if known not in made:
            made[known] = self._compile(self.step(kind), self.form(kind))
        return made[known]

    def _compile(self, step, arrange):
        """A step's functions."""
        steps = self.model.steps_per_execution

        def on_data(data):
            self.prepare_random_draws()
            with agreement.compared():
                return step(_of_any_size(data) if self.for_any_size else data)

        compiled = self._compiled(past_the_end.waiting(on_data))

        def on_next(data):
            return compiled(specs.batch_of(data, arrange))

        def on_iterator(iterator):
            result = on_next(iterator.get_next())
            return result if steps == 1 else _others(on_next, iterator, steps - 1, result)

        on_nothing = past_the_end.without_batch(lambda data: on_data(specs.arrays(arrange(data))))
        return _Functions(compiled, self._compiled(on_iterator), on_nothing)

    def _compiled(self, function):
        function = tf.autograph.experimental.do_not_convert(function)
        return function if self.model.run_eagerly else tf.function(function, reduce_retracing=True)

    def prepare_random_draws(self):
        """Make the state of draws without a seed where it can live: outside of the step."""
        layers = keras_internals.flatten_layers(self.model)
        is_lambda = (isinstance(layer, keras.layers.Lambda) for layer in layers)
        if any(is_lambda) or features.has_user_code(self.model):
            keras_internals.ensure_global_seed()


class _Functions(NamedTuple):
    """What a step is compiled to."""

    on_data: Any  # a batch at hand
    on_iterator: Any  # the next batches of an iterator: as many as an execution takes
    on_nothing: Any  # an iterator that has ended: what needs no batch


def _others(step, iterator, count, result):
    """More steps on the next batches of an iterator, as long as there are some.

    Args:
        step: Function of a batch as the iterator gives it.
        iterator: A `tf.data.Iterator`.
        count: Int, at least one. How many.
        result: What the step before gave.

    Returns:
        What the last step gave.
    """

    def is_there(done, batch, _):
        return tf.logical_and(done < count, batch.has_value())

    def one_more(done, batch, _):
        result = step(batch.get_value())
        # No batch is taken that this execution does not need.
        following = tf.cond(done + 1 < count, iterator.get_next_as_optional, lambda: batch)
        return done + 1, following, result

    start = tf.constant(0), iterator.get_next_as_optional(), result
    *_, result = tf.while_loop(is_there, one_more, start)
    return result


def _last(results):
    """The last of some results, each made when the one before is there."""
    made = list(results)
    if not made:
        raise StopIteration
    return made[-1]


def _together(outputs):
    """The outputs for several batches as one."""
    if len(outputs) == 1:
        return outputs[0]
    return tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)


def _inputs(data):
    return specs.unpacked(data)[:1]


def _of_any_size(data):
    """A batch of which the graph does not know how many rows it has."""

    def leaf_of_any_size(leaf):
        if leaf is None:
            return None
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return tree.map_structure(leaf_of_any_size, data)


class _Look:
    """What has to happen before the first step: building, and probing the user's code.

    Args:
        lowering: The model's lowering.
        kind: `"train"`, `"test"` or `"predict"`.
    """

    def __init__(self, lowering, kind):
        self.lowering = lowering
        self.model = lowering.model
        self.kind = kind
        self.is_over = False

    def is_needed(self, spec):
        """Whether the next batch has to be seen outside of the graph."""
        if spec is None:
            return True
        self._build(tree.map_structure(lambda s: None if s is None else specs.symbol(s), spec))
        self.is_over = self.kind in self.lowering.probed or not self.lowering.needs_probe()
        return not self.is_over

    def at(self, data):
        """Look at a batch; returns it."""
        lowering, kind = self.lowering, self.kind
        leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
        total_rows(data, lowering.strategy)  # refuses what cannot be cut
        self._build(data)
        if kind == "predict" or kind in lowering.probed:
            return data
        if not lowering.needs_probe():
            lowering.probed.add(kind)
        elif probing.is_enough(leaves[0].shape[0]):
            found = probing.probe(self.model, lowering.strategy, *data)
            found.check(kind, lowering.strategy)
            lowering.found(kind, found)
            lowering.probed.add(kind)
        else:
            # Right for whatever a probe may find.
            unknown = probing.Findings(of_the_batch="what is not known yet")
            lowering.findings[kind] = unknown
        return data

    def _build(self, data):
        """Build what is not built, without consuming a batch."""
        if not keras_internals.is_built(self.model, self.kind):
            self.lowering.prepare_random_draws()
            with self.lowering.building():
                keras_internals.symbolic_build(self.model, data, self.kind)
            self.lowering.attach()
            # A layer that was made in `build` has not been checked yet.
            for feature, received in features.of_model(self.model):
                capabilities.check(feature, self.lowering.strategy, "tensorflow", received)
        self.lowering.will_run_on(data[0])
