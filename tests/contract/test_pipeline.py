"""A pipeline of any number of stages and micro-batches equals plain Keras, on any graph."""

import re

import cases
import keras
import models
import numpy as np
import pytest
import rows
import stage_models
from cases import adam, compiled, graphs, sgd
from harness import (
    BACKEND,
    LONG_WHERE_TRACED,
    SEED,
    check,
    compare,
    fit,
    grid_of,
    make,
    state,
)
from keras import layers, ops

import parallel_keras as pk

OPTIONS = {"batch_size": 16, "epochs": 1, "shuffle": False, "verbose": 0}
# What `make test` runs; on TensorFlow each case is traced anew, which takes seconds.
QUICK = {
    "torch": {
        "u_net",
        "early_output",
        "masked_loss",
        "tied_weights",
        "chain_subclassed",
        "other_in_inference",
    },
    "tensorflow": {"u_net", "masked_loss", "confident_early_sum"},
}[BACKEND]


def pipeline(stages, microbatches, schedule="1f1b"):
    """A name, and a function that makes the strategy of a case."""
    strategy = pk.PipelineParallel(stages, microbatches=microbatches, schedule=schedule)
    return f"{stages}x{microbatches}_{schedule}", lambda case: strategy


GRID = [
    case
    for stages in (2, 3, 4)
    for microbatches in (1, 2, 4, 8)
    for schedule in ("1f1b", "gpipe")
    for case in grid_of(
        graphs,
        QUICK,
        pipeline(stages, microbatches, schedule),
        (stages, microbatches, schedule) == (3, 4, "1f1b"),
    )
]


@pytest.mark.parametrize("case, strategy", GRID)
def test_any_graph(case, strategy):
    check(case, strategy(case))


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=LONG_WHERE_TRACED)])
@pytest.mark.parametrize(
    "points",
    [
        ["block_0", "block_1"],
        pytest.param(["block_1", "mean"], marks=LONG_WHERE_TRACED),
        pytest.param(["block_0"], marks=LONG_WHERE_TRACED),
    ],
    ids=["attends_last", "attends_first", "attends_alone"],
)
def test_masks_that_attention_takes_away(points, recompute):
    """On one stage, and on all that are given the same words later; and not when it looks again."""
    strategy = pk.PipelineParallel(microbatches=3, split_points=points, recompute=recompute)
    check(cases.case("attended", stage_models.attended, rows.tokens), strategy)


@LONG_WHERE_TRACED
def test_masks_that_attention_takes_away_in_a_nested_model():
    strategy = pk.PipelineParallel(microbatches=2, split_points=["inner", "mean_of_words"])
    check(cases.case("attended_nested", stage_models.attended_nested, rows.tokens), strategy)


def test_recomputed_activations_change_nothing():
    """Dropout draws again what it drew; layer state moves once."""
    strategies = [pk.PipelineParallel(2, microbatches=4, recompute=r) for r in (False, True)]
    arguments = compiled(adam)
    records = []
    for strategy in strategies:
        model = make(_random_and_normalized, arguments(), strategy)
        history = fit(model, **rows.classes(), **{**OPTIONS, "epochs": 2})
        records.append({"history": history, **state(model)})
    compare("recompute", strategies[1], *records)


def _random_and_normalized():
    x = keras.Input((6,))
    y = layers.Dropout(0.5)(stage_models.dense("first")(x))
    y = layers.BatchNormalization()(y)
    y = layers.Dropout(0.3)(stage_models.dense("second")(y))
    return keras.Model(x, stage_models.head(y))


# ---- where it is cut ------------------------------------------------------------


def stages_of(model, strategy=None):
    """The stage of each layer, by its name, as the plan tells it."""
    plan = model.plan(batch_size=16, strategy=strategy)
    paths = [cost.path.split("/")[-1] for cost in plan.layers]
    return dict(zip(paths, plan.placement, strict=True))


def test_split_points():
    model = pk.parallelize(stage_models.chain())
    strategy = pk.PipelineParallel(split_points=["dense_2", "dense_3"])
    assert strategy.num_stages == 3
    where = stages_of(model, strategy)
    assert [where[f"dense_{n}"] for n in range(6)] == [0, 0, 1, 2, 2, 2]
    assert where["head"] == 2


def test_a_list_of_counts():
    where = stages_of(pk.parallelize(stage_models.chain()), pk.PipelineParallel(balance=[1, 4, 2]))
    assert [where[f"dense_{n}"] for n in range(6)] == [0, 1, 1, 1, 1, 2]


def placed():
    x = keras.Input((6,))
    with pk.place(0):
        y = stage_models.dense("first")(x)
    y = stage_models.dense("follows")(y)
    with pk.place(1):
        y = stage_models.dense("second")(y)
    with pk.place(-1):
        y = stage_models.head(y)
    return keras.Model(x, y)


def test_places():
    model = pk.parallelize(placed())
    assert stages_of(model, "pipeline") == {"first": 0, "follows": 0, "second": 1, "head": 1}
    assert stages_of(model, pk.PipelineParallel(3)) == {
        "first": 0,
        "follows": 0,
        "second": 1,
        "head": 2,
    }
    # A split point wins over places.
    assert stages_of(model, pk.PipelineParallel(split_points=["follows"]))["second"] == 1


def test_without_places_stages_cost_the_same():
    """A wide layer at the start is a stage of its own."""
    x = y = keras.Input((6,))
    for number, units in enumerate((512, 512, 8, 8, 8, 8)):
        y = stage_models.dense(f"dense_{number}", units)(y)
    model = pk.parallelize(keras.Model(x, stage_models.head(y)))
    where = stages_of(model, "pipeline=2")
    assert [where[f"dense_{n}"] for n in range(6)] == [0, 1, 1, 1, 1, 1]


def backwards():
    x = keras.Input((6,))
    with pk.place(1):
        y = stage_models.dense("first")(x)
    with pk.place(0):
        y = stage_models.head(y)
    return keras.Model(x, y)


def by_device():
    x = keras.Input((6,))
    with pk.place("cpu:0"):
        y = stage_models.dense("first")(x)
    return keras.Model(x, stage_models.head(y))


def with_gap():
    x = keras.Input((6,))
    with pk.place(2):
        y = stage_models.dense("first")(x)
    return keras.Model(x, stage_models.head(y))


WRONG = {
    "backwards": (backwards, "pipeline", ["head", "stage 1", "stage 1 or later"]),
    "a device": (by_device, "pipeline", ["pk.place(0)", "cpu:0"]),
    "a gap": (with_gap, "pipeline", ["Stage 0", "nothing to compute"]),
    "too many places": (with_gap, "pipeline=2", ["2"]),
    "no such layer": (
        stage_models.chain,
        pk.PipelineParallel(split_points=["dense_9"]),
        ["dense_9", "Near are", "dense_0, dense_1", "split_points=['dense_9']"],
    ),
    "no such layer, nor one like it": (
        stage_models.chain,
        pk.PipelineParallel(split_points=["zzz"]),
        ["'zzz'", "they are: dense_0, dense_1"],
    ),
    "wrong order": (
        stage_models.chain,
        pk.PipelineParallel(split_points=["dense_3", "dense_1"]),
        ["order", "dense_0, dense_1, dense_2"],
    ),
    "the first layer": (
        stage_models.chain,
        pk.PipelineParallel(split_points=["dense_0", "dense_3"]),
        ["'dense_0' is the first", "without being named"],
    ),
    "wrong counts": (
        stage_models.chain,
        pk.PipelineParallel(balance=[3, 3]),
        ["6 together", "has 7", "dense_0, dense_1"],
    ),
    "too few layers": (models.mlp, "pipeline=4", ["pk.PipelineParallel(2)"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_where_it_cannot_be_cut(name):
    build, strategy, words = WRONG[name]
    model = pk.parallelize(build())
    with pytest.raises(ValueError) as caught:
        model.compile("sgd", "sparse_categorical_crossentropy", strategy=strategy)
        model.fit(**rows.classes(), **OPTIONS)
    for word in [*words, "Received"]:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    before = state(model)
    model.compile("sgd", "sparse_categorical_crossentropy", strategy=None)
    model.fit(**rows.classes(), **OPTIONS)
    assert before


# ---- what a micro-batch is by definition -----------------------------------------


def normalized():
    x = keras.Input((6,))
    y = stage_models.dense("first")(x)
    y = layers.BatchNormalization(momentum=0.7, name="norm")(y)
    return keras.Model(x, stage_models.head(stage_models.dense("second")(y)))


@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_moving_averages_take_one_step_with_the_whole_batch(microbatches):
    strategy = pk.PipelineParallel(2, microbatches=microbatches, split_points=["second"])
    arguments = {"optimizer": keras.optimizers.SGD(0.0), "loss": "sparse_categorical_crossentropy"}
    model = make(normalized, arguments, strategy)
    data = rows.classes(18)
    before = model.get_layer("norm").get_weights()[2:]
    fit(model, **data, **{**OPTIONS, "batch_size": 18})
    seen = keras.Model(model.inputs, model.get_layer("first").output).predict(data["x"], verbose=0)
    expected = [
        0.7 * old + 0.3 * new
        for old, new in zip(before, (seen.mean(axis=0), seen.var(axis=0)), strict=True)
    ]
    received = model.get_layer("norm").get_weights()[2:]
    compare("moving_averages", f"M={microbatches}", {"w": expected}, {"w": received})


def test_micro_batches_are_normalized_by_themselves():
    """The loss that is trained on is that of the micro-batches."""
    strategy = pk.PipelineParallel(2, microbatches=3, split_points=["second"])
    arguments = compiled(lambda: keras.optimizers.SGD(0.1))
    model = make(normalized, arguments(), strategy)
    data = rows.classes(18)
    history = fit(model, **data, **{**OPTIONS, "batch_size": 18})
    plain = make(normalized, arguments(), None)
    losses = [
        plain.compute_loss(
            y=data["y"][at], y_pred=plain(data["x"][at], training=True), training=True
        )
        for at in (slice(0, 6), slice(6, 12), slice(12, 18))
    ]
    expected = float(np.mean([float(ops.convert_to_numpy(loss)) for loss in losses]))
    compare("normalized", strategy, {"loss": [expected]}, {"loss": history["loss"]})


def test_random_layers_draw_for_each_micro_batch_and_again_on_a_rerun():
    strategy = pk.PipelineParallel(2, microbatches=4)
    records = [run_random(strategy) for _ in range(2)]
    compare("random_rerun", strategy, *records)
    assert records[0]["seen"] == 4, "each micro-batch has a mask of its own"


def run_random(strategy):
    """Equal rows, half of them dropped: the outputs tell the masks."""
    x = keras.Input((16,))

    def build():
        y = layers.Dropout(0.5, name="drop")(x)
        y = layers.Dense(1, use_bias=False, kernel_initializer="ones", name="sum")(y)
        return keras.Model(x, layers.Identity(name="out")(y))

    model = make(build, {"optimizer": keras.optimizers.SGD(0.0), "loss": LastBatch()}, strategy)
    history = fit(
        model, x=np.arange(16.0)[None].repeat(4, 0).astype("float32"), y=np.zeros((4, 1)), **OPTIONS
    )
    masks = len(set(np.round(model.loss.seen[-4:], 4)))
    return {"history": history, "seen": masks, **state(model)}


class LastBatch(keras.losses.Loss):
    """Notes the outputs of the whole batch, which the caller has on every backend."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, y_true, y_pred):
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            tf.numpy_function(self._note, [y_pred], [])
        elif y_pred.device.type != "meta":
            self._note(y_pred.detach().numpy())
        return ops.mean(ops.square(y_true - y_pred), axis=-1)

    def _note(self, values):
        self.seen += values.ravel().tolist()


# ---- refusals ---------------------------------------------------------------------


class OwnStep(models.Subclassed):
    def train_step(self, data):
        return super().train_step(data)


class OwnLoss(models.Subclassed):
    def compute_loss(self, *arguments, **keywords):
        return super().compute_loss(*arguments, **keywords)


class OnNumbers(models.Subclassed):
    """Looks at the numbers of a batch."""

    def call(self, x):
        return super().call(x * (1 + 0 * float(np.asarray(x).sum())))


def contrastive(y_true, y_pred):
    similarity = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.mean(ops.square(similarity - 0.5))


# On TensorFlow plain Keras does not take this one either.
only_torch = pytest.mark.backend("torch")

REFUSED = {
    "train_step": (OwnStep, {}, ["train_step", "OwnStep"]),
    "compute_loss": (OwnLoss, {}, ["compute_loss", "OwnLoss"]),
    "call": (OnNumbers, {}, ["call", "OnNumbers", "traced"]),
    "batch_loss": (models.mlp, {"loss": contrastive}, ["contrastive"]),
    "jit_compile": (models.mlp, {"jit_compile": True}, ["jit_compile"]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=only_torch if n == "call" else ()) for n in REFUSED]
)
def test_refused_before_the_first_step(name):
    build, arguments, words = REFUSED[name]
    model = pk.parallelize(build())
    data = rows.classes()
    with pytest.raises(pk.UnsupportedError) as caught:
        model.compile(**{**compiled(sgd)(), "metrics": None, **arguments}, strategy="pipeline")
        model.fit(**data, **OPTIONS)
    for word in [*words, "Received"]:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


class Normalized(keras.optimizers.SGD):
    """Divides all gradients by their global norm."""

    def apply(self, grads, trainable_variables=None):
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads)) + 1e-6
        return super().apply([g / norm for g in grads], trainable_variables)


class Remembers(keras.optimizers.Optimizer):
    """Keeps one number for all variables."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.total = keras.Variable(0.0, trainable=False, name="total")
            self._track_variable(self.total)

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(self.total, ops.sum(ops.square(gradient)))
        self.assign_sub(variable, learning_rate * gradient / (1.0 + self.total))


class Signs(keras.optimizers.Optimizer):
    """Keeps something for each variable."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.means = [self.add_variable_from_reference(v, "mean") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        mean = self.means[self._get_variable_index(variable)]
        self.assign(mean, 0.9 * mean + gradient)
        self.assign_sub(variable, learning_rate * mean / (0.1 + ops.abs(mean)))


@pytest.mark.parametrize("make", [Normalized, Remembers, Signs])
def test_optimizers_of_ones_own(make):
    """On torch each stage updates its own variables: one that looks at all is refused."""
    case = cases.case(make.__name__, stage_models.chain, compile=compiled(lambda: make(0.01)))
    strategy = pk.PipelineParallel(3, microbatches=4)
    if BACKEND == "torch" and make is not Signs:
        with pytest.raises(pk.UnsupportedError, match=f"all variables together.*{make.__name__}"):
            check(case, strategy)
    else:
        check(case, strategy)


def test_one_micro_batch_may_mix_its_rows():
    """What compares the rows of a batch is refused only where batches are cut."""
    case = cases.case(
        "contrastive", stage_models.chain, rows.one_hot, compiled(sgd, contrastive, metrics=())
    )
    check(case, pk.PipelineParallel(2, microbatches=1))
    with pytest.raises(pk.UnsupportedError, match="contrastive"):
        check(case, pk.PipelineParallel(2, microbatches=2))


def test_synchronized_batch_normalization_needs_whole_batches():
    model = pk.parallelize(models.synchronized_cnn())
    arguments = compiled(sgd)()
    with pytest.raises(pk.UnsupportedError, match="synchronized"):
        model.compile(**arguments, strategy="pipeline")
    model.compile(**arguments)
    with pytest.raises(pk.UnsupportedError, match="synchronized"):
        model.set_strategy("pipeline")
    with pytest.raises(pk.UnsupportedError, match="synchronized"):
        pk.parallelize(models.synchronized_unbuilt(), "pipeline")
    model.compile(**arguments, strategy=pk.PipelineParallel(2, microbatches=1))
    model.fit(**rows.images(), **OPTIONS)


def test_schedules_that_are_not_there_yet():
    for name in ("interleaved", "ScheduleInterleaved1F1B", "zero-bubble", "ZBVZeroBubble"):
        with pytest.raises(pk.UnsupportedError, match=re.escape(name)):
            pk.PipelineParallel(schedule=name)
    with pytest.raises(ValueError, match="1f1b"):
        pk.PipelineParallel(schedule="1fb1")


# ---- what the user sees ---------------------------------------------------------


def test_the_first_fit_says_what_was_chosen(capfd, caplog):
    caplog.set_level("INFO", logger="parallel_keras")
    model = make(stage_models.chain, compiled(sgd)(), "pipeline=2")
    model.fit(**rows.classes(32), **{**OPTIONS, "verbose": 2})
    said = caplog.text + "".join(capfd.readouterr())
    assert "2 stages" in said and "8 × 2 rows" in said and "microbatches=8" in said, said


def test_a_loss_that_changes_the_order_of_work_is_said_to(capfd, caplog):
    caplog.set_level("INFO", logger="parallel_keras")
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
    model = make(stage_models.chain, {**compiled(sgd)(), "loss": loss}, "pipeline=2")
    model.fit(**rows.classes(32), **{**OPTIONS, "verbose": 2})
    said = caplog.text + "".join(capfd.readouterr())
    assert "the order of work is that of 'gpipe'" in said, said
    kinds = [event.kind for event in model.timeline().of(model.timeline().devices[0])]
    assert kinds == ["forward"] * 8 + ["backward"] * 8 + ["update"]


def test_weights_are_right_whenever_they_are_read():
    """In a callback, in the middle of an epoch, one weight or all."""
    seen = {}

    class Look(keras.callbacks.Callback):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def on_train_batch_end(self, batch, logs=None):
            layer = self.model.layers[-1 - batch % 3]
            found = ops.convert_to_numpy(layer.kernel if hasattr(layer, "kernel") else 0.0)
            seen.setdefault(self.name, []).append(np.array(found))

    for strategy in (None, "pipeline=3"):
        model = make(stage_models.chain, compiled(adam)(), strategy)
        model.fit(**rows.classes(), **OPTIONS, callbacks=[Look(strategy)])
    compare("looked_at", "pipeline=3", {"w": seen[None]}, {"w": seen["pipeline=3"]})


def another_world():
    other = make(stage_models.chain, compiled(sgd)(), "pipeline=2")
    other.fit(**rows.classes(), **OPTIONS)


def killed_workers():
    # Tests share the pool, which on TensorFlow is none.
    from parallel_keras.backends.torch import workers

    workers._pool.abort()


# What may befall the workers that hold the weights, and whether a loop of batches outlives it.
AFTERWARDS = {
    "shutdown": (pk.shutdown, True),
    "clear_session": (keras.utils.clear_session, True),
    "another world": (another_world, True),
    "killed workers": (killed_workers, False),
}


@pytest.mark.backend("torch")
@pytest.mark.parametrize(
    "name",
    # Those that start workers anew take long.
    [
        pytest.param("shutdown", marks=pytest.mark.long),
        pytest.param("clear_session", marks=pytest.mark.long),
        "another world",
        "killed workers",
    ],
)
def test_weights_outlive_the_workers(name):
    """Nobody has read them since they were trained."""
    happens, is_known_before = AFTERWARDS[name]
    data = rows.classes()

    def loop(model):
        for _ in range(3):
            model.train_on_batch(data["x"], data["y"])

    def train(model):
        fit(model, **data, **OPTIONS)

    for way in (train, loop) if is_known_before else (train,):
        expected = make(stage_models.chain, compiled(adam)(), None)
        way(expected)
        expected = state(expected)
        model = make(stage_models.chain, compiled(adam)(), "pipeline=3")
        way(model)
        happens()
        compare(f"{name} {way.__name__}", "pipeline=3", expected, state(model))
        model.fit(**data, **OPTIONS)
    if not is_known_before:
        loop(model)
        happens()
        with pytest.raises(pk.WorkerError, match=r"have ended[\s\S]*epoch's beginning"):
            model.get_weights()
        model.fit(**data, **OPTIONS)


def two_with_one_body(strategies):
    """Two models whose first layers are the same; the body's last layer is on a later stage."""
    keras.utils.set_random_seed(SEED)
    body = keras.Sequential(
        [keras.Input((6,)), *(stage_models.dense(f"body_{n}") for n in range(4))]
    )
    x = keras.Input((6,))
    models = [keras.Model(x, stage_models.head(body(x))), keras.Model(x, layers.Dense(6)(body(x)))]
    for model, strategy, loss in zip(
        models, strategies, ("sparse_categorical_crossentropy", "mse"), strict=True
    ):
        pk.parallelize(model, strategy)
        model.compile(adam(), loss)
    return models


def by_fit(one, other, x, y):
    return [fit(model, x, to, **OPTIONS) for _ in range(2) for model, to in ((one, y), (other, x))]


def by_batch(one, other, x, y):
    pairs = [(one, y), (other, x)]
    return [model.train_on_batch(x[:16], to[:16]) for _ in range(3) for model, to in pairs]


def in_a_callback(one, other, x, y):
    losses = []

    def train(batch, logs):
        losses.append(float(other.train_on_batch(x[:16], x[:16])))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=train)
    return [fit(one, x, y, **OPTIONS, callbacks=[callback]), losses]


@pytest.mark.parametrize("way", [by_fit, by_batch, in_a_callback])
@pytest.mark.parametrize(
    "strategies",
    [
        pytest.param((one, other), id=f"{name}_{one.microbatches}", marks=LONG_WHERE_TRACED)
        for one in (pk.PipelineParallel(2, microbatches=m) for m in (1, 4))
        for name, other in (("pipeline", one), ("data", "data=2"), ("none", None))
    ],
)
def test_two_models_that_share_layers_train_in_turn(strategies, way):
    """What one has left with its workers the other one needs, in the middle of an epoch too."""
    data, records = rows.classes(), []
    for chosen in ((None, None), strategies):
        models = two_with_one_body(chosen)
        record = {"logs": way(*models, **data)}
        for name, model in zip(("one", "other"), models, strict=True):
            record[name] = {**state(model), "predict": model.predict(data["x"], verbose=0)}
        records.append(record)
    compare(f"in_turn_{way.__name__}", strategies, *records)


def test_predict_keeps_the_order_of_the_rows():
    model = make(models.identity, {"optimizer": "sgd", "loss": "mse"}, None)
    plain = keras.Sequential([keras.Input((1,)), layers.Identity(), *model.layers])
    pk.parallelize(plain, pk.PipelineParallel(2, microbatches=4))
    x = np.arange(53, dtype="float32")[:, None]
    np.testing.assert_array_equal(plain.predict(x, batch_size=7, verbose=0), x)
    keras.utils.set_random_seed(SEED)


def test_a_place_that_is_given_later_counts():
    model = make(stage_models.chain, compiled(sgd)(), "pipeline=2")
    model.fit(**rows.classes(), **OPTIONS)
    pk.place(0)(model.get_layer("dense_0"))
    pk.place(1)(model.get_layer("dense_1"))
    model.fit(**rows.classes(), **OPTIONS)
    where = stages_of(model)
    assert [where[f"dense_{n}"] for n in range(3)] == [0, 1, 1]


def per_variable():
    adam, sgd = keras.optimizers.Adam(), keras.optimizers.SGD()
    return keras.optimizers.MultiOptimizer(lambda v: adam if "kernel" in v.path else sgd)


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Adam,
        pytest.param(
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
            marks=LONG_WHERE_TRACED,
        ),
        pytest.param(per_variable, marks=LONG_WHERE_TRACED),
        lambda: keras.optimizers.LossScaleOptimizer(per_variable()),
    ],
    ids=["plain", "scaled", "several", "several_scaled"],
)
def test_an_optimizer_that_was_built_for_another_model_raises(optimizer):
    arguments = {"optimizer": optimizer(), "loss": "sparse_categorical_crossentropy"}
    make(stage_models.chain, arguments, None).fit(**rows.classes(), **OPTIONS)
    model = make(stage_models.chain, arguments, "pipeline=2")
    before = model.get_weights()
    with pytest.raises((ValueError, KeyError)) as caught:  # a KeyError on TensorFlow, Keras's own
        model.fit(**rows.classes(), **OPTIONS)
    assert not isinstance(caught.value, pk.WorkerError)
    assert BACKEND == "tensorflow" or "Unknown variable" in str(caught.value)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


class Shrinks(keras.layers.Layer):
    """Makes its weight smaller each time that it is called in training."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")

    def call(self, x, training=None):
        if training:
            self.kernel.assign(self.kernel * 0.9)
        return keras.ops.tanh(x @ self.kernel)


@pytest.mark.backend("torch")
@pytest.mark.parametrize("stage", [0, 1])
def test_a_weight_that_each_call_moves_is_refused(stage):
    """TensorFlow refuses each layer that assigns a weight that trains."""

    def build():
        x = keras.Input((6,))
        order = [keras.layers.Dense(6), Shrinks()]
        y = x
        for layer in order if stage else order[::-1]:
            y = layer(y)
        return keras.Model(x, keras.layers.Dense(3, activation="softmax")(y))

    balance = [1, 2]
    model = make(build, compiled(adam)(), pk.PipelineParallel(2, microbatches=4, balance=balance))
    with pytest.raises(pk.UnsupportedError, match="(?s)moves a weight.*Received.*kernel"):
        fit(model, **rows.classes(16), **OPTIONS)
    one = pk.PipelineParallel(2, microbatches=1, balance=balance)
    records = []
    for strategy in (None, one):
        model = make(build, compiled(adam)(), strategy)
        records.append({"history": fit(model, **rows.classes(), **OPTIONS), **state(model)})
    compare("moved_weight", "pipeline", *records)
