"""Models and losses with something that no row of a first batch reaches.

Each adds up over the rows of small numbers, and does not over those of large ones.
"""

import keras
import step_models
from harness import BACKEND
from keras import layers, ops

FAR = 5.0  # beyond anything in a first batch


def error_of_rows(y, y_pred):
    return ops.mean(ops.square(y - y_pred), axis=-1)


class ByHand(step_models.Steps):
    """A regression whose gradients go through a method before they are applied."""

    def __init__(self, outputs=1, activation=None):
        super().__init__()
        self.inner = step_models.small(6, outputs, activation)
        self.built = True

    def call(self, x):
        return self.inner(x)

    def loss_of(self, x, y):
        return ops.mean(error_of_rows(y, self(x)))

    def changed(self, gradients):
        return gradients

    def train_step(self, data):
        x, y = data
        weights = self.trainable_weights
        if BACKEND == "torch":
            import torch

            self.zero_grad()
            loss = self.loss_of(x, y)
            loss.backward()
            gradients = self.changed([v.value.grad for v in weights])
            with torch.no_grad():
                self.optimizer.apply(gradients, weights)
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self.loss_of(x, y)
            gradients = self.changed(tape.gradient(loss, [v.value for v in weights]))
            self.optimizer.apply(gradients, weights)
        return self.logs_of(x, y, loss)

    def logs_of(self, x, y, loss):
        return {"loss": loss}


class ClippedByValue(ByHand):
    def changed(self, gradients):
        return [ops.clip(g, -FAR, FAR) for g in gradients]


class OneClippedByValue(ByHand):
    """The gradients of one weight only."""

    def changed(self, gradients):
        return [*gradients[:-1], ops.clip(gradients[-1], -FAR, FAR)]


class ClippedFarAway(ByHand):
    """By what training gets to only when it goes wrong."""

    def changed(self, gradients):
        return [ops.clip(g, -1e4, 1e4) for g in gradients]


class ClippedByNorm(ByHand):
    """As the guides of both backends have it; torch clips in place."""

    def changed(self, gradients):
        if BACKEND == "torch":
            import torch

            parameters = [v.value for v in self.trainable_weights]
            torch.nn.utils.clip_grad_norm_(parameters, 4 * FAR)
            return [p.grad for p in parameters]
        import tensorflow as tf

        return tf.clip_by_global_norm(gradients, 4 * FAR)[0]


class ClippedClassifier(ClippedByValue):
    """Gradients of a crossentropy stay small whatever the rows."""

    def __init__(self):
        super().__init__(3, "softmax")

    def loss_of(self, x, y):
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, self(x)))


class CappedLoss(ByHand):
    def loss_of(self, x, y):
        return ops.minimum(super().loss_of(x, y), 10.0)


class CappedCompiledLoss(step_models.Classifier):
    """In `compute_loss`, with logits."""

    def __init__(self):
        keras.Model.__init__(self)
        self.inner = step_models.small(6, 3)
        self.built = True

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        rows = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return ops.minimum(ops.mean(rows), 10.0)


class Counting(ByHand):
    """A sum from the thousandth step on."""

    def __init__(self):
        super().__init__()
        self.steps = self.add_weight(
            name="steps", dtype="int32", initializer="zeros", trainable=False
        )

    def has_come(self):
        self.steps.assign_add(1)
        return self.steps > 1000

    def loss_of(self, x, y):
        rows = error_of_rows(y, self(x))
        return ops.where(self.has_come(), ops.sum(rows), ops.mean(rows))


class CountingInFloat(Counting):
    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(name="seen", initializer="zeros", trainable=False)

    def has_come(self):
        self.seen.assign_add(1.0)
        return self.seen > 1000.0


class CountingOfOptimizer(Counting):
    def has_come(self):
        return ops.convert_to_tensor(self.optimizer.iterations) > 1000


class CountingPlain(Counting):
    """A number of Python's own."""

    calls = 0

    def has_come(self):
        self.calls += 1
        return self.calls > 1000


class CappedLog(ByHand):
    def logs_of(self, x, y, loss):
        return {"loss": loss, "capped": ops.minimum(loss, 10.0)}


class CappedState(ByHand):
    def __init__(self):
        super().__init__()
        self.capped = self.add_weight(name="capped", initializer="zeros", trainable=False)

    def logs_of(self, x, y, loss):
        self.capped.assign(0.9 * self.capped + 0.1 * ops.minimum(ops.stop_gradient(loss), 10.0))
        return {"loss": loss}


class CappedMetric(ByHand):
    def __init__(self):
        super().__init__()
        self.capped = keras.metrics.Mean(name="capped")

    def logs_of(self, x, y, loss):
        self.capped.update_state(ops.minimum(ops.stop_gradient(loss), 10.0))
        return {"loss": loss, "capped": self.capped.result()}


class CappedTest(step_models.Classifier):
    def test_step(self, data):
        return {"largest": ops.minimum(ops.mean(ops.abs(data[0])), 10.0)}


class CappedPredictions(step_models.OwnTest):
    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        return self(x) / ops.maximum(ops.max(ops.abs(x)), 50.0)


# ---- what is fine ------------------------------------------------------------------


class Hinges(ByHand):
    """Kinks and caps in each row, a warm-up, and what clips the weights."""

    def __init__(self):
        super().__init__()
        self.steps = self.add_weight(
            name="steps", dtype="int32", initializer="zeros", trainable=False
        )

    def loss_of(self, x, y):
        self.steps.assign_add(1)
        warm = ops.minimum(ops.cast(self.steps, "float32") / 10.0, 1.0)
        rows = ops.minimum(error_of_rows(y, self(x)), FAR)
        beyond = ops.sum(ops.relu(ops.abs(x) - FAR), axis=-1)
        return warm * ops.mean(rows + ops.max(ops.relu(x), axis=-1) * rows + beyond * rows)

    def logs_of(self, x, y, loss):
        for weight in self.trainable_weights:
            weight.assign(ops.clip(weight, -2.0, 2.0))
        return {"loss": loss}


# ---- losses and layers under Keras's own step ---------------------------------------


def capped(y_true, y_pred):
    """A mean over the batch, up to a number that no first batch reaches."""
    return ops.minimum(ops.mean(ops.square(y_true - y_pred)), 10.0)


def capped_crossentropy(y_true, y_pred):
    rows = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    return ops.minimum(ops.mean(rows), 10.0)


class SmallestOfAKind(keras.metrics.Metric):
    """The smallest error for targets that no first batch has, however large; infinite before."""

    def __init__(self):
        super().__init__(name="smallest")
        self.value = self.add_variable((), "zeros", name="value")
        self.reset_state()

    def reset_state(self):
        self.value.assign(float("inf"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = ops.abs(y_true - y_pred)
        is_one = (y_true > 500.0) & (y_true < 501.0)
        of_batch = ops.min(ops.where(is_one, errors, float("inf")))
        self.value.assign(ops.minimum(self.value, of_batch))

    def result(self):
        return ops.copy(self.value)


def cubed(y_true, y_pred):
    """Large, and of each row by itself."""
    return ops.mean(ops.abs(y_true - y_pred) ** 3, axis=-1)


class SummedBeyond(layers.Layer):
    """Adds a sum over the rows, which is zero where nothing is far away."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.relu(x - FAR)))
        return x


class MeanBeyond(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.relu(x - FAR)))
        return x


class MeanAndSumBeyond(layers.Layer):
    """A mean, and what is far away as a sum: neither a mean nor a sum."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)) + ops.sum(ops.relu(x - FAR)))
        return x


class ScaledByLargest(layers.Layer):
    """Mixes rows once one of them is large."""

    def call(self, x):
        return x / ops.maximum(ops.max(ops.abs(x)), 50.0)


def penalized(layer):
    """The layer at the input, and once more where the weights decide what comes."""

    def build():
        x = keras.Input((6,))
        y = layers.Dense(8, activation="gelu")(layer()(x))
        return keras.Model(x, layers.Dense(1)(layer()(y)))

    return build
