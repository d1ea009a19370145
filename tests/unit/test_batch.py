"""Row arithmetic, exhaustively over small sizes."""

import itertools

import pytest

from parallel_keras import batch

SIZES = list(itertools.product(range(40), range(1, 10)))


def every_size(test):
    """One test that runs all sizes."""

    def run():
        for rows, replicas in SIZES:
            test(rows, replicas)

    run.__name__ = test.__name__
    return run


@every_size
def test_counts_cover_the_batch_as_evenly_as_can_be(rows, replicas):
    counts = batch.row_counts(rows, replicas)
    assert len(counts) == replicas
    assert sum(counts) == rows
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@every_size
def test_slices_give_each_row_once_and_in_order(rows, replicas):
    slices = batch.row_slices(rows, replicas)
    assert [row for part in slices for row in range(rows)[part]] == list(range(rows))
    lengths = [len(range(rows)[part]) for part in slices]
    assert lengths == batch.row_counts(rows, replicas)


@every_size
def test_shares_combine_means(rows, replicas):
    shares = batch.shares(rows, replicas)
    assert len(shares) == replicas
    if rows == 0:
        assert shares == [0.0] * replicas
        return
    assert sum(shares) == pytest.approx(1.0)
    values = [float(row * row) for row in range(rows)]
    parts = [values[part] for part in batch.row_slices(rows, replicas)]
    combined = sum(
        share * sum(part) / len(part) for share, part in zip(shares, parts, strict=True) if part
    )
    assert combined == pytest.approx(sum(values) / rows)


@pytest.mark.parametrize("rows, replicas", [(-1, 2), (3, 0), (3, -1)])
def test_what_is_no_batch(rows, replicas):
    with pytest.raises(ValueError, match="Received"):
        batch.row_counts(rows, replicas)


def test_description():
    assert batch.describe(256, 2) == "global batch 256 = 2 × 128 rows"
    assert batch.describe(10, 3) == "global batch 10 = 4 + 3 + 3 rows"
    assert batch.describe(1, 2) == "global batch 1 = 1 + 0 rows"
