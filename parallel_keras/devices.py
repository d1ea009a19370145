"""Device names, and which devices a strategy takes.

Pure: the machine's devices come in as a list from the backend. One printed
form, `"cpu:0"` or `"gpu:1"`, whatever form a name was written in.
"""

import re

# Devices of one machine without accelerators. Setting aside this many costs
# nothing; a strategy takes `DEFAULT_CPU_DEVICES` of them unless told.
MAX_CPU_DEVICES = 8
DEFAULT_CPU_DEVICES = 2
CPU_DEVICES_VARIABLE = "PARALLEL_KERAS_CPU_DEVICES"

_NAME = re.compile(
    r"^/?(?:job:[^/]+/|replica:\d+/|task:\d+/)*"
    r"(?:device:|logical_device:|physical_device:)?"
    r"(?P<kind>cpu|gpu|cuda|xpu|mps|tpu)(?::(?P<index>\d+))?$",
    re.IGNORECASE,
)
_KINDS = {"cuda": "gpu"}


def canonical(device):
    """One printed form of a device name.

    Args:
        device: String such as `"gpu:1"`, `"cuda:1"`, `"/GPU:1"` or
            `"/device:GPU:1"`, or an object that prints as one, such as a
            `torch.device` or a `tf.config.LogicalDevice`.

    Returns:
        String, `"kind:index"` in lower case.

    >>> canonical("/GPU:1"), canonical("cuda:1"), canonical("cpu")
    ('gpu:1', 'gpu:1', 'cpu:0')
    """
    # tf.config devices print as a tuple; their name is what is wanted.
    text = device if isinstance(device, str) else getattr(device, "name", device)
    match = _NAME.match(str(text).strip())
    if not match:
        raise ValueError(
            "A device is named like 'cpu:0', 'gpu:1', 'cuda:1' or '/GPU:1', "
            f"or by its number. Received: {device!r}"
        )
    kind = match["kind"].lower()
    return f"{_KINDS.get(kind, kind)}:{int(match['index'] or 0)}"


def kind_of(device):
    """`"cpu"` or `"gpu"`: the part of a canonical name before the colon."""
    return device.split(":")[0]


def index_of(device):
    """The number of a canonical name."""
    return int(device.split(":")[1])


def normalize(devices):
    """What a user wrote for `devices=`, as a comparable value.

    Returns:
        `None` for all devices, an int for a count, or a tuple of canonical
        names and ints.
    """
    if devices is None or (devices == -1 and not isinstance(devices, bool)):
        return None
    if isinstance(devices, bool):
        raise ValueError(
            "`devices` is a count, a list of device names, or None for all. "
            f"Received: devices={devices}"
        )
    if isinstance(devices, int):
        if devices < 1:
            raise ValueError(
                "`devices` as a number is a count of one or more, or -1 for "
                f"all devices. Received: devices={devices}"
            )
        return devices
    if isinstance(devices, str) or not hasattr(devices, "__iter__"):
        devices = [devices]
    named = []
    for device in devices:
        if isinstance(device, bool) or (isinstance(device, int) and device < 0):
            raise ValueError(
                "A device in a list is a name or a number from 0 up. "
                f"Received: {device!r} in devices={list(devices)!r}"
            )
        named.append(device if isinstance(device, int) else canonical(device))
    if not named:
        raise ValueError(
            "`devices` names no device. Give a count, at least one name, or "
            "None for all. Received: devices=[]"
        )
    return tuple(named)


def resolve(devices, available):
    """The devices that a strategy takes of those that the machine has.

    Args:
        devices: A value of `normalize`.
        available: List of canonical names. Either all accelerators or, with
            none, the CPU devices.

    Returns:
        A tuple of canonical names.
    """
    simulated = all(kind_of(name) == "cpu" for name in available)
    if devices is None:
        count = DEFAULT_CPU_DEVICES if simulated else len(available)
        # A machine that was told to have one CPU device has one.
        return tuple(available[: max(1, min(count, len(available)))])
    if isinstance(devices, int):
        if devices > len(available):
            raise ValueError(_missing(f"{devices} devices", available))
        return tuple(available[:devices])
    chosen = []
    for device in devices:
        if isinstance(device, int):
            if device >= len(available):
                raise ValueError(_missing(f"device number {device}", available))
            device = available[device]
        elif device not in available and device != "cpu:0":
            is_accelerator = kind_of(device) != "cpu"
            raise ValueError(_missing(f"device {device!r}", available, is_accelerator))
        if device in chosen:
            raise ValueError(
                f"Device {device!r} is named twice, but each replica needs a "
                f"device of its own. Received: devices={list(devices)!r}"
            )
        chosen.append(device)
    return tuple(chosen)


def is_simulated(devices):
    """Whether several "devices" are parts of one CPU."""
    return len(devices) > 1 and all(kind_of(name) == "cpu" for name in devices)


def check_cpu_count(count):
    """A number of CPU devices as an int, or a ValueError."""
    try:
        number = int(count)
        valid = number >= 1 and not isinstance(count, bool)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"The number of CPU devices is an integer of one or more. Received: {count!r}"
        )
    return number


def _missing(what, available, is_accelerator=False):
    text = (
        f"Received a request for {what}, but the devices of this machine are "
        f"{', '.join(available)} ({len(available)})."
    )
    if available and kind_of(available[0]) == "cpu" and is_accelerator:
        text += (
            " The backend sees no accelerator: install a build of it for yours, and look at "
            "the driver and at CUDA_VISIBLE_DEVICES; or ask for CPU devices."
        )
    elif available and kind_of(available[0]) == "cpu":
        text += (
            " Call `parallel_keras.set_cpu_devices(n)` right after the import "
            f"(or set {CPU_DEVICES_VARIABLE}=n) to split the CPU into more."
        )
    return text
