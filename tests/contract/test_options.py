"""Options of `compile` and `fit` that are no case of their own: exact, or refused."""

import pathlib
import subprocess
import sys

import keras
import models
import numpy as np
import pytest
import rows
import stage_models
from cases import compiled
from harness import BACKEND, LONG_WHERE_TRACED, compare, fit, make, state

import parallel_keras as pk

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}
STRATEGIES = [
    "data=3",
    pytest.param("model=2", marks=pytest.mark.long),
    pytest.param("pipeline=2", marks=LONG_WHERE_TRACED),
]


def batches(count=4):
    """Without a length."""
    data = rows.classes()
    for start in range(0, 16 * count, 16):
        yield data["x"][start : start + 16], data["y"][start : start + 16]


def tf_data():
    import tensorflow as tf

    data = rows.classes()
    return tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(16)


def loader():
    import torch

    tensors = map(torch.from_numpy, rows.classes().values())
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors), batch_size=16)


class Pages(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return list(batches())[index]


def pages(**options):
    def made():
        return Pages(**options)

    made.__name__ = "_".join(["pages", *options])
    return made


def train(strategy, source, **arguments):
    model = make(models.mlp, compiled(weighted_metrics=("accuracy",))(), strategy)
    # Keras on torch draws a batch of pages to build the metrics: see test_inputs.py.
    model.test_on_batch(*rows.classes(2).values())
    history = fit(model, source(), epochs=1, verbose=0, **arguments)
    return {"history": history, **state(model)}


SOURCES = [
    pytest.param(tf_data, marks=pytest.mark.long if BACKEND == "torch" else []),
    *([loader] if BACKEND == "torch" else []),
    batches,
    pages(workers=2),
]
WEIGHTS = {0: 0.2, 1: 3.0, 2: 1.0}


def weighs_classes(source):
    """Plain Keras weighs those of tf.data and PyDataset; of others it says that it cannot."""
    return source is tf_data or source.__name__.startswith("pages")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("source", SOURCES)
def test_sources_with_class_weights(source, strategy):
    arguments = {"class_weight": WEIGHTS} if weighs_classes(source) else {}
    expected = train(None, source, **arguments)
    compare(f"options_{source.__name__}", strategy, expected, train(strategy, source, **arguments))


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["data=3", "model=2", "pipeline=2"])
def test_pages_that_processes_load(strategy):
    program = pathlib.Path(__file__).with_name("page_processes.py")
    done = subprocess.run(
        [sys.executable, str(program), strategy], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "options_processes" in done.stdout


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_run_eagerly(strategy):
    """On TensorFlow steps run without a graph, several to an execution too."""
    arguments = {"run_eagerly": True, "steps_per_execution": 3 if BACKEND == "tensorflow" else 1}
    records = []
    for chosen in (None, strategy):
        model = make(models.mlp, compiled(**arguments)(), chosen)
        history = fit(model, **rows.classes(), **OPTIONS, epochs=2)
        predicted = model.predict(rows.classes()["x"], batch_size=16, verbose=0)
        records.append({"history": history, "predict": predicted, **state(model)})
    compare("run_eagerly", strategy, *records)


# Within an execution of two and of three, and without one: what `make test` runs.
ENDS = {("data=3", 1), ("data=3", 2), ("model=2", 3), ("pipeline=2", 3)}


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        pytest.param(strategy, steps, marks=[] if (strategy, steps) in ENDS else pytest.mark.long)
        for strategy in ("data=3", "model=2", "pipeline=2")
        for steps in (1, 2, 3)
    ],
)
def test_data_of_unknown_size_end_within_an_execution(strategy, steps):
    """Four batches, and nobody knows: what the optimizer has counted is the same.

    It counts, decays and multiplies up without a gradient.
    """
    import tensorflow as tf

    def optimizer():
        return keras.optimizers.Nadam(0.01, weight_decay=0.1)

    signature = tf.TensorSpec((None, 6), "float32"), tf.TensorSpec((None,), "int64")
    records = []
    for chosen in (None, strategy):
        data = tf.data.Dataset.from_generator(batches, output_signature=signature)
        arguments = compiled(optimizer, steps_per_execution=steps)
        model = make(models.mlp, arguments(), chosen)
        history = fit(model, data, epochs=3, verbose=0)
        records.append({"history": history, **state(model)})
        # Keras does of a step what needs no batch, where an execution is one.
        counted = int(model.optimizer.iterations)
        if chosen is None and counted != 3 * (5 if steps == 1 else 4):
            pytest.skip(f"plain Keras has lost its race: {counted} steps")
    compare(f"unknown_size_{steps}", strategy, *records)


class Counting(keras.layers.Layer):
    """Counts its calls in training, as a fraction and as a whole number."""

    def build(self, shape):
        zeros = {"shape": (), "initializer": "zeros", "trainable": False}
        self.fraction = self.add_weight(name="fraction", **zeros)
        self.whole = self.add_weight(name="whole", dtype="int32", **zeros)

    def call(self, x, training=False):
        if training:
            self.fraction.assign_add(1.0)
            self.whole.assign_add(1)
        return x


class CountingStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.counter = self.add_weight(name="counter", initializer="zeros", trainable=False)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.counter.assign_add(1.0)
        return super().train_step(data)


def counting_layer():
    x = keras.Input((6,))
    return keras.Model(x, keras.layers.Dense(1)(Counting(name="counting")(x)))


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize(
    ("build", "strategy"),
    [
        *((counting_layer, strategy) for strategy in ("data=3", "model=2", "pipeline=2")),
        (CountingStep, "data=3"),
    ],
)
def test_counters_where_data_of_unknown_size_end(build, strategy):
    """They count the step without a batch once, on each replica, as plain Keras does."""
    import tensorflow as tf

    def unknown():
        values = rows.regression(48)
        slices = tf.data.Dataset.from_tensor_slices((values["x"], values["y"]))
        return slices.filter(lambda x, y: True).batch(16)

    records = []
    for chosen in (None, strategy):
        model = make(build, compiled(loss="mse", metrics=())(), chosen)
        for _ in range(2):
            model.fit(unknown(), verbose=0)
        counted = int(model.optimizer.iterations)
        if chosen is None and counted != 8:
            pytest.skip(f"plain Keras has lost its race: {counted} steps")
        records.append(state(model))
    compare("counters_at_the_end", strategy, *records)


@pytest.mark.parametrize(
    "strategy",
    ["data=3", pytest.param("model=2", marks=LONG_WHERE_TRACED), "pipeline=2"],
)
def test_an_input_that_a_generator_leaves_out(strategy):
    data = rows.classes()

    def parts(*names):
        for start in range(0, 48, 16):
            part = {name: values[start : start + 16] for name, values in data.items()}
            yield ({"x": part["x"], "other": None}, *(part[name] for name in names))

    records = []
    for chosen in (None, strategy):
        model = make(stage_models.optional_input, compiled()(), chosen)
        history = fit(model, parts("y"), verbose=0)
        evaluated = model.evaluate(parts("y"), verbose=0)
        predicted = model.predict(parts(), verbose=0)
        found = {"evaluate": evaluated, "predict": predicted}
        records.append({"history": history, **found, **state(model)})
    compare("left_out_by_generator", strategy, *records)


@pytest.mark.backend("tensorflow")
def test_run_eagerly_is_refused_in_a_pipeline():
    model = pk.parallelize(models.mlp())
    with pytest.raises(pk.UnsupportedError, match="(?s)run_eagerly.*Received"):
        model.compile(**compiled(run_eagerly=True)(), strategy="pipeline=2")


# ---- jit_compile="auto" where there seems to be a GPU ---------------------------


@pytest.fixture
def a_gpu(monkeypatch):
    """For Keras, which then compiles with XLA; not for who looks for a device to use."""
    import tensorflow as tf

    real = tf.config.list_physical_devices
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: real(kind) if kind else [*real(), gpu]
    )


@pytest.mark.backend("tensorflow")
def test_auto_is_asked_anew_with_each_strategy(a_gpu):
    stock = models.mlp()
    stock.compile(**compiled()())
    assert stock.jit_compile is True, "the list of devices has no effect"
    model = pk.parallelize(models.mlp())
    model.compile(**compiled()())
    assert model.jit_compile is True
    for strategy in ("data=2", "model=2", "pipeline=2"):
        model.set_strategy(strategy)
        assert model.jit_compile is False
        model.set_strategy(None)
        assert model.jit_compile is True
        model.compile(**compiled()(), strategy=strategy)
        assert model.jit_compile is False
    model.fit(**rows.classes(), **OPTIONS)


@pytest.mark.backend("tensorflow")
def test_auto_of_a_model_that_was_compiled_before(a_gpu):
    model = models.mlp()
    model.compile(**compiled()())
    assert model.jit_compile is True
    pk.parallelize(model, "data=2")
    model.fit(**rows.classes(), **OPTIONS)
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.backend("tensorflow")
def test_jit_compile_that_was_asked_for_is_refused(a_gpu):
    model = pk.parallelize(models.mlp())
    model.compile(**compiled(jit_compile=True)())
    model.set_strategy("data=2")
    with pytest.raises(pk.UnsupportedError, match="(?s)jit_compile.*Received"):
        model.fit(**rows.classes(), **OPTIONS)
