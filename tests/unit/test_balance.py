"""Splits against brute force: every small case, and random larger ones."""

import itertools
import math
import random

import pytest

from parallel_keras import balance


def brute_force(costs, parts):
    """All splits, tried one after the other in the order of their borders."""
    best = None
    for borders in itertools.combinations(range(1, len(costs)), parts - 1):
        ends = (0, *borders, len(costs))
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        key = (max(sums), sum(value * value for value in sums))
        if best is None or key < best[0]:
            best = key, [b - a for a, b in itertools.pairwise(ends)]
    return best[1]


def test_every_small_case_is_the_best_split():
    for count in range(1, 7):
        for costs in itertools.product(range(4), repeat=count):
            for parts in range(1, count + 1):
                assert balance.split(costs, parts) == brute_force(costs, parts), (costs, parts)


@pytest.mark.parametrize("seed", range(100))
def test_random_cases_are_the_best_split(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 13)
    scale = rng.choice([2, 10, 10**12])
    costs = [rng.randint(0, scale) for _ in range(count)]
    parts = rng.randint(1, count)
    assert balance.split(costs, parts) == brute_force(costs, parts), (costs, parts)


@pytest.mark.parametrize("seed", range(30))
def test_splits_of_floats_have_the_least_maximum(seed):
    rng = random.Random(seed)
    costs = [rng.random() for _ in range(rng.randint(1, 12))]
    parts = rng.randint(1, len(costs))

    def largest(counts):
        ends = balance.bounds(counts)
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

    expected = largest(brute_force(costs, parts))
    assert math.isclose(largest(balance.split(costs, parts)), expected)


@pytest.mark.parametrize("seed", range(20))
def test_invariants_of_large_cases(seed):
    rng = random.Random(seed)
    costs = [rng.randint(0, 1000) for _ in range(200)]
    parts = rng.randint(1, 12)
    counts = balance.split(costs, parts)
    assert len(counts) == parts and min(counts) >= 1 and sum(counts) == 200
    assert counts == balance.split(list(costs), parts)
    # No split into more parts has a larger maximum, and none beats the mean.
    assert balance.imbalance(costs, counts) >= 1.0
    assert balance.bounds(counts)[-1] == 200


def test_zero_costs_still_fill_every_part():
    assert balance.split([0, 0, 0], 2) == [1, 2]
    assert balance.split([0, 0, 0], 3) == [1, 1, 1]
    assert balance.imbalance([0, 0], [1, 1]) == 1.0


@pytest.mark.parametrize("parts", [0, -1, 4])
def test_numbers_of_parts_that_cannot_be_filled(parts):
    with pytest.raises(ValueError, match=rf"Received: parts={parts}, 3 costs"):
        balance.split([1, 2, 3], parts)


@pytest.mark.parametrize("cost", [-1, math.nan, math.inf, -0.5])
def test_costs_that_are_no_costs(cost):
    with pytest.raises(ValueError, match="Received: .* at index 1"):
        balance.split([1, cost], 1)
    with pytest.raises(ValueError, match="Received: .* at index 1"):
        balance.imbalance([1, cost], [1, 1])


@pytest.mark.parametrize("counts", [[], [1], [2, 2]])
def test_counts_of_another_list(counts):
    with pytest.raises(ValueError, match="Received: counts="):
        balance.imbalance([1, 2, 3], counts)
