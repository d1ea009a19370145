"""The update of one stage's variables, by a Keras optimizer that knows those of all.

Each rank applies the optimizer to what lives on it. What Keras does with all variables
at once is kept to these; what looks at all gradients at once, their global norm, is
added up over the ranks.
"""

import keras
import torch

from parallel_keras import keras_internals


class StageOptimizer:
    """Applies an optimizer to the trainable variables of one stage.

    Args:
        optimizer: A Keras optimizer, built for all variables of the model.
        variables: List of the Keras variables that are updated here.
        add_up: Function of a scalar tensor: its sum over the ranks that update.
    """

    def __init__(self, optimizer, variables, add_up):
        self.optimizer = optimizer
        self.variables = variables
        self.add_up = add_up
        self.cls = type(optimizer)
        chosen = {id(v) for v in variables}
        trainables = keras_internals.optimizer_trainables(optimizer)
        self._numbers = [i for i, v in enumerate(trainables) if id(v) in chosen]
        accumulated = keras_internals.accumulated_gradients(optimizer)
        self._accumulators = [accumulated[i] for i in self._numbers if i < len(accumulated)]
        self._methods = {
            "_clip_gradients": self.clip,
            "_backend_reset_gradient_accumulators": self.reset_accumulators,
            "_update_model_variables_moving_average": self._of_own(
                "_update_model_variables_moving_average"
            ),
            "_overwrite_model_variables_with_average_value": self._of_own(
                "_overwrite_model_variables_with_average_value"
            ),
        }

    def apply(self, gradients):
        """Update the variables with their gradients, `None` where there is none."""
        with keras_internals.overridden(self.optimizer, self._methods):
            self.cls.apply(self.optimizer, gradients, self.variables)

    def reset_accumulators(self):
        for accumulator in self._accumulators:
            if accumulator is not None:
                accumulator._value.zero_()

    def clip(self, gradients):
        limit = self.optimizer.global_clipnorm
        if limit is None or limit <= 0 or self.optimizer.clipnorm or self.optimizer.clipvalue:
            return self.cls._clip_gradients(self.optimizer, gradients)
        # keras/src/optimizers/base_optimizer.py, 3.15.1: clip_by_global_norm.
        squares = [torch.sum(torch.square(g)) for g in gradients if g is not None]
        norm = torch.sqrt(self.add_up(torch.stack(squares).sum()))
        scale = limit * keras.ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [g if g is None else g * scale for g in gradients]

    def _of_own(self, name):
        method = getattr(self.cls, name)

        def own(variables):
            averages = keras_internals.moving_averages(self.optimizer)
            chosen = [averages[i] for i in self._numbers]
            with keras_internals.with_moving_averages(self.optimizer, chosen):
                method(self.optimizer, [variables[i] for i in self._numbers])

        return own
