"""What a strategy adds to a step of plain `fit`, on one device's worth of work.

    python benchmarks/alternating.py

`pk.DataParallel(1)` and `strategy="model"` compute what plain Keras computes, so the ratio
to look for is one, and the noise between two processes (10 to 30 % here) would hide it. So
the two models train in turn in one process, a few dozen steps at a time. A turn counts with
the median of its steps, and a figure is the median over the pairs of turns of their ratio,
which a machine that is faster now and slower then does not move. Run one model and backend in
a process of its own with

    KERAS_BACKEND=torch python benchmarks/alternating.py --one "data=1" mlp
"""

import json
import pathlib
import statistics
import sys

# The models, their data and how they are timed are those of data parallel.
sys.path.append(str(pathlib.Path(__file__).parent / "data_parallel"))
import compare

STRATEGIES = {
    "data=1": "`fit`, `pk.DataParallel(1)`",
    "model=2": '`fit`, strategy="model", 2 devices',
}
STEPS = {"mlp": 40, "cnn": 24, "transformer": 16}
WARM_UP = 4
TURNS, QUICK_TURNS = 20, 2


def alternate(strategy, name, turns):
    """Train plain and under the strategy in turn, and report the medians."""
    import models
    import sides

    import parallel_keras as pk

    data = models.data(name, STEPS[name] + WARM_UP)
    trained = {"plain": sides.compiled(name)}
    trained["ours"] = pk.parallelize(sides.compiled(name), strategy)
    times = {side: [] for side in trained}

    def turn(side):
        batch_size = models.BATCH[name]
        ends = sides.times_of_fit(trained[side], *data, batch_size=batch_size, shuffle=True)
        return sides.milliseconds(ends, WARM_UP)

    for side in trained:  # what is traced and measured once
        turn(side)
    for number in range(turns):
        # There and back, so that neither is always the first after the other.
        for side in list(trained) if number % 2 else reversed(trained):
            times[side].append(turn(side))
    found = {side: statistics.median(medians) for side, medians in times.items()}
    pairs = zip(times["plain"], times["ours"], strict=True)
    found["ratio"] = statistics.median(plain / ours for plain, ours in pairs)
    print("RESULT " + json.dumps(found), flush=True)


def ratios(backend, strategy, turns):
    """Each model in a process of its own; how fast ours is, plain Keras being one."""
    for name in STEPS:
        command = [sys.executable, __file__, "--rounds", turns, "--one", strategy, name]
        found = compare.run(backend, command)
        print(backend, strategy, name, found, flush=True)
        yield f"**{found['ratio']:.2f}**"


def main():
    parser = compare.parser(__doc__, ("tensorflow", "torch"))
    parser.add_argument("--one", nargs=2, metavar=("STRATEGY", "MODEL"))
    parser.set_defaults(rounds=TURNS)
    options = parser.parse_args()
    turns = QUICK_TURNS if options.quick else options.rounds
    if options.one:
        alternate(*options.one, turns)
        return
    for backend in compare.installed(options, ("tensorflow", "torch")):
        rows = [
            (f"samples/s, {title} ÷ plain `fit`", list(ratios(backend, strategy, turns)))
            for strategy, title in STRATEGIES.items()
        ]
        print(compare.table(backend, STEPS, rows), flush=True)


if __name__ == "__main__":
    main()
