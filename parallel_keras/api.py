"""Public functions about the machine: its devices, and the idle workers."""

import os

from parallel_keras import backends, devices as device_names


def list_devices():
    """The devices that strategies may take, as printed names.

    Returns:
        List of strings: every accelerator, or where there is none the CPU
        devices, such as `["cpu:0", "cpu:1"]`.

    Example:

    >>> import parallel_keras as pk
    >>> pk.list_devices()[0]
    'cpu:0'
    """
    return list(backends.current().devices.available())


def set_cpu_devices(n):
    """Say into how many devices a machine without accelerators is split.

    On the TensorFlow backend this has to come before TensorFlow starts: right
    after the import, before a layer such as `Dropout`, an optimizer, a metric
    or a dataset is made.

    Args:
        n: Int, one or more. Defaults to 8 where this is never called, or to
            the environment variable `PARALLEL_KERAS_CPU_DEVICES`.

    Raises:
        ValueError: If `n` is no such number, or TensorFlow has started.

    Example:

    >>> import parallel_keras as pk
    >>> pk.set_cpu_devices(8)
    """
    backends.current().devices.set_cpu_devices(device_names.check_cpu_count(n))


def shutdown():
    """End the worker processes that wait for the next `fit`.

    They end by themselves with the program; `keras.utils.clear_session()`
    ends them too. Does nothing where there are none.

    Example:

    >>> import parallel_keras as pk
    >>> pk.shutdown()
    """
    backends.current().runtime.shutdown()


def _reserve_cpu_devices():
    """At import: set CPU devices aside, which starts no device."""
    wanted = os.environ.get(device_names.CPU_DEVICES_VARIABLE)
    count = device_names.MAX_CPU_DEVICES if wanted is None else device_names.check_cpu_count(wanted)
    backends.current().devices.reserve_cpu_devices(count)


_reserve_cpu_devices()
