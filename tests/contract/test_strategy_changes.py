"""A strategy may change in mid-training, and files know nothing of it."""

import pickle
import zipfile

import keras
import models
import numpy as np
import pytest
import rows
from cases import adam, compiled, sgd
from harness import LONG_WHERE_TRACED, SEED, compare, fit, make, state
from keras import optimizers

import parallel_keras as pk

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}

TOUR = (None, "data=2", "data=3", None, pk.DataParallel(2))
LONG_TOUR = ("pipeline=2", "data=2", pk.PipelineParallel(2, microbatches=3), "model=2", None)
# To a pipeline from each of the others and back, and from one with other micro-batches.
GPIPE = pk.PipelineParallel(2, microbatches=1, schedule="gpipe")
PIPELINES_TOUR = (None, "pipeline=2", GPIPE, None, "model=2", "pipeline=2", "data=3", GPIPE)

KINDS = {
    "adam": (models.mlp, compiled(adam)),
    "sgd_subclassed": (models.Subclassed, compiled(sgd)),
    "ema_accumulation": (
        models.mlp,
        compiled(
            lambda: optimizers.Adam(
                0.01, use_ema=True, ema_overwrite_frequency=3, gradient_accumulation_steps=3
            )
        ),
    ),
    "loss_scale": (
        models.mlp,
        compiled(lambda: optimizers.LossScaleOptimizer(adam(), dynamic_growth_steps=3)),
    ),
    "sequential_unbuilt": (models.sequential_unbuilt, compiled(lambda: "rmsprop")),
}


# `make test` runs one on TensorFlow, where each step of the tour is traced anew.
@pytest.mark.parametrize(
    "kind", ["adam", *(pytest.param(k, marks=LONG_WHERE_TRACED) for k in KINDS if k != "adam")]
)
@pytest.mark.parametrize(
    "tour", [TOUR, *(pytest.param(t, marks=LONG_WHERE_TRACED) for t in (LONG_TOUR, PIPELINES_TOUR))]
)
def test_a_tour_of_strategies_equals_the_unbroken_run(kind, tour):
    build, arguments = KINDS[kind]
    data = rows.classes()
    plain = make(build, arguments(), None)
    toured = pk.parallelize(make(build, arguments(), None))
    optimizer = toured.optimizer
    records = ([], [])
    for strategy in tour:
        toured.set_strategy(strategy)
        assert toured.strategy == (
            strategy if isinstance(strategy, pk.Strategy) else _expected(strategy)
        )
        for model, record in zip((plain, toured), records, strict=True):
            record.append(fit(model, **data, **OPTIONS))
            record.append(model.evaluate(**data, verbose=0))
    assert toured.optimizer is optimizer
    compare(
        f"tour_{kind}",
        "tour",
        {"logs": records[0], **state(plain)},
        {"logs": records[1], **state(toured)},
    )


def _expected(strategy):
    if strategy is None:
        return pk.SingleDevice()
    kinds = {"data": pk.DataParallel, "model": pk.ModelParallel, "pipeline": pk.PipelineParallel}
    name, _, count = strategy.partition("=")
    return kinds[name](int(count))


@pytest.mark.parametrize(
    "strategy", ["data=3", pytest.param("pipeline=2", marks=LONG_WHERE_TRACED)]
)
def test_references_stay_valid(strategy):
    model = pk.parallelize(make(models.mlp, compiled(adam)(), None))
    kernel, variables = model.layers[1].kernel, list(model.variables)
    slots = model.optimizer
    for chosen in (strategy, None):
        model.set_strategy(chosen)
        before = keras.ops.convert_to_numpy(kernel)
        fit(model, **rows.classes(), **OPTIONS)
        assert model.layers[1].kernel is kernel
        assert all(a is b for a, b in zip(model.variables, variables, strict=False))
        assert model.optimizer is slots
        after = keras.ops.convert_to_numpy(kernel)
        assert np.abs(after - before).max() > 1e-3, "the reference does not see the training"
        kernel.assign(0.0 * after)
        x = rows.classes()["x"]
        expected = keras.ops.convert_to_numpy(model(x))
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)


def test_metrics_survive_a_change():
    """`evaluate` after a change starts anew, `reset_metrics` works, results agree."""
    model = pk.parallelize(make(models.mlp, compiled()(), None), "data=3")
    data = rows.classes()
    logs = model.evaluate(**data, verbose=0, return_dict=True)
    seen = {metric.name: float(metric.result()) for metric in model.metrics[:1]}
    assert seen["loss"] == pytest.approx(logs["loss"], abs=1e-6)
    model.set_strategy(None)
    seen = {metric.name: float(metric.result()) for metric in model.metrics[:1]}
    assert seen["loss"] == pytest.approx(logs["loss"], abs=1e-6)
    again = model.evaluate(**data, verbose=0, return_dict=True)
    compare("metrics_after_change", "data=3", logs, again)


@pytest.mark.parametrize(
    "way",
    [
        "compile",
        pytest.param("parallelize", marks=LONG_WHERE_TRACED),
        "constructor",
        pytest.param("set_strategy", marks=LONG_WHERE_TRACED),
    ],
)
def test_the_ways_to_choose_a_strategy_agree(way):
    data = rows.classes()
    plain = make(models.mlp, compiled()(), None)
    expected = {"history": fit(plain, **data, **OPTIONS), **state(plain)}
    keras.utils.set_random_seed(1729)
    arguments = compiled()()
    if way == "parallelize":
        model = pk.parallelize(models.mlp(), "data=3")
        model.compile(**arguments)
    elif way == "compile":
        model = pk.parallelize(models.mlp())
        model.compile(**arguments, strategy=pk.DataParallel(3))
    elif way == "constructor":
        stock = models.mlp()
        model = pk.ParallelModel(stock.input, stock.output)
        model.compile(**arguments, strategy="DATA=3")
        assert type(model) is type(stock)
    else:
        model = models.mlp()
        model.compile(**arguments)
        pk.parallelize(model).set_strategy("data=3")
    assert model.strategy == pk.DataParallel(3)
    compare(
        f"way_{way}", "data=3", expected, {"history": fit(model, **data, **OPTIONS), **state(model)}
    )


class Sub(pk.ParallelModel):
    """A subclass, used in both ways that Keras allows."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        if not arguments:
            self.dense = keras.layers.Dense(3, activation="softmax")

    def call(self, x):
        return super().call(x) if not hasattr(self, "dense") else self.dense(x)


def test_subclasses_of_parallel_model():
    data = rows.classes()
    x = keras.Input((6,))
    functional = pk.ParallelModel(x, keras.layers.Dense(3)(x))

    class Late(pk.ParallelModel):
        """Made after a functional one."""

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3, activation="softmax")

        def call(self, x):
            return self.dense(x)

    for model in (Sub(), Late(), functional):
        model.compile("sgd", "sparse_categorical_crossentropy", strategy="data=3")
        losses = fit(model, **data, **OPTIONS, epochs=3)["loss"]
        assert np.isfinite(losses).all()


class OwnCompile(keras.Model):
    """Its `compile` has arguments of its own and none for a strategy."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.dense(x)

    def compile(self, optimizer, loss, temperature=1.0):
        super().compile(optimizer=optimizer, loss=loss)
        self.temperature = temperature


def test_compile_of_the_users_class():
    loss = "sparse_categorical_crossentropy"
    keras.utils.set_random_seed(1729)
    plain = OwnCompile()
    plain.compile(sgd(), loss, temperature=0.5)
    keras.utils.set_random_seed(1729)
    model = pk.parallelize(OwnCompile())
    model.compile(sgd(), loss, temperature=0.5, strategy="data=3")
    assert model.temperature == 0.5
    records = [
        {"history": fit(each, **rows.classes(), **OPTIONS), **state(each)}
        for each in (plain, model)
    ]
    compare("own_compile", "data=3", *records)


@LONG_WHERE_TRACED
def test_recompile_resets_the_optimizer_as_keras_does():
    records = []
    for strategies in ((None, None), ("data=3", "data=2")):
        model = make(models.mlp, compiled(adam)(), strategies[0])
        first = fit(model, **rows.classes(), **OPTIONS)
        extra = {} if strategies[1] is None else {"strategy": strategies[1]}
        model.compile(**compiled(sgd)(), **extra)
        second = fit(model, **rows.classes(), **OPTIONS)
        records.append({"first": first, "second": second, **state(model)})
    compare("recompile", "data=3", *records)


# ---- files --------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        models.mlp,
        pytest.param(models.sequential, marks=LONG_WHERE_TRACED),
        pytest.param(models.nested, marks=LONG_WHERE_TRACED),
    ],
)
def test_a_saved_model_goes_on_in_plain_keras_and_under_a_strategy(build, tmp_path):
    data = rows.classes()
    path = tmp_path / "model.keras"
    plain = make(build, compiled(adam)(), None)
    model = make(build, compiled(adam)(), "data=3")
    records = [fit(each, **data, **OPTIONS) for each in (plain, model)]
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        assert b"parallel" not in archive.read("config.json")
    in_keras = keras.models.load_model(path)
    assert type(in_keras) is type(plain)
    under = pk.load_model(path, strategy="data=2")
    assert under.strategy == pk.DataParallel(2)
    plain_again = fit(plain, **data, **OPTIONS)
    expected = {"history": [records[0], plain_again], **state(plain)}
    for name, loaded in (("keras", in_keras), ("data=2", under), ("goes_on", model)):
        history = [records[1], fit(loaded, **data, **OPTIONS)]
        received = {"history": history, **state(loaded)}
        compare(f"saved_{build.__name__}_{name}", "data=3", expected, received)


def test_weights_files_go_both_ways(tmp_path):
    path = tmp_path / "some.weights.h5"
    data = rows.classes()
    model = make(models.mlp, compiled(adam)(), "data=3")
    plain = make(models.mlp, compiled(adam)(), None)
    fit(model, **data, **OPTIONS)
    model.save_weights(path)
    plain.load_weights(path)
    compare(
        "weights_file", "data=3",
        {"predict": plain.predict(data["x"], verbose=0)},
        {"predict": model.predict(data["x"], verbose=0)},
    )  # fmt: skip
    fit(plain, **data, **OPTIONS)
    plain.save_weights(path)
    model.load_weights(path)
    compare(
        "weights_file_back", "data=3",
        {"predict": plain.predict(data["x"], verbose=0), "weights": plain.get_weights()},
        {"predict": model.predict(data["x"], verbose=0), "weights": model.get_weights()},
    )  # fmt: skip


def test_clones_and_pickles_are_plain():
    model = make(models.mlp, compiled(adam)(), "data=3")
    fit(model, **rows.classes(), **OPTIONS)
    copies = [keras.models.clone_model(model), pickle.loads(pickle.dumps(model))]
    for copy in copies:
        assert not hasattr(copy, "set_strategy")
        assert type(copy) is type(model)
    x = rows.classes()["x"]
    compare(
        "pickled", "data=3",
        {"predict": model.predict(x, verbose=0)}, {"predict": copies[1].predict(x, verbose=0)},
    )  # fmt: skip


def test_the_model_answers_as_it_did():
    model = make(models.mlp, compiled()(), "data=3")
    fit(model, **rows.classes(), **OPTIONS)
    plain = models.mlp()
    assert model.count_params() == plain.count_params()
    lines = []
    model.summary(print_fn=lines.append)
    assert "Total params" in "".join(lines)
    assert model.get_layer(index=1) is model.layers[1]
    assert model.get_config()["layers"][0]["class_name"] == "InputLayer"


@pytest.mark.parametrize("strategy", ["data", "model", "pipeline"])
def test_a_plain_model_that_shares_a_layer_sees_what_it_learns(strategy):
    data, outputs = rows.classes(), []
    for chosen in (None, strategy):
        keras.utils.set_random_seed(SEED)
        x = keras.Input((6,))
        plain = keras.Model(x, keras.layers.Dense(4, activation="tanh")(x))
        whole = keras.Model(x, keras.layers.Dense(3, activation="softmax")(plain(x)))
        found = [plain.predict(data["x"], verbose=0)]  # traced before the variables move
        pk.parallelize(whole, chosen)
        whole.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
        for last in (chosen, None):
            whole.set_strategy(last)
            fit(whole, **data, **OPTIONS)
            found.append(plain.predict(data["x"], verbose=0))
        outputs.append(found)
    for expected, received in zip(*outputs, strict=True):
        np.testing.assert_allclose(received, expected, atol=1e-5)


def _two_that_share(first, second):
    """Two compiled models that share a layer."""
    keras.utils.set_random_seed(SEED)
    x = keras.Input((6,))
    shared = keras.layers.Dense(4, activation="tanh")(x)
    pair = [keras.Model(x, keras.layers.Dense(3, activation="softmax")(shared)) for _ in range(2)]
    for model, strategy in zip(pair, (first, second), strict=True):
        pk.parallelize(model, strategy)
        model.compile(adam(), "sparse_categorical_crossentropy")
    return pair


@pytest.mark.parametrize(
    "second",
    [
        "data=3",
        "model=2",
        pytest.param("data=2", marks=LONG_WHERE_TRACED),
        pytest.param("pipeline=2", marks=LONG_WHERE_TRACED),
    ],
)
def test_two_models_that_share_a_layer_train_by_turns(second):
    data, records = rows.classes(), []
    for strategies in ((None, None), ("data=2", second)):
        pair = _two_that_share(*strategies)
        history = [fit(model, **data, **OPTIONS) for model in pair * 2]
        records.append({"history": history, "states": [state(model) for model in pair]})
    compare("shared_by_turns", second, *records)


@pytest.mark.backend("tensorflow")
def test_a_model_without_a_strategy_does_not_train_what_another_one_has():
    parallel, plain = _two_that_share("data=2", None)
    fit(parallel, **rows.classes(), **OPTIONS)
    before = plain.get_weights()
    with pytest.raises(pk.UnsupportedError, match="(?s)shares with.*compile.*Received"):
        fit(plain, **rows.classes(), **OPTIONS)
    for old, new in zip(before, plain.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    plain.compile(adam(), "sparse_categorical_crossentropy", strategy="data=2")
    fit(plain, **rows.classes(), **OPTIONS)


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize(
    "before, after", [(None, "data"), ("data", None), ("data", "data=3"), (None, "model")]
)
def test_a_function_traced_before_the_change_does_not_go_on_with_old_numbers(before, after):
    import tensorflow as tf

    model = make(models.mlp, compiled(sgd)(), before)
    fit(model, **rows.classes(), **OPTIONS)
    x = rows.classes()["x"]
    traced = tf.function(lambda x: model(x))
    traced(x)
    pk.parallelize(model).set_strategy(after)
    fit(model, **rows.classes(), **OPTIONS)
    with pytest.raises(tf.errors.InvalidArgumentError):
        traced(x)
    np.testing.assert_allclose(tf.function(lambda x: model(x))(x), model(x), atol=1e-6)


def test_what_is_compiled_anew_is_looked_at_anew():
    """A second loss may compare the rows with each other where the first did not."""

    def centred(y_true, y_pred):
        apart = y_pred - keras.ops.mean(y_pred, axis=0)
        return keras.ops.mean(keras.ops.square(apart) - y_true * y_pred)

    records = []
    for strategy in (None, "data=2"):
        model = make(models.mlp, compiled(sgd)(), strategy)
        data = rows.one_hot()
        for loss in ("categorical_crossentropy", centred):
            model.compile(sgd(), loss)
            history = fit(model, **data, **OPTIONS)
        records.append({"history": history, **state(model)})
    compare("compiled_anew", "data=2", *records)
