"""Device names, and the devices that a strategy takes."""

import pytest

from parallel_keras import devices

CPUS = [f"cpu:{index}" for index in range(8)]
GPUS = ["gpu:0", "gpu:1", "gpu:2"]


class Device:
    """Prints like a torch.device."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


class LogicalDevice:
    """Has a name, like those of tf.config."""

    name = "/device:GPU:1"


@pytest.mark.parametrize(
    "written, printed",
    [
        ("gpu:1", "gpu:1"),
        ("GPU:1", "gpu:1"),
        ("cuda:1", "gpu:1"),
        ("/GPU:1", "gpu:1"),
        ("/device:GPU:1", "gpu:1"),
        ("/job:localhost/replica:0/task:0/device:CPU:3", "cpu:3"),
        ("cpu", "cpu:0"),
        (" cuda ", "gpu:0"),
        ("xpu:2", "xpu:2"),
        ("mps", "mps:0"),
        (Device("cuda:1"), "gpu:1"),
        (LogicalDevice(), "gpu:1"),
    ],
)
def test_one_printed_form(written, printed):
    assert devices.canonical(written) == printed
    assert devices.canonical(printed) == printed
    assert f"{devices.kind_of(printed)}:{devices.index_of(printed)}" == printed


@pytest.mark.parametrize("written", ["", "disk:0", "gpu:x", "gpu:-1", "gpu 1", None, 1.5])
def test_what_is_no_device(written):
    with pytest.raises(ValueError, match="Received"):
        devices.canonical(written)


@pytest.mark.parametrize(
    "written, value",
    [
        (None, None),
        (-1, None),
        (3, 3),
        ("gpu:1", ("gpu:1",)),
        ([0, "cuda:1"], (0, "gpu:1")),
        (("cpu:0", "cpu:1"), ("cpu:0", "cpu:1")),
    ],
)
def test_normal_form(written, value):
    assert devices.normalize(written) == value


@pytest.mark.parametrize("written", [0, -2, True, False, [], [-1], [True], ["disk"], 1.5])
def test_what_is_no_choice_of_devices(written):
    with pytest.raises(ValueError, match="Received"):
        devices.normalize(written)


@pytest.mark.parametrize(
    "chosen, available, taken",
    [
        (None, CPUS, ("cpu:0", "cpu:1")),
        (None, CPUS[:1], ("cpu:0",)),
        (None, GPUS, tuple(GPUS)),
        (2, GPUS, ("gpu:0", "gpu:1")),
        (4, CPUS, tuple(CPUS[:4])),
        ((2, "gpu:0"), GPUS, ("gpu:2", "gpu:0")),
        (("cpu:0",), GPUS, ("cpu:0",)),
    ],
)
def test_devices_taken(chosen, available, taken):
    assert devices.resolve(chosen, available) == taken


@pytest.mark.parametrize(
    "chosen, available, words",
    [
        (9, CPUS, "set_cpu_devices"),
        ((8,), CPUS, "number 8"),
        (("gpu:0",), CPUS, "gpu:0"),
        (4, GPUS, "gpu:0, gpu:1, gpu:2"),
        ((0, "gpu:0"), GPUS, "twice"),
    ],
)
def test_devices_that_are_not_there(chosen, available, words):
    with pytest.raises(ValueError, match=words):
        devices.resolve(chosen, available)


def test_simulation_is_several_parts_of_one_cpu():
    assert devices.is_simulated(("cpu:0", "cpu:1"))
    assert not devices.is_simulated(("cpu:0",))
    assert not devices.is_simulated(("gpu:0", "gpu:1"))


@pytest.mark.parametrize("count", ["3", 3])
def test_cpu_count(count):
    assert devices.check_cpu_count(count) == 3


@pytest.mark.parametrize("count", ["", "many", 0, -1, True, None])
def test_what_is_no_cpu_count(count):
    with pytest.raises(ValueError, match="Received"):
        devices.check_cpu_count(count)
