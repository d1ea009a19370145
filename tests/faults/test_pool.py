"""The pool of workers by itself, with no Keras model: start, serve, watch, end.

What needs a caller of its own (its death, its forked children) runs as a program.
"""

import concurrent.futures
import contextlib
import gc
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref

import psutil
import pytest

BACKEND = os.environ.get("KERAS_BACKEND")
pytestmark = pytest.mark.backend("torch")

if BACKEND == "torch":
    import torch
    from keras.src.backend.common import global_state

    from parallel_keras import keras_internals
    from parallel_keras.backends.torch import board, looking, memory, output, workers
    from parallel_keras.errors import WorkerError

HERE = str(pathlib.Path(__file__).parent)
SERVER = "pool_server:Server"


def start(world_size, timeout=20, pool=None):
    pool = pool or workers.Pool(SERVER)
    pool.want(world_size, [f"cpu:{index}" for index in range(world_size)], timeout)
    pool.ready()
    return pool


@pytest.fixture(scope="module")
def lasting():
    """One pool for all the tests that leave it as it was."""
    pool = workers.Pool(SERVER)
    yield pool
    pool.abort()


@pytest.fixture
def pool():
    """A pool for the tests that break it."""
    pool = workers.Pool(SERVER)
    yield pool
    pool.abort()


def total(pool, values=(1.0, 2.0)):
    """The sum over the ranks, each of which gives `rank + 1` times the values."""
    pool.broadcast_message(("sum", list(values)))
    tensor = torch.tensor(values)
    pool.group.allreduce([tensor]).wait()
    return tensor.tolist()


def facts(pool, rank):
    pool.send(rank, ("facts",))
    return pool.receive(rank)[1]


def gradient_of_a_rank(group, rank):
    """One backward pass through DistributedDataParallel."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    ddp = torch.nn.parallel.DistributedDataParallel(
        module, process_group=group.of_torch, init_sync=False
    )
    ddp(torch.full((4, 3), float(rank + 1))).sum().backward()
    return module.weight.grad


# ---- serving ----


def test_the_world_grows_and_shrinks_with_the_same_workers(lasting):
    start(2, pool=lasting)
    first = facts(lasting, 1)["pid"]
    assert total(lasting) == [3.0, 6.0]
    generation = lasting.generation
    assert lasting.ready() == generation, "nothing to do"
    start(4, pool=lasting)
    assert lasting.generation != generation
    assert total(lasting) == [10.0, 20.0]
    start(3, pool=lasting)
    assert total(lasting) == [6.0, 12.0]
    assert len(lasting.workers) == 3, "the fourth rank is kept for later"
    start(2, pool=lasting)
    assert facts(lasting, 1)["pid"] == first


def test_a_worker_sees_the_same_package_and_has_its_share_of_the_machine(lasting):
    start(2, pool=lasting)
    seen = facts(lasting, 1)
    assert seen["package"] == sys.modules["parallel_keras"].__file__
    assert seen["path"] == sys.path
    assert not seen["tensorflow"], "a worker imports nothing that it does not need"
    assert seen["threads"] == workers.threads_of_a_rank(2)
    assert seen["world_size"] == 2


def test_the_users_own_torch_distributed_is_untouched(lasting):
    start(2, pool=lasting)
    assert not torch.distributed.is_initialized()
    assert not facts(lasting, 1)["default_group"]


def test_distributed_data_parallel_works_on_the_group(lasting):
    start(3, pool=lasting)
    lasting.broadcast_message(("ddp",))
    own = gradient_of_a_rank(lasting.group, 0).tolist()
    # Each rank's gradient is four times its input; DDP takes the mean.
    assert own == [[4.0 * (1 + 2 + 3) / 3] * 3] * 2
    assert lasting.receive(1)[1] == own
    assert lasting.receive(2)[1] == own


def test_regrouping_leaves_no_threads_and_one_descriptor(lasting):
    start(2, pool=lasting)
    start(3, pool=lasting)
    gc.collect()
    process = psutil.Process()
    threads, files = process.num_threads(), process.num_fds()
    sockets = len(process.net_connections())
    for _ in range(5):
        start(2, pool=lasting)
        start(3, pool=lasting)
    gc.collect()
    assert process.num_threads() <= threads + 1
    assert len(process.net_connections()) <= sockets
    assert process.num_fds() <= files + 10, "one a meeting: see memory.Meeting"


# ---- arrays and numbers ----


def test_arrays_travel_with_every_type_and_shape(lasting):
    start(2, pool=lasting)
    types = [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn),
    ]
    arrays = [torch.arange(6).reshape(2, 3).to(dtype) for dtype in types]
    arrays += [
        torch.zeros((0, 5)),
        torch.tensor(3.5),
        torch.arange(24.0).reshape(4, 6)[::2, ::3],  # not contiguous
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(2, requires_grad=True),
    ]
    layout = lasting.inbound(1).write(0, arrays)
    lasting.send(1, ("read", layout))
    back = lasting.outbound(1).read(lasting.receive(1)[1])
    assert len(back) == len(arrays)
    for sent, received in zip(arrays, back, strict=True):
        assert sent.dtype == received.dtype
        assert sent.shape == received.shape
        assert sent.tolist() == received.tolist()


def test_slots_keep_apart_while_they_grow():
    descriptor = memory.anonymous_file()
    writer, reader = memory.Buffer(descriptor), memory.Buffer(os.dup(descriptor))
    held = {}
    for step in range(40):
        slot = step % memory.SLOTS
        values = torch.full((1 + step * step * 37,), float(step))
        held[slot] = (values, reader.read(writer.write(slot, [values]))[0])
        for sent, received in held.values():
            assert torch.equal(sent, received)
    del held, received
    writer.close()
    reader.close()


def test_slots_can_be_written_from_two_threads():
    writer = memory.Buffer(memory.anonymous_file())
    reader = memory.Buffer(os.dup(writer.descriptor))

    def write(slot):
        for step in range(1, 200):
            values = torch.full((step * 301,), float(slot))
            (seen,) = reader.read(writer.write(slot, [values]))
            assert torch.equal(seen, values)

    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        list(executor.map(write, range(4)))
    writer.close()
    reader.close()
    with pytest.raises(OSError, match="given back"):
        writer.write(0, [torch.zeros(1)])


def test_a_reader_does_not_copy():
    descriptor = memory.anonymous_file()
    writer, reader = memory.Buffer(descriptor), memory.Buffer(os.dup(descriptor))
    layout = writer.write(0, [torch.zeros(3)])
    (seen,) = reader.read(layout)
    writer.write(0, [torch.ones(3)])
    assert seen.tolist() == [1.0, 1.0, 1.0]


def test_published_numbers(lasting):
    start(3, pool=lasting)
    number = lasting.next_number()
    lasting.send(1, ("publish", number, [1.5, 2.5], 0.3))
    lasting.send(2, ("publish", number, None))
    first, second = lasting.wait_published(number)
    assert first.tolist() == [1.5, 2.5]
    assert second.tolist() == []
    with pytest.raises(looking.NotSeen):
        lasting.workers[0].board.wait(number + 1, lasting.check, 0.2)


def test_more_numbers_than_the_board_holds_are_refused():
    with pytest.raises(ValueError, match="can be combined"):
        board.Board(memory.anonymous_file()).publish(1, range(board.CAPACITY + 1))


# ---- output ----


def test_what_a_worker_prints_is_shown_in_whole_lines_with_its_rank(lasting, capsys):
    start(3, pool=lasting)
    long = "x" * 200_000
    lasting.broadcast_message(("print", f"one\n{long}\ntwo"))
    for rank in (1, 2):
        lasting.send(rank, ("echo",))
        lasting.receive(rank)
    lasting.drain_output()
    shown = capsys.readouterr()
    for stream in (shown.out, shown.err):
        lines = stream.splitlines()
        for rank in (1, 2):
            own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
            assert own == [f"[rank {rank}] {text}" for text in ("one", long, "two")]
        assert len(lines) == 6


def test_the_last_words_of_a_dying_worker_are_shown(pool, capsys):
    start(2, pool=pool)
    pool.send(1, ("print", "no line's end", ""))
    pool.send(1, ("exit", 5))
    with pytest.raises(WorkerError, match="exit code 5"):
        pool.receive(1)
    pool.abort()
    assert "[rank 1] no line's end\n" in capsys.readouterr().out


def test_a_caller_without_stdout_does_not_stop_a_worker(lasting, monkeypatch, capsys):
    start(2, pool=lasting)
    monkeypatch.setattr(sys, "stdout", None)
    for _ in range(3):
        lasting.send(1, ("print", "x" * 100_000))
        lasting.send(1, ("echo",))
        lasting.receive(1)


def test_a_blocked_stdout_does_not_hold_the_caller(monkeypatch):
    """Somebody who reads the caller's own output has stopped reading."""
    go_on, shown = threading.Event(), []

    class Blocked:
        def write(self, text):
            go_on.wait(30)
            shown.append(text)

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", Blocked())
    pipes = [os.pipe() for _ in range(2)]
    forwarded = output.Output(1, *(os.fdopen(reader, "rb") for reader, _ in pipes))
    for _, writer in pipes:
        os.write(writer, b"a line\n")
        os.close(writer)
    begin = time.monotonic()
    forwarded.drain(0.5)
    forwarded.close(time.monotonic() + 0.5)
    assert time.monotonic() - begin < 5
    assert not shown
    go_on.set()
    for thread in forwarded._threads:
        thread.join(10)
    assert shown == ["[rank 1] a line\n"], "and nothing is lost"


# ---- failures ----


long = pytest.mark.long


@pytest.mark.parametrize(
    ("rank", "message", "reason"),
    [
        (1, ("kill", 9), "killed by signal 9 (SIGKILL"),
        (2, ("raise", "a mistake"), "raised ArithmeticError: a mistake"),
        pytest.param(2, ("kill", 11), "killed by signal 11 (SIGSEGV", marks=long),
        pytest.param(1, ("exit", 7), "ended with exit code 7", marks=long),
        pytest.param(1, ("raise", "a mistake"), "raised ArithmeticError: a mistake", marks=long),
        pytest.param(2, ("leave",), "raised SystemExit: 3", marks=long),
    ],
)
def test_a_worker_that_ends_in_a_collective(pool, rank, message, reason):
    start(3, pool=pool)
    other = 3 - rank
    pool.send(rank, message)
    pool.send(other, ("sum", [1.0]))  # which waits for the rank in trouble, and is not to blame
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        pool.group.allreduce([torch.ones(1)]).wait()
    found = pool.explain(caught.value)
    pool.abort()
    assert time.monotonic() - begin < 10
    assert isinstance(found, WorkerError), caught.value
    assert found.rank == rank
    assert found.reason.startswith(reason)
    assert ("on_raise" in str(found)) == (message[0] == "raise")
    if rank == 1:
        start(2, pool=pool)
        assert total(pool) == [3.0, 6.0], "the next call works"


@pytest.mark.parametrize(
    ("rank", "message", "words"),
    [
        (1, ("kill", int(signal.SIGSTOP)), ("stopped",)),
        (2, ("sleep",), ("no progress for 3 s", "a_mistake_of_the_users", "in on_sleep")),
        pytest.param(2, ("kill", int(signal.SIGSTOP)), ("stopped",), marks=long),
        pytest.param(1, ("sleep",), ("no progress for 3 s", "in on_sleep"), marks=long),
        pytest.param(1, ("spin",), ("no progress for 3 s", "in on_spin"), marks=long),
    ],
)
def test_a_worker_that_hangs(pool, rank, message, words):
    start(3, timeout=3, pool=pool)
    pool.send(3 - rank, ("sum", [1.0]))
    pool.send(rank, message)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        pool.group.allreduce([torch.ones(1)]).wait()
    found = pool.explain(caught.value)
    pool.abort()
    assert time.monotonic() - begin < 12
    assert isinstance(found, WorkerError), caught.value
    for word in words:
        assert word in str(found), found
    assert found.rank == rank, found


@pytest.mark.parametrize(
    ("wait", "message", "word"),
    [
        ("published", ("kill", 9), "SIGKILL"),
        ("message", ("sleep",), "on_sleep"),
        pytest.param("published", ("sleep",), "on_sleep", marks=long),
        pytest.param("published", ("raise", "a mistake"), "a mistake", marks=long),
        pytest.param("message", ("kill", 9), "SIGKILL", marks=long),
        pytest.param("message", ("raise", "a mistake"), "a mistake", marks=long),
    ],
)
def test_every_wait_has_an_end(pool, wait, message, word):
    start(2, timeout=3, pool=pool)
    number = pool.next_number()
    pool.send(1, message)
    with pytest.raises((WorkerError, TimeoutError)) as caught:
        pool.wait_published(number) if wait == "published" else pool.receive(1)
    found = pool.explain(caught.value)
    assert found.rank == 1
    assert word in str(found)


@pytest.mark.parametrize("state", ["stopped", pytest.param("busy", marks=long), "other_dies"])
def test_a_message_that_is_not_taken_has_an_end(pool, state):
    """More than the socket holds, in one message or in many."""
    start(3, timeout=3, pool=pool)
    pool.send(1, ("spin",) if state == "busy" else ("kill", int(signal.SIGSTOP)))
    if state == "other_dies":
        pool.send(2, ("kill", int(signal.SIGKILL)))
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        for _ in range(20_000):
            pool.send(1, ("echo", b"x" * (100 if state == "busy" else 4_000_000)))
    assert time.monotonic() - begin < 8
    word = {"stopped": "stopped", "busy": "in on_spin", "other_dies": "SIGKILL"}[state]
    assert word in str(caught.value), caught.value
    assert caught.value.rank == (2 if state == "other_dies" else 1)
    pool.abort()
    start(2, pool=pool)
    assert total(pool) == [3.0, 6.0], "the next call works"


def test_messages_of_every_size_arrive(lasting):
    start(2, pool=lasting)
    for size in (0, 1, 16_000, 16_384, 17_000, 300_000, 5_000_000):
        sent = os.urandom(size)
        lasting.send(1, ("echo", sent))
        assert lasting.receive(1) == ("echo", sent)


def test_a_worker_that_failed_after_its_step_tells_why_at_the_next(pool):
    start(2, pool=pool)
    pool.send(1, ("raise", "too late"))
    pool.workers[0].process.wait(timeout=20)
    with pytest.raises(WorkerError, match="too late"):
        for _ in range(3):
            pool.send(1, ("echo",))


def test_a_huge_error_does_not_block(pool):
    start(2, timeout=10, pool=pool)
    pool.send(1, ("raise", "x" * 1_000_000))
    pool.workers[0].process.wait(timeout=20)
    with pytest.raises(WorkerError, match="xxx"):
        pool.check()


def test_an_error_of_the_callers_own_is_not_blamed_on_a_worker(lasting):
    start(2, pool=lasting)
    begin = time.monotonic()
    assert lasting.explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert lasting.explain(TimeoutError("the user's own server")) is None
    assert lasting.explain(KeyError("x")) is None
    assert time.monotonic() - begin < 0.5


def test_ending_a_pool_leaves_nothing(pool):
    process = psutil.Process()
    gc.collect()
    before = process.num_fds()
    heard = listening(pool)  # of the pool that other tests share, where they ran before
    start(3, pool=pool)
    pool.send(1, ("child",))
    pids = [pool.receive(1)[1], *(worker.process.pid for worker in pool.workers)]
    family = [psutil.Process(pid) for pid in pids]
    pool.send(2, ("kill", int(signal.SIGSTOP)))
    begin = time.monotonic()
    pool.abort()
    assert time.monotonic() - begin < 5
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    gc.collect()
    deadline = time.monotonic() + 5
    while process.num_fds() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.num_fds() <= before + 1, "the meeting's file is kept: see memory.Meeting"
    assert set(listening(pool)) <= set(heard)


def test_workers_that_do_not_end_are_waited_for_together(pool, monkeypatch):
    start(4, pool=pool)
    monkeypatch.setattr(workers, "END_TIMEOUT", 1.0)
    processes = [worker.process for worker in pool.workers]
    for worker in pool.workers:
        monkeypatch.setattr(worker, "kill", lambda: None)
    begin = time.monotonic()
    pool.abort()
    assert time.monotonic() - begin < 2.5
    for process in processes:
        process.wait(timeout=10)  # the lifeline's end has told them


def test_a_worker_that_cannot_be_started_leaves_nothing_open(monkeypatch, pool):
    gc.collect()
    before = psutil.Process().num_fds()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            pool.want(2, ["cpu:0", "cpu:1"], 20)
    gc.collect()
    assert psutil.Process().num_fds() == before
    assert not pool.workers


def test_every_model_is_brought_home_where_one_cannot_be(pool):
    asked = []

    class Lender:
        def collect(self):
            asked.append(self)
            raise WorkerError(f"lost {len(asked)}")

    start(2, pool=pool)
    lenders = [Lender() for _ in range(4)]
    for lender in lenders:
        pool.lend(lender)
    with pytest.raises(WorkerError, match="lost 1"):
        pool.end()
    assert set(asked) == set(lenders)
    assert not pool.workers


# ---- strangers ----


def test_a_pool_outlives_the_token_of_an_earlier_one(lasting):
    """A traceback can hold what ties a pool to Keras's session, and let it go at any time."""
    start(2, pool=lasting)
    name = keras_internals.SESSION
    held = [global_state.get_global_attribute(name)]
    keras_internals.tie_to_session(weakref.WeakMethod(lasting.abort))
    pids = [worker.process.pid for worker in lasting.workers]
    held.clear()
    gc.collect()
    assert [worker.process.pid for worker in lasting.workers] == pids


def listening(pool):
    processes = [psutil.Process(), *(psutil.Process(w.process.pid) for w in pool.workers)]
    return [
        connection.laddr
        for process in processes
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]


def test_only_loopback_listens_and_a_stranger_gets_no_word_in(lasting):
    start(3, pool=lasting)
    addresses = listening(lasting)
    assert addresses, "gloo listens"
    assert {address.ip for address in addresses} <= {"127.0.0.1", "::1"}
    strangers = []
    for address in addresses:
        for words in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b"\0" * 8, b"\xff" * 64):
            stranger = socket.create_connection((address.ip, address.port), timeout=2)
            stranger.sendall(words)
            strangers.append(stranger)
    for _ in range(20):
        assert total(lasting) == [6.0, 12.0]
    for stranger in strangers:
        stranger.settimeout(0.2)
        with contextlib.suppress(TimeoutError, ConnectionError):
            assert stranger.recv(64) == b"", "a stranger is told nothing"
        stranger.close()
    for _ in range(20):
        assert total(lasting) == [6.0, 12.0]
    start(2, pool=lasting)
    assert total(lasting) == [3.0, 6.0]


def test_a_rank_without_the_secret_is_found_out(pool):
    start(2, pool=pool)
    pool.want(2, ["cpu:0", "cpu:1"], 21)
    worker = pool.workers[0]
    send = worker.send

    def send_another_secret(message, *limits):
        if message[0] == "regroup":
            message = (*message[:5], b"a guess" * 4, *message[6:])
        send(message, *limits)

    worker.send = send_another_secret
    with pytest.raises(WorkerError, match="secret"):
        pool.ready()


# ---- callers ----

PROGRAM = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {HERE!r})
from parallel_keras.backends.torch import workers
import psutil

def start(world_size):
    pool = workers._pool = workers.Pool({SERVER!r})
    pool.want(world_size, ["cpu:0", "cpu:1", "cpu:2"][:world_size], 20)
    pool.ready()
    return pool

def tell(*words):
    print(*words, flush=True)
"""


def program(tmp_path, body):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + body)
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )


@pytest.mark.parametrize(
    "state",
    [
        "stopped",
        *(
            pytest.param(state, marks=long)
            for state in ("idle", "busy", "starting", "in a thread", "forked")
        ),
    ],
)
def test_no_worker_outlives_a_killed_caller(tmp_path, state):
    body = {
        "idle": "start(3)",
        "busy": "start(3).broadcast_message(('spin',))",
        "stopped": "start(3).broadcast_message(('kill', int(signal.SIGSTOP))); time.sleep(1)",
        "starting": "workers.Pool().want(3, ['cpu:0'] * 3, 20)",
        "in a thread": "t = threading.Thread(target=start, args=(3,)); t.start(); t.join()",
        # A child of the caller's that holds its descriptors.
        "forked": "start(3); os.fork() or (time.sleep(15), os._exit(0))",
    }[state]
    process = program(tmp_path, body + "\ntell('READY')\ntime.sleep(120)\n")
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "READY" in line:
            break
    family = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "worker_main" in " ".join(child.cmdline())
    ]
    assert len(family) == 2, lines
    process.kill()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    process.wait()


@pytest.mark.parametrize(
    "end",
    [
        "pool.send(1, ('spin',))",
        *(pytest.param(end, marks=long) for end in ("", "sys.exit(3)", "raise KeyError('x')")),
    ],
)
def test_a_program_ends_with_its_workers_at_once(tmp_path, end):
    body = f"""
pool = start(3)
tell("PIDS", *[w.process.pid for w in pool.workers])
tell("END", time.time())
{end}
"""
    process = program(tmp_path, body)
    output, _ = process.communicate(timeout=120)
    ended = float(output.split("END")[1].split()[0])
    assert time.time() - ended < 8, output
    for pid in output.split("PIDS")[1].split()[:2]:
        assert not psutil.pid_exists(int(pid))


@long
def test_a_forked_child_does_not_touch_its_parents_workers(tmp_path):
    body = """
import keras
pool = start(2)
before = pool.workers[0].process.pid
child = os.fork()
if not child:
    assert workers._pool is None
    keras.utils.clear_session()
    workers.shutdown()
    sys.exit(0)  # a full end, with all destructors
deadline = time.time() + 60
while True:
    done, status = os.waitpid(child, os.WNOHANG)
    if done or time.time() > deadline:
        break
    time.sleep(0.05)
tell("CHILD", done == child, status)
pool.send(1, ("echo", "still here"))
tell(pool.receive(1)[1], pool.workers[0].process.pid == before)
"""
    output, _ = program(tmp_path, body).communicate(timeout=150)
    assert "CHILD True 0" in output, output
    assert "still here True" in output, output


@long
def test_a_folder_with_modules_of_the_same_names_does_no_harm(tmp_path):
    # The caller does not import from its working directory: nor may the workers.
    (tmp_path / "work").mkdir()
    for name in ("random", "memory", "numpy", "torch"):
        (tmp_path / "work" / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    body = """
os.chdir("work")
pool = start(2)
pool.send(1, ("facts",))
tell("UP", pool.receive(1)[1]["world_size"])
"""
    output, _ = program(tmp_path, body).communicate(timeout=120)
    assert "UP 2" in output, output


@long
def test_a_pool_starts_again_after_it_was_ended(tmp_path):
    body = """
import keras
pool = start(2)
for _ in range(2):
    keras.utils.clear_session()
    tell("LEFT", len(psutil.Process().children()))
    pool.ready()
    pool.send(1, ("echo", "again"))
    tell(pool.receive(1)[1])
"""
    output, _ = program(tmp_path, body).communicate(timeout=150)
    assert output.count("LEFT 0") == 2, output
    assert output.count("again") == 2, output
