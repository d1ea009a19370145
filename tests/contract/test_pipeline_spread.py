"""Each stage of a pipeline has its own process or device, weights, slots and work."""

import gc
import json
import os
import re
import weakref

import keras
import numpy as np
import pytest
import rows
import stage_models
from cases import adam, compiled
from executed import MOVES, executed
from harness import fit, make
from keras import layers

import parallel_keras as pk

OPTIONS = {"batch_size": 16, "epochs": 1, "shuffle": False, "verbose": 0}
UNITS = (17, 19, 23)  # nothing else has matrices of these sizes


class Witness(layers.Layer):
    """Writes down which process computes which rows, and which matrices it holds."""

    def __init__(self, directory, name):
        super().__init__(name=name)
        self.directory = str(directory)

    def call(self, x, training=False):
        if x.device.type != "meta":
            line = {"training": bool(training), "rows": len(x), "held": matrices()}
            with open(os.path.join(self.directory, f"{self.name} {os.getpid()}"), "a") as file:
                file.write(json.dumps(line) + os.linesep)
        return x + 0.0


def matrices():
    """How many matrices of each size have memory here: weights, gradients and slots."""
    import torch

    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) not in (torch.nn.Parameter, torch.Tensor) or thing.ndim != 2:
            continue
        rows, columns = thing.shape
        if rows not in (6, *UNITS) or columns not in UNITS:
            continue
        if thing.untyped_storage().nbytes() >= thing.numel() * thing.element_size():
            found[columns] = found.get(columns, 0) + 1
    return found


def witnessed(directory):
    x = y = keras.Input((6,))
    for number, units in enumerate(UNITS):
        y = layers.Dense(units, activation="tanh", name=f"dense_{number}")(y)
        y = Witness(directory, name=f"witness_{number}")(y)
    return keras.Model(x, stage_models.head(y))


@pytest.mark.backend("torch")
def test_torch_each_process_has_its_own_stage(tmp_path):
    strategy = pk.PipelineParallel(3, microbatches=4, balance=[2, 2, 3])
    model = make(lambda: witnessed(tmp_path), compiled(adam)(), strategy)
    fit(model, **rows.classes(32), **OPTIONS)
    processes = [os.getpid()]
    for number, units in enumerate(UNITS):
        found = {int(path.name.split()[1]): path for path in tmp_path.glob(f"witness_{number} *")}
        # The caller is the first stage. It has probed layers of the user's own, all of them.
        path = found.pop(os.getpid())
        if number:
            ((process, path),) = found.items()
            processes.append(process)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line for line in lines if line["training"]]
        assert [line["rows"] for line in steps[-8:]] == [4] * 8, "two batches, cut in four"
        if number:  # the caller has room for the weights of all, to show them
            assert set(steps[-1]["held"]) == {str(units)}, "weights of its own stage only"
    assert len(set(processes)) == 3


@pytest.mark.backend("torch")
def test_torch_weights_stay_with_their_stage_until_someone_looks():
    from parallel_keras.backends.torch.remote import RemoteParameter

    model = make(stage_models.chain, compiled(adam)(), pk.PipelineParallel(2, balance=[3, 4]))
    last = model.get_layer("dense_5").kernel
    before = np.array(keras.ops.convert_to_numpy(last))
    away = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights = self.model.trainable_weights
            away.append([type(v._value) is RemoteParameter for v in weights])

    fit(model, **rows.classes(), **OPTIONS, callbacks=[Look()])
    assert away[0] == [False] * 6 + [True] * 8
    assert np.abs(keras.ops.convert_to_numpy(last) - before).max() > 1e-3


class Kept(layers.Layer):
    """Counts the passes whose activations are kept for a backward pass, where it computes."""

    tokens: weakref.WeakSet = weakref.WeakSet()
    counts: list = []

    def call(self, x):
        import torch

        class Pass(torch.autograd.Function):
            """Holds a token, as long as torch holds what the pass has computed."""

            @staticmethod
            def forward(context, x):
                context.token = Token()
                Kept.tokens.add(context.token)
                Kept.counts.append(len(Kept.tokens))
                return x.view_as(x)

            @staticmethod
            def backward(context, gradient):
                return gradient

        return x if x.device.type == "meta" else Pass.apply(x)


class Token:
    """Something that can be counted."""


@pytest.mark.backend("torch")
@pytest.mark.parametrize("schedule, expected", [("1f1b", 3), ("gpipe", 8)])
def test_torch_so_many_activations_are_kept(schedule, expected):
    """On the first stage, which is the caller, of three: counted where torch keeps them."""

    def build():
        x = keras.Input((6,))
        y = Kept()(stage_models.dense("first")(x))
        return keras.Model(x, stage_models.head(stage_models.dense("second")(y)))

    strategy = pk.PipelineParallel(
        split_points=["second", "head"], microbatches=8, schedule=schedule
    )
    model = make(build, compiled(adam)(), strategy)
    before = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: Kept.counts.clear()
    )
    fit(model, **rows.classes(32), **OPTIONS, callbacks=[before])
    assert max(Kept.counts) == expected
    gc.collect()
    assert not Kept.tokens


def named():
    """Layers whose names no other test's functions have: TensorFlow may show these too."""
    x = y = keras.Input((6,))
    for number in range(6):
        y = stage_models.dense(f"own_{number}")(y)
    return keras.Model(x, stage_models.head(y, name="own_head"))


@pytest.mark.backend("tensorflow")
def test_tensorflow_each_stage_has_its_own_device():
    assert not list(executed(lambda: None))  # what was looked at before does not count below
    strategy = pk.PipelineParallel(3, microbatches=4, balance=[2, 2, 3])
    model = make(named, compiled(adam)(), strategy)
    data = rows.classes(32)
    fit(model, **data, **OPTIONS)
    where = {f"own_{n}": n // 2 for n in range(6)} | {"own_head": 2}
    for variable in (*model.weights, *model.optimizer.variables):
        name = next((n for n in where if re.search(rf"\b{n}[/_]", variable.path)), None)
        if name is not None:
            assert variable.value.device.endswith(f"CPU:{where[name]}"), variable.path

    seen, updates, losses = {}, set(), set()
    for name, operation, device in executed(lambda: fit(model, **data, **OPTIONS)):
        found = re.search(r"/(own_(?:\d|head))(_\d+)?/", name)
        if found and operation.endswith("MatMul"):  # oneDNN has others than the plain one
            assert device == where[found[1]], f"{operation} {name} ran on device {device}"
            key = found[1], "gradient_tape" in name
            seen[key] = seen.get(key, 0) + 1
        elif found and operation not in MOVES and "/adam" not in name:
            assert device == where[found[1]], f"{operation} {name} ran on device {device}"
        if "/adam" in name and operation.startswith("Assign"):
            updates.add(device)
        if "CrossEntropy" in operation:
            losses.add(device)
    # Four micro-batches forward; backward two products each, but one for the first layer.
    assert {key: n for key, n in seen.items() if not key[1]} == {(n, False): 4 for n in where}
    assert {n: seen[n, True] for n in where} == {n: 4 if n == "own_0" else 8 for n in where}
    assert updates == {0, 1, 2}
    assert losses == {2}
