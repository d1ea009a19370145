"""Optimizers of the user's own, which look at more than one variable at a time."""

import keras
from keras import ops

from cases import case, compiled

# What `make test` runs on TensorFlow too (see harness.grid).
TRACED = {"own_apply"}


def own(name, make, **rest):
    return case(name, compile=compiled(make), **rest)


def norm(tensors):
    squares = [ops.sum(ops.square(one)) for one in tensors if one is not None]
    return ops.sqrt(ops.sum(ops.stack(squares)))


class Clipping(keras.optimizers.SGD):
    """Makes the gradients of all variables together as long as one."""

    def _clip_gradients(self, grads):
        length = norm(grads)
        return [g if g is None else g / length for g in grads]


class Clipped(keras.optimizers.Adam):
    """Clips by the largest entry of all gradients, and then as Keras does."""

    def _clip_gradients(self, grads):
        largest = ops.max(ops.stack([ops.max(ops.abs(g)) for g in grads]))
        return super()._clip_gradients([g / largest for g in grads])


class Applying(keras.optimizers.Adam):
    """Looks at all gradients before Keras does."""

    def apply(self, grads, trainable_variables=None):
        length = norm(grads)
        grads = [g if g is None else g / (1.0 + length) for g in grads]
        return super().apply(grads, trainable_variables)


class Updating(keras.optimizers.SGD):
    """Moves all variables by steps that are as long as one together."""

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        length = norm(grads)
        grads = [g / length for g in grads]
        super()._backend_update_step(grads, trainable_variables, learning_rate)


class Decaying(keras.optimizers.SGD):
    """Lets all variables shrink, the more the longer they are together."""

    def _apply_weight_decay(self, variables):
        length = norm([ops.convert_to_tensor(v) for v in variables])
        for variable in variables:
            variable.assign(variable * (1.0 - 0.01 * length))
        super()._apply_weight_decay(variables)


class Counting(keras.optimizers.SGD):
    """Keeps a number for all variables: each of them makes the step of the next one smaller."""

    def build(self, variables):
        super().build(variables)
        self.updates = self.add_variable((), initializer="zeros", name="updates")

    def update_step(self, gradient, variable, learning_rate):
        rate = learning_rate / (1.0 + 0.1 * ops.convert_to_tensor(self.updates))
        super().update_step(gradient, variable, rate)
        self.updates.assign(self.updates + 1.0)


class Accumulating(keras.optimizers.SGD):
    """Forgets a little of what it has gathered, the more the larger all of it is."""

    def _backend_increment_gradient_accumulators(self, grads, acc_grads):
        length = norm(grads)
        super()._backend_increment_gradient_accumulators([g / length for g in grads], acc_grads)

    def _backend_reset_gradient_accumulators(self):
        for accumulator in self._accumulated_gradients:
            accumulator.assign(accumulator * 0.5)


class Averaging(keras.optimizers.SGD):
    """Averages the more slowly the larger all variables are."""

    def _update_model_variables_moving_average(self, trainable_variables):
        share = 1.0 / (1.0 + norm([ops.convert_to_tensor(v) for v in trainable_variables]))
        pairs = zip(trainable_variables, self._model_variables_moving_average, strict=True)
        for variable, average in pairs:
            average.assign(average + share * (variable - average))


class Finite(keras.optimizers.LossScaleOptimizer):
    """Takes large gradients for an overflow."""

    def check_finite(self, grads):
        return ops.logical_and(super().check_finite(grads), norm(grads) < 1e4)


CASES = [
    own("own_clip", lambda: Clipping(0.1, momentum=0.9)),
    own("own_clip_and_keras", lambda: Clipped(0.01, global_clipnorm=0.5), quick=()),
    own("own_apply", lambda: Applying(0.01)),
    own("own_update", lambda: Updating(0.1)),
    own("own_decay", lambda: Decaying(0.1, weight_decay=0.1)),
    own("own_count", lambda: Counting(0.1, momentum=0.9)),
    own("own_accumulation", lambda: Accumulating(0.1, gradient_accumulation_steps=3), quick=(2, 3)),
    own("own_apply_accumulation", lambda: Applying(0.01, gradient_accumulation_steps=3)),
    own(
        "own_average",
        lambda: Averaging(0.1, use_ema=True, ema_overwrite_frequency=3),
    ),
    own(
        "own_check_finite",
        lambda: Finite(keras.optimizers.SGD(0.1), initial_scale=2.0**15, dynamic_growth_steps=3),
    ),
]
