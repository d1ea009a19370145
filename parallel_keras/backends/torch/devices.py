"""The devices of this machine, seen from torch."""

import os

import torch

from parallel_keras import devices as device_names, keras_internals

# What Keras calls host memory here: torch's CPU has no number.
HOST = "cpu"

_cpu_devices = device_names.MAX_CPU_DEVICES

_STAY_AWAKE = 0.003  # seconds


def available():
    """Canonical names of all accelerators, or of the CPU devices."""
    if torch.cuda.is_available():
        return [f"gpu:{index}" for index in range(torch.cuda.device_count())]
    # A CPU device is a process with its share of the cores.
    return [f"cpu:{index}" for index in range(_cpu_devices)]


def reserve_cpu_devices(count):
    """Called at import."""
    set_cpu_devices(count)


def set_cpu_devices(count):
    """Say how many CPU devices there are. Costs nothing: none is started."""
    global _cpu_devices
    _cpu_devices = count


def bring_home(model):
    """Bring what was built in host memory to the default device."""
    if not torch.cuda.is_available():
        return
    for variable in model.variables:
        value = variable._value
        if value is not None and value.device.type == "cpu":
            value.data = value.data.to(keras_internals.default_torch_device())


def torch_device(name):
    """The `torch.device` that computes for a canonical name."""
    kind, index = device_names.kind_of(name), device_names.index_of(name)
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", index)


def by_device(devices):
    """Pairs of a device and the numbers of what is there, one for each device.

    Args:
        devices: List of the device of each.
    """
    return [
        (device, [number for number, other in enumerate(devices) if other == device])
        for device in dict.fromkeys(devices)
    ]


def available_cores():
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))  # what a container may use
    return os.cpu_count() or 1


def seconds_awake(world_size):
    """How long a rank that waits for another looks before it sleeps.

    Between two steps the caller needs about a millisecond. To fall asleep for it costs
    more than that: the one who wakes a process up pays for it too. Where there are fewer
    cores than ranks, it is another one that needs this one's.
    """
    return _STAY_AWAKE if world_size <= available_cores() else 0.0
