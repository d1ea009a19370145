"""How numbers in logs combine over replicas."""

import math

import numpy as np
import pytest

from parallel_keras import logs


@pytest.mark.parametrize(
    ("rule", "expected"), [("mean", 3.5), ("sum", 9.0), ("max", 5.0), ("min", 1.0)]
)
def test_a_replica_without_rows_does_not_count(rule, expected):
    values, shares = [3.0, 1.0, 5.0, math.nan], [0.5, 0.125, 0.375, 0.0]
    assert logs.combine(rule, values, shares) == expected


@pytest.mark.parametrize("rule", ["max", "min"])
def test_what_is_no_number_wins_as_it_does_over_the_rows(rule):
    assert math.isnan(logs.combine(rule, [1.0, math.nan], [0.5, 0.5]))


def test_arrays_combine_entry_by_entry():
    values = [np.array([1.0, 5.0]), np.array([3.0, 2.0])]
    np.testing.assert_array_equal(logs.combine("max", values, [0.5, 0.5]), [3.0, 5.0])
    np.testing.assert_array_equal(logs.combine("mean", values, [0.25, 0.75]), [2.5, 2.75])


def test_leaves_go_back_where_they_were():
    structure = {"b": 1, "a": [2, (3, None)], "empty": {}}
    leaves = logs.leaves_by_path(structure)
    assert list(leaves) == [("b",), ("a", 0), ("a", 1, 0), ("a", 1, 1)]
    assert logs.with_leaves(structure, leaves) == structure


def test_a_rule_holds_for_what_is_under_its_key():
    rules = {"worst": "max"}
    assert logs.rule_of(("worst", 0), rules) == "max"
    assert logs.rule_of(("loss",), rules) == "mean"


def test_the_decorator_says_how_on_the_step_itself():
    @logs.reduce_logs(rows="sum")
    def step(self, data):
        return {}

    assert logs.rules_of(step) == {"rows": "sum"}
    assert step.__name__ == "step"
    with pytest.raises(ValueError, match="Received: rows"):
        logs.check_keys(step, [("loss",)])
    with pytest.raises(ValueError, match=r"Received: a='median'"):
        logs.reduce_logs(a="median")
