"""Runs all sides, interleaved, and prints tables of ratios.

    python benchmarks/data_parallel/run.py             the table of README.md
    python benchmarks/data_parallel/run.py --quick     does it run at all

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
MODELS = ("mlp", "cnn", "transformer")
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


def run(backend, side, model, steps):
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, str(HERE / "sides.py"), side, model, str(steps)],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{backend} {side} {model} failed\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[-1][len("RESULT ") :])


def measure(backend, rounds, quick, only):
    sides = [
        side
        for side, _ in SIDES[backend]
        if (not only or side in only)
        and (side not in NEEDS or importlib.util.find_spec(NEEDS[side]) is not None)
    ]
    results = {}
    for model in MODELS:
        for _ in range(rounds):
            for side in sides:
                steps = 12 if quick else STEPS[model]
                results.setdefault((side, model), []).append(run(backend, side, model, steps))
                print(backend, model, side, results[side, model][-1], flush=True)
    return sides, results


def table(backend, sides, results):
    titles = dict(SIDES[backend])
    lines = [f"| {backend} | " + " | ".join(MODELS) + " |", "|---|" + "---:|" * len(MODELS)]
    for side in sides:
        cells = [f"{_median(results, side, m, 'ms'):.1f}" for m in MODELS]
        lines.append(f"| {titles[side]}, ms a step | " + " | ".join(cells) + " |")
        if "waiting" in results[side, MODELS[0]][0]:
            shares = [f"{100 * _median(results, side, m, 'waiting'):.1f} %" for m in MODELS]
            lines.append("| … of which waiting for data | " + " | ".join(shares) + " |")
    for ours, theirs in RATIOS[backend]:
        if ours in sides and theirs in sides:
            cells = [
                f"**{_median(results, theirs, m, 'ms') / _median(results, ours, m, 'ms'):.2f}**"
                for m in MODELS
            ]
            name = f"samples/s, {titles[ours]} ÷ {titles[theirs]}"
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _median(results, side, model, key):
    return statistics.median(result[key] for result in results[side, model])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", choices=SIDES, action="append")
    parser.add_argument("--side", action="append", help="only this side (may be repeated)")
    options = parser.parse_args()
    for backend in options.backend or SIDES:
        if importlib.util.find_spec(backend) is None:
            continue
        rounds = 1 if options.quick else options.rounds
        print(table(backend, *measure(backend, rounds, options.quick, options.side)), flush=True)


if __name__ == "__main__":
    main()
