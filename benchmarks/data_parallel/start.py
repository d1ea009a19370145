"""What starting costs on torch: a cold pool, a second fit, the memory of a worker.

KERAS_BACKEND=torch python benchmarks/data_parallel/start.py
"""

import os
import statistics
import subprocess
import sys
import time

os.environ["KERAS_BACKEND"] = "torch"


def imports(times=3):
    """Seconds of a fresh `import keras, torch`, with the interpreter's start."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", "import keras, torch"], check=True, capture_output=True
        )
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main():
    import keras
    import numpy as np
    import psutil

    import parallel_keras as pk
    from parallel_keras.backends.torch import workers

    fresh = imports()
    cold = []
    for _ in range(3):
        start = time.perf_counter()
        workers.pool(2, ("cpu:0", "cpu:1"), 60.0).ready()
        cold.append(time.perf_counter() - start)
        pk.shutdown()
    print(f"fresh import of keras and torch: {fresh:.2f} s")
    print(f"cold pool of one worker: {statistics.median(cold):.2f} s")
    print(f"ratio: {statistics.median(cold) / fresh:.2f}")

    model = keras.Sequential(
        [keras.Input((784,)), keras.layers.Dense(2048, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    gradients = sum(v.value.numel() * 4 for v in model.trainable_variables) / 2**20
    x, y = np.random.rand(2560, 784).astype("float32"), np.random.randint(0, 10, 2560)

    pk.parallelize(model, pk.DataParallel(2))
    model.fit(x, y, batch_size=256, verbose=0)
    first = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: first.append(time.perf_counter())
    )
    waits = []
    for _ in range(5):
        first.clear()
        start = time.perf_counter()
        model.fit(x, y, batch_size=256, verbose=0, callbacks=[watch])
        waits.append(first[0] - start)
    print(f"second fit, until its first step begins: {statistics.median(waits):.3f} s")

    worker = psutil.Process().children()[0]
    parallel = worker.memory_full_info().uss / 2**20
    command = [sys.executable, os.path.abspath(__file__), "single"]
    single = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"memory of its own (USS): worker {parallel:.0f} MiB, one device {single:.0f} MiB")
    print(f"one copy of the gradients: {gradients:.0f} MiB")


def single():
    """The same fit in a process of one device; prints its memory."""
    import keras
    import numpy as np
    import psutil

    model = keras.Sequential(
        [keras.Input((784,)), keras.layers.Dense(2048, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = np.random.rand(2560, 784).astype("float32"), np.random.randint(0, 10, 2560)
    model.fit(x, y, batch_size=256, verbose=0)
    print(psutil.Process().memory_full_info().uss / 2**20)


if __name__ == "__main__":
    single() if len(sys.argv) > 1 else main()
