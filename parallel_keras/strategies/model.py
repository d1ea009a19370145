"""The layers of one model laid out over devices."""

from parallel_keras import backends, devices as device_names
from parallel_keras.strategies import arguments
from parallel_keras.strategies.base import Strategy


class ModelParallel(Strategy):
    """The layers of one model laid out over devices, for a model too big for one.

    Variables, gradients, optimizer slots and the forward and backward
    computation of a layer are on the layer's device, and what passes between
    layers moves. One device works at a time.

    Lowers to `tf.device` on the TensorFlow backend, and to devices of one
    process on torch.

    Args:
        devices: As in `pk.DataParallel`, or `None`: every accelerator; on a
            machine without one, two CPU devices, or as many as the places of
            the model need. Defaults to `None`.
        balance: How a model without any place is split into consecutive parts:
            `"time"` or `"flops"` (equal computation), `"memory"` (equal bytes
            of parameters, gradients, slots and activations), or a list with the
            number of layers on each device. Ignored where the model has places.
            Defaults to `"time"`.

    Raises:
        ValueError: If `devices` or `balance` is none of these.

    Example:

    >>> import parallel_keras as pk
    >>> pk.ModelParallel(2, balance="memory")
    ModelParallel(devices=2, balance='memory')
    """

    name = "model"
    lowering = "model"
    balance: str | tuple
    _devices: int | tuple | None

    def __init__(self, devices=None, *, balance="time"):
        object.__setattr__(self, "_devices", device_names.normalize(devices))
        object.__setattr__(self, "balance", arguments.check_balance(balance))

    def _fields(self):
        fields: dict = {"devices": self._devices}
        if self.balance != "time":
            fields["balance"] = self.balance
        return fields

    @property
    def devices(self):
        return self.devices_for(0)

    def describe(self, rows, devices):
        return (
            "the layers are laid out over the devices, of which one works at a time "
            "(strategy='pipeline' lets them work at the same time)"
        )

    def devices_for(self, needed):
        """The devices of a model whose places need this many."""
        available = backends.current().devices.available()
        chosen = device_names.resolve(self._devices, available)
        if isinstance(self.balance, tuple):
            needed = max(needed, len(self.balance))
        if self._devices is None and len(chosen) < needed <= len(available):
            chosen = tuple(available[:needed])
        return chosen
