"""What a step leaves in attributes of the program's own, and what is sent instead.

Attention's scores, for one, that somebody wants to look at. Autograd holds them, so they
cannot be copied as they are; the next step writes them anew.
"""

import contextlib

import torch

from parallel_keras.backends.torch.reducers import BOOKKEEPING


def of_steps(owners):
    """Attributes into which steps have put tensors that autograd holds.

    Args:
        owners: List of pairs of the attributes of an object, now and before the steps.

    Returns:
        List of triples: the attributes of an object, the name of one, its value.
    """
    return [
        (members, key, value)
        for members, before in owners
        for key, value in members.items()
        if key not in BOOKKEEPING
        and value is not before.get(key)
        and any(x.grad_fn is not None for x in _tensors(value))
    ]


def of_tracing(owners):
    """Attributes into which a call for shapes only has put tensors without numbers.

    Args:
        owners: List of the attributes of objects.

    Returns:
        As `of_steps`.
    """
    return [
        (members, key, value)
        for members in owners
        for key, value in members.items()
        if key not in BOOKKEEPING and any(x.is_meta for x in _tensors(value))
    ]


@contextlib.contextmanager
def taken_away(left):
    """Inside, what was left is numbers only.

    Args:
        left: List as of `of_steps`.
    """
    for members, key, value in left:
        members[key] = _numbers_only(value)
    try:
        yield
    finally:
        for members, key, value in left:
            members[key] = value


# Keras's own way through structures sorts the keys of a dict, which may be anything here.
# The lists and dicts of a layer are of classes of Keras's own.


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)


def _numbers_only(value):
    if isinstance(value, torch.Tensor):
        return None if value.is_meta else value.detach()
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(_numbers_only, value))
    if isinstance(value, dict):
        return {key: _numbers_only(inner) for key, inner in value.items()}
    return value
