"""Compares what Keras's tests gave with no strategy and with one. Pure."""

import dataclasses
import fnmatch
from collections import Counter

import numpy as np

PASSED = "passed, with the numbers of plain Keras"
NO_MODEL = "passed, and ran no model under the strategy"
REFUSED = "refused by name"
NUMBERS = "other numbers"
FAILED = "failed"
PLAIN = "fails in plain Keras too"
SKIPPED = "skipped by Keras"
VERDICTS = (PASSED, NO_MODEL, REFUSED, NUMBERS, FAILED, PLAIN, SKIPPED)

# Of the largest number of an array, or of one.
TOLERANCE = 1e-5


@dataclasses.dataclass
class Verdict:
    """What became of one test.

    Attributes:
        test: String, the test's name below `keras/src/`.
        kind: One of `VERDICTS`.
        detail: String: the feature that was refused, the difference, the error.
    """

    test: str
    kind: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Known:
    """A line of known.toml: tests that do not pass, and why.

    Attributes:
        tests: Tuple of patterns of names, as in `fnmatch`.
        kind: `FAILED` or `NUMBERS`.
        why: String.
        strategies: Tuple of the names of strategies, empty for all.
        backends: Tuple of backends, empty for both.
    """

    tests: tuple
    kind: str
    why: str
    strategies: tuple = ()
    backends: tuple = ()

    def covers(self, verdict):
        """Whether this is the reason of a verdict."""
        return verdict.kind == self.kind and any(
            fnmatch.fnmatch(verdict.test, pattern) for pattern in self.tests
        )

    def applies(self, strategy, backend):
        """Whether the line is about a strategy on a backend."""
        return (not self.strategies or strategy in self.strategies) and (
            not self.backends or backend in self.backends
        )


def judge(plain, spread):
    """Verdicts of the tests that both runs ran.

    Args:
        plain: Dict from a test's name to its notes, as `passing.py` writes them,
            of the run without a strategy.
        spread: The same, of the run with one.
    """
    return [
        Verdict(test.removeprefix("keras/src/"), *_judge(plain[test], notes))
        for test, notes in spread.items()
        if test in plain
    ]


def _judge(plain, spread):
    if plain["outcome"] == "skipped":
        return SKIPPED, ""
    if plain["outcome"] == "failed":
        return PLAIN, plain["message"]
    difference = _difference(plain["calls"], spread["calls"])
    refused = spread["refused"]
    if refused:
        # What ran before that has to be right.
        ran = [call for call in spread["calls"] if not isinstance(call[1], str)]
        before = _difference(plain["calls"][: len(ran)], ran)
        if before and len(ran) == len(spread["calls"]) - 1:
            return NUMBERS, before
        return REFUSED, refused[0]
    if spread["outcome"] != "passed":
        return FAILED, spread["message"]
    if difference:
        return NUMBERS, difference
    return (PASSED if spread["spread"] else NO_MODEL), ""


def _difference(expected, received):
    """In what two lists of calls differ, in words; empty where they do not."""
    if [name for name, _ in expected] != [name for name, _ in received]:
        return f"calls {[name for name, _ in received]}, not {[name for name, _ in expected]}"
    for (name, one), (_, other) in zip(expected, received, strict=True):
        text = _unequal(one, other)
        if text:
            return f"{name}: {text}"
    return ""


def _unequal(one, other):
    if isinstance(one, str) or isinstance(other, str):  # an error
        return "" if one == other else f"{other}, not {one}"
    if [path for path, _ in one] != [path for path, _ in other]:
        return f"{[path for path, _ in other]}, not {[path for path, _ in one]}"
    for (path, a), (_, b) in zip(one, other, strict=True):
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            text = _far(a, b)
        else:
            text = "" if type(a) is type(b) and a == b else f"{b!r}, not {a!r}"
        if text:
            return f"{path}: {text}"
    return ""


def _far(one, other):
    if one.shape != other.shape:
        return f"shape {other.shape}, not {one.shape}"
    if one.dtype.kind not in "fiub":
        return "" if np.array_equal(one, other) else f"{other!r}, not {one!r}"
    a, b = one.astype("float64"), other.astype("float64")
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return f"{other!r}, not {one!r}"
    finite = np.isfinite(a)
    largest = max(1.0, np.abs(a[finite]).max(initial=0))
    distance = np.abs(a[finite] - b[finite]).max(initial=0) / largest
    return f"differs by {distance:.1e}" if distance > TOLERANCE else ""


def split(verdicts, known):
    """Which verdicts are new.

    Args:
        verdicts: List of `Verdict`.
        known: List of `Known` that apply.

    Returns:
        A list of pairs of a `Verdict` and its `Known`, and a list of the new.
    """
    explained, new = [], []
    for verdict in verdicts:
        if verdict.kind in (FAILED, NUMBERS):
            line = next((line for line in known if line.covers(verdict)), None)
            if line is None:
                new.append(verdict)
            else:
                explained.append((verdict, line))
    return explained, new


def as_markdown(columns):
    """The table of the docs.

    Args:
        columns: Dict from a title to the verdicts of a run.
    """
    rows = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for kind in VERDICTS:
        counts = [sum(v.kind == kind for v in verdicts) for verdicts in columns.values()]
        rows.append(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    features = [
        Counter(v.detail for v in verdicts if v.kind == REFUSED) for verdicts in columns.values()
    ]
    for feature in sorted(set().union(*features)):
        cells = [str(counter[feature] or "") for counter in features]
        rows.append(f"| &nbsp; of which `{feature}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)
