"""The work is really spread: which process, which device, which rows."""

import collections
import json
import os

import keras
import models
import numpy as np
import pytest
import rows
from cases import adam, compiled
from harness import make
from keras import layers, ops

COUNTS = {"data=2": [8, 8], "data=3": [6, 5, 5], "data=4": [4, 4, 4, 4]}
STRATEGIES = ["data=2", "data=3", pytest.param("data=4", marks=pytest.mark.long)]


# ---- torch: one process per replica -------------------------------------------


class Witness(layers.Layer):
    """Writes down who computes which rows: a line per call, a file per process."""

    def __init__(self, directory):
        super().__init__()
        self.directory = str(directory)

    def call(self, x, training=False):
        if x.device.type != "meta":
            line = {
                "training": bool(training),
                "rows": x[:, 0].detach().tolist(),
                "threads": __import__("torch").get_num_threads(),
            }
            with open(os.path.join(self.directory, f"{os.getpid()}"), "a") as file:
                file.write(json.dumps(line) + os.linesep)
        return x


def _read(directory):
    """Process id -> list of what it was called with."""
    return {
        int(path.name): [json.loads(line) for line in path.read_text().splitlines()]
        for path in directory.iterdir()
    }


def _witnessed(directory):
    x = keras.Input((6,))
    y = Witness(directory)(x)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def _numbered(n):
    data = rows.classes(n)
    data["x"][:, 0] = np.arange(n)
    return data


@pytest.mark.backend("torch")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_torch_each_process_computes_its_rows(strategy, tmp_path):
    replicas = len(COUNTS[strategy])
    model = make(lambda: _witnessed(tmp_path), compiled()(), strategy)
    data = _numbered(32)
    model.fit(**data, batch_size=16, epochs=1, shuffle=False, verbose=0)
    seen = _read(tmp_path)
    assert len(seen) == replicas, f"{len(seen)} processes computed, of {replicas}"
    assert os.getpid() in seen, "the caller is rank 0 and computes its share"
    first_batch, second_batch = collections.Counter(), collections.Counter()
    sizes = []
    for calls in seen.values():
        # A probe may have looked at rows before: what counts are the steps.
        steps = [call["rows"] for call in calls if call["training"]][-2:]
        sizes.append(len(steps[0]))
        first_batch.update(steps[0])
        second_batch.update(steps[1])
        assert steps[0] == sorted(steps[0]), "a replica's rows are contiguous and in order"
    assert sorted(sizes, reverse=True) == COUNTS[strategy]
    assert first_batch == collections.Counter(range(16)), "each row once"
    assert second_batch == collections.Counter(range(16, 32)), "each row once"


@pytest.mark.backend("torch")
def test_torch_evaluate_and_predict_are_spread(tmp_path):
    model = make(lambda: _witnessed(tmp_path), compiled()(), "data=3")
    data = _numbered(16)
    for call in (lambda: model.evaluate(**data, batch_size=16, verbose=0),
                 lambda: model.predict(data["x"], batch_size=16, verbose=0)):  # fmt: skip
        for path in tmp_path.iterdir():
            path.unlink()
        call()
        seen = _read(tmp_path)
        assert len(seen) == 3
        last = [calls[-1]["rows"] for calls in seen.values()]
        assert sorted(len(part) for part in last) == [5, 5, 6]
        assert sorted(sum(last, [])) == list(range(16))


@pytest.mark.backend("torch")
def test_torch_workers_stay_up_and_share_the_cores(tmp_path):
    import torch

    threads = torch.get_num_threads()
    model = make(lambda: _witnessed(tmp_path), compiled()(), "data=3")
    arguments = {**_numbered(32), "batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(**arguments)
    first = set(_read(tmp_path))
    model.fit(**arguments)
    again = _read(tmp_path)
    assert set(again) == first, "the second fit started other processes"
    assert torch.get_num_threads() == threads, "the caller's setting is restored"
    cores = os.cpu_count() or 1
    for calls in again.values():
        assert calls[-1]["threads"] <= max(1, cores // 3)


@pytest.mark.backend("torch")
def test_torch_one_replica_starts_no_process(tmp_path):
    model = make(lambda: _witnessed(tmp_path), compiled()(), "data=1")
    model.fit(**_numbered(32), batch_size=16, verbose=0)
    assert set(_read(tmp_path)) == {os.getpid()}


@pytest.mark.backend("torch")
@pytest.mark.parametrize("accumulated", [None, 4])
def test_torch_gradients_are_added_up_once_for_each_update(accumulated, monkeypatch):
    """Counts the bytes that the caller gives to the other ranks."""
    from parallel_keras.backends.torch import group, shared_sums

    added, others = [], []
    put = shared_sums.SharedSums.put

    def nbytes(tensor):
        return tensor.numel() * tensor.element_size()

    def count(self, tensor):
        added.append(nbytes(tensor))
        put(self, tensor)

    def count_others(self, tensors, *arguments):
        others.extend(map(nbytes, tensors))
        return self.of_torch.allreduce(tensors, *arguments)

    monkeypatch.setattr(shared_sums.SharedSums, "put", count)
    monkeypatch.setattr(group.Group, "allreduce", count_others, raising=False)

    def optimizer():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulated)

    model = make(models.mlp, compiled(optimizer)(), "data=2")
    model.fit(**rows.classes(64), batch_size=8, verbose=0)
    one = 4 * model.count_params()
    updates = 8 // (accumulated or 1)
    assert sum(added) == updates * one
    # Flags, and once, at the end of fit, what is not in an update yet.
    assert sum(others) <= one + updates * 4 * len(model.trainable_variables)


@pytest.mark.backend("torch")
def test_torch_workers_hold_no_copy_of_the_data():
    import psutil

    def fit(n):
        x = np.ones((n, 6000), "float32")
        model.fit(x, np.zeros(n), batch_size=16, steps_per_epoch=3, verbose=0)
        return x.nbytes

    def held():
        children = psutil.Process().children()
        found = [child for child in children if "worker_main" in " ".join(child.cmdline())]
        return sum(child.memory_full_info().uss for child in found)

    model = make(lambda: keras.Sequential([keras.Input((6000,)), layers.Dense(1)]),
                 compiled(loss="mse", metrics=None)(), "data=2")  # fmt: skip
    fit(64)
    before = held()
    assert before > 100 * 2**20, "a worker has torch and Keras in its memory"
    nbytes = fit(5_000)
    assert held() - before < nbytes / 10


# ---- TensorFlow: replicas on devices of one process ---------------------------


class Replica(layers.Layer):
    """Writes down, at run time, which replica on which device sees which rows."""

    seen = []

    def call(self, x):
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        number = -1 if context is None else context.replica_id_in_sync_group
        replicas = tf.distribute.get_strategy().num_replicas_in_sync

        def note(values, number, replicas):
            self.seen.append((int(replicas), int(number), values[:, 0].tolist()))
            return values

        y = tf.numpy_function(note, [x, number, replicas], x.dtype)
        y = tf.ensure_shape(y, x.shape)
        # What the note returns has no gradient; the rows themselves go on.
        return x + tf.stop_gradient(y - x)


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensorflow_each_replica_computes_its_rows(strategy):
    def build():
        x = keras.Input((6,))
        y = layers.Dense(3, activation="softmax")(Replica()(x))
        return keras.Model(x, y)

    model = make(build, compiled()(), strategy)
    Replica.seen.clear()
    model.fit(**_numbered(32), batch_size=16, epochs=1, shuffle=False, verbose=0)
    replicas = len(COUNTS[strategy])
    steps = [entry for entry in Replica.seen if entry[0] == replicas]
    assert len(steps) == 2 * replicas
    sizes = {number: len(part) for _, number, part in steps}
    assert [sizes[number] for number in range(replicas)] == COUNTS[strategy]
    seen = collections.Counter(row for _, _, part in steps for row in part)
    assert seen == collections.Counter(range(32)), "each row once"


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensorflow_variables_have_a_copy_on_each_device(strategy):
    model = make(models.mlp, compiled(adam)(), strategy)
    model.fit(**rows.classes(), batch_size=16, verbose=0)
    replicas = len(COUNTS[strategy])
    devices = [name.upper() for name in model.strategy.devices]
    assert len(set(devices)) == replicas
    for variable in [*model.weights, *model.optimizer.variables]:
        copies = variable.value.values
        assert [copy.device.split("device:")[-1] for copy in copies] == devices
        numbers = [copy.numpy() for copy in copies]
        for number in numbers[1:]:
            np.testing.assert_array_equal(number, numbers[0])
    model.set_strategy(None)
    assert not hasattr(model.weights[0].value, "values")


@pytest.mark.backend("tensorflow")
def test_tensorflow_the_work_of_each_replica_is_on_its_device():
    """The matrix products of the traced step are spread over the devices."""
    import tensorflow as tf

    model = make(models.mlp, compiled()(), "data=2")
    devices = {}

    def call(self, x, training=None):
        y = ops.matmul(x, self.kernel)
        if not isinstance(x, keras.KerasTensor) and tf.inside_function():
            devices.setdefault(y.device, 0)
            devices[y.device] += 1
        return ops.softmax(y + self.bias)

    model.layers[-1].call = call.__get__(model.layers[-1])
    model.fit(**rows.classes(), batch_size=16, verbose=0)
    used = {name.split("device:")[-1].lower() for name in devices if name}
    assert used >= set(model.strategy.devices), f"the products were on {used}"
