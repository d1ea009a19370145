"""A copy of the model on each device."""

from parallel_keras import backends, batch, devices as device_names
from parallel_keras.strategies import arguments
from parallel_keras.strategies.arguments import DEFAULT_TIMEOUT
from parallel_keras.strategies.base import Strategy


class DataParallel(Strategy):
    """A copy of the model on each device, each training on its rows.

    `batch_size` in `fit()` stays the global batch: its rows are split over the
    replicas, and losses, metrics and gradients are combined with the rows'
    weight, so that the numbers are those of one device.

    Lowers to `tf.distribute.MirroredStrategy` on the TensorFlow backend, and
    to one process per device with `DistributedDataParallel` on torch.

    Args:
        devices: Int, list or `None`. A count of devices, or their names
            (`0`, `"gpu:1"`, `"cuda:1"`, `"/GPU:1"`, a `torch.device`). `None`
            or `-1` takes every accelerator; on a machine without one, two CPU
            devices. Defaults to `None`.
        timeout: Float, in seconds. How long a replica may keep the others
            waiting before `fit` ends with a `WorkerError` (torch backend).
            Defaults to `60.0`.

    Raises:
        ValueError: If `devices` is no count and no list of device names.

    Example:

    >>> import parallel_keras as pk
    >>> pk.DataParallel(2)
    DataParallel(devices=2)
    """

    name = "data"
    lowering = "data"
    timeout: float
    _devices: int | tuple | None

    def __init__(self, devices=None, *, timeout=DEFAULT_TIMEOUT):
        object.__setattr__(self, "_devices", device_names.normalize(devices))
        object.__setattr__(self, "timeout", arguments.check_timeout(timeout))

    def _fields(self):
        fields: dict = {"devices": self._devices}
        if self.timeout != DEFAULT_TIMEOUT:
            fields["timeout"] = self.timeout
        return fields

    @property
    def devices(self):
        return device_names.resolve(self._devices, backends.current().devices.available())

    def describe(self, rows, devices):
        if rows:
            return batch.describe(rows, len(devices))
        return f"the rows of each batch are split over {len(devices)} replicas"

    @property
    def num_replicas(self):
        return len(self.devices)
