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
import contextvars
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
)

# Rows are cut as 4 + 3: uneven, so that a mean of means shows.
MAX_ROWS = 7
_TOLERANCE = {"float16": 2e-2, "bfloat16": 5e-2}
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


def _probe_forward(forward, data, parts, shares, refuse):
    """Run the model; compare its outputs, `add_loss` terms and the state of its layers.

    Returns:
        The outputs, and the keys of the `add_loss` terms that are sums over the rows.
    """
    model, layers = forward.model, forward.layers
    # A random draw differs between the whole and the parts, which says
    # nothing: such a model is compared with its random layers at rest.
    training = not any(_is_random(layer) for layer in keras_internals.flatten_layers(model))
    whole, y_pred = forward(data, training)
    if training and forward.kept.has_drawn():
        training = False
        whole, y_pred = forward(data, training)
    if not layers and not keras_internals.has_bare_operations(model):
        return y_pred, frozenset()
    outcomes = [forward(_take(data, part), training) for part in parts]
    pieces = [outcome for outcome, _ in outcomes]
    # Statistics of a batch are per device by definition, but only in training.
    of_rows = [(whole, y_pred), *outcomes]
    rests = not training
    if training and any(_has_statistics(x) for x in keras_internals.flatten_layers(model)):
        rests = True
        of_rows = forward.on_all(data, parts, training=False)
    _probe_outputs([outputs for _, outputs in of_rows], layers, refuse)
    summed = _probe_added(model, [outcome for outcome, _ in of_rows], parts, shares, refuse)
    summed |= _probe_others_added(forward, data, parts, shares, of_rows[0][0], rests, refuse)
    for key, (label, value) in whole.state.items():
        values = [piece.state[key][1] for piece in pieces if key in piece.state]
        if len(values) < len(pieces) or not _close(value, _mean(values, shares)):
            refuse("batch_state", f"variable {label}")
    if forward.others:
        in_training = [whole, *pieces]
        if not training:
            in_training = [one for one, _ in forward.on_all(data, parts, training=True)]
        _probe_others(in_training, shares, training, refuse)
        for path, _, _ in forward(data, training=False)[0].others.values():
            refuse("batch_state", f"{path} changes in inference")
    return y_pred, summed


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


def _probe_added(model, outcomes, parts, shares, refuse, known=()):
    """The keys of the `add_loss` terms that are sums over the rows; all others are means."""
    whole, *pieces = (outcome.losses for outcome in outcomes)
    summed = set()
    for key in whole.keys() - known:
        if any(key not in piece for piece in pieces):
            _refuse_added(model, key, "it is not added for each part of a batch", refuse)
        values = [piece.get(key, np.nan) for piece in pieces]
        mean = _mean(values, shares)
        if _close(whole[key], mean):
            continue
        if not _close(whole[key], sum(values)):
            text = f"{whole[key]:.6g} on {sum_rows(parts)} rows, {mean:.6g} from its parts"
            _refuse_added(model, key, text, refuse)
        summed.add(key)
    return frozenset(summed)


def _probe_others_added(forward, data, parts, shares, seen, rests, refuse):
    """The same for terms that are added only in training, or only at rest."""
    model = forward.model
    if not _takes_training(model):
        return frozenset()
    other, _ = forward(data, training=rests)
    unknown = other.losses.keys() - seen.losses.keys()
    if unknown and rests:
        text = "it is added in training only, where random draws or statistics hide what it is"
        _refuse_added(model, min(unknown), text, refuse)
    if not unknown:
        return frozenset()
    outcomes = forward.on_all(data, parts, training=rests)
    known = seen.losses.keys()
    return _probe_added(model, [one for one, _ in outcomes], parts, shares, refuse, known)


def _refuse_added(model, key, text, refuse):
    layer = keras_internals.flatten_layers(model)[key[0]]
    refuse("batch_added_loss", f"add_loss or activity loss of {_kind_and_name(layer)}: {text}")


def _kind_and_name(layer):
    return f"layer {layer.name} ({type(layer).__name__})"


def _probe_outputs(outputs, layers, refuse):
    """Compare the outputs of all rows with those of the parts, put together."""
    whole, *parts = (tree.flatten(output) for output in outputs)
    for value, *pieces in zip(whole, *parts, strict=True):
        together = np.concatenate([np.atleast_1d(_numpy(piece)) for piece in pieces])
        value = _numpy(value)
        if value.shape != together.shape or not _close(value, together):
            names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            refuse("batch_output", names or "operations between the layers")


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

    def __call__(self, data, training):
        """One pass; returns an `_Outcome` and the outputs."""
        model, x = self.model, data[0]
        self.kept.restore()
        self.rest.begin()
        with keras_internals.ObservingScope() as scope:
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

    def on_all(self, data, parts, training):
        """What a pass gives for all rows, then for each part of them."""
        of_parts = (_take(data, part) for part in parts)
        return [self(rows, training) for rows in (data, *of_parts)]

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
        if not _same_slopes(slopes, [found for _, found in pieces], shares):
            return f"loss={names}: its gradient on all rows is not that on parts of them"
    return ""


def _loss(model, data, y_pred):
    """The compiled loss, and its gradient for each output."""
    with keras_internals.ObservingScope():
        (value,), slopes = backends.room("whole_loss").with_gradients(
            lambda: keras_internals.compiled_loss(model, data[1:], y_pred),
            tree.flatten(y_pred),
            lambda loss: loss,
        )
    return _numpy(value), [None if slope is None else _numpy(slope) for slope in slopes]


def _same_slopes(whole, pieces, shares):
    """Whether the gradient of each row is, by its share, that in the row's part."""
    for slope, *parts in zip(whole, *pieces, strict=True):
        if slope is None or any(part is None for part in parts):
            if slope is not None or any(part is not None for part in parts):
                return False
            continue
        weighted = [share * part for share, part in zip(shares, parts, strict=True)]
        if not _close(slope, np.concatenate(weighted)):
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
        pieces = [
            _metric_states(model, _take(data, part), _take(y_pred, part), unknown, updates=1)[0]
            for part in parts
        ]
        plain = [metric for metric in unknown if has_plain_state(metric)]
    for metric in unknown:
        keys = [id(variable) for variable in metric.variables]
        is_steady = all(_close(again[key], whole[key]) for key in keys)
        if metric in plain or not is_steady:
            # What it is after a batch depends on what it was before.
            return Findings(of_the_batch=_described(metric))
        if all(_close(whole[key], sum(piece[key] for piece in pieces)) for key in keys):
            continue
        if not all(_close(whole[key], _mean([p[key] for p in pieces], shares)) for key in keys):
            return Findings(of_the_batch=_described(metric))
        averaged.update(keys)
    return Findings(averaged=frozenset(averaged))


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


@contextlib.contextmanager
def tolerance_of(model):
    """Compare as exactly as the coarsest type in which a model computes allows."""
    types = {layer.compute_dtype for layer in keras_internals.flatten_layers(model)}
    types.add(keras.config.floatx())
    token = _tolerance.set(max(_TOLERANCE.get(one, 1e-4) for one in types))
    try:
        yield
    finally:
        _tolerance.reset(token)


_tolerance = contextvars.ContextVar("tolerance", default=1e-4)


def tolerance():
    """By how much two results may differ, relative to their size, that are the same."""
    return _tolerance.get()


def _close(value, other):
    scale = np.maximum(np.abs(value), np.abs(other))
    with np.errstate(invalid="ignore"):
        close = np.abs(value - other) <= tolerance() * scale + 1e-6
    return bool(np.all(close | (value == other) | (np.isnan(value) & np.isnan(other))))


def _name(thing):
    return getattr(thing, "name", None) or getattr(thing, "__name__", None) or repr(thing)
