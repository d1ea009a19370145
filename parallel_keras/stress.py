"""The first batch with numbers made large, for what begins to bite only later.

A clip of gradients by hand, a cap on a mean, a penalty on what is far away, a branch at
the thousandth step: on the first batch each of them adds up over the rows, as it does
nothing. So what a probe compares is compared again where numbers are large. The rows of the
second part grow and those of the first do not, so that a cap which all of them would
exceed does not cut all alike. Tolerances are coarse then: large numbers carry large
rounding, and what a cap does is gross.
"""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from parallel_keras import keras_internals, step_state
from parallel_keras.features import is_keras

_LARGE_COUNT = 1_000_000


class Stress(NamedTuple):
    """What is made large, and by how much.

    Attributes:
        said: String, for messages.
        low, high: Floats, factors of what the rows of the first and of the second part hold.
        weights: Float, factor of the weights that train.
        gradients: Float, factor of the gradients of the loss.
        counters: Tuple of what counts, and has counted very far (see `counting`).
        opened: Tuple of variables that are zero, or are in places, and are one (see `opening`).
        nudge: Float, a relative change of the weights, as rounding might be.
    """

    said: str
    low: float = 1.0
    high: float = 1.0
    weights: float = 1.0
    gradients: float = 1.0
    counters: tuple = ()
    opened: tuple = ()
    nudge: float = 0.0

    def of_model(self, model):
        """Make the weights and counters of a model large, which somebody has taken down."""
        for variable, value in self.weights_of(model):
            variable.assign(ops.cast(value, variable.dtype))
        for counter in self.counters:
            counter.make_large()

    def weights_of(self, model):
        """Pairs of a variable and its larger value; none for those that stay."""
        opened = [(v, _without_zeros(step_state.as_array(v))) for v in self.opened]
        if self.weights == 1 and not self.nudge:
            return opened
        floats = [v for v in model.trainable_variables if keras.backend.is_float_dtype(v.dtype)]
        return [(v, self._larger(step_state.as_array(v))) for v in floats] + opened

    def _larger(self, value):
        signs = np.where(np.arange(value.size) % 2, 1.0, -1.0).reshape(value.shape)
        larger = value.astype("float64") * self.weights * (1.0 + self.nudge * signs)
        return larger.astype("float32" if value.dtype.itemsize < 4 else value.dtype)

    def of_data(self, data, cut, model):
        """The rows with larger numbers.

        Whole numbers stay what they are: classes, numbers of words, of pixels. So do the
        inputs of a model that looks things up, where a number may be a place.

        Args:
            data: What a step takes: `(x, y, sample_weight)`, part of it, or one structure.
            cut: Int, the rows of the first part.
            model: The model.
        """
        if self.low == self.high == 1:
            return data
        parts = list(data) if isinstance(data, tuple) else [data]
        looks_up = any(
            isinstance(layer, keras.layers.Embedding)
            for layer in keras_internals.flatten_layers(model)
        )
        scaled = [
            part
            if number == 0 and looks_up
            else tree.map_structure(lambda leaf, n=number: self._scaled(leaf, cut, n == 2), part)
            for number, part in enumerate(parts)
        ]
        return tuple(scaled) if isinstance(data, tuple) else scaled[0]

    def of_rows(self, leaf, cut):
        """An array, all of whose numbers grow."""
        return self._scaled(leaf, cut, True)

    def _scaled(self, leaf, cut, whole_numbers):
        if leaf is None or not keras.backend.is_float_dtype(
            keras.backend.standardize_dtype(leaf.dtype)
        ):
            return leaf
        larger = ops.concatenate([leaf[:cut] * self.low, leaf[cut:] * self.high], axis=0)
        larger = ops.cast(larger, leaf.dtype)
        return larger if whole_numbers else ops.where(leaf == ops.round(leaf), leaf, larger)

    def nudged(self, by):
        """The same with other roundings."""
        return self._replace(nudge=by)


NO_STRESS = Stress("")
# Where the first rows are next to nothing, large weights do not make them large as well.
_ROWS = Stress("inputs and targets × 30", high=30.0)
_WEIGHTS = (
    Stress("inputs, targets and weights × 30", low=1e-4, high=30.0, weights=30.0),
    Stress("inputs and targets × 30, weights × 4", low=1e-4, high=30.0, weights=4.0),
)
_GRADIENTS = Stress("inputs and targets × 30, gradients × 10000", high=30.0, gradients=1e4)

# For what gives a loss, outputs or state; for steps that train.
LEVELS = (_ROWS, *_WEIGHTS)
LEVELS_OF_TRAINING = (_ROWS, _GRADIENTS, *_WEIGHTS)
_PREDICTIONS = (
    Stress("predictions and targets × 30", high=30.0),
    Stress("predictions and targets × 10000", high=1e4),
)


def predictions(data, y_pred, cut, model):
    """Larger predictions for a loss or a metric.

    Args:
        data: `(x, y, sample_weight)`.
        y_pred: Outputs of the model.
        cut: Int, the rows of the first part.
        model: The model.

    Yields:
        Tuples of a name, the data and the predictions.
    """
    for level in _PREDICTIONS:
        larger = tree.map_structure(lambda leaf, by=level: by.of_rows(leaf, cut), y_pred)
        yield level.said, level.of_data(data, cut, model), larger
    if all(bool(ops.all((leaf >= 0) & (leaf <= 1))) for leaf in tree.flatten(y_pred)):
        surer = tree.map_structure(
            lambda leaf: ops.concatenate([leaf[:cut], leaf[cut:] ** 30], axis=0), y_pred
        )
        yield "predictions near 0 and 1", data, surer


# ---- coefficients that are zero, as yet ----------------------------------------------


def opening(model):
    """The stress in which what is multiplied with zero counts.

    A callback raises a coefficient from zero in later epochs (the weight of a divergence in
    a VAE), and on the first batch its term is not there.

    Args:
        model: A Keras model.

    Returns:
        A list of one `Stress`, empty where nothing is zero.
    """
    layers = [one for one in keras_internals.flatten_layers(model) if not is_keras(type(one))]
    found = {
        id(v): v
        for layer in layers
        for v in keras_internals.own_state(layer)
        if not v.trainable
        and len(v.shape) < 2
        and keras.backend.is_float_dtype(v.dtype)
        and not np.all(step_state.as_array(v))
    }
    names = ", ".join(v.path for v in found.values())
    return [Stress(f"1 in {names} for 0", opened=tuple(found.values()))] if found else []


def _without_zeros(value):
    return np.where(value == 0, np.ones_like(value), value)


# ---- counters ----------------------------------------------------------------------


def counting(model, run, steady):
    """The stress in which all that a step counts has been counted for long.

    Args:
        model: A Keras model.
        run: The `step_runs.Run` of its step.
        steady: Ids of the variables to which the step gives the same whatever the rows.

    Returns:
        A list of one `Stress`, empty where the step counts nothing.
    """
    counters: list = [
        _Variable(variable)
        for key, (variable, before, after) in run.state.items()
        if key in steady and not before.shape and _is_whole(before) and _is_whole(after)
    ]
    layers = keras_internals.flatten_layers(model)
    for (number, name), value in step_state.attributes_of(model).items():
        if type(value) is int and f"{layers[number].name}.{name}" in run.attributes:
            counters.append(_Attribute(layers[number], name))
    names = ", ".join(counter.name for counter in counters)
    return [Stress(f"{names} above {_LARGE_COUNT}", counters=tuple(counters))] if counters else []


def _is_whole(value):
    return value.dtype.kind in "iuf" and bool(np.isfinite(value)) and value == np.round(value)


class _Variable:
    """A variable that counts."""

    def __init__(self, variable):
        self.variable = variable
        self.name = variable.path

    def make_large(self):
        value = step_state.as_array(self.variable)
        limits = np.iinfo(value.dtype) if value.dtype.kind in "iu" else np.finfo(value.dtype)
        large = min(float(value) + _LARGE_COUNT, float(limits.max) / 4)
        self.variable.assign(ops.cast(np.asarray(large, "float64"), self.variable.dtype))


class _Attribute:
    """A number of Python's own that counts."""

    def __init__(self, layer, name):
        self.layer, self.attribute = layer, name
        self.name = f"{layer.name}.{name}"

    def make_large(self):
        # The first value may be one of the class.
        vars(self.layer)[self.attribute] = getattr(self.layer, self.attribute) + _LARGE_COUNT
