"""A timeline's numbers, table, drawing, trace and picture."""

import itertools
import json
import sys

import pytest

from parallel_keras import schedule
from parallel_keras.timeline import Event, Timeline, human_seconds

GRID = list(itertools.product(("gpipe", "1f1b"), (1, 2, 4), (1, 2, 8)))


def simulated(name="1f1b", stages=2, microbatches=4, update=0.0, **kwargs):
    orders = schedule.order(name, stages, microbatches)
    events = schedule.simulate(orders, [1e-3] * stages, [2e-3] * stages, update=update)
    found = [
        Event(f"gpu:{s.stage}", s.kind, s.stage, None if s.microbatch < 0 else s.microbatch, *times)
        for s, *times in events
    ]
    return Timeline(found, [f"gpu:{stage}" for stage in range(stages)], **kwargs)


def replicas(**kwargs):
    events = [
        Event("gpu:0", "waiting for data", None, None, 10.0, 11.0),
        Event("gpu:0", "compute", None, None, 11.0, 14.0),
        Event("gpu:0", "all-reduce", None, None, 14.0, 15.0),
        Event("gpu:0", "update", None, None, 15.0, 16.0),
        Event("gpu:1", "compute", None, None, 12.0, 13.0),
    ]
    return Timeline(events, ["gpu:0", "gpu:1"], **kwargs)


# ---- numbers ----


@pytest.mark.parametrize("name, stages, microbatches", GRID)
def test_the_bubble_of_even_stages(name, stages, microbatches):
    timeline = simulated(name, stages, microbatches)
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert timeline.step_time == pytest.approx(3e-3 * (microbatches + stages - 1))
    for total in timeline.totals:
        assert total["forward"] == pytest.approx(1e-3 * microbatches)
        assert total["backward"] == pytest.approx(2e-3 * microbatches)
        assert total["idle"] == pytest.approx(3e-3 * (stages - 1))
        assert timeline.busy[total["device"]] == total["busy"]


def test_times_begin_with_the_first_event():
    timeline = replicas()
    assert timeline.events[0].start == 0.0 and timeline.step_time == 6.0
    assert timeline.idle == {"gpu:0": [], "gpu:1": [(0.0, 2.0), (3.0, 6.0)]}
    assert timeline.kinds == ("compute", "all-reduce", "waiting for data", "update")


def test_waiting_for_data_is_no_work():
    timeline = replicas()
    assert timeline.busy == {"gpu:0": pytest.approx(5 / 6), "gpu:1": pytest.approx(1 / 6)}
    assert timeline.bubble == pytest.approx(0.5)


def test_no_events():
    empty = Timeline([], ["cpu:0"])
    assert (empty.step_time, empty.bubble, empty.idle) == (0.0, 0.0, {"cpu:0": []})
    assert "cpu:0" in str(empty)


@pytest.mark.parametrize(
    "event",
    [
        Event("gpu:1", "forward", 0, 0, 0.0, 1.0),
        Event("gpu:0", "sleep", 0, 0, 0.0, 1.0),
        Event("gpu:0", "forward", 0, 0, 1.0, 0.0),
    ],
)
def test_events_that_are_none(event):
    with pytest.raises(ValueError, match="Received: Event"):
        Timeline([event], ["gpu:0"])


# ---- text ----


def test_the_table_and_the_drawing():
    text = str(simulated(update=1e-3, title="PipelineParallel(2)", note="On a good day."))
    assert text.splitlines() == [
        "PipelineParallel(2), measured",
        "device  forward  backward   update     idle    busy",
        "───────────────────────────────────────────────────",
        "gpu:0   4.00 ms   8.00 ms  1.00 ms  3.00 ms  81.2 %",
        "gpu:1   4.00 ms   8.00 ms  1.00 ms  3.00 ms  81.2 %",
        "Step time 16.0 ms, bubble (no work) 18.8 %",
        "On a good day.",
        "",
        "gpu:0 │F0─F1─······B0────F2─B1────F3─B2────···B3────U──│",
        "gpu:1 │···F0─B0────F1─B1────F2─B2────F3─B3────U──······│",
        "F forward, B backward, U update, · idle; numbers are micro-batches",
    ]


def test_a_drawing_shows_no_part_of_a_number():
    lines = str(simulated(microbatches=14)).splitlines()
    drawn = [line for line in lines if "│" in line]
    assert len(drawn) == 2 and "B13" in drawn[0]
    assert "Too many passes" in str(simulated("1f1b", 4, 64))


def test_what_is_not_known_is_said():
    assert "not predicted" in str(replicas(is_predicted=True, unknown=("waiting for data",)))
    measured = str(replicas(unknown=("waiting for data",)))
    assert "not measured" in measured and "W waiting" not in measured


def test_html_is_escaped():
    page = simulated(title="<Timeline>")._repr_html_()
    assert "&lt;Timeline&gt;" in page and "<Timeline>" not in page and "<td>gpu:1</td>" in page
    assert "2 devices, 15.0 ms a step, bubble 0.20" in repr(simulated())


def test_human_seconds_never_prints_four_digits_of_the_next_unit():
    assert [human_seconds(s) for s in (9.996e-6, 999.6e-6, 0.9996)] == [
        "10.0 µs",
        "1.00 ms",
        "1.00 s",
    ]


# ---- trace ----


@pytest.mark.parametrize("name, stages, microbatches", GRID)
def test_the_trace(tmp_path, name, stages, microbatches):
    timeline = simulated(name, stages, microbatches, update=1e-4)
    timeline.save(tmp_path / "trace.json")
    check_trace(json.loads((tmp_path / "trace.json").read_text()), timeline)


def test_the_trace_of_replicas():
    check_trace(replicas().trace(), replicas())


def check_trace(trace, timeline):
    """What Perfetto and chrome://tracing ask of a trace."""
    events = trace["traceEvents"]
    named = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(named) == timeline.devices and len(set(named.values())) == len(named)
    assert [e["ph"] for e in events if e["name"] == "process_name"] == ["M"]
    pieces = [e for e in events if e["ph"] == "X"]
    assert len(pieces) == len(timeline.events)
    assert [e["ts"] for e in pieces] == sorted(e["ts"] for e in pieces)
    for piece, event in zip(pieces, timeline.events, strict=True):
        assert set(piece) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert piece["tid"] == named[event.device] and piece["cat"] == event.kind
        assert piece["ts"] == pytest.approx(event.start * 1e6, abs=1e-3)
        assert piece["dur"] == pytest.approx(event.seconds * 1e6, abs=1e-3)
        assert piece["args"].get("microbatch") == event.microbatch
    for thread in named.values():
        own = [e for e in pieces if e["tid"] == thread]
        for before, after in itertools.pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-9


# ---- picture ----


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
@pytest.mark.parametrize("timeline", [simulated, replicas])
def test_the_picture(tmp_path, timeline, ending):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"timeline.{ending}"
    timeline().save(path)
    assert path.stat().st_size > 5000


def test_the_picture_of_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    Timeline([], ["cpu:0"]).save(tmp_path / "timeline.png")


def test_other_endings(tmp_path):
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf.*\.json.*Received: .*step\.txt"):
        simulated().save(tmp_path / "step.txt")


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        simulated().save(tmp_path / "timeline.png")
    simulated().save(tmp_path / "timeline.json")
