"""One side of a comparison, in a process of its own: `python sides.py SIDE MODEL STEPS`.

Prints a JSON line with the median of the milliseconds per step, after a warm-up.
Every side trains the same Keras model from the same kind of data with Adam and
accuracy, unless its name says otherwise, with the cores shared among its processes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

WARM_UP = 8
DEVICES = 2
CORES = os.cpu_count() or 1


def milliseconds(times, warm_up=WARM_UP):
    """The median of what the steps took that end at these times, after a warm-up."""
    steps = zip(times[warm_up:], times[warm_up + 1 :], strict=False)
    return statistics.median(1000 * (end - start) for start, end in steps)


def report(times, **more):
    """What `run.py` reads."""
    print("RESULT " + json.dumps({"ms": milliseconds(times), **more}), flush=True)


# ---- Keras's fit --------------------------------------------------------------


def compiled(name):
    import keras
    import models

    keras.utils.set_random_seed(0)
    model = models.KERAS[name]()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def times_of_fit(model, *data, **options):
    """When each step of a `fit` ended."""
    import keras

    times = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: times.append(time.perf_counter())
    )
    model.fit(*data, verbose=0, callbacks=[watch], **options)
    return times


def fit(model, name, steps):
    import models

    data = models.data(name, steps)
    report(times_of_fit(model, *data, batch_size=models.BATCH[name], shuffle=True))


def plain(name, steps):
    """One device, plain Keras."""
    fit(compiled(name), name, steps)


def ours_1(name, steps):
    """`pk.DataParallel(1)`."""
    import parallel_keras as pk

    fit(pk.parallelize(compiled(name), pk.DataParallel(1)), name, steps)


def ours_2(name, steps):
    """`pk.DataParallel(2)`."""
    import parallel_keras as pk

    fit(pk.parallelize(compiled(name), pk.DataParallel(DEVICES)), name, steps)


def ours_2_loader(name, steps):
    """`pk.DataParallel(2)`, fed by a DataLoader of two workers."""
    import torch

    import parallel_keras as pk

    def loader(x, y, batch_size):
        rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        return Timed(torch.utils.data.DataLoader, rows, batch_size)

    waited = []

    class Timed(torch.utils.data.DataLoader):
        def __init__(self, _, rows, batch_size):
            super().__init__(rows, batch_size=batch_size, shuffle=True, num_workers=2)

        def __iter__(self):
            batches = super().__iter__()
            while True:
                start = time.perf_counter()
                batch = next(batches, None)
                waited.append(time.perf_counter() - start)
                if batch is None:
                    return
                yield batch

    import models

    model = pk.parallelize(compiled(name), pk.DataParallel(DEVICES))
    times = times_of_fit(model, loader(*models.data(name, steps), models.BATCH[name]))
    measured = times[-1] - times[WARM_UP]
    report(times, waiting=sum(waited[WARM_UP + 2 : -1]) / measured)


def mirrored(name, steps):
    """Stock Keras in `MirroredStrategy.scope()` on two logical CPU devices."""
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * DEVICES,
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(DEVICES)])
    with strategy.scope():
        model = compiled(name)
    fit(model, name, steps)


# ---- two processes by hand ----------------------------------------------------


def two_processes(side, name, steps):
    """Run a rank function on two processes that meet through a file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), side, name, str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, CORES // DEVICES))}
        ranks = [
            subprocess.Popen([*command, str(rank), folder], env=environment)
            for rank in range(DEVICES)
        ]
        if any(rank.wait(timeout=600) for rank in ranks):
            raise SystemExit(f"a rank of {side} failed")


def rank_set_up(rank, folder):
    import torch

    torch.set_num_threads(max(1, CORES // DEVICES))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=DEVICES
    )


def rank_loader(name, steps, rank):
    """As in the guide: a DataLoader over a DistributedSampler."""
    import models
    import torch

    x, y = models.data(name, steps)
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    sampler = torch.utils.data.distributed.DistributedSampler(
        rows, num_replicas=DEVICES, rank=rank, shuffle=True
    )
    return torch.utils.data.DataLoader(
        rows, sampler=sampler, batch_size=models.BATCH[name] // DEVICES, shuffle=False
    )


def guide(name, steps, rank, folder):
    """The loop of Keras's guide with Keras's optimizer and metric."""
    import keras
    import models
    import torch

    rank_set_up(rank, folder)
    model = models.KERAS[name]()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    metric = keras.metrics.SparseCategoricalAccuracy()
    times = []
    for x, y in rank_loader(name, steps, rank):
        model.zero_grad()
        outputs = ddp(x)
        loss = loss_fn(y, outputs)
        loss.backward()
        trainable = model.trainable_variables
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in trainable], trainable)
            metric.update_state(y, outputs)
        times.append(time.perf_counter())
    if rank == 0:
        report(times)


def guide_bare(name, steps, rank, folder):
    """The loop of Keras's guide with torch's Adam and no metric."""
    import models

    rank_set_up(rank, folder)
    bare(models.KERAS[name](), name, steps, rank, probabilities=True)


def pure_torch(name, steps, rank, folder):
    """The model in pure torch under DDP with torch's Adam and no metric."""
    import models

    rank_set_up(rank, folder)
    bare(models.TORCH[name](), name, steps, rank, probabilities=False)


def bare(model, name, steps, rank, probabilities):
    import torch

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=0.001, eps=1e-7
    )
    times = []
    for x, y in rank_loader(name, steps, rank):
        optimizer.zero_grad()
        outputs = ddp(x)
        if probabilities:
            loss = torch.nn.functional.nll_loss(torch.log(outputs + 1e-7), y)
        else:
            loss = torch.nn.functional.cross_entropy(outputs, y)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter())
    if rank == 0:
        report(times)


def fabric(name, steps, rank, folder):
    """Lightning Fabric with the same Keras model, torch's Adam, no metric."""
    import models
    import torch
    from lightning.fabric import Fabric

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=_port(folder), NODE_RANK="0",
        LOCAL_RANK=str(rank), WORLD_SIZE=str(DEVICES), RANK=str(rank),
    )  # fmt: skip
    torch.set_num_threads(max(1, CORES // DEVICES))
    fabric = Fabric(accelerator="cpu", devices=DEVICES, strategy="ddp")
    fabric.launch()
    model = models.KERAS[name]()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], eps=1e-7)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(local_loader(name, steps))
    times = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(torch.log(model(x) + 1e-7), y)
        fabric.backward(loss)
        optimizer.step()
        times.append(time.perf_counter())
    if rank == 0:
        report(times)


def accelerate(name, steps, rank, folder):
    """Accelerate with the same Keras model, torch's Adam, no metric."""
    import models
    import torch

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=_port(folder), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(DEVICES), RANK=str(rank), ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    torch.set_num_threads(max(1, CORES // DEVICES))
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = models.KERAS[name]()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], eps=1e-7)
    model, optimizer, loader = accelerator.prepare(model, optimizer, local_loader(name, steps))
    times = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(torch.log(model(x) + 1e-7), y)
        accelerator.backward(loss)
        optimizer.step()
        times.append(time.perf_counter())
    if rank == 0:
        report(times)


def local_loader(name, steps):
    """The loader that Fabric and Accelerate shard themselves."""
    import models
    import torch

    x, y = models.data(name, steps)
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(rows, batch_size=models.BATCH[name] // DEVICES, shuffle=True)


def _port(folder):
    """A port that both ranks derive from their common folder."""
    import hashlib

    digest = hashlib.sha256(folder.encode()).digest()
    return str(20000 + int.from_bytes(digest[:2], "little") % 20000)


IN_ONE = (plain, ours_1, ours_2, ours_2_loader, mirrored)
IN_TWO = (guide, guide_bare, pure_torch, fabric, accelerate)


def main():
    side, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if side in {function.__name__ for function in IN_ONE}:
        globals()[side](name, steps)
    elif len(sys.argv) == 6:
        globals()[side](name, steps, int(sys.argv[4]), sys.argv[5])
        os._exit(0)  # torch's groups are left as they are
    else:
        two_processes(side, name, steps)


if __name__ == "__main__":
    main()
