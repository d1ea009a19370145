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

from parallel_keras.backends.torch.shared_sums import SharedSums, rounded
from parallel_keras.errors import WorkerError


class Group:
    """The process group of all ranks, with all that torch's own has.

    Args:
        of_torch: A `torch.distributed.ProcessGroup`.
        sums: `SharedSums`, where all ranks are on one machine's CPU, else `None`.
    """

    def __init__(self, of_torch, sums=None):
        self.of_torch = of_torch
        self.sums = sums

    def __getattr__(self, name):
        return getattr(self.of_torch, name)

    def add_up(self, tensor):
        """Write the sum over the ranks into a tensor of one dimension."""
        if self.sums is None:
            self.of_torch.allreduce([tensor]).wait()
            return
        self.sums.begin(rounded(tensor.numel() * tensor.element_size()))
        self.sums.put(tensor)
        self.sums.finish()


def make(paths, rank, world_size, device, timeout, secret, check):
    """Meet the other ranks.

    Args:
        paths: Pair of strings: files that all ranks can open, to meet in, empty at first,
            and for `SharedSums`, or `None` where there are none.
        rank, world_size: Ints.
        device: This rank's `torch.device`.
        timeout: Float, in seconds, for each collective.
        secret: Bytes, the same on all ranks.
        check: Called now and then while others are waited for; raises where that is in vain.

    Returns:
        A `Group`.
    """
    path, path_of_sums = paths
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
    sums = None
    if path_of_sums is not None:
        # Before the ranks have met: after that the file may have no path any more.
        sums = SharedSums(path_of_sums, rank, world_size, timeout, check)
    _prove(group, rank, world_size, secret)
    return Group(group, sums)


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
