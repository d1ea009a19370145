"""What the user asks for: plain, frozen, comparable, printable objects.

A strategy holds no device and starts nothing. `lowering` names the room of
`backends/<backend>/` that turns it into train, test and predict functions.
"""

import difflib

from parallel_keras import backends, batch
from parallel_keras import devices as device_names
from parallel_keras.errors import UnsupportedError

DEFAULT_TIMEOUT = 60.0


class Strategy:
    """Base of the strategies. Compare, print and hash them like values."""

    name = ""
    lowering = ""
    num_stages = 1

    def _fields(self):
        """The arguments that tell this strategy from another, in order."""
        return {}

    @property
    def devices(self):
        """Tuple of device names, such as `("gpu:0", "gpu:1")`."""
        raise NotImplementedError

    @property
    def num_replicas(self):
        """Int. How many copies of the model train on slices of a batch."""
        return 1

    def devices_for(self, needed):
        """The devices for a model whose places need this many.

        Args:
            needed: Int, zero for a model without places.
        """
        return self.devices

    def describe(self, rows, devices):
        """What the first `fit` says of how the work is spread.

        Args:
            rows: Int or `None`. The rows of a global batch, where they are known.
            devices: Tuple of the names of the devices that are used.
        """
        raise NotImplementedError

    def __eq__(self, other):
        return type(self) is type(other) and self._fields() == other._fields()

    def __hash__(self):
        return hash((type(self), tuple(self._fields().items())))

    def __repr__(self):
        arguments = ", ".join(
            f"{key}={list(value) if isinstance(value, tuple) else value!r}"
            for key, value in self._fields().items()
        )
        return f"{type(self).__name__}({arguments})"

    def __setattr__(self, name, value):
        raise AttributeError(
            f"{type(self).__name__} cannot be changed once made. Make a new one "
            "and pass it to `model.set_strategy` or `model.compile`. "
            f"Received: {name}={value!r}"
        )

    def __mul__(self, other):
        raise UnsupportedError(
            "Products of strategies are not supported yet. Supported: None, "
            f"'single', 'data', 'model'. Received: {self!r} * {other!r}"
        )


class SingleDevice(Strategy):
    """One device: Keras as it is.

    Example:

    >>> import parallel_keras as pk
    >>> pk.SingleDevice() == pk.SingleDevice()
    True
    """

    name = "single"
    lowering = "single"

    @property
    def devices(self):
        return (backends.current().devices.available()[0],)


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
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(
                f"`timeout` is a number of seconds above 0. Received: timeout={timeout!r}"
            )
        object.__setattr__(self, "_devices", device_names.normalize(devices))
        object.__setattr__(self, "timeout", float(timeout))

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


BALANCES = ("time", "flops", "memory")


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
        object.__setattr__(self, "balance", _check_balance(balance))

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
            "(strategy='pipeline', where it is supported, lets them work at the same time)"
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


def _check_balance(balance):
    if isinstance(balance, str) and balance.lower() in BALANCES:
        return balance.lower()
    if isinstance(balance, (list, tuple)) and balance:
        counts = tuple(balance)
        if all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts):
            return counts
    raise ValueError(
        "`balance` is 'time', 'flops', 'memory', or a list with the number of layers on each "
        f"device, such as [3, 2]. Received: balance={balance!r}"
    )


_BY_NAME = {"single": SingleDevice, "data": DataParallel, "model": ModelParallel}

# Named in the contract, not there yet.
_LATER = ("pipeline", "auto", "sharded")

# What people write elsewhere, and what it is called here.
_ELSEWHERE = {
    "ddp": "data",
    "dp": "data",
    "dataparallel": "data",
    "distributeddataparallel": "data",
    "mirrored": "data",
    "mirroredstrategy": "data",
    "fsdp": "sharded",
    "zero": "sharded",
    "pp": "pipeline",
    "gpipe": "pipeline",
    "mp": "model",
    "tp": "model",
    "none": "single",
}


def parse(strategy):
    """A strategy from what a user may write for `strategy=`.

    Args:
        strategy: `None`, a string such as `"data"` or `"data=2"`, or a
            strategy object.

    Returns:
        A `Strategy`.

    Raises:
        ValueError: If it is none of these.
        UnsupportedError: If it is known and not supported yet.
    """
    if strategy is None:
        return SingleDevice()
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, str):
        return _parse_string(strategy)
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise ValueError(
            f"Pass an object, not the class: strategy=pk.{strategy.__name__}(). "
            f"Received: strategy={strategy.__name__}"
        )
    raise ValueError(_foreign(strategy))


def _parse_string(text):
    name = text.strip().lower()
    if "," in name or "*" in name:
        raise UnsupportedError(
            "Products of strategies are not supported yet. "
            f"{_supported()} Received: strategy={text!r}"
        )
    name, _, count = name.partition("=")
    name = name.strip()
    if name in _LATER:
        raise UnsupportedError(
            f"The strategy {name!r} is not supported yet. {_supported()} "
            f"Received: strategy={text!r}"
        )
    if name in _ELSEWHERE:
        here = _ELSEWHERE[name]
        later = ", which is not supported yet" if here in _LATER else ""
        raise ValueError(
            f"What is called {name!r} elsewhere is {here!r} here{later}: write "
            f"strategy={here!r}. {_supported()} Received: strategy={text!r}"
        )
    if name not in _BY_NAME:
        near = difflib.get_close_matches(name, [*_BY_NAME, *_LATER], n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"Unknown strategy. {hint}{_supported()} Received: strategy={text!r}")
    if not count:
        return _BY_NAME[name]()
    if name == "single" or not count.strip().lstrip("-").isdigit():
        raise ValueError(
            f"A count of devices is written like strategy='data=2'. Received: strategy={text!r}"
        )
    return _BY_NAME[name](int(count))


def _supported():
    return (
        "Supported: None, 'single', 'data' or pk.DataParallel(devices), 'model' or "
        "pk.ModelParallel(devices)."
    )


def _foreign(strategy):
    """The message for an object of another library."""
    kind = type(strategy)
    names = {base.__name__ for base in kind.__mro__}
    modules = {base.__module__.split(".")[0] for base in kind.__mro__}
    write = None
    if "tensorflow" in modules and names & {"Strategy", "StrategyBase", "StrategyV1"}:
        count = getattr(strategy, "num_replicas_in_sync", None)
        if "MirroredStrategy" in names:
            write = f"strategy=pk.DataParallel({count})"
        what = "A tf.distribute strategy"
    elif "DeviceMesh" in names:
        what = "A device mesh"
    elif names & {"DataParallel", "ModelParallel", "Distribution"} and "keras" in modules:
        what = "A keras.distribution object"
    else:
        return f"{_supported()} Received: strategy={strategy!r} of type {kind.__name__}"
    write = write or 'strategy="data" or strategy=pk.DataParallel(2)'
    return (
        f"{what} cannot be passed as a strategy: parallel_keras makes its own. "
        f"Write {write} instead, and make the model outside of any strategy "
        f"scope. Received: strategy={strategy!r}"
    )
