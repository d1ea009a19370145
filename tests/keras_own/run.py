"""Runs Keras's own tests with every model under a strategy, next to plain Keras.

    KERAS_BACKEND=torch python tests/keras_own/run.py data=2 model pipeline=2
    KERAS_BACKEND=torch python tests/keras_own/run.py data=2 --tests callbacks -k early

The tests are those of the installed wheel. They run once as they are and once under
each strategy, each time in a process of its own. Ends with 1 where a test fails, or
gives other numbers, that known.toml does not explain. docs/keras_tests.md holds the counts.
"""

import argparse
import importlib.util
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import tomllib

import verdicts

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
TESTS = ("trainers/trainer_test.py", "callbacks", "models", "saving")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("strategies", nargs="+", help="such as data=2, model, pipeline=2")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="paths below keras/src")
    parser.add_argument("-k", dest="chosen", help="as in pytest")
    parser.add_argument("--timeout", default="120", help="seconds for one test")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder to keep, and find, records in")
    arguments = parser.parse_args()
    backend = os.environ.get("KERAS_BACKEND")
    if backend not in ("tensorflow", "torch"):
        parser.error("set KERAS_BACKEND to tensorflow or torch")
    lines = [
        verdicts.Known(**{key: v if isinstance(v, str) else tuple(v) for key, v in line.items()})
        for line in tomllib.loads((HERE / "known.toml").read_text())["known"]
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or pathlib.Path(scratch)
        folder.mkdir(exist_ok=True, parents=True)
        plain = record("single", folder, arguments)
        columns = {
            strategy: verdicts.judge(plain, record(strategy, folder, arguments))
            for strategy in arguments.strategies
        }
    sys.exit(report(columns, lines, backend))


def record(strategy, folder, arguments):
    """What each test gave under a strategy."""
    path = folder / f"{os.environ['KERAS_BACKEND']}-{strategy.replace(',', '-')}.pickle"
    if arguments.keep is None or not path.exists():
        packages = pathlib.Path(importlib.util.find_spec("keras").origin).parent.parent
        before = os.environ.get("PYTHONPATH")
        paths = [str(REPOSITORY), str(HERE), *([before] if before else [])]
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={packages}"]
        command += ["-p", "passing", "-p", "no:cacheprovider", "-q", "-W", "ignore", "--tb=no"]
        command += ["--continue-on-collection-errors", f"--timeout={arguments.timeout}"]
        command += [f"--pass-through={strategy}", f"--record={path}"]
        command += ["-k", arguments.chosen] if arguments.chosen else []
        print(f"---- {strategy}", flush=True)
        subprocess.run(
            command + [f"keras/src/{test}" for test in arguments.tests],
            cwd=packages,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    return pickle.loads(path.read_bytes())


def report(columns, lines, backend):
    """Print what came of each strategy; 1 where something is new, else 0."""
    news = 0
    print(f"\n{verdicts.as_markdown({f'{s}, {backend}': v for s, v in columns.items()})}")
    for strategy, found in columns.items():
        known = [line for line in lines if line.applies(strategy.split("=")[0], backend)]
        explained, new = verdicts.split(found, known)
        for line in known:
            tests = [verdict.test for verdict, reason in explained if reason is line]
            if tests:
                print(f"\n{strategy}: {line.kind}, known: {line.why}")
                print("".join(f"    {test}\n" for test in tests), end="")
        for verdict in new:
            print(f"\nNEW, {strategy}: {verdict.kind}: {verdict.test}\n    {verdict.detail[-600:]}")
        news += len(new)
    return 1 if news else 0


if __name__ == "__main__":
    main()
