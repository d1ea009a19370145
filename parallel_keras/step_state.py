"""Everything that a model's own step may change, taken down and put back.

Training starts as if the probe had not run: variables, those of optimizers too, random
states, flags, and the plain attributes of the model and its layers.
"""

import random
from collections import deque

import keras
import numpy as np
from keras import ops

from parallel_keras import backends, keras_internals

_PLAIN = (int, float, bool, str, type(None))
_CONTAINERS = (list, dict, set, deque)


class Kept:
    """A model as it was.

    Args:
        model: A Keras model.
    """

    def __init__(self, model):
        self.model = model
        self._values: dict = {}
        for variable in state_of(model):
            self.note(variable)
        self._flags = [(v, v.trainable) for v, _ in self._values.values()]
        self._attributes = attributes_of(model)
        self._content = {key: _content(value) for key, value in self._attributes.items()}
        self._of_backend = backends.room("step_scope").Kept(model)
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def note(self, variable):
        """Take down a variable's value, once."""
        if variable._value is not None:
            self._values.setdefault(id(variable), (variable, as_array(variable)))

    def values(self):
        """Pairs of a variable and the value that it had."""
        return list(self._values.values())

    def restore(self):
        """Put everything back. What was made meanwhile, such as an optimizer's slots, stays."""
        for variable, value in self._values.values():
            if not same(as_array(variable), value):
                variable.assign(ops.cast(value, variable.dtype))
        for variable, flag in self._flags:
            if variable.trainable != flag:
                variable.trainable = flag
        self._restore_attributes()
        self._of_backend.restore()
        keras_internals.clear_losses(self.model)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def _restore_attributes(self):
        for key, value in attributes_of(self.model).items():
            holder, name = self._holder(key)
            if key not in self._attributes:
                if not _is_of_keras(value):
                    del holder[name]
            elif value is not self._attributes[key] and not _is_of_keras(value):
                holder[name] = self._attributes[key]
        for key, value in self._attributes.items():
            holder, name = self._holder(key)
            holder.setdefault(name, value)
            _set_content(value, self._content[key])

    def _holder(self, key):
        number, name = key
        return vars(keras_internals.flatten_layers(self.model)[number]), name


def state_of(model):
    """All variables that a step may write."""
    found = keras_internals.every_variable(model)
    found += [v for metric in keras_internals.every_metric(model) for v in metric.variables]
    found += backends.room("step_scope").other_state(model)
    state = keras_internals.global_seed_state()
    return found if state is None else [*found, state]


def is_live(leaf, path, rules):
    """Whether a leaf of the logs is a variable itself, and shows what becomes of it.

    Args:
        leaf: What a step returned.
        path: Its path in the logs.
        rules: What `logs.reduce_logs` said: a value that comes by a rule is one of the step.
    """
    if any(key in rules for key in path):
        return False
    return isinstance(leaf, keras.Variable) or backends.room("step_scope").is_variable(leaf)


# ---- attributes ------------------------------------------------------------------


def attributes_of(model):
    """The attributes of the user's own, by the number of the layer and their name."""
    base = {*vars(keras.layers.Layer()), *vars(keras.Model()), *keras_internals.INSTANCE_OVERRIDES}
    return {
        (number, name): value
        for number, layer in enumerate(keras_internals.flatten_layers(model))
        for name, value in vars(layer).items()
        if name == "_trainable" or (name not in base and not _is_of_keras(value))
    }


def numbers_of(model):
    """What attributes hold in numbers, as dict from a label to an array.

    Of layers those that are plain: what a `call` keeps of its rows, as attention scores for
    a picture, is nobody's state.
    """
    layers = keras_internals.flatten_layers(model)
    found = {}
    for (number, name), value in attributes_of(model).items():
        leaves = _leaves(value) if number == 0 else [value]
        arrays = [_number(leaf, only_plain=number > 0) for leaf in leaves]
        if arrays and all(array is not None for array in arrays):
            found[f"{layers[number].name}.{name}"] = arrays
    return found


def _leaves(value):
    if isinstance(value, dict):
        return [leaf for inside in value.values() for leaf in _leaves(inside)]
    if isinstance(value, (list, tuple, set, deque)):
        return [leaf for inside in value for leaf in _leaves(inside)]
    return [value]


def _number(leaf, only_plain):
    if isinstance(leaf, (int, float)):
        return np.asarray(leaf, "float64")
    if only_plain or isinstance(leaf, (str, keras.Variable, keras.KerasTensor)):
        return None
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return np.asarray(ops.convert_to_numpy(leaf))
    return None


def _is_of_keras(value):
    """Whether an attribute is a part of the model that a step may have made."""
    kinds = (keras_internals.KerasSaveable, keras.Variable, keras.random.SeedGenerator)
    return isinstance(value, kinds)


def _content(value):
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    return list(value) if isinstance(value, _CONTAINERS) else None


def _set_content(value, content):
    # Past the container's own methods, which track what comes in.
    if isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, dict) and dict(value) != content:
        dict.clear(value)
        dict.update(value, content)
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), content)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, content)
    elif isinstance(value, deque):
        value.clear()
        value.extend(content)


# ---- numbers ---------------------------------------------------------------------


def as_array(tensor):
    """A tensor's or a variable's numbers, which stay what they are."""
    return np.array(ops.convert_to_numpy(tensor))


def same(value, other):
    """Whether two arrays hold the same numbers, or none in the same places."""
    if value.shape != other.shape:
        return False
    equal = value == other
    if value.dtype.kind in "fc":
        equal = equal | (np.isnan(value) & np.isnan(other))
    return bool(np.all(equal))
