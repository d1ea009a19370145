"""What objects refer to, and how it is said."""

import functools
import types

import pytest

from parallel_keras import references

WANTED = types.SimpleNamespace()  # found by identity


class _Base:
    def method(self):
        return WANTED


class _Derived(_Base):
    pass


class _Slots:
    __slots__ = ("inner", "nothing")

    def __init__(self):
        self.inner = WANTED


def _calls(function):
    return function()


def _in_a_lambda():
    return _calls(lambda: WANTED)


def _in_a_comprehension():
    return [WANTED for _ in range(2)]


def _twice_inside():
    return _calls(lambda: _calls(lambda: WANTED))


def _closed_over(thing=None):
    thing = WANTED
    return lambda: thing


THINGS = {
    "dict": ({"a": [1, WANTED]}, "['a'][1]"),
    "tuple": ((WANTED,), "[0]"),
    "attribute": (types.SimpleNamespace(one=WANTED), ".one"),
    "slot": (_Slots(), ".inner"),
    "global": (_Base.method, " (global 'WANTED')"),
    "lambda": (_in_a_lambda, " (global 'WANTED')"),
    "comprehension": (_in_a_comprehension, " (global 'WANTED')"),
    "twice_inside": (_twice_inside, " (global 'WANTED')"),
    "closure": (_closed_over(), " (variable 'thing')"),
    "bound": (_Slots().__init__, ".__self__.inner"),
    "partial": (functools.partial(_calls, WANTED), ".args[0]"),
    "property": (property(lambda self: WANTED), ".fget (global 'WANTED')"),
    "static": (staticmethod(_in_a_lambda), ".__func__ (global 'WANTED')"),
    "class": (_Base, ".method (global 'WANTED')"),
    "object": (_Base(), " (class _Base).method (global 'WANTED')"),
    "base": (_Derived, " (base _Base).method (global 'WANTED')"),
}


@pytest.mark.parametrize("kind", THINGS)
def test_what_is_referred_to_is_found_and_named(kind):
    thing, expected = THINGS[kind]
    ways = [way for one, way in references.walk(thing, references.of) if one is WANTED]
    assert [references.expression(way) for way in ways] == [expected]


def test_a_default_of_an_argument():
    def function(thing=WANTED):
        return thing

    assert (" (default {!r})", WANTED, WANTED) in references.of(function)


def test_rings_end_and_plain_values_are_passed_by():
    ring: list = ["text", 1, None]
    ring.append(ring)
    assert [one for one, _ in references.walk(ring, references.of)] == [ring]


def test_what_the_walk_is_not_told_of_is_not_found():
    def outside_of_objects(thing):
        return [] if isinstance(thing, types.SimpleNamespace) else references.of(thing)

    held = types.SimpleNamespace(one=WANTED)
    assert all(one is not WANTED for one, _ in references.walk([held], outside_of_objects))


def test_a_module_is_not_looked_through():
    assert references.of(types) == []
