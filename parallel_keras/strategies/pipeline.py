"""The layers of one model as stages that work at the same time."""

from parallel_keras import backends, batch, devices as device_names, schedule
from parallel_keras.strategies import arguments
from parallel_keras.strategies.arguments import DEFAULT_TIMEOUT
from parallel_keras.strategies.base import Strategy

_parse_schedule = schedule.parse  # an argument has the same name as the module


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
            "_stages": arguments.check_count("stages", stages),
            "_devices": device_names.normalize(devices),
            "microbatches": arguments.check_count("microbatches", microbatches),
            "schedule": _parse_schedule(schedule),
            "balance": arguments.check_balance(balance),
            "split_points": arguments.check_split_points(split_points),
            "recompute": arguments.check_bool("recompute", recompute),
            "timeout": arguments.check_timeout(timeout),
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
            said["split_points (the first stage begins without one)"] = len(self.split_points) + 1
        if isinstance(self.balance, tuple):
            said["balance"] = len(self.balance)
        said = {name: count for name, count in said.items() if count is not None}
        if len(set(said.values())) > 1:
            raise ValueError(
                "Each stage has one device, and these say different numbers of stages: "
                f"{', '.join(f'{name} says {count}' for name, count in said.items())}. "
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
