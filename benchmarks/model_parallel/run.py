"""`fit` with "model" on two CPU devices against plain `fit`, side by side.

    python benchmarks/model_parallel/run.py             the table of README.md
    python benchmarks/model_parallel/run.py --quick     does it run at all

Each side is a process of its own. A round runs every side once; a figure is the
median over the rounds of the median milliseconds per step. Do not do anything
else on the machine meanwhile.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
# The models, their data, and the plain side are those of data parallel.
sys.path.append(str(HERE.parent / "data_parallel"))

MODELS = ("mlp", "cnn", "transformer")
BACKENDS = ("tensorflow", "torch")
SIDES = ("laid_out", "plain")
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


def run(backend, side, model, steps):
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, __file__, "--one", side, model, str(steps)],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{backend} {side} {model} failed\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[-1][len("RESULT ") :])["ms"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "MODEL", "STEPS"))
    options = parser.parse_args()
    if options.one:
        side, model, steps = options.one
        globals()[side](model, int(steps))
        return
    for backend in options.backend or BACKENDS:
        if importlib.util.find_spec(backend) is None:
            continue
        found: dict = {}
        for model in MODELS:
            for _ in range(1 if options.quick else options.rounds):
                for side in SIDES:
                    steps = 12 if options.quick else STEPS[model]
                    found.setdefault((side, model), []).append(run(backend, side, model, steps))
        medians = {key: statistics.median(values) for key, values in found.items()}
        print(f"| {backend} | " + " | ".join(MODELS) + " |\n|---|" + "---:|" * len(MODELS))
        for side, title in (("laid_out", '`fit`, strategy="model"'), ("plain", "plain `fit`")):
            cells = [f"{medians[side, model]:.1f}" for model in MODELS]
            print(f"| {title}, ms a step | " + " | ".join(cells) + " |")
        ratios = [f"**{medians['plain', m] / medians['laid_out', m]:.2f}**" for m in MODELS]
        print("| samples/s, ratio | " + " | ".join(ratios) + " |\n", flush=True)


if __name__ == "__main__":
    main()
