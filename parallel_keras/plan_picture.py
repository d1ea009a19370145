"""The picture of a plan."""

from parallel_keras.figures import figure
from parallel_keras.plan import PARTS, human_bytes

# Okabe and Ito's colours, which all eyes tell apart.
PART_COLORS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73")
DEVICE_COLORS = (
    *("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB", "#EE8866"),
)
OVER = "#D55E00"


def draw(plan):
    """A matplotlib figure of a plan.

    Args:
        plan: `Plan`.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    bars = 0.9 + 0.42 * len(plan.devices)
    drawn = figure((9, bars + 2.7), plan.title, "plan")
    top, bottom = drawn.subplots(2, 1, height_ratios=[bars, 1.0])
    _bars(plan, top)
    _strip(plan, bottom)
    return drawn


def _bars(plan, axes):
    unit, name = _unit(max(entry["bytes"] for entry in plan.totals))
    rows = range(len(plan.devices))
    left = [0.0] * len(plan.devices)
    for part, color in zip(PARTS, PART_COLORS, strict=True):
        widths = [entry[part] / unit for entry in plan.totals]
        axes.barh(rows, widths, left=left, height=0.68, color=color, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    rooms = [entry["capacity"] for entry in plan.totals if entry["capacity"] is not None]
    reach = max(left) or 1.0
    # A capacity far away would squeeze the bars into nothing.
    shown = [room / unit for room in rooms if room / unit <= 2.5 * reach]
    reach = max([reach, *shown])
    for row, entry in enumerate(plan.totals):
        text = f"{human_bytes(entry['bytes'])}  ({100 * entry['share']:.0f} %)"
        if entry["over"]:
            text += f"\n{human_bytes(entry['over'])} too many"
        color = OVER if entry["over"] else "#222222"
        axes.annotate(
            text,
            (left[row], row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=color,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            zorder=3,
        )
        room = entry["capacity"]
        if room is not None and room / unit <= reach:
            edge = room / unit
            axes.plot([edge, edge], [row - 0.44, row + 0.44], color=OVER, linewidth=2)
    if shown:
        axes.plot([], [], color=OVER, linewidth=2, label="capacity")
    axes.set_xlim(0, reach * 1.24)
    axes.set_yticks(list(rows), plan.devices)
    axes.invert_yaxis()
    axes.set_xlabel(f"{name} per device, imbalance {plan.imbalance:.2f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False, fontsize=9)


def _strip(plan, axes):
    """The layers from left to right, as wide as their bytes, at least a sliver each."""
    total = sum(cost.bytes for cost in plan.layers) or 1
    count = max(len(plan.layers), 1)
    widths = [max(cost.bytes / total, 0.15 / count) for cost in plan.layers]
    scale = sum(widths) or 1.0
    start = 0.0
    for cost, index, width in zip(plan.layers, plan.placement, widths, strict=True):
        width /= scale
        color = DEVICE_COLORS[index % len(DEVICE_COLORS)]
        axes.barh(0, width, left=start, height=1, color=color, edgecolor="white", linewidth=0.6)
        label = cost.path.split("/")[-1]
        # About 110 characters fit over the whole width at this size.
        if len(label) + 1 < width * 110:
            axes.text(
                start + width / 2, 0, label, ha="center", va="center", fontsize=8, color="white"
            )
        elif width * 40 > 1 and len(label) < 24:
            axes.text(
                *(start + width / 2, 0, label[:14]),
                **{"rotation": 90, "ha": "center", "va": "center", "fontsize": 7, "color": "white"},
            )
        start += width
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.set_title("layers in order, as wide as their bytes", fontsize=9, loc="left")
    for index, name in enumerate(plan.devices[:16]):
        axes.bar(0, 0, color=DEVICE_COLORS[index % len(DEVICE_COLORS)], label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=8, frameon=False, fontsize=9)


def _unit(largest):
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1024**power, name
    return 1, "bytes"
