"""Runs all sides, interleaved, and prints tables of ratios.

    python benchmarks/data_parallel/run.py             the table of README.md
    python benchmarks/data_parallel/run.py --quick     does it run at all

Each side is a process of its own. A round runs every side once; a figure is the
median over the rounds of the median milliseconds per step. Do not do anything
else on the machine meanwhile.
"""

import importlib.util
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import compare

SIDE = pathlib.Path(__file__).with_name("sides.py")
SIDES = {
    "torch": [
        ("ours_2", '`fit`, strategy="data", 2 devices'),
        ("guide", "the guide's DDP loop, Keras's Adam and accuracy"),
        ("guide_bare", "the guide's DDP loop, torch's Adam, no metric"),
        ("pure_torch", "the model in pure torch under DDP, torch's Adam, no metric"),
        ("fabric", "Lightning Fabric, torch's Adam, no metric"),
        ("accelerate", "Accelerate, torch's Adam, no metric"),
        ("plain", "`fit` on one device"),
        ("ours_1", "`fit`, `pk.DataParallel(1)`"),
        ("ours_2_loader", '`fit`, strategy="data", DataLoader of two workers'),
    ],
    "tensorflow": [
        ("ours_2", '`fit`, strategy="data", 2 devices'),
        ("mirrored", "stock `fit` in `MirroredStrategy.scope()`"),
        ("plain", "`fit` on one device"),
        ("ours_1", "`fit`, `pk.DataParallel(1)`"),
    ],
}
# (ours, theirs): samples/s of ours over theirs.
RATIOS = {
    "torch": [("ours_2", "guide"), ("ours_1", "plain")],
    "tensorflow": [("ours_2", "mirrored"), ("ours_1", "plain")],
}
STEPS = {"mlp": 120, "cnn": 80, "transformer": 60}
NEEDS = {"fabric": "lightning", "accelerate": "accelerate"}


def sides_of(backend, only):
    """The sides that were asked for, as far as what they need is installed."""
    return [
        side
        for side, _ in SIDES[backend]
        if (not only or side in only)
        and (side not in NEEDS or importlib.util.find_spec(NEEDS[side]) is not None)
    ]


def table(backend, sides, results):
    titles, rows = dict(SIDES[backend]), []
    for side in sides:
        cells = [f"{results.median(side, model):.1f}" for model in STEPS]
        rows.append((f"{titles[side]}, ms a step", cells))
        if results.has(side, "waiting"):
            shares = [f"{100 * results.median(side, model, 'waiting'):.1f} %" for model in STEPS]
            rows.append(("… of which waiting for data", shares))
    for ours, theirs in RATIOS[backend]:
        if ours in sides and theirs in sides:
            cells = [f"**{results.ratio(ours, theirs, model):.2f}**" for model in STEPS]
            rows.append((f"samples/s, {titles[ours]} ÷ {titles[theirs]}", cells))
    return compare.table(backend, STEPS, rows)


def main():
    parser = compare.parser(__doc__, SIDES)
    parser.add_argument("--side", action="append", help="only this side (may be repeated)")
    options = parser.parse_args()
    for backend in compare.installed(options, SIDES):
        sides = sides_of(backend, options.side)
        results = compare.measure(
            backend,
            lambda side, model, steps: [sys.executable, SIDE, side, model, steps],
            sides,
            STEPS,
            options,
        )
        print(table(backend, sides, results), flush=True)


if __name__ == "__main__":
    main()
