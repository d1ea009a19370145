"""Global-batch arithmetic: which rows are whose, and with what weight.

Pure: integers in, integers out. The tensor libraries slice by these numbers.

The rule of the whole package stands here. A global batch of `n` rows is cut
into one contiguous slice per replica, as even as can be, the first replicas
taking one row more where it does not divide. A replica's mean over its own
rows counts with its *share*, `rows / n`; shares sum to one, so

    mean over the batch = sum over replicas of share * mean over the slice

holds for any cut, and nothing has to be padded, repeated or dropped.
"""


def row_counts(rows, replicas):
    """The number of rows of each replica.

    Args:
        rows: Int. Rows of the global batch.
        replicas: Int. Number of replicas.

    Returns:
        A list of `replicas` integers that sum to `rows`, in decreasing order
        and never more than one apart.

    >>> row_counts(10, 4)
    [3, 3, 2, 2]
    >>> row_counts(1, 3)
    [1, 0, 0]
    """
    if rows < 0 or replicas < 1:
        raise ValueError(
            "A batch has zero or more rows and one or more replicas. "
            f"Received: rows={rows}, replicas={replicas}"
        )
    base, extra = divmod(rows, replicas)
    return [base + (rank < extra) for rank in range(replicas)]


def row_slices(rows, replicas):
    """The slice of rows of each replica, in the order of the rows.

    >>> row_slices(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    slices, start = [], 0
    for count in row_counts(rows, replicas):
        slices.append(slice(start, start + count))
        start += count
    return slices


def some_rows(rows, replicas):
    """The same, where a replica without rows computes on the last one, which is another's.

    >>> some_rows(1, 2)
    [slice(0, 1, None), slice(0, 1, None)]
    """
    return [
        part if part.stop > part.start else slice(rows - 1, rows)
        for part in row_slices(rows, replicas)
    ]


def shares(rows, replicas):
    """The weight of each replica's mean in the mean of the global batch."""
    if rows == 0:
        return [0.0] * replicas
    return [count / rows for count in row_counts(rows, replicas)]


def describe(rows, replicas):
    """The split in words: `global batch 256 = 2 × 128 rows`."""
    counts = row_counts(rows, replicas)
    if counts[0] == counts[-1]:
        split = f"{replicas} × {counts[0]} rows"
    else:
        split = " + ".join(str(count) for count in counts) + " rows"
    return f"global batch {rows} = {split}"
