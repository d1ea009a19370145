"""How the numbers in a step's logs come from those of the replicas.

Pure: numbers in, numbers out. What a model's own `train_step` or `test_step` returns is
a mean over the rows unless the user says otherwise here; the results of metrics never
come this way, they are computed anew from the metrics' combined state.
"""

import functools

import numpy as np

MEAN, SUM, MAX, MIN = RULES = ("mean", "sum", "max", "min")
_ATTRIBUTE = "_parallel_keras_logs"


def reduce_logs(**how):
    """Say how values in the logs of a model's own step combine over replicas.

    Without it, each number that a `train_step` or a `test_step` returns is the mean over
    the rows of the batch; the result of a metric is computed from the metric's state of the
    whole batch. Under strategy=None the decorator changes nothing.

    Args:
        **how: For each key of the returned dict that is no mean over the rows one of
            `"mean"`, `"sum"`, `"max"` and `"min"`.

    Returns:
        A decorator, which returns the step itself.

    Raises:
        ValueError: If a value is none of these. If the step returns no such key, then when
            the step runs under a strategy.

    Example:

    >>> import keras, parallel_keras as pk
    >>> class Counting(pk.ParallelModel):
    ...     @pk.reduce_logs(rows="sum", worst="max")
    ...     def test_step(self, data):
    ...         x, y = data
    ...         errors = keras.ops.abs(self(x) - y)
    ...         return {"rows": keras.ops.shape(x)[0], "worst": keras.ops.max(errors)}
    """
    for key, rule in how.items():
        if rule not in RULES:
            raise ValueError(
                f"reduce_logs takes one of {', '.join(map(repr, RULES))} for each key. "
                f"Received: {key}={rule!r}"
            )

    def decorate(step):
        setattr(step, _ATTRIBUTE, dict(how))
        return step

    return decorate


def rules_of(step):
    """What `reduce_logs` said of a step: a dict from key to rule, empty without it."""
    return getattr(step, _ATTRIBUTE, {})


def rule_of(path, rules):
    """The rule of a leaf, from what was said of one of the keys that lead to it."""
    return next((rules[key] for key in reversed(path) if key in rules), MEAN)


def check_keys(step, paths):
    """Raise where `reduce_logs` names a key that the logs do not have.

    Args:
        step: The step, decorated or not.
        paths: The paths of the leaves of what it returned.
    """
    keys = {key for path in paths for key in path}
    unknown = [key for key in rules_of(step) if key not in keys]
    if unknown:
        raise ValueError(
            f"reduce_logs names what {step.__name__} does not return. It returned "
            f"{sorted(map(str, keys))}. Received: {', '.join(unknown)}"
        )


def combine(rule, values, shares):
    """One number from those of the replicas.

    Args:
        rule: One of `RULES`.
        values: List of numbers or arrays, one for each replica.
        shares: List of floats, each replica's part of the rows. One without rows does not
            count, whatever its value.

    >>> combine("mean", [2.0, 5.0], [0.75, 0.25])
    2.75
    >>> combine("sum", [2.0, 5.0, 7.0], [0.5, 0.5, 0.0])
    7.0
    """
    counted = [(value, share) for value, share in zip(values, shares, strict=True) if share]
    if rule == MEAN:
        return sum(value * share for value, share in counted)
    values = [value for value, _ in counted]
    if rule == SUM:
        return sum(values)
    # What is no number wins, as in a maximum over the rows.
    best = np.maximum if rule == MAX else np.minimum
    return functools.reduce(best, values)


# ---- nested structures ---------------------------------------------------------------


def leaves_by_path(structure, path=()):
    """The leaves of nested dicts, lists and tuples by their paths, in their order.

    >>> leaves_by_path({"b": 1, "a": [2, None]})
    {('b',): 1, ('a', 0): 2, ('a', 1): None}
    """
    if isinstance(structure, dict):
        items = list(structure.items())
    elif isinstance(structure, (list, tuple)):
        items = list(enumerate(structure))
    else:
        return {path: structure}
    found = {}
    for key, inside in items:
        found.update(leaves_by_path(inside, (*path, key)))
    return found


def with_leaves(structure, leaves, path=()):
    """The same structure with other leaves, by their paths."""
    if isinstance(structure, dict):
        return {k: with_leaves(v, leaves, (*path, k)) for k, v in structure.items()}
    if isinstance(structure, (list, tuple)):
        values = [with_leaves(v, leaves, (*path, n)) for n, v in enumerate(structure)]
        if hasattr(structure, "_fields"):
            return type(structure)(*values)
        return tuple(values) if isinstance(structure, tuple) else values
    return leaves[path]
