"""Does a loss of the user's own keep state from batch to batch, or read that of the model?

A counter of its calls, a moving average of the errors, a queue of what it has seen: a replica
without rows would not move it, and micro-batches would move it several times. Such a loss is
computed once, on the whole batch. It is found by calling the loss: variables are seen to be
read and assigned, and whatever else it refers to is compared with what was there before.
Penalties of weights are looked at in the same way.
"""

import collections
import contextlib
import functools
import types
from typing import NamedTuple

from parallel_keras import backends, keras_internals, raw_variables, references
from parallel_keras.probe_rows import as_array, name_of
from parallel_keras.tolerances import close

_PLAIN = (bool, int, float, str, type(None))


@contextlib.contextmanager
def kept(losses):
    """Undo what losses do to all that they refer to, but for Keras's variables.

    Args:
        losses: List of losses of the user's own.
    """
    held = _held(losses)
    try:
        yield
    finally:
        for one in held:
            one.put_back()


class Found(NamedTuple):
    """What losses do beside computing. Each is a string, empty where there is none.

    Attributes:
        changed: The state that they change, be it only that they take down what they see.
        computed_with: The same where they compute with it, or it is a variable.
        assigned: A variable of the model, or of its optimizer, that they assign.
        read: One that they read.
    """

    changed: str = ""
    computed_with: str = ""
    assigned: str = ""
    read: str = ""


def look_at(model, losses, targets, y_pred):
    """See what the losses of a model do beside computing.

    Args:
        model: A compiled Keras model.
        losses: List of its losses of the user's own.
        targets: `(y, sample_weight)` of some rows.
        y_pred: The model's outputs for them.

    Returns:
        `Found`. What a first call makes, and a second one leaves as it is, is no state.
    """
    if not losses:
        return Found()
    names = ", ".join(name_of(loss) for loss in losses)
    changed, scope, results = _changes(
        losses, lambda: keras_internals.compiled_loss(model, targets, y_pred)
    )
    of_metrics = {id(v) for metric in keras_internals.every_metric(model) for v in metric.variables}
    assigned = {key: v for key, v in scope.assigned.items() if key not in of_metrics}
    changed += [f" (variable {v.path})" for v in assigned.values()]
    state = f"loss={names}, of which each call changes {names}{changed[0]}," if changed else ""
    is_same = all(close(as_array(a), as_array(b)) for a, b in zip(*results, strict=True))
    known = keras_internals.every_variable(model)
    of_model = {id(v): v for v in known if id(v) not in of_metrics}
    return Found(
        state,
        "" if is_same and not assigned else state,
        *(
            next((f"loss={names}, variable {of_model[key].path}" for key in found), "")
            for found in (of_model.keys() & assigned.keys(), of_model.keys() & scope.read.keys())
        ),
    )


def of_penalties(variables):
    """The state that penalties of the user's own change when they are computed.

    Args:
        variables: List of Keras variables that have one.

    Yields:
        Strings.
    """
    for variable in variables:
        penalty = variable.regularizer
        with kept([penalty]):
            changed, scope, _ = _changes([penalty], functools.partial(penalty, variable))
        changed += [f" (variable {v.path})" for v in scope.assigned.values()]
        if changed:
            yield f"{type(penalty).__name__}{changed[0]}, of variable {variable.path}"


def _changes(things, call):
    """Call twice.

    Returns:
        List of what each call changes beside Keras's variables, the scope that saw the second
        one, and what the two returned.
    """
    results = []
    for _ in range(2):
        held = _held(things)
        with keras_internals.ReadingScope() as scope, keras_internals.no_gradient():
            results.append(call())
    return [one.where for one in held if one.has_changed()], scope, results


class _Held:
    """What one object holds, and held when it was looked at.

    Args:
        ways: Pair of functions: one reads what it holds, as a dict, the other writes that.
        where: String, for messages.
    """

    def __init__(self, ways, where):
        self._read, self._write = ways
        self._before = self._read()
        self.where = where

    def has_changed(self):
        now, before = self._read(), self._before
        return now.keys() != before.keys() or not all(_same(now[k], before[k]) for k in now)

    def put_back(self):
        if self.has_changed():
            self._write(self._before)


class _Array:
    """The same of an array that can be written in place."""

    def __init__(self, array, where):
        self._room = backends.room("arrays")
        self._array = array
        self._before = self._room.copied(array)
        self.where = where

    def has_changed(self):
        return not self._room.is_same(self._array, self._before)

    def put_back(self):
        if self.has_changed():
            self._room.write(self._array, self._before)


def _same(one, other):
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


def _held(losses):
    is_array = backends.room("arrays").is_array
    found: list = []
    for loss in losses:
        look = functools.partial(
            _references,
            roots=[loss, getattr(loss, "__self__", None)],
            home={raw_variables.package_of(type(loss))},
        )
        for one, way in references.walk(loss, look):
            where = references.expression(way)
            if is_array(one):
                found.append(_Array(one, where))
            elif isinstance(one, types.FunctionType):
                found += [_Held(ways, where) for ways in (_globals(one), _cells(one))]
            elif isinstance(one, (list, set, collections.deque)):
                found.append(_Held(_entries(one), where))
            elif isinstance(one, dict):
                found.append(_Held(_dict(one), where))
            elif not isinstance(one, type) and look(one) and hasattr(one, "__dict__"):
                found.append(_Held(_dict(vars(one)), where))
    return found


def _references(value, roots, home):
    """As `references.of`, for what may be the user's own."""
    if any(value is root for root in roots):
        return references.of(value)
    return raw_variables.references_of_users(value, home)


# The ways of each kind of object. Those of `list` and `dict` go past Keras, which keeps track of
# what is put into an attribute.


def _entries(one):
    def write(before):
        values = list(before.values())
        if isinstance(one, list):
            list.__setitem__(one, slice(None), values)
        else:
            one.clear()
            (one.update if isinstance(one, set) else one.extend)(values)

    return lambda: dict(enumerate(one)), write


def _dict(one):
    def write(before):
        for key in one.keys() - before.keys():
            dict.pop(one, key)
        dict.update(one, before)

    return lambda: dict(one), write


def _globals(function):
    space = function.__globals__
    used = [name for name in references.names(function.__code__) if name in space]
    return lambda: {name: space[name] for name in used}, space.update


def _cells(function):
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read():
        found = {}
        for name, cell in cells.items():
            with contextlib.suppress(ValueError):  # not assigned yet
                found[name] = cell.cell_contents
        return found

    def write(before):
        for name, value in before.items():
            cells[name].cell_contents = value

    return read, write
