"""What passes between the stages of a graph."""

import typing

import pytest

from parallel_keras import stages


class Call(typing.NamedTuple):
    inputs: tuple
    outputs: tuple
    changes: tuple = ()


def cut(calls, numbers):
    last = calls[-1].outputs
    return stages.cut(calls, numbers, (0,), last, changed=lambda call: call.changes)


def test_what_a_call_changes_comes_from_its_stage_from_then_on():
    calls = [Call((0,), (1,)), Call((1,), (2,), (1,)), Call((1, 2), (3,)), Call((1, 3), (4,), (1,))]
    first, second, third, last = cut(calls, [0, 1, 2, 3])
    assert first.gives == {1: (1,)}
    assert second.gives == {1: (2, 3), 2: (2,)}
    assert third.takes == {1: 1, 2: 1} and last.takes == {1: 1, 3: 2}


def test_what_it_has_not_itself_it_cannot_give():
    """The same tensor under another name, on a stage where it is known by one only."""
    calls = [Call((0,), (1,)), Call((1,), (2,), (1, 0)), Call((1, 2, 0), (3,))]
    _, second, third = cut(calls, [0, 1, 2])
    assert third.takes == {1: 1, 2: 1, 0: stages.BATCH}
    assert 0 not in second.gives


def test_nothing_goes_back_for_what_a_later_stage_changes():
    calls = [Call((0,), (1,)), Call((1,), (2,), (1,)), Call((1,), (3,)), Call((2, 3), (4,))]
    with pytest.raises(ValueError, match="stage 1 or later.*mask"):
        cut(calls, [0, 1, 0, 1])
    cut(calls, [0, 1, 1, 1])


@pytest.mark.parametrize("count", [3, 20, 50])
def test_many_names_are_shortened(count):
    text = stages.shortened(f"n{i}" for i in range(count))
    assert text.startswith("n0, n1") and text.endswith(f"n{count - 1}")
    assert ("more" in text) == (count > 20) and len(text) < 150
