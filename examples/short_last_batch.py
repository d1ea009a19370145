"""69 rows in batches of 16: what a short last batch does to the weights.

Trains one small model for 5 epochs on one device, with `strategy="data"` on two,
and with what the backend itself offers on two: `tf.distribute.MirroredStrategy`, or
on torch the DistributedDataParallel loop of Keras's own guide. Prints the largest
difference of any weight to the one-device run, and the loss that each run logs.

    KERAS_BACKEND=tensorflow python examples/short_last_batch.py
    KERAS_BACKEND=torch python examples/short_last_batch.py
"""

import os
import sys
import tempfile

import keras
import numpy as np

import parallel_keras as pk

ROWS, BATCH_SIZE, EPOCHS = 69, 16, 5


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 12)).astype("float32")
    return x, (x[:, :1] * 2 + np.sin(3 * x[:, 1:2])).astype("float32")


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    return model


def fit(model):
    x, y = data()
    history = model.fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0)
    return model.get_weights(), history.history["loss"][-1]


def mirrored():
    """Stock Keras under TensorFlow's own strategy."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        model = make()
    return fit(model)


def guide(rank, folder):
    """One of two processes of https://keras.io/guides/distributed_training_with_torch."""
    import torch

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    x, y = (torch.from_numpy(array) for array in data())
    dataset = torch.utils.data.TensorDataset(x, y)
    # The sampler deals every second row to each rank, and repeats a row where
    # they do not divide.
    sampler = torch.utils.data.distributed.DistributedSampler(
        dataset, num_replicas=2, rank=rank, shuffle=False
    )
    loader = torch.utils.data.DataLoader(dataset, sampler=sampler, batch_size=BATCH_SIZE // 2)
    model = make()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(EPOCHS):
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * len(inputs))
    if rank == 0:
        np.savez(f"{folder}/result.npz", *model.get_weights(), loss=sum(losses) / len(sampler))
    # Without taking the group down: that can wait for a rank that has gone.
    os._exit(0)


def torch_guide():
    """Keras's guide, started on two processes."""
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([sys.executable, os.path.abspath(__file__), str(rank), folder])
            for rank in (0, 1)
        ]
        try:
            if any(rank.wait(timeout=120) for rank in ranks):
                raise RuntimeError("a rank of the guide's loop failed")
        finally:
            for rank in ranks:
                rank.kill()
        with np.load(f"{folder}/result.npz") as saved:
            weights = [saved[name] for name in saved.files if name != "loss"]
            return weights, float(saved["loss"])


def difference(weights, reference):
    return max(float(np.abs(a - b).max()) for a, b in zip(weights, reference, strict=True))


def main():
    reference, loss = fit(make())
    print(f"{keras.backend.backend()}: {ROWS} rows, batches of {BATCH_SIZE}, {EPOCHS} epochs")
    print(f"{'one device':42} loss {loss:.6f}")
    peer = mirrored if keras.backend.backend() == "tensorflow" else torch_guide
    names = {
        mirrored: "MirroredStrategy, 2 devices",
        torch_guide: "Keras's torch guide (DDP), 2 devices",
    }
    ours, loss = fit(pk.parallelize(make(), pk.DataParallel(2)))
    ours = difference(ours, reference)
    print(f"{'parallel_keras, 2 devices':42} loss {loss:.6f}  largest difference {ours:.1e}")
    weights, loss = peer()
    print(
        f"{names[peer]:42} loss {loss:.6f}  largest difference {difference(weights, reference):.1e}"
    )
    return 0 if ours < 1e-6 else 1


if __name__ == "__main__":
    if len(sys.argv) == 3:
        guide(int(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(main())
