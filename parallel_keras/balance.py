"""Cutting a row of layers into contiguous parts of even cost.

Pure: a list of numbers in, a list of counts out.
"""

import math


def split(costs, parts):
    """Counts of consecutive items per part that keep the largest part small.

    Exact. Among the splits whose largest part is as small as can be, the one
    whose parts are most even is taken (the smallest sum of squares), and of
    those the one whose borders lie earliest. So the same costs always give
    the same split.

    Args:
        costs: List of numbers, zero or more each, one per item.
        parts: Int. Number of parts, each of at least one item.

    Returns:
        A list of `parts` integers of one or more that sum to `len(costs)`.

    Raises:
        ValueError: If there are fewer items than parts, fewer parts than one,
            or a cost that is negative, infinite or not a number.

    >>> split([1, 1, 1, 9, 1, 1], 3)
    [3, 1, 2]
    >>> split([5, 5, 5, 5], 2)
    [2, 2]
    """
    costs = _checked(costs)
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(
            "Each part takes at least one item, so the number of parts is from 1 to the "
            f"number of items. Received: parts={parts}, {count} costs"
        )
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    largest = _largest(sums, parts)

    # From the back, so that the first border is the outermost choice and
    # "earliest" is decided by it first. best[i] is the smallest sum of squares
    # of the items from i on in the parts still to fill, with no part over the
    # optimum; first[part][i] is the count that reaches it.
    best = [math.inf] * count + [0]
    first = []
    for left in range(parts - 1, -1, -1):
        squares, counts = [math.inf] * (count + 1), [0] * (count + 1)
        # `left` parts lie before this one and take an item each at least.
        for start in range(left, count):
            base = sums[start]
            for end in range(start + 1, count + 1):
                total = sums[end] - base
                if total > largest:
                    break
                square = total * total + best[end]
                if square < squares[start]:
                    squares[start], counts[start] = square, end - start
        best = squares
        first.append(counts)

    result, start = [], 0
    for counts in reversed(first):
        result.append(counts[start])
        start += counts[start]
    return result


def _largest(sums, parts):
    """The smallest possible largest part: the same recursion, on maxima only."""
    count = len(sums) - 1
    best = list(sums)  # of the first `end` items in one part
    for part in range(1, parts):
        ends = range(part + 1, count + 1)
        best = [math.inf] * (part + 1) + [_cut(sums, best, part, end) for end in ends]
    return best[count]


def _cut(sums, best, parts, end):
    # Where the last part of the first `end` items starts. best[start], the
    # parts before it, grows with start while the last part shrinks: the
    # optimum lies where they cross, which is found by halving.
    low, high = parts, end - 1
    while low < high:
        middle = (low + high) // 2
        if best[middle] >= sums[end] - sums[middle]:
            high = middle
        else:
            low = middle + 1
    before = max(low - 1, parts)
    return min(max(best[start], sums[end] - sums[start]) for start in (before, low))


def bounds(counts):
    """The first item of each part, and the number of items at the end.

    >>> bounds([3, 1, 2])
    [0, 3, 4, 6]
    """
    result = [0]
    for count in counts:
        result.append(result[-1] + count)
    return result


def imbalance(costs, counts):
    """The largest part's cost over the mean of the parts: 1.0 is even.

    >>> imbalance([1, 1, 2, 4], [3, 1])
    1.0
    >>> imbalance([1, 1, 2, 4], [2, 2])
    1.5
    """
    costs = _checked(costs)
    if not counts or sum(counts) != len(costs):
        raise ValueError(
            "The counts of the parts sum to the number of items. "
            f"Received: counts={list(counts)}, {len(costs)} costs"
        )
    borders = bounds(counts)
    parts = [sum(costs[a:b]) for a, b in zip(borders, borders[1:], strict=False)]
    mean = sum(parts) / len(parts)
    return max(parts) / mean if mean else 1.0


def _checked(costs):
    costs = list(costs)
    for index, cost in enumerate(costs):
        if not 0 <= cost < math.inf:  # false for NaN, too
            raise ValueError(
                f"A cost is a finite number of zero or more. Received: {cost!r} at index {index}"
            )
    return costs
