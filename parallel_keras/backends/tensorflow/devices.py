"""The devices of this machine, seen from TensorFlow."""

import tensorflow as tf

from parallel_keras import devices as device_names
from parallel_keras.backends.tensorflow import placing

HOST = "cpu:0"  # what Keras calls host memory here

_wanted = None  # what could not be set because TensorFlow had started


def available():
    """Canonical names of all accelerators, or of the logical CPU devices."""
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    return [device_names.canonical(device) for device in tf.config.list_logical_devices(kind)]


def reserve_cpu_devices(count):
    """Called at import: set the number aside, starting nothing."""
    global _wanted
    try:
        _set_logical(count)
    except RuntimeError:
        # TensorFlow has started already with one CPU device. Only asking for
        # more of them is an error, and that one names what there is.
        _wanted = count


def set_cpu_devices(count):
    """Split the CPU into this many logical devices."""
    try:
        _set_logical(count)
    except RuntimeError as error:
        if len(tf.config.list_logical_devices("CPU")) == count:
            return
        raise ValueError(
            "TensorFlow has started already, and its CPU devices are fixed from then on. Call "
            "set_cpu_devices (or set PARALLEL_KERAS_CPU_DEVICES) before a Dropout layer, an "
            "optimizer, a metric or a dataset is made. "
            f"Received: n={count}, with {len(tf.config.list_logical_devices('CPU'))} CPU devices "
            "there"
        ) from error


def bring_home(model):
    """Bring what was built in host memory to the default device."""
    if not tf.config.list_physical_devices("GPU"):
        return
    for variable in model.variables:
        if variable._value is not None and "CPU" in variable._value.device:
            placing.move(variable, None)


def tf_device(name):
    """TensorFlow's name for a canonical name."""
    return f"/{device_names.kind_of(name).upper()}:{device_names.index_of(name)}"


def _set_logical(count):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )
