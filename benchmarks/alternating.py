"""What a strategy adds to a step of plain `fit`, on one device's worth of work.

    python benchmarks/alternating.py

`pk.DataParallel(1)` and `strategy="model"` compute what plain Keras computes, so the ratio
to look for is one, and the noise between two processes (10 to 30 % here) would hide it. So
the two models train in turn in one process, a few dozen steps at a time. A turn counts with
the median of its steps, and a figure is the median over the pairs of turns of their ratio,
which a machine that is faster now and slower then does not move. Run one model and backend in
a process of its own with

    KERAS_BACKEND=torch python benchmarks/alternating.py "data=1" mlp
"""

import json
import pathlib
import statistics
import sys
import time

sys.path += [
    str(pathlib.Path(__file__).parent / "data_parallel"),
    str(pathlib.Path(__file__).parent),
]
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
    import keras
    import models

    import parallel_keras as pk

    def compiled():
        keras.utils.set_random_seed(0)
        model = models.KERAS[name]()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    x, y = models.data(name, STEPS[name] + WARM_UP)
    sides = {"plain": compiled(), "ours": pk.parallelize(compiled(), strategy)}
    times = {side: [] for side in sides}

    def turn(side):
        ends = []
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
        )
        batch = models.BATCH[name]
        sides[side].fit(x, y, batch_size=batch, shuffle=True, verbose=0, callbacks=[watch])
        steps = zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)
        return [1000 * (end - start) for start, end in steps]

    for side in sides:  # what is traced and measured once
        turn(side)
    for number in range(turns):
        # There and back, so that neither is always the first after the other.
        for side in list(sides) if number % 2 else reversed(list(sides)):
            times[side].append(statistics.median(turn(side)))
    found = {side: statistics.median(medians) for side, medians in times.items()}
    pairs = zip(times["plain"], times["ours"], strict=True)
    found["ratio"] = statistics.median(plain / ours for plain, ours in pairs)
    print("RESULT " + json.dumps(found), flush=True)


def ratios(backend, strategy, more):
    """Each model in a process of its own; how fast ours is, plain Keras being one."""
    for name in STEPS:
        found = compare.run(backend, [sys.executable, __file__, strategy, name, *more])
        print(backend, strategy, name, found, flush=True)
        yield f"**{found['ratio']:.2f}**"


def main():
    parser = compare.parser(__doc__, ("tensorflow", "torch"))
    parser.add_argument("alone", nargs="*", metavar="STRATEGY MODEL")
    options = parser.parse_args()
    if options.alone:
        alternate(*options.alone, QUICK_TURNS if options.quick else TURNS)
        return
    more = ["--quick"] if options.quick else []
    for backend in compare.installed(options, ("tensorflow", "torch")):
        rows = [
            (f"samples/s, {title} ÷ plain `fit`", list(ratios(backend, strategy, more)))
            for strategy, title in STRATEGIES.items()
        ]
        print(compare.table(backend, STEPS, rows), flush=True)


if __name__ == "__main__":
    main()
