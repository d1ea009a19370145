"""One side of a comparison, in a process of its own: `python sides.py SIDE MODEL STEPS`.

Sides are `plain`, `pipelining_M` (torch.distributed.pipelining, 1F1B, M micro-batches) and
`pipeline_M`, `gpipe_M`, `recompute_M`, `even_M` for our own strategy. Each device computes
with one thread. Prints a JSON line with the median of the milliseconds per step.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TF_NUM_INTRAOP_THREADS"] = "1"
WARM_UP = 4
STAGES = {"sleep2": 2, "sleep4": 4, "nap2": 2, "nap4": 4, "heavy": 2, "uneven": 2}


def report(times, **more):
    steps = [1000 * (b - a) for a, b in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
    print("RESULT " + json.dumps({"ms": statistics.median(steps), **more}), flush=True)


def strategy(side, microbatches, name):
    import models

    import parallel_keras as pk

    stages = STAGES[name]
    arguments = {"microbatches": microbatches}
    if side == "gpipe":
        arguments["schedule"] = "gpipe"
    if side == "recompute":
        arguments["recompute"] = True
    if models.sleeps(name):
        arguments["balance"] = [1] * stages
    if side == "even":
        arguments["balance"] = [4, 5]
    return pk.PipelineParallel(stages, **arguments)


def keras_side(side, name, steps):
    kind, _, microbatches = side.partition("_")
    # Before TensorFlow starts: as many operations at a time as there are devices.
    os.environ["TF_NUM_INTEROP_THREADS"] = "1" if kind == "plain" else str(STAGES[name])
    import keras
    import models

    import parallel_keras as pk

    keras.utils.set_random_seed(0)
    model, more = models.make(name), {}
    if kind != "plain":
        pk.parallelize(model, strategy(kind, int(microbatches), name))
    model.compile(**models.compile_arguments(name))
    rows = models.batch_size(name)
    if kind != "plain" and not models.sleeps(name):
        more["predicted_ms"] = 1000 * model.timeline(batch_size=rows).step_time
    times = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: times.append(time.perf_counter())
    )
    x, y = models.data(name, steps)
    model.fit(x, y, batch_size=rows, verbose=0, callbacks=[watch])
    if kind != "plain":
        more["alive"] = alive(model.timeline())
    report(times, **more)


def alive(timeline):
    """The largest number of micro-batches that the first stage kept for the backward pass."""
    count = most = 0
    for event in sorted(timeline.events, key=lambda event: event.end):
        if event.stage == 0 and event.kind in ("forward", "backward"):
            count += 1 if event.kind == "forward" else -1
            most = max(most, count)
    return most


# ---- torch's own executor -------------------------------------------------------------


def pipelining(side, name, steps):
    """torch.distributed.pipelining: the same layers, torch's Adam, no metric, two processes."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([sys.executable, __file__, side, name, str(steps), str(n), folder])
            for n in range(STAGES[name])
        ]
        codes = [rank.wait(timeout=800) for rank in ranks]
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")


def pipelining_rank(side, name, steps, rank, folder):
    import keras
    import models
    import torch
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stages, microbatches = STAGES[name], int(side.partition("_")[2])
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=stages
    )
    torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    parts = models.make(name).layers
    borders = [0, len(parts) // 2, len(parts)]
    part = torch.nn.Sequential(*parts[borders[rank] : borders[rank + 1]])
    rows = models.batch_size(name)
    width = models.make(name).input_shape[-1]
    example = torch.zeros(rows // microbatches, width)
    stage = PipelineStage(part, rank, stages, torch.device("cpu"), input_args=(example,))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=torch.nn.functional.cross_entropy)
    optimizer = torch.optim.Adam(part.parameters(), lr=0.001)
    x, y = (torch.from_numpy(a) for a in models.data(name, steps))
    times = []
    for start in range(0, rows * steps, rows):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x[start : start + rows])
        else:
            schedule.step(target=y[start : start + rows], losses=[])
        optimizer.step()
        times.append(time.perf_counter())
    distributed.barrier()
    if rank == 0:
        report(times)
    distributed.destroy_process_group()


def main():
    side, name, steps, *rest = sys.argv[1:]
    if rest:
        pipelining_rank(side, name, int(steps), int(rest[0]), rest[1])
    elif side.startswith("pipelining"):
        pipelining(side, name, int(steps))
    else:
        keras_side(side, name, int(steps))


if __name__ == "__main__":
    main()
