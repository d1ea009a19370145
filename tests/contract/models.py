"""Small models, each with the one thing that a case is about."""

import warnings

import keras
from keras import layers, ops

import parallel_keras as pk


def mlp(**dense):
    """A functional classifier of three kinds."""
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh", **dense)(x)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def logits():
    """The same without its softmax."""
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3)(layers.Dense(8, activation="tanh")(x)))


def confident(activation=layers.Softmax):
    """Probabilities of which some are nought in float32: their logarithm is not."""
    x = keras.Input((6,))
    wide = keras.initializers.RandomNormal(stddev=12.0)
    y = layers.Dense(8, activation="tanh")(x)
    y = layers.Dense(3, kernel_initializer=wide)(y)
    return keras.Model(x, activation()(y))


class TensorFlowsSoftmax(layers.Layer):
    """What Keras knows by its operation only."""

    def call(self, x):
        import tensorflow as tf

        return tf.nn.softmax(x)


class TensorFlowsSigmoid(layers.Layer):
    def call(self, x):
        import tensorflow as tf

        return tf.sigmoid(x)


def regressor(outputs=1, **dense):
    """Positive outputs, as logarithms and ratios in metrics need them."""
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh", **dense)(x)
    y = layers.Dense(outputs, activation="softplus")(y)
    return keras.Model(x, ops.add(y, 0.5))


def sigmoid(outputs=1):
    """Probabilities of independent kinds."""
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    return keras.Model(x, layers.Dense(outputs, activation="sigmoid")(y))


def embeddings():
    """Vectors of length one, to be compared with each other."""
    x = keras.Input((6,))
    return keras.Model(x, layers.UnitNormalization()(layers.Dense(4)(x)))


def signs():
    """Outputs between -1 and 1."""
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    return keras.Model(x, layers.Dense(1, activation="tanh")(y))


def identity():
    """Gives back its input, times a weight of one."""
    return keras.Sequential(
        [keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )


# ---- how models are made ----------------------------------------------------


def sequential():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.Dense(3, activation="softmax"),
        ]
    )


def sequential_unbuilt():
    """No Input: it is built by the first batch."""
    return keras.Sequential(
        [layers.Dense(8, activation="tanh"), layers.Dense(3, activation="softmax")]
    )


def said_to_be_built():
    """Keras calls a model built when its `build` was called, whatever its layers are."""
    model = Residual()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.build((None, 6))
    return model


class Residual(keras.Model):
    """Layers inside layers that have no `build`."""

    def __init__(self):
        super().__init__()
        self.blocks = [ResidualBlock(), ResidualBlock()]
        self.head = layers.Dense(3, activation="softmax")

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ResidualBlock(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6, activation="tanh")

    def call(self, x):
        return x + self.dense(x)


class Subclassed(keras.Model):
    """No `get_config`, layers in a list and a dict, built by the first batch."""

    def __init__(self):
        super().__init__()
        self.hidden = [layers.Dense(8, activation="tanh"), layers.Dense(8, activation="tanh")]
        self.heads = {"label": layers.Dense(3)}

    def call(self, x, training=False):
        for layer in self.hidden:
            x = layer(x)
        return ops.softmax(self.heads["label"](x))


class Subfunctional(keras.Model):
    """Called as `Subfunctional(inputs, outputs)`: Keras gives it a functional base."""


def subfunctional():
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    return Subfunctional(x, layers.Dense(3, activation="softmax")(y))


def nested():
    """A model inside a model inside a model."""
    x = keras.Input((8,))
    inner = keras.Model(x, layers.Dense(8, activation="tanh")(x))
    middle = keras.Sequential([inner, layers.Dense(8, activation="tanh")])
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    return keras.Model(x, layers.Dense(3, activation="softmax")(middle(y)))


def shared():
    """One layer and one model, each called twice."""
    x = keras.Input((6,))
    layer = layers.Dense(6, activation="tanh")
    tower = keras.Sequential([keras.Input((6,)), layers.Dense(6, activation="tanh")])
    y = layers.add([tower(layer(x)), tower(x)])
    return keras.Model(x, layers.Dense(3, activation="softmax")(layer(y)))


def placed_skip():
    """A skip connection from device to device, and an operation of its own."""
    x = keras.Input((6,))
    with pk.place(0):
        h = layers.Dense(8, activation="tanh", name="first")(x)
    with pk.place(1):
        y = layers.Dense(8, activation="tanh", name="second")(h) + h
        y = layers.Dense(3, activation="softmax", name="third")(y)
    return keras.Model(x, y)


def frozen():
    """The middle layer does not train."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.Dense(8, activation="tanh", trainable=False),
            layers.Dense(3, activation="softmax"),
        ]
    )


class Unreached(layers.Layer):
    """Has a weight, and a layer, that its output does not use."""

    def build(self, shape):
        self.spare = self.add_weight(shape=(4,), name="spare")
        self.idle = layers.Dense(3)
        self.idle.build(shape)

    def call(self, x):
        return x * 1.5


def unreached():
    x = keras.Input((6,))
    y = Unreached()(layers.Dense(8, activation="tanh")(x))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def unreached_output():
    """The second output has no loss, so its layers get no gradient."""
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    label = layers.Dense(3, activation="softmax", name="label")(y)
    amount = layers.Dense(1, name="amount")(y)
    return keras.Model(x, {"label": label, "amount": amount})


# ---- losses inside models ---------------------------------------------------


class MeanPenalty(layers.Layer):
    """Adds the mean over the batch of a term of its output."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class RowPenalty(layers.Layer):
    """Adds a mean over the rows, of one value each."""

    def call(self, x):
        self.add_loss(ops.mean(ops.sum(ops.abs(x), axis=-1)) * 0.05)
        return x


class SumPenalty(layers.Layer):
    """Adds a sum over the batch."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class Penalties(layers.Layer):
    """Adds sums and means: one value, one for each row, one more for training."""

    def call(self, x, training=False):
        squares = ops.square(x)
        self.add_loss(0.1 * ops.mean(squares))
        self.add_loss(0.01 * ops.sum(squares))
        if training:
            self.add_loss(0.02 * ops.sum(ops.abs(x), axis=-1))
        return x


def summed_losses(**dense):
    x = keras.Input((6,))
    y = SumPenalty()(layers.Dense(8, activation="tanh", **dense)(x))
    y = Penalties()(layers.Dense(8, activation="tanh", kernel_regularizer="l2")(y))
    y = MeanPenalty()(y)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def summed_losses_regressor():
    """The same before outputs for a loss that needs the whole batch."""
    x = keras.Input((6,))
    y = Penalties()(layers.Dense(8, activation="tanh")(x))
    return keras.Model(x, layers.Dense(3, activation="softplus")(SumPenalty()(y)))


def sum_called_twice():
    """One layer, on two stages of a pipeline."""
    x = keras.Input((6,))
    penalty = SumPenalty()
    y = penalty(layers.Dense(8, activation="tanh")(x))
    y = penalty(layers.Dense(8, activation="tanh")(y))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def times_rows(x):
    """Keras divides what an activity regularizer gives by the rows: this one becomes a sum."""
    return 0.01 * ops.sum(x * x) * ops.cast(ops.shape(x)[0], x.dtype)


def summed_activity():
    layer = layers.Dense(8, activity_regularizer=lambda x: 0.1 * ops.sum(ops.abs(x)))
    own = layers.Dense(8, activity_regularizer=times_rows)
    return keras.Sequential([keras.Input((6,)), layer, own, layers.Dense(3, activation="softmax")])


def added_losses():
    x = keras.Input((6,))
    y = MeanPenalty()(layers.Dense(8, activation="tanh")(x))
    y = RowPenalty()(layers.Dense(8, activation="tanh", kernel_regularizer="l2")(y))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


class AutoEncoder(keras.Model):
    """Trains on `add_loss` alone: no loss is compiled."""

    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(3, activation="tanh")
        self.decoder = layers.Dense(6)

    def call(self, x):
        y = self.decoder(self.encoder(x))
        self.penalize(x, y)
        return y

    def penalize(self, x, y):
        self.add_loss(ops.mean(ops.square(x - y)))


class SumEncoder(AutoEncoder):
    """Adds a sum and a mean instead."""

    def penalize(self, x, y):
        self.add_loss(0.1 * ops.sum(ops.square(x - y)))
        self.add_loss(ops.mean(ops.abs(y)))


def regularized():
    x = keras.Input((6,))
    y = layers.Dense(
        8,
        activation="tanh",
        kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02),
        bias_regularizer="l1",
        activity_regularizer=keras.regularizers.L2(0.02),
    )(x)
    y = layers.ActivityRegularization(l1=0.01, l2=0.01)(y)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def penalized_regressor():
    """Regularizers, and means that layers add to the loss."""
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(x)
    y = layers.Dense(8, activation="tanh", activity_regularizer="l2")(MeanPenalty()(y))
    return keras.Model(x, layers.Dense(3, activation="softplus", bias_regularizer="l1")(y))


def masked_steps():
    """The mask of its first layer counts in the loss of its output."""
    x = keras.Input((5,), dtype="int64")
    y = layers.Embedding(11, 4, mask_zero=True, name="words")(x)
    y = layers.LSTM(5, return_sequences=True, name="lstm")(y)
    y = layers.Dense(6, activation="tanh", name="middle")(y)
    y = layers.LayerNormalization(name="norm")(y)
    return keras.Model(x, layers.Dense(3, activation="softmax", name="head")(y))


# ---- several inputs and outputs ---------------------------------------------


def two_outputs():
    """A dict of outputs."""
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    label = layers.Dense(3, activation="softmax", name="label")(y)
    amount = layers.Dense(1, name="amount")(y)
    return keras.Model(x, {"label": label, "amount": amount})


def two_outputs_list():
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    label = layers.Dense(3, activation="softmax", name="label")(y)
    return keras.Model(x, [label, layers.Dense(1, name="amount")(y)])


def rounded_output():
    """The second output takes whole values: metrics that count equal ones see both."""
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    kind = ops.cast(ops.greater(ops.sum(x, axis=-1, keepdims=True), 0), "float32")
    kind = layers.Identity(name="kind")(kind)
    label = layers.Dense(3, activation="softmax", name="label")(y)
    return keras.Model(x, {"label": label, "kind": kind})


def two_inputs_dict():
    features = keras.Input((6,), name="features")
    words = keras.Input((5,), dtype="int64", name="words")
    y = layers.GlobalAveragePooling1D()(layers.Embedding(11, 4)(words))
    y = layers.Concatenate()([layers.Dense(4, activation="tanh")(features), y])
    y = layers.Dense(3, activation="softmax")(y)
    return keras.Model({"features": features, "words": words}, y)


def two_inputs_tuple():
    features, series = keras.Input((6,)), keras.Input((4, 3))
    y = layers.Concatenate()([features, layers.Flatten()(series)])
    y = layers.Dense(8, activation="tanh")(y)
    return keras.Model((features, series), layers.Dense(3, activation="softmax")(y))


# ---- kinds of layers --------------------------------------------------------


def embedding():
    """Its gradient has rows of the words of a batch only."""
    x = keras.Input((5,), dtype="int64")
    y = layers.Flatten()(layers.Embedding(11, 4)(x))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


class Positions(layers.Layer):
    """Adds to each word what its place in the sentence is worth, as the tutorials do."""

    def __init__(self, for_each_row=False):
        super().__init__()
        self.for_each_row = for_each_row
        self.words = layers.Embedding(11, 8)
        self.places = layers.Embedding(5, 8)

    def call(self, x):
        places = ops.arange(0, 5)
        if self.for_each_row:
            places = ops.broadcast_to(places, ops.shape(x))
        return self.words(x) + self.places(places)


def positions(**options):
    x = keras.Input((5,), dtype="int64")
    y = layers.Dense(6, activation="tanh")(Positions(**options)(x))
    y = layers.GlobalAveragePooling1D()(y)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def positions_of_each_row():
    return positions(for_each_row=True)


def embedding_twice():
    """One table, looked up with two kinds of words."""
    x = keras.Input((5,), dtype="int64")
    table = layers.Embedding(11, 8)
    y = layers.GlobalAveragePooling1D()(layers.Dense(8, activation="tanh")(table(x)))
    y = y + layers.GlobalMaxPooling1D()(table(10 - x))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def embedding_regularized():
    x = keras.Input((5,), dtype="int64")
    y = layers.Flatten()(layers.Embedding(11, 4, embeddings_regularizer="l2")(x))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def cnn(normalize=None):
    x = keras.Input((8, 8, 2))
    y = layers.Conv2D(4, 3, padding="same", name="conv")(x)
    if normalize is not None:
        y = normalize()(y)
    y = layers.MaxPooling2D()(layers.Activation("tanh")(y))
    y = layers.Conv2D(4, 3, activation="tanh")(y)
    return keras.Model(x, layers.Dense(3, activation="softmax")(layers.Flatten()(y)))


def synchronized_cnn():
    """Statistics of the global batch."""
    return cnn(lambda: layers.BatchNormalization(synchronized=True))


def synchronized_twice():
    """No bias before a normalization; the last one is frozen."""
    x = keras.Input((8, 8, 2))
    y = layers.Conv2D(4, 3, use_bias=False)(x)
    y = layers.Activation("tanh")(layers.BatchNormalization(synchronized=True)(y))
    y = layers.Conv2D(4, 3, use_bias=False)(y)
    y = layers.Activation("tanh")(layers.BatchNormalization(synchronized=True)(y))
    y = layers.BatchNormalization(synchronized=True, trainable=False)(layers.Flatten()(y))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def synchronized_heads():
    """A normalization that the loss does not reach, beside one that it does."""
    x = keras.Input((8, 8, 2))
    y = layers.BatchNormalization(synchronized=True)(layers.Conv2D(4, 3, use_bias=False)(x))
    y = layers.Flatten()(layers.Activation("tanh")(y))
    label = layers.Dense(3, activation="softmax", name="label", activity_regularizer="l2")(y)
    layers.BatchNormalization(synchronized=True)(layers.Dense(2)(y))
    return keras.Model(x, label)


class SynchronizedScale(layers.Layer):
    """Statistics of the whole batch in a layer of the user's own."""

    synchronized = False

    def build(self, shape):
        self.synchronized = True
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale")
        self.seen = self.add_weight(shape=shape[-1:], trainable=False, name="seen")

    def call(self, x, training=False):
        if training:
            axes = list(range(len(x.shape) - 1))
            mean, variance = ops.moments(x, axes, synchronized=self.synchronized)
            self.seen.assign(0.9 * self.seen + 0.1 * mean)
            x = (x - mean) * ops.rsqrt(variance + 1e-3)
        return x * self.scale


def synchronized_of_the_user():
    x = keras.Input((8, 8, 2))
    y = SynchronizedScale()(layers.Conv2D(4, 3, use_bias=False)(x))
    y = layers.Flatten()(layers.Activation("tanh")(y))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def synchronized_always():
    """Statistics of the batch in `evaluate` and `predict` too."""
    x = keras.Input((8, 8, 2))
    y = layers.Conv2D(4, 3, use_bias=False)(x)
    y = layers.BatchNormalization(synchronized=True)(y, training=True)
    y = layers.Flatten()(layers.Activation("tanh")(y))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def synchronized_renorm():
    return cnn(lambda: layers.BatchNormalization(synchronized=True, renorm=True))


def synchronized_masked():
    """Statistics over what is not masked in the global batch."""
    x = keras.Input((5,), dtype="int32")
    y = layers.Embedding(11, 8, mask_zero=True)(x)
    y = layers.BatchNormalization(synchronized=True)(y)
    y = layers.GlobalAveragePooling1D()(y)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def unsynchronized_cnn():
    """Statistics of each device's rows."""
    return cnn(layers.BatchNormalization)


def lstm():
    x = keras.Input((4, 3))
    return keras.Model(x, layers.Dense(3, activation="softmax")(layers.LSTM(5)(x)))


def orthogonal():
    """Square kernels, whose numbers do not lie in their order where QR has made them."""
    x = keras.Input((4, 3))
    y = layers.SimpleRNN(5)(x)
    return keras.Model(x, layers.Dense(5, kernel_initializer="orthogonal")(y)[:, :3])


def conv_lstm():
    x = keras.Input((3, 4, 4, 2))
    y = layers.Flatten()(layers.ConvLSTM2D(2, 2)(x))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def spectral():
    """Its kernel is assigned in each forward pass, also where a replica has no rows."""
    x = keras.Input((6,))
    y = layers.SpectralNormalization(layers.Dense(8, activation="tanh"))(x)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


class ClippedDense(layers.Dense):
    """The same by a layer of the user's own, as the critic of a WGAN clips its weights."""

    def call(self, x, training=False):
        if training:
            self.kernel.assign(ops.clip(self.kernel.value, -0.3, 0.3))
        return super().call(x)


def clipped():
    x = keras.Input((6,))
    y = ClippedDense(8, activation="tanh")(x)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


class Shown(layers.Layer):
    """Keeps what it has computed, for somebody to look at."""

    def __init__(self):
        super().__init__()
        self.scores = None

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")

    def call(self, x):
        self.scores = ops.tanh(x @ self.kernel)
        self.both = [self.scores, {"again": 2.0 * self.scores}]
        return self.scores


def shown():
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3, activation="softmax")(Shown()(x)))


def lstm_steps():
    """An output for each step."""
    x = keras.Input((4, 3))
    y = layers.LSTM(5, return_sequences=True)(x)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def steps():
    """Logits for each step of a sequence, the first for "no label"."""
    x = keras.Input((8, 3))
    y = layers.Conv1D(6, 3, padding="same", activation="tanh")(x)
    return keras.Model(x, layers.Dense(4)(y))


def gru():
    x = keras.Input((4, 3))
    y = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    return keras.Model(x, layers.Dense(3, activation="softmax")(layers.GRU(4)(y)))


def transformer():
    x = keras.Input((5,), dtype="int64")
    y = layers.Embedding(11, 8)(x)
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 4, name="attention")(y, y))
    z = layers.Dense(8)(layers.Dense(16, activation="gelu")(y))
    y = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(y + z))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def normalizers():
    """Layers that normalize within a row."""
    x = keras.Input((8, 8, 2))
    y = layers.GroupNormalization(groups=2)(layers.Conv2D(4, 3)(x))
    y = layers.DepthwiseConv2D(3, activation="tanh")(y)
    y = layers.RMSNormalization()(layers.GlobalAveragePooling2D()(y))
    y = layers.UnitNormalization()(y)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def mobilenet():
    """A model of keras.applications; its BatchNormalization layers are frozen."""
    model = keras.applications.MobileNet(
        input_shape=(32, 32, 3), alpha=0.25, weights=None, classes=3, dropout=0.0
    )
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
    return model


def dropout(rate=0.5):
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    y = layers.Dropout(rate)(y)
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


class MeanOfInputs(layers.Layer):
    """Reports metrics of its own from inside `call`."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")
        self.weight = keras.metrics.Sum(name="weight")

    def call(self, x):
        self.seen.update_state(ops.sum(x, axis=-1))
        self.weight.update_state(ops.abs(x[:, 0]) * 0.1)
        return x


def layer_metric():
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(MeanOfInputs()(x))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


class RunningMean(layers.Layer):
    """A state of its own that is an average over the rows."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False, name="mean"
        )

    def call(self, x, training=False):
        # Read before it is written: what a row becomes does not depend on its batch.
        y = x - self.mean
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return y


def running_mean():
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(RunningMean()(x))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def adapted_normalization():
    """Normalization holds the mean of some data, which is no weight that trains."""
    from rows import classes

    layer = layers.Normalization()
    layer.adapt(classes()["x"])
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(layer(x))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def synchronized_unbuilt():
    """It is not known before the first batch what there is to synchronize."""
    return keras.Sequential(
        [
            layers.Conv2D(4, 3),
            layers.BatchNormalization(synchronized=True),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )
