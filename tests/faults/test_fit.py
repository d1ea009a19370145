"""What goes wrong in a fit ends it in the caller, soon, with the reason, and leaves nothing.

Each case is a program of its own, started as a user starts it, since a broken
pool, signals and orphans are matters of whole processes.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

BACKEND = os.environ.get("KERAS_BACKEND")
pytestmark = pytest.mark.backend("torch")  # TensorFlow has no processes of ours
long = pytest.mark.long

HEAD = """
import os, signal, sys, threading, time
import keras
import numpy as np
import parallel_keras as pk

MARK = sys.argv[1]

def tell(word):
    print(word, flush=True)

class Trouble(keras.layers.Layer):
    "Does what `kind` says in a worker, at the third training step."
    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind, self.calls, self.caller = kind, 0, os.getpid()
    def call(self, x, training=False):
        if os.getpid() != self.caller and training:
            self.calls += 1
            if self.calls == 3:
                if self.kind == "raise":
                    raise ArithmeticError("a mistake of the user's own")
                if self.kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.kind == "exit":
                    os._exit(7)
                if self.kind == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if self.kind == "sleep":
                    time.sleep(600)
        return x * 1.0

def make(kind="", timeout=8, replicas=2):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(8), Trouble(kind), keras.layers.Dense(1)]
    model = pk.parallelize(keras.Sequential(layers), pk.DataParallel(replicas, timeout=timeout))
    model.compile("sgd", "mse")
    return model

def make_stages(kind="", timeout=8, stages=2, **options):
    "The last stage is where the trouble is."
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(8), Trouble(kind)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    strategy = pk.PipelineParallel(stages, microbatches=2, balance=[2] * stages, timeout=timeout)
    pk.parallelize(model, strategy)
    model.compile("sgd", "mse")
    return model

x, y = np.ones((64, 8), "float32"), np.ones((64, 1), "float32")

def children():
    import psutil
    return [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]

def fits_again():
    good = make()
    good.fit(x, y, batch_size=8, verbose=0)
    tell("FITS AGAIN")
"""


def start(tmp_path, body, name="program.py"):
    path = tmp_path / name
    path.write_text(HEAD + body)
    return subprocess.Popen(
        [sys.executable, str(path), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )


def workers_at_a_step(process):
    """The processes that a program has started, once it prints `STEP`."""
    for line in process.stdout:
        if "STEP" in line:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert family, "the fit had no worker"
    return family


def check_gone(family):
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, alive


def kill_at_a_step(process):
    """Kill a program, and see that its workers end too."""
    family = workers_at_a_step(process)
    process.kill()
    check_gone(family)


def finish(process, timeout=180):
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raise", ("Rank 1", "ArithmeticError", "a mistake of the user's own")),
        ("kill", ("Rank 1", "SIGKILL")),
        pytest.param("exit", ("Rank 1", "7"), marks=long),
        pytest.param("stop", ("Rank 1", "stopped"), marks=long),
        ("sleep", ("Rank 1", "no progress", "in call")),
    ],
)
def test_a_worker_in_trouble_ends_the_fit(kind, words, tmp_path):
    body = f"""
model, begin = make({kind!r}), time.time()
try:
    model.fit(x, y, batch_size=8, verbose=0)
except pk.WorkerError as error:
    assert error.rank == 1, error.rank
    tell(str(error))
    tell(f"SECONDS {{time.time() - begin:.1f}}")
assert not children(), children()
fits_again()
"""
    output = finish(start(tmp_path, body))
    for word in words:
        assert word in output, output
    assert "FITS AGAIN" in output, output
    assert float(output.split("SECONDS ")[1].split()[0]) < 45


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raise", ("Rank 1", "ArithmeticError", "a mistake of the user's own")),
        ("kill", ("Rank 1", "SIGKILL")),
        pytest.param("stop", ("Rank 1", "stopped"), marks=long),
        pytest.param("sleep", ("Rank 1", "no progress", "in call"), marks=long),
    ],
)
def test_a_stage_in_trouble_ends_the_fit_and_the_model_is_whole(kind, words, tmp_path):
    """Weights of both stages are those of the same moment: the epoch's beginning."""
    body = f"""
def fit(model, epochs):
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)
    return model.get_weights()
after_one = fit(make_stages(), 1)
model, begin = make_stages({kind!r}), time.time()
try:
    fit(model, 9)  # two micro-batches to a batch: the third call is in the second epoch
except pk.WorkerError as error:
    assert error.rank == 1, error.rank
    tell(str(error))
    tell(f"SECONDS {{time.time() - begin:.1f}}")
assert not children(), children()
assert all((a == b).all() for a, b in zip(model.get_weights(), after_one))
assert int(model.optimizer.iterations) == 1, model.optimizer.iterations
tell("WHOLE")
model.layers[-2].kind = ""
two = fit(model, 1)
assert all(abs(a - b).max() < 1e-6 for a, b in zip(two, fit(make_stages(), 2)))
tell("FITS AGAIN")
"""
    output = finish(start(tmp_path, body))
    for word in (*words, "epoch's beginning", "WHOLE", "FITS AGAIN"):
        assert word in output, output
    assert float(output.split("SECONDS ")[1].split()[0]) < 45


@pytest.mark.parametrize(
    ("model", "when"),
    [
        ("accumulating()", "on_train_end"),
        pytest.param("make_stages(timeout=4)", "on_train_end", marks=long),
        pytest.param("make(timeout=4)", "timeline", marks=long),
    ],
)
def test_a_worker_that_stops_after_the_last_step_is_named(model, when, tmp_path):
    """What the workers hold is fetched when a fit has ended, and when somebody asks."""
    body = f"""
from parallel_keras.backends.torch import workers
def accumulating():
    model = make(timeout=4)
    model.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=3), "mse")
    return model
class Stop(keras.callbacks.Callback):
    def {when}(self, logs=None):
        os.kill(workers._pool.workers[0].process.pid, signal.SIGSTOP)
model, begin = {model}, time.time()
try:
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[Stop()])
    if {when == "timeline"}:
        Stop().timeline()
        model.timeline()
except pk.WorkerError as error:
    assert error.rank == 1, error.rank
    tell(str(error))
    tell(f"SECONDS {{time.time() - begin:.1f}}")
assert not children(), children()
assert "reset_metrics" not in vars(model)
tell(f"FINITE {{np.isfinite(model.evaluate(x, y, verbose=0))}}")
fits_again()
"""
    output = finish(start(tmp_path, body))
    for word in ("Rank 1", "stopped", "FINITE True", "FITS AGAIN"):
        assert word in output, output
    assert float(output.split("SECONDS ")[1].split()[0]) < 45


def test_no_stage_outlives_a_killed_caller(tmp_path):
    body = """
model = make_stages(stages=2)
step = lambda batch, logs: tell("STEP") if batch == 2 else None
model.fit(np.repeat(x, 50, 0), np.repeat(y, 50, 0), batch_size=8, verbose=0, epochs=100,
          callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=step)])
"""
    kill_at_a_step(start(tmp_path, body))


def test_an_exception_in_a_callback_reaches_the_user_as_it_is(tmp_path):
    body = """
def fail(batch, logs):
    if batch == 2: raise KeyError("in the callback")
try:
    make().fit(x, y, batch_size=8, verbose=0,
               callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=fail)])
except KeyError as error:
    tell(f"CAUGHT {error}")
fits_again()
"""
    output = finish(start(tmp_path, body))
    assert "CAUGHT 'in the callback'" in output
    assert "FITS AGAIN" in output


def test_an_exception_in_the_data_reaches_the_user_as_it_is(tmp_path):
    body = """
def rows():
    yield x[:8], y[:8]
    raise OSError("the disk is gone")
try:
    make().fit(rows(), steps_per_epoch=5, verbose=0)
except OSError as error:
    tell(f"CAUGHT {error}")
fits_again()
"""
    output = finish(start(tmp_path, body))
    assert "CAUGHT the disk is gone" in output
    assert "FITS AGAIN" in output


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(times, tmp_path):
    body = """
def step(batch, logs):
    if batch == 2: tell("STEP")
    time.sleep(0.05)
try:
    make().fit(np.repeat(x, 50, 0), np.repeat(y, 50, 0), batch_size=8, verbose=0,
               callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=step)])
except KeyboardInterrupt:
    tell("INTERRUPTED")
"""
    process = start(tmp_path, body)
    family = workers_at_a_step(process)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    process.communicate(timeout=30)
    check_gone(family)


@pytest.mark.parametrize("when", [pytest.param("idle", marks=long), "training"])
def test_no_worker_outlives_a_killed_caller(when, tmp_path):
    body = f"""
model = make()
step = lambda batch, logs: tell("STEP") if batch == 2 and {when!r} == "training" else None
many = 50 if {when!r} == "training" else 1
model.fit(np.repeat(x, many, 0), np.repeat(y, many, 0), batch_size=8, verbose=0,
          epochs=100 if many > 1 else 1,
          callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=step)])
tell("STEP")
time.sleep(60)
"""
    kill_at_a_step(start(tmp_path, body))


def test_two_jobs_at_once(tmp_path):
    body = """
make().fit(x, y, batch_size=8, epochs=3, verbose=0)
tell("DONE")
"""
    jobs = [start(tmp_path, body, f"job{i}.py") for i in range(2)]
    assert all("DONE" in finish(job) for job in jobs)


@long
def test_a_small_shared_memory_mount_is_no_trouble(tmp_path):
    body = """
before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
big = np.ones((64, 500_000), "float32")  # 128 MB, 64 MB of it for the worker
model = pk.parallelize(keras.Sequential([keras.layers.Dense(1)]), pk.DataParallel(2))
model.compile("sgd", "mse")
def look(batch, logs):
    if os.path.isdir("/dev/shm"):
        tell(f"FILES {sorted(set(os.listdir('/dev/shm')) - before)}")
model.fit(big, y, batch_size=64, verbose=0,
          callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=look)])
tell("DONE")
"""
    output = finish(start(tmp_path, body))
    assert "DONE" in output
    assert "FILES" not in output or "FILES []" in output, output


def test_a_model_that_cannot_be_shipped_names_the_object(tmp_path):
    body = """
class Holds(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.handle = threading.Lock()
    def call(self, x): return x
model = pk.parallelize(keras.Sequential([Holds(), keras.layers.Dense(1)]), "data")
model.compile("sgd", "mse")
try:
    model.fit(x, y, verbose=0)
except ValueError as error:
    tell(f"{type(error).__name__} {error}")
"""
    output = finish(start(tmp_path, body))
    assert "UnsupportedError" in output
    assert "handle" in output


@long
def test_nothing_is_left_in_the_temporary_folder(tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    body = """
import tempfile
tempfile.tempdir = MARK + "/tmp"
make().fit(x, y, batch_size=8, verbose=0)
pk.shutdown()
tell("DONE")
"""
    assert "DONE" in finish(start(tmp_path, body))
    assert not list(pathlib.Path(folder).iterdir())


@long
def test_clear_session_ends_the_workers(tmp_path):
    body = """
make().fit(x, y, batch_size=8, verbose=0)
assert children()
keras.utils.clear_session()
time.sleep(1)
tell(f"LEFT {len(children())}")
fits_again()
"""
    output = finish(start(tmp_path, body))
    assert "LEFT 0" in output, output
    assert "FITS AGAIN" in output
