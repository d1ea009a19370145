"""In which order the stages of a pipeline work micro-batches off.

Pure. GPipe (Huang et al., 2019, https://arxiv.org/abs/1811.06965) does all forward
passes before all backward passes. 1F1B (Narayanan et al., 2021,
https://arxiv.org/abs/2104.04473) begins a backward pass as soon as there is one, so that
a stage keeps the activations of no more micro-batches than there are stages. Both leave
the same bubble: (K - 1) / (M + K - 1) of the time, for K even stages and M micro-batches.
"""

import difflib
from typing import NamedTuple

from parallel_keras.errors import UnsupportedError

FORWARD, BACKWARD, _UPDATE = "forward", "backward", "update"

_NAMES = {"gpipe": "gpipe", "1f1b": "1f1b", "schedulegpipe": "gpipe", "schedule1f1b": "1f1b"}
_LATER = (
    "interleaved",
    "interleaved1f1b",
    "interleavedzerobubble",
    "loopedbfs",
    "zerobubble",
    "zbvzerobubble",
    "zb1p",
    "zbv",
    "dualpipe",
    "dualpipev",
    "flushgpipe",
)


class Step(NamedTuple):
    """One piece of a stage's work: a pass over a micro-batch."""

    stage: int
    microbatch: int
    kind: str


def parse(name):
    """A schedule's name, as a user may write it.

    Args:
        name: String, such as `"1f1b"`, `"GPipe"` or torch's `"Schedule1F1B"`.

    Returns:
        `"gpipe"` or `"1f1b"`.

    Raises:
        ValueError: If there is no such schedule.
        UnsupportedError: If it is known and not supported yet.

    >>> parse("ScheduleGPipe")
    'gpipe'
    """
    supported = "Supported: '1f1b' and 'gpipe'."
    if not isinstance(name, str):
        raise ValueError(f"`schedule` is a name. {supported} Received: schedule={name!r}")
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    if plain in _NAMES:
        return _NAMES[plain]
    if plain.removeprefix("schedule") in _LATER:
        raise UnsupportedError(
            f"The schedule {name!r} is not supported yet. {supported} Received: schedule={name!r}"
        )
    near = difflib.get_close_matches(plain, list(_NAMES), n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"Unknown schedule. {hint}{supported} Received: schedule={name!r}")


def default_microbatches(stages, rows):
    """How many micro-batches a batch has unless told: 4 for each stage, at most its rows.

    >>> default_microbatches(2, 256), default_microbatches(4, 10)
    (8, 10)
    """
    return max(1, min(4 * stages, rows))


def order(name, stages, microbatches):
    """The work of each stage, in order.

    Args:
        name: `"gpipe"` or `"1f1b"`.
        stages: Int.
        microbatches: Int.

    Returns:
        A list for each stage, of `Step`s.

    >>> [f"{kind[0]}{m}" for _, m, kind in order("1f1b", 2, 3)[0]]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    return [_of_stage(name, stage, stages, microbatches) for stage in range(stages)]


def _of_stage(name, stage, stages, microbatches):
    forward = [Step(stage, m, FORWARD) for m in range(microbatches)]
    backward = [Step(stage, m, BACKWARD) for m in range(microbatches)]
    if name == "gpipe":
        # In the order of the forward passes: the last stage could begin with either end,
        # and a sum over the micro-batches is then in the order of the rows.
        return forward + backward
    warm_up = min(microbatches, stages - stage)
    work = forward[:warm_up]
    for m in range(microbatches):
        work.append(backward[m])
        work += forward[warm_up + m : warm_up + m + 1]
    return work


def merged(orders):
    """One order of all stages' work, in which each step comes after those that it needs.

    Args:
        orders: What `order` gives.

    Returns:
        A list of `Step`s. What can go on at the same time is side by side.

    Raises:
        ValueError: If the stages would wait for one another for ever.
    """
    done: set = set()
    waiting = [list(reversed(work)) for work in orders]
    result: list = []
    while any(waiting):
        ready = [work for work in waiting if work and _needs(work[-1], len(orders)) <= done]
        if not ready:
            stuck = [work[-1] for work in waiting if work]
            raise ValueError(f"The stages wait for one another. Received: {stuck}")
        steps = [work.pop() for work in ready]
        result += steps
        done.update(steps)
    return result


def _needs(step, stages):
    """The steps of which a step needs the outcome."""
    stage, microbatch, kind = step
    if kind == FORWARD:
        return {Step(stage - 1, microbatch, FORWARD)} if stage else set()
    needs = {Step(stage, microbatch, FORWARD)}
    if stage < stages - 1:
        needs.add(Step(stage + 1, microbatch, BACKWARD))
    return needs


def alive(work):
    """The largest number of micro-batches whose activations a stage keeps at once.

    Args:
        work: List of `Step`s, one stage's.

    >>> [alive(work) for work in order("1f1b", 3, 8)], alive(order("gpipe", 3, 8)[0])
    ([3, 2, 1], 8)
    """
    count = most = 0
    for step in work:
        count += 1 if step.kind == FORWARD else -1
        most = max(most, count)
    return most


def simulate(orders, forward, backward, transfer=0.0, update=0.0, together=None):
    """When each step of a schedule begins and ends, from what each takes.

    Args:
        orders: What `order` gives.
        forward, backward: Lists with the seconds that a stage's pass over a micro-batch
            takes.
        transfer: Float, in seconds: from one stage to the next.
        update: Float, in seconds, or a list with each stage's: what it does after its
            last pass.
        together: Number of the stages that can compute at the same time at full speed,
            where they are parts of one machine; with more of them at work each is slower.
            `None` for all.

    Returns:
        A list of `(step, start, end)`, by their starts, with the update of a stage as a
        `Step` of kind `"update"` and micro-batch -1.

    >>> events = simulate(order("gpipe", 2, 4), [1.0, 1.0], [1.0, 1.0])
    >>> max(end for _, _, end in events)
    10.0
    >>> events = simulate(order("gpipe", 2, 4), [1.0, 1.0], [1.0, 1.0], together=1)
    >>> max(end for _, _, end in events)
    16.0
    """
    stages = len(orders)
    updates = update if isinstance(update, (list, tuple)) else [update] * stages
    takes = {FORWARD: forward, BACKWARD: backward, _UPDATE: updates}
    waiting = [
        [*([Step(stage, -1, _UPDATE)] if updates[stage] else []), *reversed(work)]
        for stage, work in enumerate(orders)
    ]
    now, events = 0.0, []
    ends: dict = {}
    running: dict = {}  # by stage: its step, when it began, the seconds of work that are left
    while any(waiting) or running:
        coming = []
        for stage, work in enumerate(waiting):
            if not work or stage in running:
                continue
            needed = {} if work[-1].kind == _UPDATE else _needs(work[-1], stages)
            if not all(other in ends for other in needed):
                continue
            there = [ends[o] + (transfer if o.stage != stage else 0.0) for o in needed]
            if max(there, default=now) <= now:
                step = work.pop()
                running[stage] = step, now, takes[step.kind][stage]
            else:
                coming.append(max(there))
        if not running and not coming:
            raise ValueError(
                "The stages wait for one another. "
                f"Received: {[work[-1] for work in waiting if work]}"
            )
        speed = min(1.0, (together or stages) / len(running)) if running else 1.0
        finishes = {stage: now + left / speed for stage, (_, _, left) in running.items()}
        then = min([*finishes.values(), *coming])
        for stage, (step, start, left) in list(running.items()):
            if finishes[stage] <= then:
                ends[step] = then
                events.append((step, start, then))
                del running[stage]
            else:
                running[stage] = step, start, left - (then - now) * speed
        now = then
    return sorted(events, key=lambda event: (event[1], event[0].stage))
