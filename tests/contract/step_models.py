"""Models with steps of their own, as Keras's guides write them.

What differs between the backends in a user's code is here in one place: `Steps.update`
takes gradients with `loss.backward()` on torch and a GradientTape on TensorFlow.
"""

import os

import keras
import numpy as np
from harness import BACKEND
from keras import layers, ops

import parallel_keras as pk


def small(inputs, outputs, activation=None):
    """A Sequential that is built."""
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(8, activation="tanh"),
            layers.Dense(outputs, activation=activation),
        ]
    )


class Steps(keras.Model):
    """What the models below share."""

    def update(self, optimizer, weights, loss):
        """Minimize `loss()`, a function, with one update; returns the loss.

        Weights are variables; `loss` may return a tuple, of which the first counts.
        """
        if BACKEND == "torch":
            import torch

            self.zero_grad()
            values = loss()
            first = values[0] if isinstance(values, tuple) else values
            optimizer.scale_loss(first).backward()
            gradients = [v.value.grad for v in weights]
            with torch.no_grad():
                optimizer.apply(gradients, weights)
            return values
        import tensorflow as tf

        with tf.GradientTape() as tape:
            values = loss()
            first = values[0] if isinstance(values, tuple) else values
            scaled = optimizer.scale_loss(first)
        gradients = tape.gradient(scaled, [v.value for v in weights])
        optimizer.apply(gradients, weights)
        return values


class VAE(Steps):
    """Keras's example of a variational autoencoder; without draws unless told."""

    def __init__(self, noise=0.0):
        super().__init__()
        self.encoder, self.decoder = small(6, 4), small(2, 6)
        self.noise = noise
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")
        self.built = True

    @property
    def metrics(self):
        return [
            self.total_loss_tracker,
            self.reconstruction_loss_tracker,
            self.kl_loss_tracker,
        ]

    def losses_of(self, data):
        encoded = self.encoder(data)
        mean, variance = encoded[:, :2], encoded[:, 2:]
        z = mean
        if self.noise:
            epsilon = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
            z = mean + self.noise * ops.exp(0.5 * variance) * epsilon
        reconstruction = self.decoder(z)
        reconstruction_loss = ops.mean(ops.sum(ops.square(data - reconstruction), axis=-1))
        kl = -0.5 * (1 + variance - ops.square(mean) - ops.exp(variance))
        kl_loss = ops.mean(ops.sum(kl, axis=1))
        return reconstruction_loss + kl_loss, reconstruction_loss, kl_loss

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        found = self.update(self.optimizer, self.trainable_weights, lambda: self.losses_of(data))
        for metric, value in zip(self.metrics, found, strict=True):
            metric.update_state(value)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
            "kl_of_the_batch": found[2],
        }

    def test_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        for metric, value in zip(self.metrics, self.losses_of(data), strict=True):
            metric.update_state(value)
        return {m.name: m.result() for m in self.metrics}

    def call(self, x):
        return self.decoder(self.encoder(x)[:, :2])


class GAN(Steps):
    """Two optimizers and a `compile` of its own; its latent points come from the data."""

    def __init__(self, critic_steps=1, clip=None):
        super().__init__()
        self.discriminator, self.generator = small(6, 1), small(6, 6)
        self.critic_steps, self.clip = critic_steps, clip
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def call(self, x):
        return self.generator(x)

    def test_step(self, data):
        return {"score": ops.mean(self.discriminator(self.generator(data[1])))}

    def train_step(self, data):
        real, latent = data
        rows = ops.shape(real)[0]
        for number in range(self.critic_steps):
            points = latent + 0.1 * number
            fake = ops.stop_gradient(self.generator(points))
            labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))])

            def d_loss_of(fake=fake, labels=labels):
                both = ops.concatenate([fake, real])
                return self.loss_fn(labels, self.discriminator(both))

            d_loss = self.update(self.d_optimizer, self.discriminator.trainable_weights, d_loss_of)
            if self.clip:
                for weight in self.discriminator.trainable_weights:
                    weight.assign(ops.clip(weight, -self.clip, self.clip))

        def g_loss_of():
            return self.loss_fn(ops.zeros((rows, 1)), self.discriminator(self.generator(latent)))

        g_loss = self.update(self.g_optimizer, self.generator.trainable_weights, g_loss_of)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class Penalized(GAN):
    """A critic whose gradient between real and fake points is held at one (WGAN-GP)."""

    def __init__(self, weight=10.0):
        super().__init__(critic_steps=2)
        self.weight = weight

    def slopes(self, points):
        """The norm of the critic's gradient at each point, which gradients go through."""
        if BACKEND == "torch":
            import torch

            points = points.detach().requires_grad_()
            score = self.discriminator(points).sum()
            (gradients,) = torch.autograd.grad(score, points, create_graph=True)
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                tape.watch(points)
                score = self.discriminator(points)
            gradients = tape.gradient(score, points)
        return ops.sqrt(ops.sum(ops.square(gradients), axis=1) + 1e-12)

    def train_step(self, data):
        real, latent = data
        part = 0.5 + 0.4 * ops.tanh(latent[:, :1])  # drawn by the data, row by row
        for _ in range(self.critic_steps):
            fake = ops.stop_gradient(self.generator(latent))
            between = fake + part * (real - fake)

            def d_loss_of(fake=fake, between=between):
                value = ops.mean(self.discriminator(fake)) - ops.mean(self.discriminator(real))
                return value + self.weight * ops.mean(ops.square(self.slopes(between) - 1.0))

            d_loss = self.update(self.d_optimizer, self.discriminator.trainable_weights, d_loss_of)

        def g_loss_of():
            return -ops.mean(self.discriminator(self.generator(latent)))

        g_loss = self.update(self.g_optimizer, self.generator.trainable_weights, g_loss_of)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class Distiller(Steps):
    """A frozen teacher; the compiled loss and metrics for the labels."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = small(6, 3, "softmax"), small(6, 3, "softmax")
        self.teacher.trainable = False
        self.divergence = keras.losses.KLDivergence()
        self.built = True

    def call(self, x, training=False):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        student_loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        soft = self.divergence(self.teacher(x, training=False), y_pred)
        return 0.3 * student_loss + 0.7 * soft


class Target(Steps):
    """A network that follows the weights, a mean of the losses, counters."""

    def __init__(self):
        super().__init__()
        self.online, self.target = small(6, 3), small(6, 3)
        self.target.trainable = False
        self.target.set_weights(self.online.get_weights())
        self.mean_loss = self.add_weight(name="mean_loss", initializer="zeros", trainable=False)
        self.centre = self.add_weight(
            name="centre", shape=(3,), initializer="zeros", trainable=False
        )
        self.steps = self.add_weight(
            name="steps", dtype="int32", initializer="zeros", trainable=False
        )
        self.calls = 0
        self.built = True

    def call(self, x):
        return self.online(x)

    def train_step(self, data):
        x, y = data
        labels = ops.one_hot(y, 3)

        def loss_of():
            wanted = ops.stop_gradient(self.target(x + 0.1)) - self.centre.value
            difference = self.online(x) - 0.5 * wanted - labels
            return ops.mean(ops.square(difference))

        loss = self.update(self.optimizer, self.online.trainable_weights, loss_of)
        for target, weight in zip(self.target.weights, self.online.weights, strict=True):
            target.assign(0.9 * target + 0.1 * weight)
        self.mean_loss.assign(0.8 * self.mean_loss + 0.2 * ops.stop_gradient(loss))
        seen = ops.mean(ops.stop_gradient(self.target(x)), axis=0)
        self.centre.assign(0.9 * self.centre + 0.1 * seen)
        self.steps.assign_add(1)
        if BACKEND == "torch":  # TensorFlow counts traces
            self.calls += 1
        return {"loss": loss, "mean_loss": ops.copy(self.mean_loss), "rate": self.rate()}

    def test_step(self, data):
        apart = self.online(data[0]) - self.target(data[0])
        return {"apart": ops.mean(ops.square(apart))}

    def rate(self):
        return ops.convert_to_tensor(self.optimizer.learning_rate)


class OwnLoss(keras.Model):
    """Only `compute_loss` is its own, with a tracker of a part of it."""

    def __init__(self):
        super().__init__()
        self.inner = small(6, 3, "softmax")
        self.tracker = keras.metrics.Mean(name="confidence")
        self.built = True

    def call(self, x, training=False):
        return self.inner(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        confidence = ops.mean(ops.max(y_pred, axis=-1))
        self.tracker.update_state(confidence)
        return loss + 0.1 * confidence


class OwnMetrics(keras.Model):
    """Only `compute_metrics` is its own; it adds a metric by rows."""

    def __init__(self):
        super().__init__()
        self.inner = small(6, 3, "softmax")
        self.certain = keras.metrics.MeanMetricWrapper(
            lambda y, p: ops.cast(ops.max(p, axis=-1) > 0.5, "float32"), name="certain"
        )
        self.built = True

    def call(self, x):
        return self.inner(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.certain.update_state(y, y_pred)
        results["certain"] = self.certain.result()
        return results


class OwnTest(keras.Model):
    """`test_step` and `predict_step` are its own; rows, a maximum and a plain number."""

    def __init__(self):
        super().__init__()
        self.inner = small(6, 3, "softmax")
        self.built = True

    def call(self, x):
        return self.inner(x)

    @pk.reduce_logs(rows="sum", worst="max", best="min")
    def test_step(self, data):
        x, y = data[0], data[1]
        probabilities = self(x)
        loss = self.compute_loss(x, y, probabilities)
        self._loss_tracker.update_state(loss, sample_weight=ops.shape(x)[0])
        errors = 1.0 - ops.max(probabilities, axis=-1)
        return {
            "loss": self._loss_tracker.result(),
            "rows": ops.shape(x)[0],
            "worst": ops.max(errors),
            "best": ops.min(errors),
            "mean": {"error": ops.mean(errors)},
        }

    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        probabilities = self(x)
        return {"kind": ops.argmax(probabilities, axis=-1), "sure": ops.max(probabilities, -1)}


class Classifier(Steps):
    """A `train_step` as in the guide, with the compiled loss and metrics."""

    def __init__(self):
        super().__init__()
        self.inner = small(6, 3, "softmax")
        self.built = True

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, y = data[0], data[1]
        weights = data[2] if len(data) > 2 else None

        def loss_of():
            y_pred = self(x, training=True)
            return self.compute_loss(y=y, y_pred=y_pred, sample_weight=weights), y_pred

        loss, y_pred = self.update(self.optimizer, self.trainable_weights, loss_of)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=weights)
        return {m.name: m.result() for m in self.metrics}


class RawTorch(Steps):
    """Optimizers of torch itself."""

    def __init__(self, kind="Adam"):
        super().__init__()
        self.inner = small(6, 3)
        self.kind = kind
        self.opt = None
        self.built = True

    def compile(self, **arguments):
        import torch

        super().compile(**arguments)
        parameters = [v.value for v in self.inner.trainable_weights]
        self.opt = getattr(torch.optim, self.kind)(parameters, lr=0.02)

    def call(self, x):
        return self.inner(x)

    def test_step(self, data):
        return {"output": ops.mean(self(data[0]))}

    def train_step(self, data):
        import torch

        x, y = data
        self.opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(self(x), y.long())
        loss.backward()
        self.opt.step()
        return {"loss": loss.item()}


# ---- what is refused ---------------------------------------------------------------


class SumLoss(Classifier):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss * ops.cast(ops.shape(y_pred)[0], "float32")


class SumLater(Classifier):
    """A sum over the rows, with a coefficient that a callback raises from zero."""

    def __init__(self):
        super().__init__()
        self.beta = self.add_weight(shape=(), initializer="zeros", trainable=False, name="beta")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + self.beta * ops.sum(ops.square(y_pred))


class SumByAttribute(Classifier):
    """The same with a plain number of Python's."""

    def __init__(self):
        super().__init__()
        self.beta = 0.0

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + self.beta * ops.sum(ops.square(y_pred))


class InBatch(Steps):
    """Contrasts each row with all others of the batch."""

    def __init__(self):
        super().__init__()
        self.inner = small(6, 4)
        self.built = True

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x = data[0]

        def loss_of():
            one, other = self.inner(x), self.inner(x + 0.1)
            likeness = ops.matmul(one, ops.transpose(other))
            return ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    ops.arange(ops.shape(x)[0]), likeness, from_logits=True
                )
            )

        return {"loss": self.update(self.optimizer, self.trainable_weights, loss_of)}


class Centred(InBatch):
    """Subtracts the mean of the batch."""

    def train_step(self, data):
        x = data[0]

        def loss_of():
            outputs = self.inner(x)
            return ops.mean(ops.square(outputs - ops.mean(outputs, axis=0, keepdims=True) - 1.0))

        return {"loss": self.update(self.optimizer, self.trainable_weights, loss_of)}


class TwiceTheResult(Classifier):
    def train_step(self, data):
        found = super().train_step(data)
        return {**found, "twice": 2 * self._loss_tracker.result()}


class LargestLog(Classifier):
    def train_step(self, data):
        found = super().train_step(data)
        return {**found, "largest": ops.max(data[0])}


class LargestMetric(Classifier):
    """A metric whose state is a maximum over batches."""

    def __init__(self):
        super().__init__()
        self.kept = self.metric()

    @staticmethod
    def metric():
        return Kept("largest", 0.0, ops.maximum, ops.max)

    def train_step(self, data):
        found = super().train_step(data)
        return {**found, self.kept.name: self.kept.result()}


class SmallestMetric(LargestMetric):
    """One whose state is a minimum over batches, from infinity on."""

    @staticmethod
    def metric():
        return Kept("smallest", float("inf"), ops.minimum, ops.min)


class LaterMetric(LargestMetric):
    """The same of numbers of a kind only, of which the first batch has none."""

    @staticmethod
    def metric():
        def of_all(y):
            return ops.min(ops.where(y > 2.0, y, float("inf")))

        return Kept("later", float("inf"), ops.minimum, of_all)


class Kept(keras.metrics.Metric):
    """An extreme of all outputs.

    Args:
        name: String.
        start: Float, what it is before there are any.
        of_two: Function of two numbers that chooses one.
        of_all: Function of an array that chooses one.
    """

    def __init__(self, name, start, of_two, of_all):
        super().__init__(name=name)
        self.start, self.of_two, self.of_all = start, of_two, of_all
        self.value = self.add_variable((), "zeros", name="value")
        self.reset_state()

    def reset_state(self):
        self.value.assign(self.start)

    def update_state(self, y, y_pred, sample_weight=None):
        self.value.assign(self.of_two(self.value, self.of_all(y_pred)))

    def result(self):
        return ops.copy(self.value)


class Infinite(Classifier):
    """State that stays infinite, and logs that are infinite for all rows, or for one."""

    def __init__(self):
        super().__init__()
        self.best = self.add_weight(name="best", initializer="zeros", trainable=False)
        self.mean = self.add_weight(name="mean", initializer="zeros", trainable=False)
        self.best.assign(float("inf"))

    def train_step(self, data):
        found = super().train_step(data)
        lowest = ops.min(data[0])
        self.best.assign(ops.where(lowest > 1e30, lowest, self.best))
        value = ops.mean(data[0][:, 0])
        value = ops.where(value > 1e6, float("inf"), value)  # one row is far away
        self.mean.assign(value)
        return {**found, "all": ops.copy(self.best), "one": value}


class Live(Classifier):
    """Logs that are variables themselves: they show what becomes of them in the step."""

    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(name="mean", initializer="zeros", trainable=False)
        self.steps = self.add_weight(
            name="steps", dtype="int32", initializer="zeros", trainable=False
        )

    def train_step(self, data):
        early = {"steps": self.steps, "value": self.mean.value}
        found = super().train_step(data)
        tracker = self.metrics[0]
        held = {"mean": self.mean, "total": tracker.total, "count": tracker.count}
        iterations = self.optimizer.iterations
        self.mean.assign(0.5 * self.mean + ops.mean(data[0]))
        self.steps.assign_add(3)
        return {**found, **early, **held, "iterations": iterations}


class HeldByMetric(Classifier):
    """A log that is computed from what a metric holds."""

    def train_step(self, data):
        found = super().train_step(data)
        return {**found, "more": self.metrics[0].total + 1.0}


class LargestState(Classifier):
    def __init__(self):
        super().__init__()
        self.largest = self.add_weight(name="largest", initializer="zeros", trainable=False)

    def train_step(self, data):
        found = super().train_step(data)
        self.largest.assign(ops.maximum(self.largest, ops.max(data[0])))
        return found


COUNTED = keras.Variable(0.0, trainable=False, name="counted")


class ForeignGlobal(Classifier):
    """Counts in a variable that is none of the model's."""

    def train_step(self, data):
        found = super().train_step(data)
        COUNTED.assign_add(ops.cast(ops.shape(data[0])[0], "float32"))
        return found


class Plain:
    """What Keras does not look into.

    Args:
        **things: Its attributes.
    """

    def __init__(self, **things):
        vars(self).update(things)


class ForeignLater(ForeignGlobal):
    """The same, from the third step on, in the process of the caller or in the others.

    Args:
        in_caller: Boolean.
    """

    def __init__(self, in_caller):
        super().__init__()
        self.caller, self.in_caller = os.getpid(), in_caller

    def train_step(self, data):
        is_here = (os.getpid() == self.caller) == self.in_caller
        if is_here and int(self.optimizer.iterations) == 2:
            return super().train_step(data)
        return Classifier.train_step(self, data)


DRAWS = keras.random.SeedGenerator(7)


class ForeignDraws(Classifier):
    """Draws from a generator of nobody's, and from Keras's own.

    Dropout at such a rate has no effect on the numbers, but draws.
    """

    def train_step(self, data):
        x = keras.random.dropout(data[0], 1e-12, seed=DRAWS)
        x = keras.random.dropout(x, 1e-12)
        return super().train_step((x, *data[1:]))


class ForeignAttribute(Classifier):
    """Keeps a mean of the losses where Keras does not see it."""

    def __init__(self):
        super().__init__()
        self.kept = Plain(mean=keras.Variable(0.0, trainable=False, name="hidden_mean"))

    def train_step(self, data):
        found = super().train_step(data)
        error = ops.mean(self.compute_loss(y=data[1], y_pred=self(data[0])))
        self.kept.mean.assign(0.9 * self.kept.mean + 0.1 * ops.stop_gradient(error))
        return found


class ForeignClosure(Classifier):
    """Trains a weight that a function holds."""

    def __init__(self):
        super().__init__()
        scale = keras.Variable(np.ones(3, "float32"), name="held_scale")
        self.scale = lambda: scale
        self.of_scale = keras.optimizers.SGD(0.1)

    def train_step(self, data):
        found = super().train_step(data)
        scale = self.scale()

        def loss_of():
            return self.compute_loss(y=data[1], y_pred=ops.softmax(self(data[0]) * scale))

        self.update(self.of_scale, [scale], loss_of)
        return found


class FixedRows(Classifier):
    """Knows that batches have 16 rows."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.0 * ops.sum(ops.reshape(y_pred, (16, 3)))


class Unknown(Classifier):
    @pk.reduce_logs(wosrt="max")
    def train_step(self, data):
        return super().train_step(data)


class MixedPredictions(OwnTest):
    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        return self(x) - ops.mean(self(x), axis=0)


class UnclearedGradients(Classifier):
    """On torch: gradients of steps before are added."""

    def zero_grad(self, set_to_none=True):
        pass


def latent(n=49):
    """Rows and latent points for a GAN, each of six numbers."""
    rng = np.random.default_rng(7)
    real = rng.normal(size=(n, 6)).astype("float32")
    return {"x": real, "y": rng.normal(size=(n, 6)).astype("float32")}
