"""Is the state of each compiled metric summed over the rows, or averaged, or neither?"""

import contextlib
import itertools

import keras
import numpy as np
from keras import tree

from parallel_keras import keras_internals, stress
from parallel_keras.probe_known import Findings, unknown_metrics
from parallel_keras.probe_rows import SUM, as_array, take, ways_of
from parallel_keras.step_numbers import difference
from parallel_keras.tolerances import close, close_changes, roughly


def probe_metrics(model, data, y_pred, parts, shares):
    """Find for each metric whether its state is summed, or averaged by rows, or neither."""
    averaged: set = set()
    unknown = unknown_metrics(model)
    if not unknown:
        return Findings()
    with _plain_state_kept(unknown) as has_plain_state:
        whole, again = _metric_states(model, data, y_pred, unknown, updates=2)
        pieces = _metric_states_of_parts(model, data, y_pred, unknown, parts)
        plain = [metric for metric in unknown if has_plain_state(metric)]
        plain += [metric for metric in unknown if _starts_at_infinity(metric)]
    of_large = [] if plain else list(_large_metric_states(model, data, y_pred, unknown, parts))
    for metric in unknown:
        keys = [id(variable) for variable in metric.variables]
        is_steady = all(close(again[key], whole[key]) for key in keys)
        if metric in plain or not is_steady:
            # What it is after a batch depends on what it was before.
            return Findings(of_the_batch=_described(metric))
        ways = ways_of(_changes(keys, whole, pieces), shares, close_changes)
        if not ways:
            return Findings(of_the_batch=_described(metric))
        for said, large, of_parts in of_large:
            ways &= ways_of(_changes(keys, large, of_parts), shares, roughly)
            if not ways:
                text = f"{_described(metric)}, with larger numbers ({said}),"
                return Findings(of_the_batch=text)
        if SUM not in ways:
            if not all(keras.backend.is_float_dtype(v.dtype) for v in metric.variables):
                # Of a counter of batches there is no part that a share of the rows would count.
                return Findings(of_the_batch=_described(metric))
            averaged.update(keys)
    return Findings(averaged=frozenset(averaged))


def metrics_that_read(model, data, y_pred):
    """A metric of the user's own that reads what a training step changes; a string, or `""`.

    Keras updates metrics when the optimizer has been applied, a strategy before.
    """
    metrics = unknown_metrics(model)
    if not metrics:
        return ""
    _, y, sample_weight = data
    container = keras_internals.compile_metrics_of(model)
    with (
        _plain_state_kept(metrics),
        keras_internals.ReadingScope() as scope,
        keras_internals.no_gradient(),
    ):
        container.update_state(y, y_pred, sample_weight)
    changed = [*model.trainable_variables]
    for optimizer in keras_internals.every_optimizer(model):
        rate = keras_internals.learning_rate_variable(optimizer)  # changes between steps only
        changed += [v for v in keras_internals.optimizer_variables(optimizer) if v is not rate]
    read = [variable.path for variable in changed if id(variable) in scope.read]
    names = ", ".join(metric.name for metric in metrics)
    return f"metrics={names}, variable {read[0]}" if read else ""


def _starts_at_infinity(metric):
    """Whether it is not known what its state will go up by, as nothing goes up from there."""
    with keras_internals.ObservingScope() as scope, keras_internals.no_gradient():
        metric.reset_state()
        values = [as_array(scope.get_current_value(v)) for v in metric.variables]
    return any(np.isinf(value).any() for value in values)


def _changes(keys, whole, pieces):
    return [(whole[key], [piece[key] for piece in pieces]) for key in keys]


def _metric_states_of_parts(model, data, y_pred, metrics, parts):
    return [
        _metric_states(model, take(data, part), take(y_pred, part), metrics, updates=1)[0]
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

    Those that they make inside are taken away.

    Yields:
        A function of a metric: whether it has changed one.
    """
    before = {id(metric): _plain_state(metric) for metric in metrics}

    def has_changed(metric):
        return not _same(_plain_state(metric), before[id(metric)])

    try:
        yield has_changed
    finally:
        for metric in metrics:
            _put_back(metric, before[id(metric)])


def _put_back(metric, before):
    for key in _plain_state(metric).keys() - before.keys():
        keras_internals.untrack(metric, vars(metric).pop(key))
    for key, (value, content) in before.items():
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
        states = [{id(v): as_array(scope.get_current_value(v)) for v in variables}]
        for _ in range(updates):
            container.update_state(y, y_pred, sample_weight)
            states.append({id(v): as_array(scope.get_current_value(v)) for v in variables})
    return [
        {key: difference(after[key], before[key]) for key in after}
        for before, after in itertools.pairwise(states)
    ]
