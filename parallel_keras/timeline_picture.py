"""The picture of a timeline."""

from parallel_keras.figures import figure
from parallel_keras.timeline import WAITING, human_seconds

# Okabe and Ito's colours, which all eyes tell apart.
COLORS = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "compute": "#56B4E9",
    "all-reduce": "#CC79A7",
    WAITING: "#F0E442",
    "update": "#009E73",
}
IDLE = "#F4F4F4"

# Inches that a micro-batch's number needs beside others, and points of its letters.
_BOX = 0.15
_LARGEST, _SMALLEST = 9, 5


def draw(timeline):
    """A matplotlib figure of a timeline.

    Args:
        timeline: `Timeline`.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    width = _width(timeline)
    size = width + 2, 1.5 + 0.5 * len(timeline.devices)
    drawn = figure(size, timeline.title, "timeline")
    axes = drawn.subplots()
    _boxes(timeline, axes, width)
    return drawn


def _boxes(timeline, axes, width):
    unit, name = _unit(timeline.step_time)
    for row, device in enumerate(timeline.devices):
        reach = timeline.step_time / unit
        axes.barh(row, reach, height=0.8, color=IDLE, zorder=1)
        events = timeline.of(device)
        axes.barh(
            [row] * len(events),
            [event.seconds / unit for event in events],
            left=[event.start / unit for event in events],
            height=0.8,
            color=[COLORS[event.kind] for event in events],
            edgecolor="white",
            linewidth=0.5,
            zorder=2,
        )
        for event in events:
            _number(event, axes, row, unit, width / (timeline.step_time or 1.0))
        share = f"{100 * timeline.busy[device]:.0f} % busy"
        axes.annotate(
            share,
            *((reach, row), (6, 0)),
            **{"textcoords": "offset points", "va": "center", "fontsize": 9, "color": "#222222"},
        )
    for kind in timeline.kinds:
        if kind not in timeline.unknown:
            axes.bar(0, 0, color=COLORS[kind], label=kind)
    axes.bar(0, 0, color=IDLE, edgecolor="#CCCCCC", linewidth=0.5, label="idle")
    axes.set_xlim(0, timeline.step_time / unit or 1.0)
    axes.set_ylim(len(timeline.devices) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.devices)), timeline.devices)
    axes.tick_params(axis="y", length=0)
    how = "predicted" if timeline.is_predicted else "measured"
    axes.set_xlabel(
        f"{name}, {how}: step time {human_seconds(timeline.step_time)}, "
        f"bubble {100 * timeline.bubble:.0f} %"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False, fontsize=9)


def _number(event, axes, row, unit, inches_per_second):
    """The micro-batch's number, where its box has room for it."""
    if event.microbatch is None:
        return
    text = str(event.microbatch)
    # A digit is about 0.6 of its size wide, and 72 points are an inch.
    fits = 72 * 0.85 * event.seconds * inches_per_second / (0.6 * len(text))
    if fits < _SMALLEST:
        return
    axes.text(
        (event.start + event.seconds / 2) / unit,
        row,
        text,
        **{"ha": "center", "va": "center_baseline", "fontsize": min(_LARGEST, fits), "zorder": 3},
    )


def _width(timeline):
    """Inches of a step, in which most boxes have room for their number."""
    lengths = sorted(e.seconds for e in timeline.events if e.microbatch is not None)
    if not lengths:
        return 8.0
    return max(8.0, min(22.0, _BOX * timeline.step_time / (lengths[len(lengths) // 4] or 1e9)))


def _unit(seconds):
    for size, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return size, name
    return 1e-6, "µs"
