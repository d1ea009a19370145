"""Does what the user wrote add up over the rows? Asked of the first batch.

Most of Keras's own losses and metrics are known to. For a loss, a metric or a layer
of the user's own there is one way to know: compute it on some rows at once and on
two uneven parts of them, and compare the first with the combination of the
others. A loss or a metric that does not add up needs the whole batch; a layer, which
sees only the rows of its device, is refused by name, before any weight changes.

Everything runs under a stateless scope: no variable is touched. What a backend holds
beside them, as the buffers of `torch.nn` modules, is put back.
"""

import contextlib
import itertools
from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from parallel_keras import (
    backends,
    batch,
    capabilities,
    features,
    keras_internals,
    resting,
    step_state,
    stress,
)
from parallel_keras.tolerances import close as _close
from parallel_keras.tolerances import nudge, roughly, tolerance_of

# Rows are cut as 4 + 3: uneven, so that a mean of means shows.
MAX_ROWS = 7
# Keras's own losses that reduce over the batch unless told otherwise.
_BATCH_LOSSES = ("Circle", "Dice", "Tversky", "dice", "tversky", "circle")


class Findings(NamedTuple):
    """How loss and metrics of a batch come from those of its parts.

    Attributes:
        averaged: Frozenset of the ids of the metrics' variables whose change counts with
            the part's share of the rows. All others are summed.
        summed: Frozenset of the keys of what layers add to the loss as a sum over the rows:
            it counts in full. All else that they add counts with the share of the rows.
        of_the_batch: String, the loss or metric that has to be computed on the whole
            batch. Empty where all add up.
    """

    averaged: frozenset = frozenset()
    summed: frozenset = frozenset()
    of_the_batch: str = ""

    def described(self):
        """A line for the log, empty where all add up."""
        if not self.of_the_batch:
            return ""
        return (
            f"{self.of_the_batch} does not add up over the rows of a batch: the outputs of all "
            "replicas come together on the first device, which computes loss and metrics once"
        )


def known(model):
    """The `Findings` that need no look at a batch."""
    found = features.loss_of_the_batch(model) if model.compiled else ""
    return Findings(of_the_batch=found)


def needs_probe(model):
    """Whether a model has a loss, metric or layer that is not known to add up."""
    return bool(
        _unknown_losses(model)
        or _unknown_metrics(model)
        or _unknown_layers(model)
        or _makes_masks(model)
        or keras_internals.has_bare_operations(model)
    )


def is_enough(rows):
    """Whether a batch has the rows that a probe needs."""
    return rows >= 2


def probe(model, strategy, x, y=None, sample_weight=None):
    """Compare the whole of the first rows with the combination of two parts.

    Args:
        model: A built, compiled Keras model.
        strategy: The `Strategy`, for messages.
        x, y, sample_weight: The first batch, as backend tensors.

    Returns:
        `Findings`.

    Raises:
        UnsupportedError: If something does not add up, and is not supported so.
    """
    if not needs_probe(model):
        return known(model)
    rows = min(MAX_ROWS, int(next(leaf for leaf in tree.flatten(x) if leaf is not None).shape[0]))
    data = _take((x, y, sample_weight), slice(0, rows))
    parts = batch.row_slices(rows, 2)
    shares = batch.shares(rows, 2)

    def refuse(feature, received):
        capabilities.check(feature, strategy, backends.name(), received)

    scope = backends.room("step_scope")
    kept, rest = scope.Kept(model), resting.Rest()
    try:
        with tolerance_of(model), scope.layers_at_rest(rest):
            forward = _Forward(model, kept, rest)
            y_pred, summed = _probe_forward(forward, data, parts, shares, refuse)
            found = _probe_compiled(model, data, y_pred, parts, shares, refuse)
    finally:
        kept.restore()
    return found._replace(summed=summed)


def _probe_compiled(model, data, y_pred, parts, shares, refuse):
    """Compare what `compile` was given: losses and metrics."""
    found = known(model)
    if not model.compiled or data[1] is None or found.of_the_batch:
        return found
    if any(keras_internals.keras_mask(leaf) is not None for leaf in tree.flatten(y_pred)):
        return Findings(of_the_batch="the loss of an output with a mask")
    loss = _probe_losses(model, data, y_pred, parts, shares)
    if loss:
        refuse("batch_loss", loss)
        return Findings(of_the_batch=loss)
    return _probe_metrics(model, data, y_pred, parts, shares)


# ---- what is not known ------------------------------------------------------


def _unknown_losses(model):
    return [loss for loss in features.user_losses(model) if not _is_known_loss(loss)]


def _is_known_loss(loss):
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    function = getattr(loss, "fn", loss)
    names = {type(loss).__name__, getattr(function, "__name__", "")}
    of_keras = features.is_keras(loss) and features.is_keras(function)
    return of_keras and not names & {*_BATCH_LOSSES} and not _is_over_rows(loss)


def _is_over_rows(thing):
    """Whether a loss or a metric around a function has it work along the rows."""
    return features.may_be_over_rows(getattr(thing, "_fn_kwargs", {}).get("axis"))


def _unknown_metrics(model):
    container = keras_internals.compile_metrics_of(model) if model.compiled else None
    metrics = container.metrics if container is not None else []
    return [metric for metric in metrics if not _is_known_metric(metric)]


def _is_known_metric(metric):
    function = getattr(metric, "_fn", None)
    if function is None:
        return features.is_keras(metric)
    # A Keras metric class around a function: a loss object as a metric has
    # reduced over its rows already, so only plain Keras functions are known.
    known = features.is_keras(function) and hasattr(function, "__code__")
    known = known and function.__name__ not in _BATCH_LOSSES and not _is_over_rows(metric)
    return features.is_keras(metric) and known


def _unknown_layers(model):
    return [
        layer
        for layer in keras_internals.flatten_layers(model)
        if not features.keeps_rows_apart(layer)
    ]


def _makes_masks(model):
    return any(
        isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)
        for layer in keras_internals.flatten_layers(model)
    )


# ---- losses and state of the forward pass -----------------------------------


class _Differs(Exception):
    """With larger numbers something does not add up."""


def _probe_forward(forward, data, parts, shares, refuse):
    """Run the model; compare its outputs, `add_loss` terms and the state of its layers.

    Returns:
        The outputs, and the keys of the `add_loss` terms that are sums over the rows.
    """
    y_pred, ways = _Look(forward, parts, shares, refuse).at(data)
    if forward.layers or keras_internals.has_bare_operations(forward.model):
        for level in stress.LEVELS:
            ways = _under(level, forward, data, parts, shares, refuse, ways)
    return y_pred, frozenset(key for key, found in ways.items() if _MEAN not in found)


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


_MEAN, _SUM = "mean", "sum"


class _Look:
    """Compares a forward pass on all rows with those on parts of them.

    Args:
        forward: The `_Forward` of the model.
        parts, shares, refuse: As in `probe`.
        levels: The `stress.Stress` of all rows, and that of the parts.
        near: Function that tells whether two arrays are the same.
    """

    def __init__(self, forward, parts, shares, refuse, levels=(stress.NO_STRESS,) * 2, near=_close):
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
            if len(values) < len(pieces) or not self.near(value, _mean(values, self.shares)):
                self.refuse("batch_state", f"variable {label}")
        if forward.others and self.levels[0] is stress.NO_STRESS:
            self._others(data, [whole, *pieces], training)
        return y_pred, {**(known or {}), **ways}

    def _of_parts(self, data, training):
        rows = (_take(data, part) for part in self.parts)
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
            mean = _mean(values, self.shares)
            fits = {_MEAN: self.near(whole[key], mean), _SUM: self.near(whole[key], sum(values))}
            found[key] = {way for way, is_it in fits.items() if is_it}
            found[key] &= (known or {}).get(key, found[key])
            if not found[key]:
                text = f"{whole[key]:.6g} on {sum_rows(self.parts)} rows, {mean:.6g} from its parts"
                self._refuse_added(key, text)
        return found

    def _others_added(self, data, seen, rests, known):
        """The same for terms that are added only in training, or only at rest."""
        model = self.model
        if not _takes_training(model):
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
            pieces = [np.atleast_1d(_numpy(piece)) for piece in pieces]
            value = _numpy(value)
            fits = value.shape == np.concatenate(pieces).shape
            # Part by part: beside large rows small ones would not be seen.
            cuts = np.cumsum([len(piece) for piece in pieces])[:-1]
            if not fits or not all(map(self.near, np.split(value, cuts), pieces)):
                names = ", ".join(sorted({type(layer).__name__ for layer in self.layers}))
                self.refuse("batch_output", names or "operations between the layers")

    def _refuse_added(self, key, text):
        _refuse_added(self.model, key, text, self.refuse)


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
            is_mean = not are_exact or _close(whole, _mean(parts, shares))
        else:
            is_mean = all(np.array_equal(part, whole) for part in parts)
        if not is_mean:
            refuse("batch_state", path)


def _refuse_added(model, key, text, refuse):
    layer = keras_internals.flatten_layers(model)[key[0]]
    refuse("batch_added_loss", f"add_loss or activity loss of {_kind_and_name(layer)}: {text}")


def _kind_and_name(layer):
    return f"layer {layer.name} ({type(layer).__name__})"


def _has_statistics(layer):
    if getattr(layer, "synchronized", False):  # a layer of the user's own, which says so
        return True
    return isinstance(layer, keras.layers.BatchNormalization)


def sum_rows(parts):
    """The number of rows in a list of slices."""
    return parts[-1].stop


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


class _Forward:
    """Forward passes of a model, each from the same state.

    Attributes:
        layers: Those that are not known to keep the rows apart.
        others: Dict from the id of each thing with state that is no Keras variable to its
            path and value.
    """

    def __init__(self, model, kept, rest):
        self.model, self.kept, self.rest = model, kept, rest
        self.layers = _unknown_layers(model)
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
                y_pred = model(x, training=training) if _takes_training(model) else model(x)
                added = keras_internals.added_by_layers(model)
                losses = {key: _numpy(loss) for key, loss in added.items()}
            state = {}
            metric_ids = {id(v) for metric in model.metrics for v in metric.variables}
            for layer in self.layers:
                for variable in keras_internals.own_state(layer):
                    value = scope.assigned_value(variable)
                    if value is not None and id(variable) not in metric_ids:
                        state[id(variable)] = (variable.path, _numpy(value))
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


def _takes_training(model):
    return keras_internals.call_has_training(model)


def _is_random(layer):
    return bool(keras_internals.seed_generators(layer))


# ---- compiled losses --------------------------------------------------------


def _probe_losses(model, data, y_pred, parts, shares):
    """A string that tells of losses that do not add up; empty where all do."""
    unknown = _unknown_losses(model)
    if not unknown:
        return ""
    # Twice: with the predictions, and with those of the neighbouring row, so
    # that a coincidence at the start of training does not pass.
    # Copies: of the outputs Keras may know more than their numbers, of a part of them not.
    for shift in (0, 1):
        predictions = tree.map_structure(lambda t, by=shift: ops.roll(t, by, axis=0), y_pred)
        whole, slopes = _loss(model, data, predictions)
        pieces = [_loss(model, _take(data, part), _take(predictions, part)) for part in parts]
        together = _mean([value for value, _ in pieces], shares)
        names = ", ".join(_name(loss) for loss in unknown)
        if not _close(whole, together):
            return (
                f"loss={names}: {float(whole):.6g} on {sum_rows(parts)} rows, "
                f"{float(together):.6g} from its parts"
            )
        if not _same_slopes(slopes, [found for _, found in pieces], shares, _close):
            return f"loss={names}: its gradient on all rows is not that on parts of them"
    for said, rows, predictions in stress.predictions(data, y_pred, parts[0].stop, model):
        if _is_a_mean_of_large(model, rows, predictions, parts, shares):
            continue
        names = ", ".join(_name(loss) for loss in unknown)
        return f"loss={names}, with larger numbers ({said}), is no mean over the rows"
    return ""


def _is_a_mean_of_large(model, data, predictions, parts, shares):
    """Whether a loss of large numbers adds up, as far as that can be told."""

    def add_up(whole, pieces, shares):
        values, slopes = zip(*pieces, strict=True)
        same = roughly(whole[0], _mean(values, shares))
        return same and _same_slopes(whole[1], slopes, shares, roughly)

    try:
        whole = _loss(model, data, predictions)
        pieces = [_loss(model, _take(data, part), _take(predictions, part)) for part in parts]
        if add_up(whole, pieces, shares):
            return True
        rounded = tree.map_structure(lambda t: t * (1.0 + nudge()), predictions)
        return not add_up(whole, [_loss(model, data, rounded)], [1.0])
    except Exception:
        return True  # it has no answer to such numbers


def _loss(model, data, y_pred):
    """The compiled loss, and its gradient for each output."""
    with keras_internals.ObservingScope():
        (value,), slopes = backends.room("whole_loss").with_gradients(
            lambda: keras_internals.compiled_loss(model, data[1:], y_pred),
            tree.flatten(y_pred),
            lambda loss: loss,
        )
    return _numpy(value), [None if slope is None else _numpy(slope) for slope in slopes]


def _same_slopes(whole, pieces, shares, near):
    """Whether the gradient of each row is, by its share, that in the row's part."""
    for slope, *parts in zip(whole, *pieces, strict=True):
        if slope is None or any(part is None for part in parts):
            if slope is not None or any(part is not None for part in parts):
                return False
            continue
        weighted = [share * part for share, part in zip(shares, parts, strict=True)]
        if not near(slope, np.concatenate(weighted)):
            return False
    return True


# ---- metrics ----------------------------------------------------------------


def _probe_metrics(model, data, y_pred, parts, shares):
    """Find for each metric whether its state is summed, or averaged by rows, or neither."""
    averaged: set = set()
    unknown = _unknown_metrics(model)
    if not unknown:
        return Findings()
    with _plain_state_kept(unknown) as has_plain_state:
        whole, again = _metric_states(model, data, y_pred, unknown, updates=2)
        pieces = _metric_states_of_parts(model, data, y_pred, unknown, parts)
        plain = [metric for metric in unknown if has_plain_state(metric)]
    of_large = [] if plain else list(_large_metric_states(model, data, y_pred, unknown, parts))
    for metric in unknown:
        keys = [id(variable) for variable in metric.variables]
        is_steady = all(_close(again[key], whole[key]) for key in keys)
        if metric in plain or not is_steady:
            # What it is after a batch depends on what it was before.
            return Findings(of_the_batch=_described(metric))
        ways = _ways(keys, whole, pieces, shares, _close)
        if not ways:
            return Findings(of_the_batch=_described(metric))
        for said, large, of_parts in of_large:
            ways &= _ways(keys, large, of_parts, shares, roughly)
            if not ways:
                text = f"{_described(metric)}, with larger numbers ({said}),"
                return Findings(of_the_batch=text)
        if _SUM not in ways:
            averaged.update(keys)
    return Findings(averaged=frozenset(averaged))


def _ways(keys, whole, pieces, shares, near):
    """How the changes of a metric's variables come together."""
    fits = {
        _SUM: all(near(whole[key], sum(piece[key] for piece in pieces)) for key in keys),
        _MEAN: all(near(whole[key], _mean([p[key] for p in pieces], shares)) for key in keys),
    }
    return {way for way, is_it in fits.items() if is_it}


def _metric_states_of_parts(model, data, y_pred, metrics, parts):
    return [
        _metric_states(model, _take(data, part), _take(y_pred, part), metrics, updates=1)[0]
        for part in parts
    ]


def _large_metric_states(model, data, y_pred, metrics, parts):
    """What is said of larger numbers, and the changes by all of them and by their parts."""
    for said, rows, predictions in stress.predictions(data, y_pred, parts[0].stop, model):
        with _plain_state_kept(metrics):
            try:
                whole = _metric_states(model, rows, predictions, metrics, updates=1)[0]
                pieces = _metric_states_of_parts(model, rows, predictions, metrics, parts)
            except Exception:
                continue  # they have no answer to such numbers
        yield said, whole, pieces


def _described(metric):
    return f"metric {metric.name} ({type(metric).__name__})"


@contextlib.contextmanager
def _plain_state_kept(metrics):
    """Undo what metrics do to attributes that are no variables, such as a list of batches.

    Yields:
        A function of a metric: whether it has changed one.
    """
    before = {id(metric): _plain_state(metric) for metric in metrics}

    def has_changed(metric):
        return not _same(_plain_state(metric), before[id(metric)])

    yield has_changed
    for metric in metrics:
        for key, (value, content) in before[id(metric)].items():
            vars(metric)[key] = value
            if isinstance(value, list):
                list.__setitem__(value, slice(None), content)
            elif isinstance(value, dict):
                dict.clear(value)
                dict.update(value, zip(*content, strict=True))


def _plain_state(metric):
    """A metric's own attributes by name, each with a list of what it contains."""
    of_keras = vars(keras.metrics.Metric(name="any"))
    return {key: (v, _content(v)) for key, v in vars(metric).items() if key not in of_keras}


def _content(value):
    if isinstance(value, dict):
        return [list(value), list(value.values())]
    return list(value) if isinstance(value, list) else []


def _same(one, other):
    """Whether two nests of lists and dicts hold the very same objects."""
    leaves, others = ([id(leaf) for leaf in tree.flatten(nest)] for nest in (one, other))
    return leaves == others


def _metric_states(model, data, y_pred, metrics, updates):
    """The change of each state variable by each of some equal updates."""
    _, y, sample_weight = data
    container = keras_internals.compile_metrics_of(model)
    with keras_internals.ObservingScope() as scope, keras_internals.no_gradient():
        for metric in metrics:
            metric.reset_state()
        variables = [v for metric in metrics for v in metric.variables]
        states = [{id(v): _numpy(scope.get_current_value(v)) for v in variables}]
        for _ in range(updates):
            container.update_state(y, y_pred, sample_weight)
            states.append({id(v): _numpy(scope.get_current_value(v)) for v in variables})
    return [
        {key: after[key] - before[key] for key in after}
        for before, after in itertools.pairwise(states)
    ]


# ---- small things -----------------------------------------------------------


def _take(structure, rows):
    return tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], structure)


def _mean(values, shares):
    return sum(share * value for share, value in zip(shares, values, strict=True))


def _numpy(value):
    return np.asarray(ops.convert_to_numpy(ops.cast(value, "float64")))


def _name(thing):
    return getattr(thing, "name", None) or getattr(thing, "__name__", None) or repr(thing)
