"""A Keras optimizer whose variables lie on several devices of one process.

Each update runs once per device, on that device's variables, with the optimizer's
own scalars (iterations, learning rate, what Nadam multiplies up) there for as long.
What looks at all gradients at once (their global norm, whether they are finite) adds
scalars up, not gradients. What the user has written runs once, with all variables, on the
current device.
"""

import itertools

import keras
import torch

from parallel_keras import features, keras_internals
from parallel_keras.backends.torch.devices import by_device


class PlacedOptimizer:
    """The methods that replace an optimizer's own.

    Args:
        optimizer: A Keras optimizer.
        place: Function of a variable: the name of its torch device.
    """

    def __init__(self, optimizer, place):
        self.optimizer = optimizer
        self.place = place
        self.cls = type(optimizer)

    def methods(self):
        """Dict from a method's name to the function that replaces it, where it is Keras's."""
        if hasattr(self.optimizer, "check_finite"):
            found = {"check_finite": self.check_finite}
        else:
            found = self._of_a_leaf()
        own = features.own_methods(self.optimizer)
        return {name: method for name, method in found.items() if name not in own}

    def _of_a_leaf(self):
        return {
            "apply": self.apply,
            "_backend_update_step": self.update,
            "_clip_gradients": self.clip,
            "_apply_weight_decay": self.decay,
            "_update_model_variables_moving_average": self.average,
            "_backend_reset_gradient_accumulators": self.reset_accumulators,
            "_backend_increment_gradient_accumulators": self.accumulate,
        }

    def apply(self, grads, trainable_variables=None):
        variables = trainable_variables
        if variables is None:
            variables = keras_internals.optimizer_trainables(self.optimizer)
        variables = list(variables)
        grads = [
            g if g is None else g.to(self.place(v)) for g, v in zip(grads, variables, strict=True)
        ]
        return self.cls.apply(self.optimizer, grads, trainable_variables)

    def update(self, grads, variables, learning_rate):
        def update(numbers):
            rate = learning_rate
            if isinstance(rate, (torch.Tensor, keras.Variable)):
                rate = keras.ops.convert_to_tensor(rate)
            chosen = [variables[i] for i in numbers]
            found = [grads[i].to(self.place(variables[i])) for i in numbers]
            self.cls._backend_update_step(self.optimizer, found, chosen, rate)

        self._on_each_device(variables, update)

    def decay(self, variables):
        def decay(numbers):
            self.cls._apply_weight_decay(self.optimizer, [variables[i] for i in numbers])

        self._on_each_device(variables, decay)

    def average(self, variables):
        averages = keras_internals.moving_averages(self.optimizer)

        def average(numbers):
            with keras_internals.with_moving_averages(
                self.optimizer, [averages[i] for i in numbers]
            ):
                self.cls._update_model_variables_moving_average(
                    self.optimizer, [variables[i] for i in numbers]
                )

        self._on_each_device(variables, average)

    def reset_accumulators(self):
        for accumulator in keras_internals.accumulators(self.optimizer):
            accumulator._value.zero_()

    def accumulate(self, grads, accumulators):
        for gradient, accumulator in zip(grads, accumulators, strict=True):
            accumulator._value.add_(gradient.to(accumulator._value.device))

    def clip(self, grads):
        limit = self.optimizer.global_clipnorm
        if limit is None or limit <= 0 or self.optimizer.clipnorm or self.optimizer.clipvalue:
            return [
                self._on(g, lambda one: self.cls._clip_gradients(self.optimizer, [one])[0])
                for g in grads
            ]
        # keras/src/optimizers/base_optimizer.py, 3.15.1: clip_by_global_norm.
        home = keras_internals.torch_device()
        squares = [self._on(g, lambda one: keras.ops.sum(keras.ops.square(one))) for g in grads]
        squares = [square.to(home) for square in squares if square is not None]
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.stack(squares)))
        scale = limit * keras.ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [g if g is None else g * scale.to(g.device) for g in grads]

    def check_finite(self, grads):
        home = keras_internals.torch_device()
        found = [self._on(g, lambda one: keras.ops.all(keras.ops.isfinite(one))) for g in grads]
        return keras.ops.all(keras.ops.stack([one.to(home) for one in found if one is not None]))

    @staticmethod
    def _on(gradient, function):
        """A function of a gradient, computed where it is."""
        if gradient is None:
            return None
        before = keras_internals.set_torch_device(str(gradient.device))
        try:
            return function(gradient)
        finally:
            keras_internals.set_torch_device(before)

    def _on_each_device(self, variables, function):
        """Call a function of the numbers of the variables of a device, for each device."""
        places = [self.place(v) for v in variables]
        scalars = keras_internals.own_scalars(self.optimizer)
        own = {id(v) for v in features.own_numbers(self.optimizer)}
        originals = [v._value for v in scalars]
        starts = [value.detach().clone() for value in originals]
        before = keras_internals.torch_device()
        try:
            for place, numbers in _together(places, in_order=bool(own)):
                keras_internals.set_torch_device(place)
                # Each device starts from the same numbers, whichever came first: Keras moves
                # its own once for any variables, the user's go on from variable to variable.
                for variable, start in zip(scalars, starts, strict=True):
                    copy = (variable._value if id(variable) in own else start).to(place, copy=True)
                    variable._value = torch.nn.Parameter(copy, requires_grad=False)
                function(numbers)
        finally:
            keras_internals.set_torch_device(before)
            with torch.no_grad():
                for variable, original in zip(scalars, originals, strict=True):
                    new, variable._value = variable._value, original
                    original.copy_(new)


def _together(places, in_order):
    """Pairs of a place and the numbers of what is there, one for each place.

    Args:
        places: List of strings.
        in_order: Bool. Whether the numbers have to come in their order, and a place as often
            as that needs.
    """
    if in_order:
        runs = itertools.groupby(range(len(places)), key=places.__getitem__)
        return [(place, list(numbers)) for place, numbers in runs]
    return by_device(places)
