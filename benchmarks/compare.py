"""Compares the sides of a benchmark: each in a process of its own, interleaved, in medians.

A side is a program that prints a line `RESULT {"ms": 1.5}` with what it has measured. A
round runs every side once; a figure is the median over the rounds.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess

_RESULT = "RESULT "
_QUICK_STEPS = 12


def parser(description, backends):
    """The options that all benchmarks have."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--quick", action="store_true", help="a few steps, one round")
    result.add_argument("--rounds", type=int, default=5)
    result.add_argument("--backend", choices=list(backends), action="append")
    return result


def installed(options, backends):
    """The backends that were asked for, as far as they are there."""
    return [name for name in options.backend or backends if importlib.util.find_spec(name)]


class Results:
    """What the sides have measured, by side and model."""

    def __init__(self):
        self._found: dict = {}

    def add(self, side, model, figures):
        self._found.setdefault((side, model), []).append(figures)

    def has(self, side, key):
        """Whether this is among what a side measures."""
        return any(key in rounds[0] for (name, _), rounds in self._found.items() if name == side)

    def median(self, side, model, key="ms"):
        return statistics.median(figures[key] for figures in self._found[side, model])

    def ratio(self, ours, theirs, model):
        """How many samples of ours in the time of one of theirs."""
        return self.median(theirs, model) / self.median(ours, model)


def measure(backend, command, sides, steps, options):
    """Run all sides on all models.

    Args:
        backend: String. The Keras backend.
        command: Function of a side, a model and a number of steps: the program to run.
        sides: List of names.
        steps: Dict from the name of a model to the steps to measure.
        options: What `parser` has read.

    Returns:
        `Results`.
    """
    results = Results()
    for model in steps:
        for _ in range(1 if options.quick else options.rounds):
            for side in sides:
                count = _QUICK_STEPS if options.quick else steps[model]
                figures = run(backend, command(side, model, count))
                print(backend, model, side, figures, flush=True)
                results.add(side, model, figures)
    return results


def run(backend, command):
    """What a program that is a side, or several in turn, has measured."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [str(part) for part in command]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not lines:
        raise SystemExit(f"{backend}: {' '.join(command)} failed\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[-1].removeprefix(_RESULT))


def table(corner, columns, rows):
    """A table in Markdown.

    Args:
        corner: String. What stands above the titles of the rows.
        columns: The titles of the columns.
        rows: List of pairs of a title and a list of cells.
    """
    lines = [f"| {corner} | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {title} | " + " | ".join(cells) + " |" for title, cells in rows]
    return "\n".join(lines)
