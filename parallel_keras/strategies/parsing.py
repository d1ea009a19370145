"""A strategy from what a user may write for `strategy=`."""

import difflib

from parallel_keras.errors import UnsupportedError
from parallel_keras.strategies.base import SingleDevice, Strategy
from parallel_keras.strategies.data import DataParallel
from parallel_keras.strategies.model import ModelParallel
from parallel_keras.strategies.pipeline import PipelineParallel

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
    if any(sign in name for sign in ",*+"):
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
        kind, sign, number = name.partition(":")
        near = difflib.get_close_matches(kind, [*_BY_NAME, *_LATER], n=1)
        meant = f"{near[0]}={number}" if near and sign and number.isdigit() else "".join(near)
        hint = f"Did you mean {meant!r}? " if meant else ""
        raise ValueError(f"Unknown strategy. {hint}{_supported()} Received: strategy={text!r}")
    if not count:
        return _BY_NAME[name]()
    if name == "single":
        raise ValueError(
            "'single' is one device and takes no count: write strategy='single'. "
            f"Received: strategy={text!r}"
        )
    if not count.strip().lstrip("-").isdigit():
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
