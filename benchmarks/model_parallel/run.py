"""`fit` with "model" on two CPU devices against plain `fit`, side by side.

    python benchmarks/model_parallel/run.py             the table of README.md
    python benchmarks/model_parallel/run.py --quick     does it run at all

Each side is a process of its own. A round runs every side once; a figure is the
median over the rounds of the median milliseconds per step. Do not do anything
else on the machine meanwhile.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
# The models, their data, and the plain side are those of data parallel.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "data_parallel"))
import compare

BACKENDS = ("tensorflow", "torch")
SIDES = {"laid_out": '`fit`, strategy="model"', "plain": "plain `fit`"}
STEPS = {"mlp": 120, "cnn": 80, "transformer": 60}


def laid_out(name, steps):
    """`pk.ModelParallel(2)`, with the layers split by the package."""
    import sides

    import parallel_keras as pk

    sides.fit(pk.parallelize(sides.compiled(name), pk.ModelParallel(2)), name, steps)


def plain(name, steps):
    """One device, plain Keras."""
    import sides

    sides.plain(name, steps)


def command(side, model, steps):
    return [sys.executable, __file__, "--one", side, model, steps]


def table(backend, results):
    rows = [
        (f"{title}, ms a step", [f"{results.median(side, model):.1f}" for model in STEPS])
        for side, title in SIDES.items()
    ]
    ratios = [f"**{results.ratio('laid_out', 'plain', model):.2f}**" for model in STEPS]
    return compare.table(backend, STEPS, [*rows, ("samples/s, ratio", ratios)])


def main():
    parser = compare.parser(__doc__, BACKENDS)
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "MODEL", "STEPS"))
    options = parser.parse_args()
    if options.one:
        side, model, steps = options.one
        globals()[side](model, int(steps))
        return
    for backend in compare.installed(options, BACKENDS):
        results = compare.measure(backend, command, SIDES, STEPS, options)
        print(table(backend, results), flush=True)


if __name__ == "__main__":
    main()
