"""Pipelines against one device, side by side.

    python benchmarks/pipeline/run.py             the tables of README.md
    python benchmarks/pipeline/run.py --quick     does it run at all

Each side is a process of its own, and each device computes with one thread. A round runs
every side once; a figure is the median over the rounds of the median milliseconds per
step. Do not do anything else on the machine meanwhile.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import compare

BACKENDS = ("tensorflow", "torch")
SLEEP_MS = {"sleep": 400.0, "nap": 200.0}  # models.SLEEP
COUNTS = (2, 4, 8)


def command(side, model, steps):
    return [sys.executable, pathlib.Path(__file__).parent / "sides.py", side, model, steps]


def ideal(stages, microbatches):
    """The time of a step of even stages, as a share of that on one device."""
    return (microbatches + stages - 1) / (microbatches * stages)


def sleeping(backend, options):
    """Stages that sleep: what a step takes above the ideal."""
    rows = []
    for model in ("sleep2", "sleep4", "nap2", "nap4"):
        stages, asleep = int(model[-1]), SLEEP_MS[model[:-1]]
        results = compare.measure(backend, command, ["pipeline_8"], {model: 16}, options)
        best = asleep * stages * ideal(stages, 8)
        found = results.median("pipeline_8", model)
        cells = [f"{best:.1f}", f"{found:.1f}", f"**{found / best:.2f}**"]
        rows.append((f"{stages} stages that sleep {asleep:.0f} ms", cells))
    return compare.table(backend, ["ideal, ms", "a step, ms", "ratio"], rows)


def heavy(backend, options):
    """Dense layers: how much of the ideal speed-up is there."""
    sides = ["plain", *(f"pipeline_{m}" for m in (1, *COUNTS)), "gpipe_8", "recompute_8"]
    peers = [f"pipelining_{m}" for m in COUNTS] if backend == "torch" else []
    results = compare.measure(backend, command, [*sides, *peers], {"heavy": 24}, options)
    rows = [("plain `fit`", [f"{results.median('plain', 'heavy'):.1f}", "1.00", "", "", ""])]
    for side in sides[1:] + peers:
        kind, _, count = side.partition("_")
        best = 1 / ideal(2, int(count))
        ratio = results.ratio(side, "plain", "heavy")
        cells = [f"{results.median(side, 'heavy'):.1f}", f"{ratio:.2f}", f"**{ratio / best:.2f}**"]
        if kind == "pipelining":
            cells += ["", ""]
        else:
            predicted = results.median(side, "heavy", "predicted_ms")
            cells.append(f"{predicted / results.median(side, 'heavy'):.2f}")
            cells.append(f"{results.median(side, 'heavy', 'alive'):.0f}")
        rows.append((f"{TITLES[kind]}, {count} micro-batches", cells))
    return compare.table(
        backend,
        ["ms", "speed-up", "of ideal", "predicted ÷ measured", "kept on stage 0"],
        rows,
    )


TITLES = {
    "pipeline": '"1f1b"',
    "gpipe": '"gpipe"',
    "recompute": '"1f1b", recompute',
    "pipelining": "torch.distributed.pipelining, 1F1B",
}


def uneven(backend, options):
    """A model whose first layers are wide, cut by cost and in the middle."""
    sides = ["pipeline_8", "even_8"]
    results = compare.measure(backend, command, sides, {"uneven": 24}, options)
    rows = [
        ("cut by cost", [f"{results.median('pipeline_8', 'uneven'):.1f}"]),
        ("half of the layers each", [f"{results.median('even_8', 'uneven'):.1f}"]),
        ("ratio", [f"**{results.ratio('pipeline_8', 'even_8', 'uneven'):.2f}**"]),
    ]
    return compare.table(backend, ["ms"], rows)


def main():
    parser = compare.parser(__doc__, BACKENDS)
    parser.add_argument("--part", choices=["sleeping", "heavy", "uneven"], action="append")
    options = parser.parse_args()
    for backend in compare.installed(options, BACKENDS):
        for part in options.part or ("sleeping", "heavy", "uneven"):
            print(globals()[part](backend, options) + "\n", flush=True)


if __name__ == "__main__":
    main()
