"""Does a forward pass add up over the rows: outputs, what layers add to the loss, their state?"""

import keras
import numpy as np
from keras import tree

from parallel_keras import backends, keras_internals, step_state, stress
from parallel_keras.probe_known import unknown_layers
from parallel_keras.probe_rows import MEAN, as_array, mean_of, sum_rows, take, ways_of
from parallel_keras.tolerances import close, nudge, roughly


class _Differs(Exception):
    """With larger numbers something does not add up."""


def probe_forward(forward, data, parts, shares, refuse):
    """Run the model; compare its outputs, `add_loss` terms and the state of its layers.

    Returns:
        The outputs, and the keys of the `add_loss` terms that are sums over the rows.
    """
    y_pred, ways = _Look(forward, parts, shares, refuse).at(data)
    if forward.layers or keras_internals.has_bare_operations(forward.model):
        for level in (*stress.LEVELS, *stress.opening(forward.model)):
            ways = _under(level, forward, data, parts, shares, refuse, ways)
    return y_pred, frozenset(key for key, found in ways.items() if MEAN not in found)


def _under(level, forward, data, parts, shares, refuse, ways):
    """The same with larger numbers; it says nothing where a model has no answer to them."""

    def differs(feature, received):
        raise _Differs(feature, received)

    model = forward.model
    rows = level.of_data(data, parts[0].stop, model)
    try:
        look = _Look(forward, parts, shares, differs, (level, level), roughly)
        return look.at(rows, ways)[1]
    except _Differs as difference:
        feature, received = difference.args
    except Exception:
        keras_internals.clear_losses(model)
        return ways
    everything, other = slice(0, sum_rows(parts)), level.nudged(nudge())
    try:
        # All rows alone, with the weights rounded otherwise: is it rounding?
        _Look(forward, [everything], [1.0], differs, (level, other), roughly).at(rows, ways)
    except Exception:
        keras_internals.clear_losses(model)
        return ways
    refuse(feature, f"{received}, on the first batch with larger numbers ({level.said})")
    return ways


class _Look:
    """Compares a forward pass on all rows with those on parts of them.

    Args:
        forward: The `Forward` of the model.
        parts, shares, refuse: As in `probe`.
        levels: The `stress.Stress` of all rows, and that of the parts.
        near: Function that tells whether two arrays are the same.
    """

    def __init__(self, forward, parts, shares, refuse, levels=(stress.NO_STRESS,) * 2, near=close):
        self.forward, self.parts, self.shares, self.refuse = forward, parts, shares, refuse
        self.model, self.layers = forward.model, forward.layers
        self.levels, self.near = levels, near

    def at(self, data, known=None):
        """Look at some rows.

        Args:
            data: `(x, y, sample_weight)`.
            known: What was found before, of other numbers.

        Returns:
            The outputs, and a dict from the keys of the `add_loss` terms to sets of `"mean"`
            and `"sum"`: what they are. One that is zero would do as either.
        """
        forward, model, layers = self.forward, self.model, self.layers
        # A random draw differs between the whole and the parts, which says
        # nothing: such a model is compared with its random layers at rest.
        training = not any(_is_random(layer) for layer in keras_internals.flatten_layers(model))
        whole, y_pred = forward(data, training, self.levels[0])
        if training and forward.kept.has_drawn():
            training = False
            whole, y_pred = forward(data, training, self.levels[0])
        if not layers and not keras_internals.has_bare_operations(model):
            return y_pred, {}
        outcomes = self._of_parts(data, training)
        pieces = [outcome for outcome, _ in outcomes]
        # Statistics of a batch are per device by definition, but only in training.
        of_rows = [(whole, y_pred), *outcomes]
        rests = not training
        if training and any(_has_statistics(x) for x in keras_internals.flatten_layers(model)):
            rests = True
            of_rows = self._on_all(data, training=False)
        self._outputs([outputs for _, outputs in of_rows])
        ways = self._added([outcome for outcome, _ in of_rows], known)
        ways |= self._others_added(data, of_rows[0][0], rests, known)
        for key, (label, value) in whole.state.items():
            values = [piece.state[key][1] for piece in pieces if key in piece.state]
            if len(values) < len(pieces) or not self.near(value, mean_of(values, self.shares)):
                self.refuse("batch_state", f"variable {label}")
        if forward.others and self.levels[0] is stress.NO_STRESS:
            self._others(data, [whole, *pieces], training)
        return y_pred, {**(known or {}), **ways}

    def _of_parts(self, data, training):
        rows = (take(data, part) for part in self.parts)
        return [self.forward(part, training, self.levels[1]) for part in rows]

    def _on_all(self, data, training):
        """What a pass gives for all rows, then for each part of them."""
        whole = self.forward(data, training, self.levels[0])
        return [whole, *self._of_parts(data, training)]

    def _others(self, data, outcomes, training):
        """Compare what is in no Keras variable."""
        if not training:
            outcomes = [one for one, _ in self._on_all(data, training=True)]
        _probe_others(outcomes, self.shares, training, self.refuse)
        for path, _, _ in self.forward(data, training=False)[0].others.values():
            self.refuse("batch_state", f"{path} changes in inference")

    def _added(self, outcomes, known, skip=()):
        """Whether the `add_loss` terms are sums over the rows, or means."""
        whole, *pieces = (outcome.losses for outcome in outcomes)
        found = {}
        for key in whole.keys() - skip:
            if any(key not in piece for piece in pieces):
                self._refuse_added(key, "it is not added for each part of a batch")
            values = [piece.get(key, np.nan) for piece in pieces]
            found[key] = ways_of([(whole[key], values)], self.shares, self.near)
            found[key] &= (known or {}).get(key, found[key])
            if not found[key]:
                mean = mean_of(values, self.shares)
                text = f"{whole[key]:.6g} on {sum_rows(self.parts)} rows, {mean:.6g} from its parts"
                self._refuse_added(key, text)
        return found

    def _others_added(self, data, seen, rests, known):
        """The same for terms that are added only in training, or only at rest."""
        model = self.model
        if not keras_internals.call_has_training(model):
            return {}
        other, _ = self.forward(data, rests, self.levels[0])
        unknown = other.losses.keys() - seen.losses.keys()
        if unknown and rests:
            text = "it is added in training only, where random draws or statistics hide what it is"
            self._refuse_added(min(unknown), text)
        if not unknown:
            return {}
        outcomes = self._on_all(data, training=rests)
        return self._added([one for one, _ in outcomes], known, seen.losses.keys())

    def _outputs(self, outputs):
        """Compare the outputs of all rows with those of the parts, put together."""
        whole, *parts = (tree.flatten(output) for output in outputs)
        for value, *pieces in zip(whole, *parts, strict=True):
            pieces = [np.atleast_1d(as_array(piece)) for piece in pieces]
            value = as_array(value)
            fits = value.shape == np.concatenate(pieces).shape
            # Part by part: beside large rows small ones would not be seen.
            cuts = np.cumsum([len(piece) for piece in pieces])[:-1]
            if not fits or not all(map(self.near, np.split(value, cuts), pieces)):
                names = ", ".join(sorted({type(layer).__name__ for layer in self.layers}))
                self.refuse("batch_output", names or "operations between the layers")

    def _refuse_added(self, key, text):
        layer = keras_internals.flatten_layers(self.model)[key[0]]
        kind = f"layer {layer.name} ({type(layer).__name__})"
        self.refuse("batch_added_loss", f"add_loss or activity loss of {kind}: {text}")


def _probe_others(outcomes, shares, are_exact, refuse):
    """Compare what is in no Keras variable after all rows with what it is after parts of them.

    Args:
        outcomes: Of all rows, then of the parts.
        shares: Of the parts.
        are_exact: Bool. Whether no random draws hide what fractions come to.
        refuse: Function of a feature and what was met.
    """
    found = [outcome.others for outcome in outcomes]
    for key in {key for others in found for key in others}:
        path, before, _ = next(others[key] for others in found if key in others)
        refuse("torch_buffer", path)
        whole, *parts = (others[key][2] if key in others else before for others in found)
        if any(
            part.shape != before.shape or part.dtype != before.dtype for part in (whole, *parts)
        ):
            refuse("batch_state", f"{path} gets another shape or type")
        if before.dtype.kind in "fc":
            is_mean = not are_exact or close(whole, mean_of(parts, shares))
        else:
            is_mean = all(np.array_equal(part, whole) for part in parts)
        if not is_mean:
            refuse("batch_state", path)


def _has_statistics(layer):
    if getattr(layer, "synchronized", False):  # a layer of the user's own, which says so
        return True
    return isinstance(layer, keras.layers.BatchNormalization)


class _Outcome:
    """What one forward pass left behind: what each layer added to the loss, and new states.

    Attributes:
        losses: Dict of what was added, by key.
        state: Dict from the id of a variable that was assigned to its path and value.
        others: Dict from the id of other state that was written to its path, and its value
            before and after.
    """

    def __init__(self, losses, state, others):
        self.losses = losses
        self.state = state
        self.others = others


class Forward:
    """Forward passes of a model, each from the same state.

    Attributes:
        layers: Those that are not known to keep the rows apart.
        others: Dict from the id of each thing with state that is no Keras variable to its
            path and value.
    """

    def __init__(self, model, kept, rest):
        self.model, self.kept, self.rest = model, kept, rest
        self.layers = unknown_layers(model)
        self.others = self._others()

    def _others(self):
        found = backends.room("step_scope").other_state(self.model)
        return {id(one): (one.path, step_state.as_array(one)) for one in found}

    def __call__(self, data, training, level=stress.NO_STRESS):
        """One pass, under some `stress.Stress`; returns an `_Outcome` and the outputs."""
        model, x = self.model, data[0]
        self.kept.restore()
        self.rest.begin()
        with keras_internals.ObservingScope(level.weights_of(model)) as scope:
            with keras_internals.no_gradient():
                y_pred = keras_internals.call_model(model, x, training)
                added = keras_internals.added_by_layers(model)
                losses = {key: as_array(loss) for key, loss in added.items()}
            state = {}
            metric_ids = {id(v) for metric in model.metrics for v in metric.variables}
            for layer in self.layers:
                for variable in keras_internals.own_state(layer):
                    value = scope.assigned_value(variable)
                    if value is not None and id(variable) not in metric_ids:
                        state[id(variable)] = (variable.path, as_array(value))
        keras_internals.clear_losses(model)
        return _Outcome(losses, state, self._written()), y_pred

    def _written(self):
        nothing = np.zeros(0)
        before = {key: value for key, (_, value) in self.others.items()}
        return {
            key: (path, before.get(key, nothing), value)
            for key, (path, value) in self._others().items()
            if not step_state.same(value, before.get(key, nothing))
        }


def _is_random(layer):
    return bool(keras_internals.seed_generators(layer))
