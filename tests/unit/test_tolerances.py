"""When two numbers of a probe are the same."""

import numpy as np
import pytest

from parallel_keras import tolerances

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("value", "other", "expected"),
    [
        (1.0, 1.0 + 1e-5, True),
        (1.0, 1.01, False),
        (INF, INF, True),
        (-INF, -INF, True),
        (NAN, NAN, True),
        (INF, -INF, False),
        (0.0, INF, False),
        (0.0, -INF, False),
        (NAN, 0.0, False),
        (NAN, INF, False),
        ([1.0, INF], [1.0, INF], True),
        ([1.0, INF], [INF, 1.0], False),
        ([1.0, 2.0], [1.0], False),
    ],
)
def test_close(value, other, expected):
    value, other = np.array(value), np.array(other)
    assert tolerances.close(value, other) is expected
    assert tolerances.close(other, value) is expected


def test_infinity_around_makes_nothing_the_same():
    assert not tolerances.close(np.array(INF), np.array(0.0), around=np.array(1.0))


@pytest.mark.parametrize(
    ("value", "other", "expected"),
    [(2.0, 2.0, True), (2.0, 3.0, False), (-INF, -INF, False), (NAN, NAN, False)],
)
def test_changes_that_are_not_finite_tell_nothing(value, other, expected):
    assert tolerances.close_changes(np.array(value), np.array(other)) is expected
