"""Strategies as values, and the forms in which they are written."""

import pickle
import types

import pytest

from parallel_keras import backends
from parallel_keras.errors import UnsupportedError
from parallel_keras.strategies import DataParallel, PipelineParallel, SingleDevice, parse, parsing


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Eight parts of one CPU, whatever this machine has."""
    names = [f"cpu:{index}" for index in range(8)]
    rooms = types.SimpleNamespace(devices=types.SimpleNamespace(available=lambda: names))
    monkeypatch.setattr(backends, "current", lambda: rooms)


@pytest.mark.parametrize(
    "written, strategy",
    [
        (None, SingleDevice()),
        ("single", SingleDevice()),
        ("data", DataParallel()),
        (" Data ", DataParallel()),
        ("data=3", DataParallel(3)),
        ("DATA = 3", DataParallel(3)),
        ("data=-1", DataParallel()),
        (DataParallel(["cpu:1", 0]), DataParallel(["/CPU:1", 0])),
        ("pipeline", PipelineParallel()),
        ("Pipeline=3", PipelineParallel(3)),
        (PipelineParallel(schedule="ScheduleGPipe"), PipelineParallel(schedule="gpipe")),
    ],
)
def test_forms(written, strategy):
    assert parse(written) == strategy
    assert hash(parse(written)) == hash(strategy)


@pytest.mark.parametrize("name", ["auto", "sharded", "data=2,pipeline=2"])
def test_what_comes_later_is_refused_by_name(name):
    with pytest.raises(UnsupportedError, match="(?s)not supported yet.*Received"):
        parse(name)


@pytest.mark.parametrize(
    "name, here",
    [("ddp", "data"), ("FSDP", "sharded"), ("pp", "pipeline"), ("mirrored", "data")],
)
def test_names_from_elsewhere(name, here):
    with pytest.raises(ValueError, match=f"strategy='{here}'"):
        parse(name)


@pytest.mark.parametrize("thing", ["", "nothing", "data=x", "single=2", 2, [0], DataParallel])
def test_what_is_no_strategy(thing):
    with pytest.raises(ValueError, match="Received"):
        parse(thing)


def test_near_misses_get_a_hint():
    with pytest.raises(ValueError, match="Did you mean 'data'"):
        parse("dat")
    with pytest.raises(ValueError, match="Did you mean 'data=2'"):
        parse("data:2")
    with pytest.raises(UnsupportedError, match="Products"):
        parse("data+model")
    with pytest.raises(ValueError, match="takes no count"):
        parse("single=2")


def test_an_accelerator_that_is_not_there():
    with pytest.raises(ValueError, match="sees no accelerator"):
        assert DataParallel(["gpu:0", "gpu:1"]).devices


def test_values():
    assert DataParallel(2) == DataParallel(2)
    assert DataParallel(2) != DataParallel(2, timeout=5)
    assert DataParallel() != SingleDevice()
    assert repr(DataParallel(2)) == "DataParallel(devices=2)"
    assert repr(DataParallel([0, "gpu:1"], timeout=5)) == (
        "DataParallel(devices=[0, 'gpu:1'], timeout=5.0)"
    )
    assert pickle.loads(pickle.dumps(DataParallel(2, timeout=5))) == DataParallel(2, timeout=5)
    with pytest.raises(AttributeError, match="Received"):
        DataParallel(2).timeout = 1
    with pytest.raises(UnsupportedError, match="Received"):
        DataParallel(2) * DataParallel(2)


def test_devices_and_replicas():
    assert DataParallel().devices == ("cpu:0", "cpu:1")
    assert DataParallel(3).num_replicas == 3
    assert SingleDevice().devices == ("cpu:0",)
    assert SingleDevice().num_replicas == SingleDevice().num_stages == 1
    with pytest.raises(ValueError, match="of this machine are cpu:0, .*[(]8[)]"):
        DataParallel(9).devices  # noqa: B018


@pytest.mark.parametrize("timeout", [0, -1, True, "60", None])
def test_timeouts(timeout):
    with pytest.raises(ValueError, match="Received"):
        DataParallel(timeout=timeout)


def test_every_name_is_known_once():
    later, here = set(parsing._LATER), set(parsing._BY_NAME)
    assert not later & here
    assert set(parsing._ELSEWHERE.values()) <= later | here


def test_pipelines():
    assert PipelineParallel(3).num_stages == 3
    assert PipelineParallel().devices == ("cpu:0", "cpu:1")
    assert PipelineParallel(devices=["cpu:2", "cpu:5"]).devices == ("cpu:2", "cpu:5")
    assert PipelineParallel(split_points=["a", "b"]).num_stages == 3
    assert PipelineParallel(balance=[1, 2]).num_stages == 2
    assert PipelineParallel().devices_for(4) == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert PipelineParallel(2).num_replicas == 1
    assert repr(PipelineParallel(2, microbatches=8, schedule="GPipe", recompute=True)) == (
        "PipelineParallel(stages=2, microbatches=8, schedule='gpipe', recompute=True)"
    )
    strategy = PipelineParallel(2, split_points=["a"], timeout=5)
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert strategy != PipelineParallel(2, split_points=["b"], timeout=5)
    assert PipelineParallel().microbatches_of(256, 2) == 8
    assert PipelineParallel().microbatches_of(3, 2) == 3
    assert PipelineParallel(microbatches=4).microbatches_of(1, 2) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"stages": 0},
        {"stages": True},
        {"stages": 2.0},
        {"microbatches": 0},
        {"microbatches": "4"},
        {"schedule": 3},
        {"schedule": "round-robin"},
        {"balance": "even"},
        {"balance": [0, 2]},
        {"split_points": "dense_1"},
        {"split_points": []},
        {"recompute": 1},
        {"timeout": -1},
        {"stages": 3, "split_points": ["a"]},
        {"stages": 3, "devices": 2},
        {"balance": [1, 2], "devices": ["cpu:0", "cpu:1", "cpu:2"]},
    ],
)
def test_what_is_no_pipeline(arguments):
    with pytest.raises(ValueError, match="Received"):
        PipelineParallel(**arguments)


def test_each_number_of_stages_is_told_with_what_says_it():
    with pytest.raises(ValueError, match="stages says 3.*without one. says 2"):
        PipelineParallel(3, split_points=["a"])
