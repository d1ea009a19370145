"""The timeline of a training step: what each device did, and when.

Pure: events in, a table, a drawing, a picture or a trace file out. The events are
measured by the backends, or predicted by `prediction`.
"""

import html
import json
import pathlib
from typing import NamedTuple

from parallel_keras.tables import aligned, as_html

WAITING = "waiting for data"
PIPELINE_KINDS = ("forward", "backward", "update")
DATA_KINDS = ("compute", "all-reduce", WAITING, "update")
LETTERS = {
    "forward": "F",
    "backward": "B",
    "compute": "C",
    "all-reduce": "R",
    WAITING: "W",
    "update": "U",
}
PICTURES = (".png", ".svg", ".pdf")
TRACE = ".json"

# How wide the drawing of a schedule may be.
_MOST_COLUMNS = 110


class Event(NamedTuple):
    """A piece of work of one device.

    Attributes:
        device: String, the device's name.
        kind: String. `"forward"`, `"backward"` or `"update"` under a pipeline;
            `"compute"`, `"all-reduce"`, `"waiting for data"` or `"update"` of a replica.
        stage: Int, or `None` where there are no stages.
        microbatch: Int, or `None` where it is about no micro-batch.
        start, end: Floats, in seconds.
    """

    device: str
    kind: str
    stage: int | None
    microbatch: int | None
    start: float
    end: float

    @property
    def seconds(self):
        """How long it took."""
        return self.end - self.start


class Timeline:
    """What each device did in one training step, and when.

    `str(timeline)` is a table and a drawing, `timeline.save(path)` writes a picture or a
    trace file, and a notebook shows an HTML table.

    Args:
        events: List of `Event`, with times of one clock.
        devices: List of device names.
        title: String. The first line of the table and of the picture.
        is_predicted: Bool. Whether the times are predicted, not measured.
        unknown: Tuple of the kinds that belong here and are not known.
        note: String. What one has to know about the times.

    Attributes:
        events: List of `Event`, by their start, which is 0 for the first.
        devices, title, is_predicted, unknown, note: As given.
        kinds: Tuple of the kinds of events, in the order of a step.
        step_time: Float, in seconds. From the first start to the last end.
        totals: List of one dict per device: `device`, the seconds of each kind, the
            seconds that it was `idle`, and the share of the time that it was `busy`.
        busy: Dict from each device to the share of the step in which it worked. Waiting
            for data is no work.
        bubble: Float. The share of devices times step time in which no work was done.
        idle: Dict from each device to a list of `(start, end)` in which nothing happened.

    Raises:
        ValueError: If an event ends before it starts, is of no device, or of no kind.

    Example:

    >>> events = [
    ...     Event("gpu:0", "forward", 0, 0, 5.0, 6.0),
    ...     Event("gpu:1", "forward", 1, 0, 6.0, 7.0),
    ...     Event("gpu:1", "backward", 1, 0, 7.0, 8.0),
    ...     Event("gpu:0", "backward", 0, 0, 8.0, 9.0),
    ... ]
    >>> timeline = Timeline(events, ["gpu:0", "gpu:1"])
    >>> timeline.step_time, timeline.bubble, timeline.idle["gpu:0"]
    (4.0, 0.5, [(1.0, 3.0)])
    """

    def __init__(self, events, devices, title="Timeline", is_predicted=False, unknown=(), note=""):
        self.devices = [str(name) for name in devices]
        self.title = title
        self.is_predicted = is_predicted
        self.unknown = tuple(unknown)
        self.note = note
        for event in events:
            if event.device not in self.devices or event.kind not in LETTERS:
                raise ValueError(
                    f"An event is of one of the devices {self.devices} and of a kind of "
                    f"{list(LETTERS)}. Received: {event}"
                )
            if event.end < event.start:
                raise ValueError(f"An event ends after it starts. Received: {event}")
        begin = min((event.start for event in events), default=0.0)
        moved = [e._replace(start=e.start - begin, end=e.end - begin) for e in events]
        number = {name: index for index, name in enumerate(self.devices)}
        self.events = sorted(moved, key=lambda e: (e.start, e.end, number[e.device]))
        self.step_time = max((event.end for event in self.events), default=0.0)
        seen = {event.kind for event in self.events} | set(self.unknown)
        of_data = seen & (set(DATA_KINDS) - set(PIPELINE_KINDS))
        self.kinds = DATA_KINDS if of_data else PIPELINE_KINDS
        self.idle = {name: self._gaps(name) for name in self.devices}
        self.totals = [self._total(name) for name in self.devices]
        self.busy = {total["device"]: total["busy"] for total in self.totals}
        count = len(self.devices)
        self.bubble = 1 - sum(self.busy.values()) / count if self.step_time else 0.0

    def of(self, device):
        """The events of one device, in order."""
        return [event for event in self.events if event.device == device]

    def _gaps(self, device):
        gaps, free = [], 0.0
        for event in self.of(device):
            if event.start > free:
                gaps.append((free, event.start))
            free = max(free, event.end)
        if free < self.step_time:
            gaps.append((free, self.step_time))
        return gaps

    def _total(self, device):
        total = {"device": device, **dict.fromkeys(self.kinds, 0.0)}
        for event in self.of(device):
            total[event.kind] += event.seconds
        total["idle"] = sum(end - start for start, end in self.idle[device])
        idle = total["idle"] + total.get(WAITING, 0.0)
        total["busy"] = 1 - idle / self.step_time if self.step_time else 0.0
        return total

    # ---- as text ----

    def __str__(self):
        lines = [self._headline(), *aligned([self._head(), *self._rows()], ("device",))]
        lines += [self.summary, *([self.note] if self.note else []), "", *self._drawing()]
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self):
        return (
            f"<Timeline {self._headline()!r}: {len(self.devices)} devices, "
            f"{human_seconds(self.step_time)} a step, bubble {self.bubble:.2f}>"
        )

    def _repr_html_(self):
        return "".join(
            [
                f"<p><b>{html.escape(self._headline())}</b></p>",
                as_html(self._head(), self._rows()),
                f"<p>{html.escape(self.summary)}</p>",
                *([f"<p>{html.escape(self.note)}</p>"] if self.note else []),
                f"<pre>{html.escape(chr(10).join(self._drawing()))}</pre>",
            ]
        )

    def _headline(self):
        return f"{self.title}, {'predicted' if self.is_predicted else 'measured'}"

    @property
    def summary(self):
        """The time of the step and the bubble, as a line."""
        return (
            f"Step time {human_seconds(self.step_time)}, bubble (no work) {100 * self.bubble:.1f} %"
        )

    def _head(self):
        return ("device", *self.kinds, "idle", "busy")

    def _rows(self):
        for total in self.totals:
            cells = [self._cell(total, kind) for kind in (*self.kinds, "idle")]
            yield (total["device"], *cells, f"{100 * total['busy']:.1f} %")

    def _cell(self, total, kind):
        if kind in self.unknown:
            return "not predicted" if self.is_predicted else "not measured"
        return human_seconds(total[kind])

    def _drawing(self):
        """One line for each device, to scale: letters for kinds, numbers for micro-batches."""
        if not self.step_time:
            return []
        columns = self._columns()
        scale = columns / self.step_time
        passes = [event for event in self.events if event.microbatch is not None]
        if sum(e.seconds * scale >= len(_label(e)) for e in passes) < 0.75 * len(passes):
            return ["Too many passes to draw in text: `save('timeline.png')` draws them."]
        width = max(len(name) for name in self.devices)
        lines = []
        for name in self.devices:
            cells = ["·"] * columns
            for event in self.of(name):
                start, end = round(event.start * scale), round(event.end * scale)
                cells[start:end] = _box(event, end - start)
            lines.append(f"{name.ljust(width)} │{''.join(cells)}│")
        shown = [kind for kind in self.kinds if kind not in self.unknown]
        legend = ", ".join([*(f"{LETTERS[kind]} {kind}" for kind in shown), "· idle"])
        if passes:
            legend += "; numbers are micro-batches"
        return [*lines, legend]

    def _columns(self):
        """So many that most passes have room for their number."""
        lengths = sorted(e.seconds for e in self.events if e.microbatch is not None)
        if not lengths:
            return 60
        wanted = 1 + max(len(_label(event)) for event in self.events)
        typical = lengths[len(lengths) // 4] or self.step_time
        return max(40, min(_MOST_COLUMNS, round(wanted * self.step_time / typical)))

    # ---- as a file ----

    def save(self, path, dpi=150):
        """Draws the timeline, or writes it as a trace.

        Args:
            path: String or path of the file. Its ending says what is written: `.png`,
                `.svg` and `.pdf` are pictures; `.json` is a trace in the Chrome
                trace-event format, which https://ui.perfetto.dev opens.
            dpi: Int. Dots per inch of a bitmap.

        Raises:
            ValueError: If the ending is none of these.
            ImportError: If a picture is asked for and matplotlib is not installed.
        """
        ending = pathlib.Path(path).suffix.lower()
        if ending == TRACE:
            pathlib.Path(path).write_text(json.dumps(self.trace(), indent=1), encoding="utf-8")
        elif ending in PICTURES:
            from parallel_keras.timeline_picture import draw

            draw(self).savefig(path, dpi=dpi)
        else:
            raise ValueError(
                f"A timeline is saved as a picture ({', '.join(PICTURES)}) or as a trace for "
                f"Perfetto ({TRACE}). Received: path={str(path)!r}"
            )

    def trace(self):
        """The timeline as a dict in the Chrome trace-event format.

        One process, a thread for each device, a complete event ("X") for each piece of
        work, in the order of their starts, with times in microseconds.
        """
        # Perfetto takes process and thread 0 for the kernel's idle task.
        process, first = 1, 100
        threads = {name: first + index for index, name in enumerate(self.devices)}
        found: list = [_named("process_name", process, first, self._headline())]
        for index, (name, thread) in enumerate(threads.items()):
            found.append(_named("thread_name", process, thread, name))
            sort = {
                **_named("thread_sort_index", process, thread, ""),
                "args": {"sort_index": index},
            }
            found.append(sort)
        for event in self.events:
            # Rounded to nanoseconds at both ends: what did not overlap does not now.
            start, end = round(event.start * 1e9), round(event.end * 1e9)
            facts = {"stage": event.stage, "microbatch": event.microbatch}
            found.append(
                {
                    "name": event.kind
                    + ("" if event.microbatch is None else f" {event.microbatch}"),
                    "cat": event.kind,
                    "ph": "X",
                    "ts": start / 1000,
                    "dur": (end - start) / 1000,
                    "pid": process,
                    "tid": threads[event.device],
                    "args": {key: value for key, value in facts.items() if value is not None},
                }
            )
        return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"note": self.note}}


def human_seconds(seconds):
    """A time to three digits.

    >>> human_seconds(0), human_seconds(0.000234), human_seconds(0.0234), human_seconds(2.5)
    ('0', '234 µs', '23.4 ms', '2.50 s')
    """
    if not seconds:
        return "0"
    # 999.6 µs would print as "1000": it is the next unit's 1.00.
    units = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
    unit, size = next((u for u in units if seconds < 999.5 * u[1]), units[-1])
    value = seconds / size
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def _named(name, process, thread, value):
    """A metadata event of a trace."""
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": value}}


def _label(event):
    number = "" if event.microbatch is None else event.microbatch
    return f"{LETTERS[event.kind]}{number}"


def _box(event, width):
    """A piece of work, so many letters wide; half a number would be another one."""
    label = _label(event)
    return (label if len(label) <= width else LETTERS[event.kind])[:width].ljust(width, "─")
