"""A plain script, `python -i` and a notebook cell, with no main guard."""

import jupyter_client
import pytest
from programs import BACKENDS, SCRIPT, environment, run


@pytest.mark.parametrize("backend", BACKENDS)
def test_script_without_a_main_guard(backend, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = run([str(path)], backend)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TRAINED") == 1, done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_interactive_python(backend):
    # Line by line, as typed: blank lines end a block there.
    typed = SCRIPT.replace("\ndef ", "\n\ndef ").replace("\nrng", "\n\nrng")
    typed = typed.replace("\nclass ", "\n\nclass ")
    done = run(["-i", "-q"], backend, input=typed)
    assert done.stdout.count("TRAINED") == 1, done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_notebook_cells(backend):
    manager, client = jupyter_client.manager.start_new_kernel(
        kernel_name="python3", env=environment(backend)
    )
    printed = []

    def hear(message):
        content = message["content"]
        printed.append(content.get("text") or "\n".join(content.get("traceback", ())))

    try:
        for cell in (*SCRIPT.split("\n\n"), "pk.shutdown()"):
            client.execute_interactive(cell, timeout=120, output_hook=hear)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "".join(printed).count("TRAINED") == 1, "".join(printed)


# Both `torch` and `ops` are names that the step uses, as in Keras's guides.
OWN_STEP = """
import keras
import numpy as np
import torch
from keras import layers, ops

import parallel_keras as pk


class Scaled(pk.ParallelModel):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ops.mean(ops.square(self(x) - y))
        loss.backward()
        with torch.no_grad():
            weights = self.trainable_weights
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


x = np.random.default_rng(0).normal(size=(21, 4)).astype("float32")
losses = []
for strategy in (None, "data=2"):
    keras.utils.set_random_seed(1)
    model = Scaled()
    model.compile("sgd", strategy=strategy)
    losses.append(model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0).history["loss"])
np.testing.assert_allclose(*losses, rtol=1e-5)
print("TRAINED")
"""


def test_script_with_a_train_step_of_its_own(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(OWN_STEP)
    done = run([str(path)], "torch")
    assert done.stdout.count("TRAINED") == 1, done.stderr
