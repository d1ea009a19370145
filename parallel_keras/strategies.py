"""What the user asks for: plain, frozen, comparable, printable objects.

A strategy holds no device and starts nothing. `lowering` names the room of
`backends/<backend>/` that turns it into train, test and predict functions.
"""

import difflib

from parallel_keras import backends, batch, schedule
from parallel_keras import devices as device_names
from parallel_keras.errors import UnsupportedError

DEFAULT_TIMEOUT = 60.0


class Strategy:
    """Base of the strategies. Compare, print and hash them like values."""

    name = ""
    lowering = ""

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

    @property
    def num_stages(self):
        """Int. Into how many parts the model is cut that work at the same time."""
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
            f"'single', 'data', 'model', 'pipeline'. Received: {self!r} * {other!r}"
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
        object.__setattr__(self, "_devices", device_names.normalize(devices))
        object.__setattr__(self, "timeout", _check_timeout(timeout))

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


class PipelineParallel(Strategy):
    """The layers of one model as stages that work at the same time.

    A batch is cut into micro-batches, which follow one another through the stages:
    while one stage computes on a micro-batch, the stage before it is at the next.
    Gradients add up over the micro-batches and are applied once, so that the numbers
    are those of one device. Any graph of layers will do: what a later stage needs
    of an earlier one (skip connections, masks, several inputs and outputs) is carried.

    Lowers to stages under `tf.device` in one `tf.function` on the TensorFlow backend,
    and to one process per stage on torch.

    Args:
        stages: Int or `None`. The number of stages, each on a device of its own.
            Defaults to `None`: as many as the places, `split_points`, `balance` or
            `devices` say; without any, one for each accelerator, or two CPU devices.
        devices: As in `pk.DataParallel`: the device of each stage.
        microbatches: Int or `None`. Into how many micro-batches a batch is cut, at most
            its rows. Defaults to `None`: 4 for each stage.
        schedule: `"1f1b"` or `"gpipe"`: in which order a stage works its micro-batches
            off. Both take the same time; `"1f1b"` keeps the activations of at most as
            many micro-batches as there are stages. Defaults to `"1f1b"`.
        balance: As in `pk.ModelParallel`: how a model without any place is cut.
            Defaults to `"time"`.
        split_points: List of strings or `None`. The names of the layers that begin a
            new stage, in the order in which they run. Wins over places.
        recompute: Bool. Whether to keep only what stages hand to one another, and to
            compute the activations anew for the backward pass: less memory, more time.
            Defaults to `False`.
        timeout: As in `pk.DataParallel`.

    Raises:
        ValueError: If an argument is none of these.
        UnsupportedError: If `schedule` is known but not supported yet.

    References:
        - [GPipe](https://arxiv.org/abs/1811.06965), Huang et al., 2019
        - [1F1B](https://arxiv.org/abs/2104.04473), Narayanan et al., 2021

    Example:

    >>> import parallel_keras as pk
    >>> pk.PipelineParallel(2, microbatches=8)
    PipelineParallel(stages=2, microbatches=8)
    """

    name = "pipeline"
    lowering = "pipeline"
    balance: str | tuple
    microbatches: int | None
    recompute: bool
    schedule: str
    split_points: tuple | None
    timeout: float
    _count: int | None
    _devices: int | tuple | None
    _stages: int | None

    def __init__(
        self,
        stages=None,
        *,
        devices=None,
        microbatches=None,
        schedule="1f1b",
        balance="time",
        split_points=None,
        recompute=False,
        timeout=DEFAULT_TIMEOUT,
    ):
        values = {
            "_stages": _check_count("stages", stages),
            "_devices": device_names.normalize(devices),
            "microbatches": _check_count("microbatches", microbatches),
            "schedule": _parse_schedule(schedule),
            "balance": _check_balance(balance),
            "split_points": _check_split_points(split_points),
            "recompute": _check_bool("recompute", recompute),
            "timeout": _check_timeout(timeout),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_numbers()

    def _check_numbers(self):
        """The arguments that each say how many stages there are say the same."""
        said: dict = {"stages": self._stages}
        if isinstance(self._devices, tuple):
            said["devices"] = len(self._devices)
        elif self._devices is not None:
            said["devices"] = self._devices
        if self.split_points is not None:
            said["split_points"] = len(self.split_points) + 1
        if isinstance(self.balance, tuple):
            said["balance"] = len(self.balance)
        said = {name: count for name, count in said.items() if count is not None}
        if len(set(said.values())) > 1:
            raise ValueError(
                "Each stage has one device, and these say different numbers of stages: "
                f"{', '.join(f'{name} {count}' for name, count in said.items())}. "
                f"Received: {self!r}"
            )
        object.__setattr__(self, "_count", next(iter(said.values()), None))

    def _fields(self):
        fields: dict = {"stages": self._stages}
        defaults = {
            "devices": (self._devices, None),
            "microbatches": (self.microbatches, None),
            "schedule": (self.schedule, "1f1b"),
            "balance": (self.balance, "time"),
            "split_points": (self.split_points, None),
            "recompute": (self.recompute, False),
            "timeout": (self.timeout, DEFAULT_TIMEOUT),
        }
        fields.update({k: value for k, (value, default) in defaults.items() if value != default})
        return fields

    @property
    def devices(self):
        return self.devices_for(0)

    @property
    def num_stages(self):
        return len(self.devices)

    def devices_for(self, needed):
        available = backends.current().devices.available()
        if self._devices is not None:
            return device_names.resolve(self._devices, available)
        if self._count is None and not needed:
            return device_names.resolve(None, available)
        return device_names.resolve(self._count or max(needed, 2), available)

    def microbatches_of(self, rows, stages):
        """Int. How many micro-batches a batch of this many rows has."""
        if self.microbatches is None:
            return schedule.default_microbatches(stages, rows)
        return max(1, min(self.microbatches, rows))

    def describe(self, rows, devices):
        how = f"{len(devices)} stages, schedule {self.schedule!r}"
        if not rows:
            return how
        count = self.microbatches_of(rows, len(devices))
        text = f"{how}, {batch.describe(rows, count)} as micro-batches"
        if self.microbatches is None:
            text += f" (4 for each stage, at most the rows; microbatches={count} says the same)"
        return text


def _check_count(name, count):
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count > 0):
        return count
    raise ValueError(f"`{name}` is an integer of one or more, or None. Received: {name}={count!r}")


def _check_bool(name, value):
    if isinstance(value, bool):
        return value
    raise ValueError(f"`{name}` is True or False. Received: {name}={value!r}")


def _check_split_points(points):
    if points is None:
        return None
    if isinstance(points, (list, tuple)) and points and all(isinstance(p, str) for p in points):
        return tuple(points)
    raise ValueError(
        "`split_points` is a list of the names of the layers that begin a new stage. "
        f"Received: split_points={points!r}"
    )


def _check_timeout(timeout):
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"`timeout` is a number of seconds above 0. Received: timeout={timeout!r}")
    return float(timeout)


def _parse_schedule(name):
    # An argument of the strategy has the same name as the module.
    return schedule.parse(name)


_BY_NAME: dict = {
    "single": SingleDevice,
    "data": DataParallel,
    "model": ModelParallel,
    "pipeline": PipelineParallel,
}

# Named in the contract, not there yet.
_LATER = ("auto", "sharded")

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
        "pk.ModelParallel(devices), 'pipeline' or pk.PipelineParallel(stages)."
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
