"""A model's own steps on TensorFlow: what is written with its tapes, functions and branches."""

import keras
import numpy as np
import pytest
import rows
import step_models
from cases import compiled, own_steps
from harness import compare, fit, make, number, state
from keras import layers, ops

import parallel_keras as pk

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend("tensorflow")

OPTIONS = {"batch_size": 16, "verbose": 0, "shuffle": False}


class Guide(step_models.Classifier):
    """As in Keras's guide: the tape gives gradients of `self.trainable_weights`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


class Values(Guide):
    """The optimizer is given what is inside of the variables."""

    def train_step(self, data):
        x, y = data
        weights = [v.value for v in self.trainable_weights]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class Penalized(Guide):
    """A gradient penalty, taken in a tape inside of a persistent one; two updates."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = ops.sum(self.inner(x)[:, 0])
            norms = ops.sqrt(ops.sum(ops.square(inner.gradient(score, x)), axis=1))
            penalty = ops.mean(ops.square(norms - 1.0))
            loss = self.compute_loss(y=y, y_pred=self(x))
        weights = self.trainable_weights
        for value in (loss, penalty):
            self.optimizer.apply(tape.gradient(value, weights), weights)
        return {"loss": loss, "penalty": penalty}


class Functions(Guide):
    """Everything is a `tf.function`, with branches that autograph makes."""

    @tf.function
    def train_step(self, data):
        x, y = data
        loss = self.learn(x, y)
        if loss > 100.0:
            loss = loss * 0.0
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}

    @tf.function
    def learn(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss


class Branches(Guide):
    """Variables that are assigned, and read again, in a branch and in a loop."""

    def __init__(self):
        super().__init__()
        self.steps = self.add_weight(name="steps", initializer="zeros", trainable=False)
        self.scale = self.add_weight(name="scale", initializer="ones", trainable=False)

    def train_step(self, data):
        found = super().train_step(data)
        self.steps.assign_add(1.0)

        def halve():
            self.scale.assign(self.scale * 0.5)
            return self.scale + 0.0

        def add():
            for _ in range(2):
                self.scale.assign_add(0.25)
            return self.scale + 0.0

        scale = ops.cond(self.steps % 2 > 0, halve, add)
        return {**found, "scale": scale}


class Unbuilt(Guide):
    """Nothing is built before the first step, optimizers in a dict neither."""

    def __init__(self):
        keras.Model.__init__(self)
        self.inner = keras.Sequential(
            [layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dense(3, "softmax")]
        )

    def compile(self, **arguments):
        super().compile(**arguments)
        self.others = {"second": own_steps.adam()}

    def train_step(self, data):
        found = super().train_step(data)
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        weights = self.inner.layers[-1].trainable_weights
        self.others["second"].apply(tape.gradient(loss, weights), weights)
        return found


class Normalized(Guide):
    """Statistics of the whole batch, through which each replica's loss reaches all rows."""

    def __init__(self):
        keras.Model.__init__(self)
        normalization = layers.BatchNormalization(synchronized=True)
        self.inner = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8), normalization, layers.Dense(3, "softmax")]
        )


class Table(Guide):
    """Tokens, each in several rows, and places that are the same in all."""

    def __init__(self):
        keras.Model.__init__(self)
        self.tokens, self.places = layers.Embedding(7, 4), layers.Embedding(5, 4)
        self.inner = layers.Dense(3, activation="softmax")

    def call(self, x, training=False):
        found = self.tokens(x) + self.places(ops.arange(5))
        return self.inner(ops.mean(found, axis=1))


def tokens():
    rng = np.random.default_rng(3)
    return {"x": rng.integers(0, 7, (49, 5)), "y": rng.integers(0, 3, 49)}


def uneven():
    return keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1)


def sgd():
    return keras.optimizers.SGD(0.1)


LINES = {
    "guide": (Guide, rows.classes, uneven),
    "values": (Values, rows.classes, own_steps.adam),
    "penalty": (Penalized, rows.classes, own_steps.adam),
    "functions": (Functions, rows.classes, own_steps.adam),
    "branches": (Branches, rows.classes, own_steps.adam),
    "normalized": (Normalized, lambda: rows.classes(55), sgd),
    "table": (Table, tokens, own_steps.adam),
}


def _record(build, data, optimizer, strategy, **options):
    model = make(build, compiled(optimizer, metrics=None)(), strategy)
    return {"history": fit(model, **data(), **OPTIONS, **options), **state(model)}


@pytest.mark.parametrize("name", LINES)
def test_equals_plain_keras(name):
    records = [_record(*LINES[name], strategy, epochs=2) for strategy in (None, "data=3")]
    compare(f"own_tf_{name}", "data=3", *records)


@pytest.mark.parametrize("first", [1, 16])
def test_nothing_is_built_before_the_first_step(first):
    """Also where the first batch has too few rows to be probed."""
    records = []
    for strategy in (None, "data=2"):
        model = make(Unbuilt, compiled(own_steps.adam, metrics=None)(), strategy)
        model.inner.layers[1].trainable = False  # statistics of a batch are of each replica's rows
        data = rows.classes(first + 16)
        batches = tf.data.Dataset.from_tensor_slices((data["x"], data["y"]))
        parts = batches.take(first).batch(first).concatenate(batches.skip(first).batch(16))
        record = {"history": [fit(model, parts, verbose=0) for _ in range(2)], **state(model)}
        record["second"] = [ops.convert_to_numpy(v) for v in model.others["second"].variables]
        records.append(record)
    compare(f"own_tf_unbuilt_{first}", "data=2", *records)


class Bare(step_models.Steps):
    """Batches are single tensors, as datasets of images are."""

    def __init__(self):
        super().__init__()
        self.inner = step_models.small(6, 6)

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        assert tf.is_tensor(data)
        return {
            "loss": self.update(
                self.optimizer, self.trainable_weights, lambda: ops.mean((self(data) - data) ** 2)
            )
        }


def test_a_batch_comes_as_the_dataset_has_it():
    records = []
    for strategy in (None, "data=3"):
        model = make(Bare, own_steps.nothing(), strategy)
        batches = tf.data.Dataset.from_tensor_slices(rows.classes(20)["x"]).batch(8)
        records.append({"history": fit(model, batches, verbose=0, epochs=2), **state(model)})
    compare("own_tf_bare", "data=3", *records)


def test_run_eagerly():
    records = []
    for strategy in (None, "data=3"):
        arguments = compiled(own_steps.adam, metrics=None)()
        model = make(Branches, {**arguments, "run_eagerly": True}, strategy)
        records.append({"history": fit(model, **rows.classes(33), **OPTIONS), **state(model)})
    compare("own_tf_eagerly", "data=3", *records)


class Counting(Guide):
    """Counts its steps in a plain attribute, which is one for all replicas."""

    calls = 0

    def train_step(self, data):
        self.calls += 1
        return super().train_step(data)


def test_a_plain_attribute_that_a_step_sets_eagerly_is_refused():
    arguments = {**compiled(own_steps.adam, metrics=None)(), "run_eagerly": True}
    model = make(Counting, arguments, "data=2")
    with pytest.raises(pk.UnsupportedError, match=r"Received: attribute .*calls"):
        fit(model, **rows.classes(16), **OPTIONS)
    assert model.calls == number(model.optimizer.iterations) == 0


def test_a_measured_timeline_is_refused():
    model = make(step_models.Classifier, compiled(own_steps.adam)(), "data=2")
    fit(model, **rows.classes(16), **OPTIONS)
    with pytest.raises(pk.UnsupportedError, match=r"(?s)model.timeline\(\).*Received"):
        model.timeline()


class Noisy(Guide):
    """Draws of TensorFlow's own."""

    @pk.reduce_logs(least="min", most="max")
    def train_step(self, data):
        x, y = data
        noise = tf.random.normal(tf.shape(x), stddev=0.1)
        draw = tf.random.uniform(())
        return {**super().train_step((x + noise, y)), "least": draw, "most": draw}


def test_draws_of_tensorflow_are_each_replicas_own():
    history = _record(Noisy, lambda: rows.classes(48), own_steps.adam, "data=3")["history"]
    assert history["most"][0] - history["least"][0] > 1e-4


# ---- spread ----------------------------------------------------------------------------


@pytest.mark.parametrize(("replicas", "counts"), [(2, [8, 8]), (3, [6, 5, 5])])
def test_each_device_has_its_rows(replicas, counts):
    devices, seen = set(), []

    def note(x):
        seen.append(x[:, 0].tolist())
        return x

    class Witness(step_models.Classifier):
        def train_step(self, data):
            if tf.distribute.get_strategy().num_replicas_in_sync == replicas:
                devices.add(tf.identity(data[1]).device.split("device:")[-1].lower())
            noted = tf.numpy_function(note, [data[0]], tf.float32)
            with tf.control_dependencies([noted]):
                return super().train_step(data)

    model = make(Witness, compiled(own_steps.adam)(), f"data={replicas}")
    data = rows.classes(16)
    data["x"][:, 0] = np.arange(16)
    model.train_on_batch(**data)
    seen.clear()  # the probe's too
    model.train_on_batch(**data)
    assert devices == set(model.strategy.devices)
    parts = sorted(seen)
    assert [len(part) for part in parts] == counts
    assert sum(parts, []) == list(range(16))


def test_all_copies_of_all_optimizers_stay_equal():
    model = make(step_models.GAN, own_steps.gan()(), "data=3")
    fit(model, **step_models.latent(33), **OPTIONS)
    slots = [v for o in (model.d_optimizer, model.g_optimizer) for v in o.variables]
    for variable in [*model.weights, *slots]:
        first, *others = [copy.numpy() for copy in variable.value.values]
        assert len(others) == 2
        for other in others:
            np.testing.assert_array_equal(first, other)


# ---- refused ---------------------------------------------------------------------------


class AppliesInABranch(Guide):
    def train_step(self, data):
        return ops.cond(
            ops.max(data[0]) > -1e6,
            lambda: {"loss": self.loss_of(data)},
            lambda: {"loss": ops.zeros(())},
        )

    def loss_of(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss


class ComputesWithEntries(Guide):
    """One table for tokens and for places, and a gradient that is made anew."""

    def __init__(self):
        keras.Model.__init__(self)
        self.table, self.inner = layers.Embedding(7, 4), layers.Dense(3, activation="softmax")

    def call(self, x, training=False):
        found = self.table(x) + self.table(ops.arange(5))
        return self.inner(ops.mean(found, axis=1))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        weights = self.trainable_weights
        gradients = [
            tf.IndexedSlices(1.0 * g.values, g.indices, g.dense_shape)
            if isinstance(g, tf.IndexedSlices)
            else g
            for g in tape.gradient(loss, weights)
        ]
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


class Stranger(Guide):
    """Assigns a variable that no attribute holds."""

    def __init__(self):
        super().__init__()
        vars(self)["hidden"] = [keras.Variable(0.0, trainable=False, name="hidden")]

    def train_step(self, data):
        found = super().train_step(data)
        vars(self)["hidden"][0].assign_add(1.0)
        return found


@pytest.mark.parametrize(
    ("build", "data", "words"),
    [
        (AppliesInABranch, rows.classes, "`tf.cond`.*Received"),
        (Stranger, rows.classes, "Received: .*variable hidden"),
        (ComputesWithEntries, tokens, "gradient of a table.*Received"),
    ],
)
def test_refused_by_name(build, data, words):
    model = make(build, compiled(own_steps.adam, metrics=None)(), "data=2")
    with pytest.raises(pk.UnsupportedError, match=f"(?s){words}"):
        fit(model, **data(), **OPTIONS)
    assert number(model.optimizer.iterations) == 0
