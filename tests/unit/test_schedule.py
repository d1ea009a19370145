"""Schedules against what must hold for each of them, for all small numbers of stages."""

import itertools

import pytest

from parallel_keras import schedule
from parallel_keras.errors import UnsupportedError
from parallel_keras.schedule import BACKWARD, FORWARD, Step

GRID = list(itertools.product(("gpipe", "1f1b"), range(1, 7), range(1, 13)))


@pytest.mark.parametrize("name, stages, microbatches", GRID)
def test_each_pass_is_done_once(name, stages, microbatches):
    for stage, work in enumerate(schedule.order(name, stages, microbatches)):
        wanted = {Step(stage, m, k) for m in range(microbatches) for k in (FORWARD, BACKWARD)}
        assert set(work) == wanted and len(work) == len(wanted)


@pytest.mark.parametrize("name, stages, microbatches", GRID)
def test_merged_order_has_everything_that_a_step_needs_before_it(name, stages, microbatches):
    orders = schedule.order(name, stages, microbatches)
    done = set()
    merged = schedule.merged(orders)
    for step in merged:
        if step.kind == FORWARD and step.stage:
            assert Step(step.stage - 1, step.microbatch, FORWARD) in done
        if step.kind == BACKWARD:
            assert Step(step.stage, step.microbatch, FORWARD) in done
            if step.stage < stages - 1:
                assert Step(step.stage + 1, step.microbatch, BACKWARD) in done
        done.add(step)
    for stage, work in enumerate(orders):
        assert [step for step in merged if step.stage == stage] == work


@pytest.mark.parametrize("name, stages, microbatches", GRID)
def test_kept_activations(name, stages, microbatches):
    kept = [schedule.alive(work) for work in schedule.order(name, stages, microbatches)]
    if name == "gpipe":
        assert kept == [microbatches] * stages
    else:
        assert kept == [min(microbatches, stages - stage) for stage in range(stages)]


@pytest.mark.parametrize("name, stages, microbatches", GRID)
def test_even_stages_take_the_ideal_time(name, stages, microbatches):
    orders = schedule.order(name, stages, microbatches)
    events = schedule.simulate(orders, [1.0] * stages, [2.0] * stages)
    assert max(end for _, _, end in events) == 3.0 * (microbatches + stages - 1)
    busy = sum(end - start for _, start, end in events)
    bubble = 1 - busy / (stages * 3.0 * (microbatches + stages - 1))
    assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_simulation_counts_transfers_updates_and_the_slowest_stage():
    orders = schedule.order("gpipe", 2, 2)
    events = schedule.simulate(orders, [1.0, 3.0], [1.0, 3.0], transfer=0.5, update=[0.25, 0])
    ends = {step: end for step, _, end in events}
    assert ends[Step(1, 0, FORWARD)] == 1.0 + 0.5 + 3.0
    assert ends[Step(1, 1, BACKWARD)] == 1.5 + 4 * 3.0
    assert ends[Step(0, 1, BACKWARD)] == 1.5 + 4 * 3.0 + 0.5 + 1.0
    assert ends[Step(0, -1, "update")] == ends[Step(0, 1, BACKWARD)] + 0.25


@pytest.mark.parametrize("name, stages, microbatches", GRID)
def test_stages_that_share_a_processor_take_the_time_of_all_work(name, stages, microbatches):
    orders = schedule.order(name, stages, microbatches)
    events = schedule.simulate(orders, [1.0] * stages, [2.0] * stages, together=1)
    assert max(end for _, _, end in events) == pytest.approx(3.0 * stages * microbatches)
    order = {stage: [s for s, _, _ in events if s.stage == stage] for stage in range(stages)}
    assert list(order.values()) == orders


def test_stages_that_share_two_of_three_processors():
    orders = schedule.order("gpipe", 3, 3)
    events = schedule.simulate(orders, [1.0] * 3, [1.0] * 3, together=2)
    ends = {step: end for step, _, end in events}
    assert ends[Step(1, 0, FORWARD)] == ends[Step(0, 1, FORWARD)] == 2.0
    assert ends[Step(2, 0, FORWARD)] == 3.5  # three at once on two


def test_orders_that_wait_for_one_another():
    (first, second) = schedule.order("gpipe", 2, 1)
    with pytest.raises(ValueError, match="wait for one another"):
        schedule.merged([list(reversed(first)), second])
    with pytest.raises(ValueError, match="wait for one another"):
        schedule.simulate([list(reversed(first)), second], [1.0] * 2, [1.0] * 2)


@pytest.mark.parametrize("name", ["gpipe", "GPipe", "ScheduleGPipe", "1F1B", "schedule1f1b"])
def test_names(name):
    assert schedule.parse(name) == ("gpipe" if "g" in name.lower() else "1f1b")


@pytest.mark.parametrize("name", ["interleaved", "ScheduleInterleaved1F1B", "zero-bubble", "zbv"])
def test_schedules_that_come_later(name):
    with pytest.raises(UnsupportedError, match="not supported yet"):
        schedule.parse(name)


@pytest.mark.parametrize("name", ["1f2b", "", None, 3])
def test_unknown_schedules(name):
    with pytest.raises(ValueError, match="Received: schedule="):
        schedule.parse(name)


def test_default_microbatches():
    assert schedule.default_microbatches(4, 1000) == 16
    assert schedule.default_microbatches(4, 3) == 3
    assert schedule.default_microbatches(4, 0) == 1
