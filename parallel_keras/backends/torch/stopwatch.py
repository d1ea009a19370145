"""What `rates` measures, as torch computes it."""

import contextlib

import torch

from parallel_keras import devices as device_names
from parallel_keras.backends.torch import workers


@contextlib.contextmanager
def computing(devices):
    """Compute as one of these devices does; gives how many do at full speed together."""
    if not device_names.is_simulated(devices):
        yield None
        return
    with workers.as_a_rank(devices):
        yield workers.threads_of_a_rank(1) / workers.threads_of_a_rank(len(devices))


def compiled(function):
    """A function without arguments, as the backend runs it."""
    return function


def with_backward(function, weights):
    """A function and its gradients with respect to weights."""

    def run():
        return torch.autograd.grad(function().sum(), [weight._value for weight in weights])[0]

    return run


def wait(tensor):
    """Until a tensor has been computed."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
