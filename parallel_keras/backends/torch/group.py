"""The process group of the ranks, without a listening store and without a global.

torch keeps one default group per process, which belongs to the user's own code.
Ours is an object, and works for DistributedDataParallel all the same. The ranks
meet through a memory file of the caller, which only its user can open, and then
prove to one another that they know a secret that the caller handed down: whoever
connects to one of gloo's loopback ports in between is found out before any data
travels.
"""

import hashlib
import hmac
import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel_keras.errors import WorkerError


def make(path, rank, world_size, device, timeout, secret):
    """Meet the other ranks.

    Args:
        path: String, a file that all ranks can open, empty at first.
        rank, world_size: Ints.
        device: This rank's `torch.device`.
        timeout: Float, in seconds, for each collective.
        secret: Bytes, the same on all ranks.

    Returns:
        A `torch.distributed.ProcessGroup`.
    """
    limit = timedelta(seconds=timeout)
    store = dist.FileStore(path, world_size)
    store.set_timeout(limit)
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, world_size)
    kinds = dist.ProcessGroup.BackendType
    # torch's stubs know these classes in part only.
    gloo_class: Any = dist.ProcessGroupGloo
    options = gloo_class._Options()
    options._timeout = limit
    options._devices = [gloo_class.create_device(hostname="127.0.0.1")]
    gloo = gloo_class(dist.PrefixStore("gloo", store), rank, world_size, options)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    group._set_default_backend(kinds.GLOO)
    if device.type == "cuda":
        nccl_class: Any = dist.ProcessGroupNCCL
        nccl_options = nccl_class.Options()
        nccl_options._timeout = limit
        nccl_store = dist.PrefixStore("nccl", store)
        nccl = nccl_class(nccl_store, rank, world_size, nccl_options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    _prove(group, rank, world_size, secret)
    return group


def _prove(group, rank, world_size, secret):
    nonce = torch.from_numpy(np.frombuffer(os.urandom(32), np.uint8).copy())
    nonces = [torch.empty_like(nonce) for _ in range(world_size)]
    group.allgather([nonces], [nonce]).wait()
    challenge = b"".join(bytes(part.tolist()) for part in nonces)
    answer = torch.tensor(list(_answer(secret, challenge, rank)), dtype=torch.uint8)
    answers = [torch.empty_like(answer) for _ in range(world_size)]
    group.allgather([answers], [answer]).wait()
    for other, given in enumerate(answers):
        if not hmac.compare_digest(bytes(given.tolist()), _answer(secret, challenge, other)):
            raise WorkerError(
                f"Whoever answered as rank {other} does not know this program's secret. Another "
                "program has connected to its loopback port in between; fit again.",
                rank=other,
                reason="wrong secret",
            )


def _answer(secret, challenge, rank):
    return hmac.new(secret, challenge + rank.to_bytes(4, "little"), hashlib.sha256).digest()
