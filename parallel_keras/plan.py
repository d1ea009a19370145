"""The plan of a model over devices: which layer lies where, and what that costs.

Pure: numbers and names in, a table or a picture out. The numbers come from
`costs`, the assignment from whoever cuts the model.
"""

import dataclasses
import html
import re

from parallel_keras.tables import aligned, as_html

PARTS = ("parameters", "gradients", "slots", "activations")
HEADS = ("parameters", "gradients", "slots", "activations", "FLOPs")
WORDS = ("layer", "kind", "output", "device")  # the heads of columns without numbers


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """What one layer costs.

    Attributes:
        path: String. The layer's path, or the name of a bare operation.
        kind: String. The name of its class.
        parameters: Int. Bytes of its variables that were not counted before.
        gradients: Int. Bytes of the gradients of those that are trained.
        slots: Int. Bytes that the optimizer keeps for those that are trained.
        activations: Int. Bytes kept for the backward pass of a batch.
        flops: Int. FLOPs of the forward pass of a batch.
        output_shape: Tuple. The shape of its output, with the batch, or a
            tuple of shapes.
    """

    path: str
    kind: str
    parameters: int = 0
    gradients: int = 0
    slots: int = 0
    activations: int = 0
    flops: int = 0
    output_shape: tuple = ()

    @property
    def bytes(self):
        """All of its bytes together."""
        return self.parameters + self.gradients + self.slots + self.activations


class Plan:
    """Which layer of a model lies on which device, and what each device holds.

    `str(plan)` is a table, `plan.save(path)` draws a picture, and a notebook
    shows an HTML table.

    Args:
        layers: List of `LayerCost`, in order of execution.
        placement: List of ints, the index into `devices` of each layer.
        devices: List of device names.
        capacity: Bytes that a device holds: an int for all, a list with one
            entry (or `None`) per device, or `None` where it is not known.
        title: String. The first line of the table and of the picture.

    Attributes:
        layers: List of `LayerCost`.
        placement: List of ints.
        devices: List of device names.
        totals: List of one dict per device: `device`, `layers`, `parameters`,
            `gradients`, `slots`, `activations`, `bytes`, `flops`, the
            `share` of all bytes, `capacity`, and `over`, the bytes that do
            not fit.
        imbalance: Float. The largest device's bytes over the mean, 1.0 is even.

    Raises:
        ValueError: If the lists do not fit together.

    Example:

    >>> costs = [
    ...     LayerCost("a", "Dense", parameters=1024, activations=512, flops=2000),
    ...     LayerCost("b", "Dense", parameters=512, flops=1000),
    ... ]
    >>> plan = Plan(costs, [0, 1], ["gpu:0", "gpu:1"])
    >>> plan.imbalance
    1.5
    >>> [total["bytes"] for total in plan.totals]
    [1536, 512]
    """

    def __init__(self, layers, placement, devices, capacity=None, title="Plan"):
        self.layers = list(layers)
        self.placement = [int(index) for index in placement]
        self.devices = [str(name) for name in devices]
        self.title = title
        if len(self.placement) != len(self.layers):
            raise ValueError(
                "A plan places each layer once. "
                f"Received: {len(self.layers)} layers, placement={self.placement}"
            )
        if not self.devices or any(not 0 <= i < len(self.devices) for i in self.placement):
            raise ValueError(
                "A layer is placed by the number of its device, from 0. "
                f"Received: placement={self.placement}, devices={self.devices}"
            )
        if capacity is None or isinstance(capacity, (int, float)):
            capacity = [capacity] * len(self.devices)
        if len(capacity) != len(self.devices):
            raise ValueError(
                "The capacity is one number, or one per device. "
                f"Received: capacity={capacity}, devices={self.devices}"
            )
        self.totals = [self._total(index, room) for index, room in enumerate(capacity)]
        total = sum(entry["bytes"] for entry in self.totals)
        for entry in self.totals:
            entry["share"] = entry["bytes"] / total if total else 0.0
        largest = max(entry["bytes"] for entry in self.totals)
        self.imbalance = largest * len(self.devices) / total if total else 1.0

    def _total(self, index, capacity):
        mine = [c for c, at in zip(self.layers, self.placement, strict=True) if at == index]
        entry = {"device": self.devices[index], "layers": len(mine)}
        for part in (*PARTS, "bytes", "flops"):
            entry[part] = sum(getattr(cost, part) for cost in mine)
        entry["share"] = 0.0
        entry["capacity"] = capacity
        entry["over"] = max(0, entry["bytes"] - capacity) if capacity is not None else 0
        return entry

    @property
    def warnings(self):
        """One sentence for each device that does not hold what is placed on it."""
        return [
            f"{entry['device']} holds {human_bytes(entry['capacity'])}, but "
            f"{human_bytes(entry['bytes'])} are placed on it: "
            f"{human_bytes(entry['over'])} too many."
            for entry in self.totals
            if entry["over"]
        ]

    def __str__(self):
        lines = [self.title, *aligned([self._layer_head(), *self._layer_rows()], WORDS), ""]
        lines += aligned([self._device_head(), *self._device_rows()], WORDS)
        lines.append(self._summary())
        lines += [f"Warning: {warning}" for warning in self.warnings]
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self):
        return (
            f"<Plan {self.title!r}: {len(self.layers)} layers on {len(self.devices)} devices, "
            f"imbalance {self.imbalance:.2f}>"
        )

    def _repr_html_(self):
        return "".join(
            [
                f"<p><b>{html.escape(self.title)}</b></p>",
                as_html(self._layer_head(), self._layer_rows()),
                as_html(self._device_head(), self._device_rows()),
                f"<p>{html.escape(self._summary())}</p>",
                *(f"<p><b>Warning:</b> {html.escape(line)}</p>" for line in self.warnings),
            ]
        )

    def save(self, path, dpi=150):
        """Draws the plan: bytes per device, and the layers in order by device.

        Args:
            path: String or path of the file. The ending chooses the format,
                such as `.png`, `.svg` or `.pdf`.
            dpi: Int. Dots per inch of a bitmap.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from parallel_keras.plan_picture import draw

        draw(self).savefig(path, dpi=dpi)

    def _layer_head(self):
        return ("layer", "kind", "output", "device", *HEADS)

    def _layer_rows(self):
        for cost, index in zip(self.layers, self.placement, strict=True):
            numbers = [human_bytes(getattr(cost, part)) for part in PARTS]
            shape = _shape(cost.output_shape)
            device = self.devices[index]
            yield (cost.path, cost.kind, shape, device, *numbers, human_number(cost.flops))

    def _device_head(self):
        room = ("capacity",) if self._knows_capacity() else ()
        return ("device", "layers", *HEADS, "sum", "share", *room)

    def _device_rows(self):
        entries = list(self.totals)
        if len(entries) > 1:
            together = {key: sum(entry[key] for entry in entries) for key in ("layers", "flops")}
            for part in (*PARTS, "bytes"):
                together[part] = sum(entry[part] for entry in entries)
            entries.append({"device": "all", "share": 1.0, "capacity": None, **together})
        for entry in entries:
            row = [entry["device"], str(entry["layers"])]
            row += [human_bytes(entry[part]) for part in PARTS]
            row += [human_number(entry["flops"]), human_bytes(entry["bytes"])]
            row.append(f"{100 * entry['share']:.1f} %")
            if self._knows_capacity():
                room = entry["capacity"]
                row.append("" if room is None else human_bytes(room))
            yield tuple(row)

    def _knows_capacity(self):
        return any(entry["capacity"] is not None for entry in self.totals)

    def _summary(self):
        return f"Imbalance (largest device / mean): {self.imbalance:.2f}"


def human_bytes(count):
    """A number of bytes to three digits, in units of 1024.

    >>> human_bytes(0), human_bytes(1023), human_bytes(1536), human_bytes(80 * 1024**3)
    ('0', '1023 B', '1.50 KiB', '80.0 GiB')
    """
    if count == 0:
        return "0"
    return _scaled(count, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def human_number(count):
    """A number to three digits, in units of 1000.

    >>> human_number(950), human_number(2_500_000), human_number(3e12)
    ('950', '2.50 M', '3.00 T')
    """
    return _scaled(count, 1000, ("", " k", " M", " G", " T", " P", " E"))


def _scaled(count, base, units):
    value, position = float(count), 0
    # 999.6 would print as "1000": it is the next unit's 1.00.
    while value >= base - 0.5 and position < len(units) - 1:
        value /= base
        position += 1
    if position == 0:
        return f"{value:.0f}{units[0]}"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}{units[position]}"


def parse_devices(text):
    """The names and the capacity of devices that need not exist.

    Args:
        text: String such as `"4x80GB"`, `"2 x 40 GiB"`, `"8"`, or a kind in
            front, as in `"cpu:4x16GB"`. Kinds default to `"gpu"`. GB is
            10**9 bytes and GiB is 2**30, as on the box and in the driver.

    Returns:
        A pair: a list of names, and the bytes per device or `None`.

    Raises:
        ValueError: If the text is of another form.

    >>> parse_devices("2x80GB")
    (['gpu:0', 'gpu:1'], 80000000000)
    >>> parse_devices("cpu:1x512MiB")
    (['cpu:0'], 536870912)
    """
    match = _DEVICES.match(str(text).strip())
    if not match:
        raise ValueError(
            "Devices to plan for are written as a count, or as a count and the memory of each, "
            f"such as '4x80GB'. Received: {text!r}"
        )
    names = [f"{(match['kind'] or 'gpu').lower()}:{index}" for index in range(int(match["count"]))]
    if match["size"] is None:
        return names, None
    base = 1024 if match["binary"] else 1000
    power = " KMGT".index((match["unit"] or " ").upper())
    return names, int(float(match["size"]) * base**power)


_DEVICES = re.compile(
    r"^(?:(?P<kind>[a-z]+):)?(?P<count>[1-9]\d{0,4})"
    r"(?:\s*[x×*]\s*(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt])(?P<binary>i)?b)?$",
    re.IGNORECASE,
)


def _shape(shape):
    if shape and isinstance(shape[0], (tuple, list)):
        return ", ".join(_shape(part) for part in shape)
    return "×".join(str(size) for size in shape)
