"""Sums over ranks that map the same memory: here each rank is a thread."""

import concurrent.futures
import random
import time

import pytest
import torch

from parallel_keras.backends.torch import looking, memory
from parallel_keras.backends.torch.shared_sums import SharedSums, rounded

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)


@pytest.fixture
def ranks(request):
    file = memory.SharedFile(SharedSums.FIRST_SIZE)
    size = request.param
    yield [SharedSums(file.path, rank, size, 10.0, lambda: None) for rank in range(size)]
    file.close()


def together(ranks, work):
    """The results of `work(sums, rank)` in a thread for each rank."""
    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
        return [f.result() for f in [pool.submit(work, s, n) for n, s in enumerate(ranks)]]


def value(step, rank, number, count, dtype):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randint(-8, 8, (count,), generator=generator).to(dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5], indirect=True)
def test_all_ranks_have_the_sum_of_each_tensor(ranks):
    """Sums of many sizes, one after the other, larger and smaller, with ranks that are late."""
    shapes = random.Random(0)
    steps = [
        [(shapes.choice([0, 1, 2, 7, 64, 1000, 5000]), shapes.choice(DTYPES)) for _ in range(n)]
        for n in [1, 3, 0, 2, 4, 1] * 4
    ]

    def work(sums, rank):
        late, found = random.Random(rank), []
        for step, of_step in enumerate(steps):
            tensors = [value(step, rank, n, *one) for n, one in enumerate(of_step)]
            sums.begin(sum(rounded(t.numel() * t.element_size()) for t in tensors))
            for tensor in tensors:
                time.sleep(late.choice([0, 0, 0.002]))
                sums.put(tensor)
            sums.finish()
            found.append(tensors)
        return found

    results = together(ranks, work)
    for step, of_step in enumerate(steps):
        for n, one in enumerate(of_step):
            wanted = sum(value(step, rank, n, *one) for rank in range(len(ranks)))
            for result in results:
                assert torch.equal(result[step][n], wanted)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_all_ranks_have_the_same_rounding(ranks):
    def work(sums, rank):
        tensor = torch.rand(999, generator=torch.Generator().manual_seed(rank)) ** 9
        sums.begin(rounded(999 * 4))
        sums.put(tensor)
        sums.finish()
        return tensor

    first, *others = together(ranks, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_rank_that_stays_away_is_found_out(ranks):
    def gone():
        raise RuntimeError("a worker is gone")

    for limits, error in (((lambda: None, 0.3), looking.NotSeen), ((gone, 30.0), RuntimeError)):
        ranks[0]._limits = limits
        ranks[0].begin(64)
        with pytest.raises(error):
            ranks[0].finish()
        ranks[0]._count -= 1
