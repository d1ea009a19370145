"""Every kind of input: the same rows give the same weights, and none is drawn in vain."""

import collections
import functools
import os
import time

import keras
import models
import pytest
import rows
from cases import compiled
from harness import BACKEND, LONG_WHERE_TRACED, TOLERANCE, compare, fit, make, oracle, state

BATCH = 16
STEPS = 4  # of the 49 rows: 16, 16, 16 and 1
EPOCHS = 2


def numpy_arrays(data):
    return {**data, "batch_size": BATCH, "shuffle": False}


def backend_tensors(data):
    tensors = {key: keras.ops.convert_to_tensor(data[key]) for key in data}
    return {**tensors, "batch_size": BATCH, "shuffle": False}


def torch_tensors(data):
    import torch

    tensors = {key: torch.from_numpy(data[key]) for key in data}
    return {**tensors, "batch_size": BATCH, "shuffle": False}


def tf_data(data):
    import tensorflow as tf

    return {"x": tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(BATCH)}


def tf_data_of_unknown_size(data):
    """No cardinality, no static batch size, and it repeats: `steps_per_epoch` ends an epoch."""
    import tensorflow as tf

    def batches():
        for start in range(0, 49, BATCH):
            yield data["x"][start : start + BATCH], data["y"][start : start + BATCH]

    signature = (tf.TensorSpec((None, 6), "float32"), tf.TensorSpec((None,), "int64"))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return {"x": dataset.repeat(), "steps_per_epoch": STEPS}


def torch_loader(data):
    import torch

    dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, data.values()))
    return {"x": torch.utils.data.DataLoader(dataset, batch_size=BATCH)}


def torch_loader_with_workers(data):
    import torch

    dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, data.values()))
    return {"x": torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=1)}


class Pages(keras.utils.PyDataset):
    """Counts which page is loaded how often."""

    def __init__(self, data, **options):
        super().__init__(**options)
        self.data = data
        self.loaded = []

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        self.loaded.append(index)
        page = slice(index * BATCH, (index + 1) * BATCH)
        return self.data["x"][page], self.data["y"][page]


def py_dataset(data):
    return {"x": Pages(data), "shuffle": False}


def py_dataset_with_workers(data):
    return {"x": Pages(data, workers=2, use_multiprocessing=False), "shuffle": False}


class Draws:
    """A Python generator that counts what is drawn from it."""

    def __init__(self, data):
        self.data = data
        self.drawn = 0

    def batches(self):
        while True:
            for start in range(0, 49, BATCH):
                self.drawn += 1
                yield self.data["x"][start : start + BATCH], self.data["y"][start : start + BATCH]


def generator(data):
    return {"x": Draws(data).batches(), "steps_per_epoch": STEPS}


KINDS = [
    numpy_arrays,
    backend_tensors,
    tf_data,
    tf_data_of_unknown_size,
    torch_loader,
    torch_loader_with_workers,
    py_dataset,
    py_dataset_with_workers,
    generator,
    *([torch_tensors] if BACKEND == "tensorflow" else []),
]
# Data of the other framework, which loads it, and what is traced like another kind.
SLOW = {
    "torch": {tf_data, tf_data_of_unknown_size},
    "tensorflow": {torch_loader, torch_loader_with_workers, torch_tensors, backend_tensors},
}


def kinds(strategies=("data=2", "data=3", "model=2", "pipeline=2")):
    return [
        pytest.param(
            kind,
            strategy,
            id=f"{kind.__name__}-{strategy.replace('=', '')}",
            marks=[pytest.mark.long] if strategy != "data=3" or kind in SLOW[BACKEND] else [],
        )
        for kind in KINDS
        for strategy in strategies
    ]


def train(strategy, kind=numpy_arrays):
    model = make(models.mlp, compiled()(), strategy)
    if kind is py_dataset_with_workers:
        # Keras 3.15.1 on torch draws a batch to build the metrics and does not
        # put it back when there are workers: each epoch is shifted by a batch.
        # Built before, plain Keras takes the pages in their order.
        model.test_on_batch(*rows.classes(2).values())
    history = fit(model, **kind(rows.classes()), epochs=EPOCHS, verbose=0)
    return {"history": history, **state(model)}


@pytest.mark.parametrize("kind, strategy", kinds())
def test_the_same_rows_give_the_same_weights(kind, strategy):
    compare(f"input_{kind.__name__}", strategy, oracle(train), train(strategy, kind))


@pytest.mark.parametrize("kind, strategy", kinds())
def test_evaluate_and_predict(kind, strategy):
    expected = _evaluate_and_predict(None, numpy_arrays)
    received = _evaluate_and_predict(strategy, kind)
    compare(f"evaluate_{kind.__name__}", strategy, expected, received)


def _evaluate_and_predict(strategy, kind):
    model = _model(strategy)
    data = kind(rows.classes())
    data.pop("shuffle", None)
    steps = {"steps": data.pop("steps_per_epoch")} if "steps_per_epoch" in data else {}
    record = {"evaluate": model.evaluate(**data, **steps, verbose=0)}
    data = {**kind(rows.classes())}
    options = {"batch_size": data["batch_size"]} if "batch_size" in data else {}
    record["predict"] = model.predict(data["x"], **options, **steps, verbose=0)
    return record


@functools.cache
def _model(strategy):
    return make(models.mlp, compiled()(), strategy)


@pytest.mark.parametrize("strategy", ["data=3", pytest.param("data=2", marks=pytest.mark.long)])
def test_a_generator_is_drawn_from_as_by_plain_keras(strategy):
    drawn, records = [], []
    for chosen in (None, strategy):
        model = make(models.mlp, compiled()(), chosen)
        source = Draws(rows.classes())
        history = fit(model, source.batches(), epochs=2, steps_per_epoch=5, verbose=0)
        drawn.append(source.drawn)
        evaluated = model.evaluate(source.batches(), steps=3, verbose=0)
        drawn.append(source.drawn)
        predicted = model.predict(source.batches(), steps=2, verbose=0)
        drawn.append(source.drawn)
        records.append({"history": history, "evaluate": evaluated, "predict": predicted,
                        **state(model)})  # fmt: skip
    # Stock TensorFlow draws ahead in a thread: how far differs from run to run.
    ahead = 2 if BACKEND == "tensorflow" else 0
    for plain, received in zip(drawn[:3], drawn[3:], strict=True):
        assert abs(plain - received) <= ahead, f"{drawn[:3]} draws became {drawn[3:]}"
    compare("generator_draws", strategy, *records)


@pytest.mark.parametrize("strategy", ["data=3"])
def test_pages_are_loaded_as_often_as_by_plain_keras(strategy):
    loaded = []
    for chosen in (None, strategy):
        model = make(models.mlp, compiled()(), chosen)
        pages = Pages(rows.classes(), workers=1)
        fit(model, pages, epochs=2, shuffle=False, verbose=0)
        loaded.append(pages.loaded)
    assert loaded[0] == loaded[1]


class Infinite(Draws):
    """Ends by itself after 6 batches: `fit` without `steps_per_epoch`."""

    def batches(self):
        for _, batch in zip(range(6), super().batches(), strict=False):
            yield batch


@LONG_WHERE_TRACED
@pytest.mark.parametrize("strategy", ["data=3"])
def test_a_generator_that_ends(strategy):
    records = []
    for chosen in (None, strategy):
        model = make(models.mlp, compiled()(), chosen)
        source = Infinite(rows.classes())
        history = fit(model, source.batches(), epochs=1, verbose=0)
        records.append({"history": history, "drawn": source.drawn, **state(model)})
    compare("generator_that_ends", strategy, *records)


# ---- structures ---------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["data=3"])
@pytest.mark.parametrize("source", ["tf_data", "generator"])
def test_structures_through_a_pipeline(source, strategy):
    """Dicts of inputs with row weights, through tf.data and a generator."""
    if BACKEND == "torch" and source == "tf_data":
        pytest.skip("the kinds above run tf.data on torch")
    data = rows.weighted(rows.two_inputs_dict())

    def batches():
        for start in range(0, 49, BATCH):
            page = slice(start, start + BATCH)
            x = {name: value[page] for name, value in data["x"].items()}
            yield x, data["y"][page], data["sample_weight"][page]

    def made():
        if source == "generator":
            return batches()
        import tensorflow as tf

        whole = (data["x"], data["y"], data["sample_weight"])
        return tf.data.Dataset.from_tensor_slices(whole).batch(BATCH)

    records = []
    for chosen in (None, strategy):
        model = make(models.two_inputs_dict, compiled(weighted_metrics=("accuracy",))(), chosen)
        history = fit(model, made(), epochs=1, verbose=0)
        records.append({"history": history, **state(model)})
    compare(f"structures_{source}", strategy, *records, tolerance=TOLERANCE)


@pytest.mark.parametrize(
    "strategy",
    ["data=3", *(pytest.param(s, marks=LONG_WHERE_TRACED) for s in ("model=2", "pipeline=2"))],
)
def test_named_tuples_that_cannot_be_imported(strategy):
    """Inputs and targets in a class that was made in a function, as a script's own is."""
    inputs = collections.namedtuple("inputs", ["a", "b"])
    targets = collections.namedtuple("targets", ["c", "d"])

    def build():
        symbols = inputs(keras.Input((3,), name="a"), keras.Input((6,), name="b"))
        joined = keras.layers.Concatenate()(list(symbols))
        c, d = (keras.layers.Dense(1, name=name)(joined) for name in targets._fields)
        return keras.Model(symbols, targets(c, d))

    def arguments():
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": targets("mse", "mae")}

    records = []
    for chosen in (None, strategy):
        model = make(build, arguments(), chosen)
        data = rows.regression(features=9)
        x, y = inputs(data["x"][:, :3], data["x"][:, 3:]), targets(data["y"], -data["y"])
        history = fit(model, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
        assert type(predicted) is targets
        records.append({"history": history, "evaluate": evaluated, "predict": predicted._asdict(),
                        **state(model)})  # fmt: skip
    compare("named_tuples", strategy, *records)


class SlowGradient(keras.layers.Layer):
    """The identity, whose gradient takes its time in the workers."""

    def __init__(self):
        super().__init__()
        self.caller = os.getpid()

    def call(self, x):
        if os.getpid() != self.caller and x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(0.05))
        return x


@pytest.mark.backend("torch")
def test_a_batch_stays_until_the_slowest_replica_is_through_with_it():
    """Between two updates no all-reduce holds the caller back: it may be a step ahead."""

    def model():
        x = keras.Input((6,))
        hidden = SlowGradient()(keras.layers.Dense(8, name="first")(x))
        return keras.Model(x, keras.layers.Dense(3, activation="softmax", name="last")(hidden))

    def optimizer():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=6)

    records = []
    for strategy in (None, "data=2"):
        made = make(model, compiled(optimizer)(), strategy)
        history = fit(made, **rows.classes(96), batch_size=8, epochs=1, shuffle=False)
        records.append({"history": history, **state(made)})
    compare("slow_gradient", "data=2", *records)
