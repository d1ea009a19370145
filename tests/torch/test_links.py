"""Values from rank to rank through memory that both map."""

import os

import torch

from parallel_keras.backends.torch.links import LinkedChannel, make_files


def channel(rank, paths):
    return LinkedChannel(rank, paths, timeout=5.0, check=lambda: None)


def test_a_rank_that_is_late_finds_what_was_sent():
    paths, give_back = make_files(2)
    # No rank makes a file the size that it needs: another may have written meanwhile.
    assert all(os.stat(path).st_size for path in paths.values())
    sent = [torch.arange(500_000.0), torch.arange(7)]
    sender = channel(0, paths)
    sender.begin()
    sender.send(1, sent)
    receiver = channel(1, paths)
    receiver.begin()
    found = receiver.receive(0, len(sent))
    assert all(torch.equal(a, b) for a, b in zip(sent, found, strict=True))
    for one in (sender, receiver):
        one.close()
    give_back()


def test_slots_that_grow_are_read_where_they_are():
    paths, give_back = make_files(2)
    sender, receiver = channel(0, paths), channel(1, paths)
    for size in (3, 30_000, 10, 300_000):
        sender.begin()
        receiver.begin()
        value = torch.full((size,), float(size))
        sender.send(1, [value, None])
        found, nothing = receiver.receive(0, 2)
        assert torch.equal(found, value) and nothing is None
    for one in (sender, receiver):
        one.close()
    give_back()
