"""Variables that a model's own step assigns and that are none of the model's.

A global, what a closure holds, what sits in an object that Keras does not track: each
replica would assign a copy of its own, and nothing brings the copies together. So a step
in which one is assigned is refused, by the name of the variable.
"""

import contextlib

import keras

from parallel_keras import keras_internals, step_state


class Assigns:
    """Watches what a model's own step assigns.

    Args:
        model: A Keras model.
        refuse: Function of a foreign variable, which raises.
        note: Function of the state of random draws that are none of the model's: that may
            be assigned, as each replica draws for itself.
    """

    def __init__(self, model, refuse, note=None):
        self.model = model
        self._refuse, self._note = refuse, note
        self._known: dict = {}  # variables by id
        self._made: dict = {}  # in this step

    @contextlib.contextmanager
    def watched(self):
        """Inside, a step runs. What it makes itself is its own, for as long as it runs."""
        self._made = {}
        with (
            keras_internals.noting_new_variables(self._note_new),
            keras_internals.watching_assigns(self.check),
        ):
            yield

    def check(self, variable):
        """Refuse a variable, unless it is the model's, new or a seed."""
        if self._is_known(variable):
            return
        if keras_internals.is_seed_state(variable):
            if self._note is not None:
                self._note(variable)
            return
        self._refuse(variable)

    def check_update(self, variables):
        """The same of what an optimizer is about to change: Keras variables, or tensors."""
        for variable in variables:
            if isinstance(variable, keras.Variable):
                self.check(variable)

    def _is_known(self, variable):
        key = id(variable)
        if key not in self._known and key not in self._made:
            # Also after a first look: a step can make a layer, an optimizer its slots.
            self._known = {id(v): v for v in step_state.state_of(self.model)}
        return key in self._known or key in self._made

    def _note_new(self, variable):
        self._made[id(variable)] = variable
