"""ModelParallel on TensorFlow: `tf.device` per layer, for the backward pass too.

`tf.GradientTape` records no devices: the gradient of a layer on device 1 would be
computed on device 0. So each layer computes in a name scope that tells its place,
which TensorFlow repeats in the names of the gradient's operations, and a device
function of the step's graph reads it there. What has no place of its own (the loss,
clipping, the sum of two gradients) computes where its inputs are.
"""

import contextlib
import functools
import re

import tensorflow as tf
from keras import tree

from parallel_keras import features, keras_internals
from parallel_keras.backends import laid_out
from parallel_keras.backends.tensorflow import past_the_end, placing, specs
from parallel_keras.backends.tensorflow.devices import tf_device

_SCOPE = "parallel_keras_device_{}"
_IN_NAME = re.compile(r"parallel_keras_device_(\d+)")
_GRADIENT = "gradient_tape/"


class Lowering(laid_out.LaidOut):
    """One model under `ModelParallel` on TensorFlow."""

    own_steps_build = True

    def changed_devices(self):
        self.names = [tf_device(name) for name in self.devices]
        # As operations and variables print them.
        self.full_names = [placing.full_name("/device:" + name.strip("/")) for name in self.names]

    def attach(self):
        super().attach()
        self._replace(self.model, "_maybe_symbolic_build", self._building_early)

    def _building_early(self, model, stock):
        """Build before the first step is traced, so that it is traced laid out.

        Keras on TensorFlow builds while it traces.
        """

        def maybe_symbolic_build(iterator=None, data_batch=None):
            if "train" in features.own_steps(model):
                return  # a step of the model's own may build in its own way
            if iterator is not None:
                data_batch = _symbols(specs.spec_of(keras_internals.batches_of(iterator)))
            if data_batch is not None and not keras_internals.is_built(model, "predict"):
                model._symbolic_build(data_batch=data_batch)

        return maybe_symbolic_build

    @contextlib.contextmanager
    def computing(self, number):
        on_device = functools.partial(tf.device, self.names[number])
        with (
            keras_internals.making_put_off_variables(on_device),
            on_device(),
            tf.name_scope(_SCOPE.format(number)),
        ):
            yield

    def bring(self, structure, number):
        return structure  # TensorFlow moves what an operation needs

    @contextlib.contextmanager
    def stepping(self):
        if tf.executing_eagerly():
            yield
            return
        with placing.device_function(_Places(self)):
            yield

    def move(self, variable, number):
        return placing.move(variable, None if number is None else self.names[number])

    def make_function(self, kind):
        stock = super().make_function(kind)

        def function(batches):
            if kind == "predict":
                self._build_before(kind, keras_internals.unpack(batches[0])[:1])
            elif isinstance(batches, tf.data.Iterator):
                self._build_before(kind, specs.spec_of(batches))
            else:
                batches = list(batches)
                self._build_before(kind, specs.arrays(keras_internals.unpack(batches[0])))
                batches = iter(batches)
            return stock(batches)

        if kind != "train":
            return function
        without = past_the_end.without_batch(lambda data: self.model.train_step(data))
        return past_the_end.going_past(function, self.model, without)

    def _step(self, model, stock):
        return past_the_end.waiting(super()._step(model, stock))

    def _build_before(self, kind, data):
        """Build what is not built before the step is traced, so that it has its place."""
        if data is None or keras_internals.is_built(self.model, kind):
            return
        if any(name in vars(type(self.model)) for name in (f"{kind}_step", "compute_loss")):
            return  # a step of the model's own may build in its own way
        keras_internals.symbolic_build(self.model, _symbols(data), kind)
        self.attach()

    def moved(self, variables):
        placing.tell(variables)

    def tune_optimizer(self, optimizer):
        stock = type(optimizer).update_step

        def update_step(gradient, variable, learning_rate):
            with tf.device(keras_internals.tf_variable(variable).device):
                return stock(optimizer, gradient, variable, learning_rate)

        return {"update_step": update_step}

    def making_slots(self):
        # In a graph they would have values only when the step has been traced: nothing that
        # Keras does not make where the weight is could be moved there.
        return tf.init_scope()


def _symbols(data):
    """Symbolic inputs for the specs, or the tensors, of a batch."""
    return tree.map_structure(lambda leaf: None if leaf is None else specs.symbol(leaf), data)


class _Places:
    """The device of an operation that is added to the graph of a step."""

    def __init__(self, lowering):
        self.names = lowering.full_names
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._scopes: dict = {}  # of the forward pass: the device of what has no place

    def __call__(self, operation):
        if operation.device:
            return operation.device
        number = self._from_names(operation)
        if number is None:
            number = self._from_forward(operation.name)
        if number is None:
            number = self._from_inputs(operation)
            if number is not None and _GRADIENT not in operation.name:
                self._scopes[_scope(operation.name)] = number
        return "" if number is None else self.names[number]

    def _from_names(self, operation):
        for name in _names_around(operation):
            found = _IN_NAME.findall(name)
            if found:
                return int(found[-1])
        return None

    def _from_forward(self, name):
        if _GRADIENT not in name:
            return None
        return self._scopes.get(_scope(name.rpartition(_GRADIENT)[2]))

    def _from_inputs(self, operation):
        # Where its inputs meet: the work moves on, not back.
        numbers = [self._numbers.get(placing.device_of(x)) for x in operation.inputs]
        return max((n for n in numbers if n is not None), default=None)


def _names_around(operation):
    """An operation's name, and those of the graphs that it is in, from the inside out."""
    yield operation.name
    graph = operation.graph
    while graph is not None:
        # The body of a loop or a branch is named after the operation that runs it.
        yield getattr(graph, "name", "")
        graph = getattr(graph, "outer_graph", None)


def _scope(name):
    return name.rpartition("/")[0]
