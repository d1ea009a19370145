"""Models whose graphs are hard to cut into stages, each with the one thing that it is about.

All have six layers or more, so that four stages have work.
"""

import keras
from keras import layers, ops


def dense(name, units=8, **rest):
    return layers.Dense(units, activation="tanh", name=name, **rest)


def head(x, kinds=3, name="head"):
    return layers.Dense(kinds, activation="softmax", name=name)(x)


def chain():
    """One layer after the other."""
    x = y = keras.Input((6,))
    for number in range(6):
        y = dense(f"dense_{number}")(y)
    return keras.Model(x, head(y))


def chain_sequential():
    return keras.Sequential(
        [*(dense(f"dense_{n}") for n in range(6)), layers.Dense(3, name="head")]
    )


class Chain(keras.Model):
    """A `call` of its own, with a loop, an operation and layers in a list."""

    def __init__(self):
        super().__init__()
        self.hidden = [dense(f"dense_{number}") for number in range(6)]
        self.head = layers.Dense(3, activation="softmax", name="head")

    def call(self, x, training=False):
        skip = None
        for layer in self.hidden:
            x = layer(x)
            skip = x if skip is None else skip + 0.5 * x
        return self.head(x + skip)


class OtherInInference(keras.Model):
    """Training and inference have a layer each that the other has not, and other orders.

    The second stage of three has nothing to compute in inference, the first one reads a weight
    of the last, and the head, which the last stage trains, comes after all of them.
    """

    def __init__(self):
        super().__init__()
        self.start = dense("start", 6)
        self.middle = dense("middle", 6, kernel_regularizer="l2")
        self.end = dense("end", 6)
        self.only = layers.Dense(6, name="only", bias_initializer="ones")
        self.head = layers.Dense(3, activation="softmax", name="head")

    def build(self, shape):
        for layer in (self.start, self.middle, self.end, self.only, self.head):
            layer.build((None, 6))
        self.built = True

    def call(self, x, training=False):
        if training:
            return self.head(self.end(self.middle(self.start(x))))
        x = ops.matmul(x, self.end.kernel)
        return self.head(self.only(self.start(self.end(x))))


def u_net():
    """Skip connections from each step down to the step up of the same size."""
    x = y = keras.Input((8, 8, 2))
    skips = []
    for number, filters in enumerate((3, 4)):
        y = layers.Conv2D(filters, 3, padding="same", activation="tanh", name=f"down_{number}")(y)
        skips.append(y)
        y = layers.MaxPooling2D(name=f"pool_{number}")(y)
    y = layers.Conv2D(6, 3, padding="same", activation="tanh", name="bottom")(y)
    for number, filters in ((1, 4), (0, 3)):
        y = layers.UpSampling2D(name=f"grow_{number}")(y)
        y = layers.Concatenate(name=f"join_{number}")([y, skips[number]])
        y = layers.Conv2D(filters, 3, padding="same", activation="tanh", name=f"up_{number}")(y)
    return keras.Model(x, layers.Conv2D(2, 1, name="head")(y))


def ends():
    """An input that is needed at the end, and an output with a loss of its own early."""
    features, words = (
        keras.Input((6,), name="features"),
        keras.Input((5,), dtype="int64", name="words"),
    )
    y = dense("first")(features)
    amount = layers.Dense(1, name="amount")(y)
    for number in range(3):
        y = dense(f"dense_{number}")(y)
    words_too = layers.GlobalAveragePooling1D()(layers.Embedding(11, 4, name="words_late")(words))
    label = head(layers.Concatenate()([y, words_too]), name="label")
    return keras.Model({"features": features, "words": words}, {"label": label, "amount": amount})


def whole_numbers():
    """Whole numbers and truth values cross borders beside what is trained."""
    x = y = keras.Input((6,))
    y = dense("first")(y)
    kind = ops.cast(ops.argmax(x, axis=-1), "int32")
    is_high = ops.greater(x[:, :1], 0)
    y = dense("second")(y)
    y = dense("third")(y)
    y = y + layers.Embedding(6, 8, name="kinds")(kind)
    y = ops.where(is_high, y, -0.5 * y)
    return keras.Model(x, head(dense("fourth")(y)))


class Tied(layers.Layer):
    """Turns vectors into scores for words, with the weights of an embedding."""

    def __init__(self, embedding, **rest):
        super().__init__(**rest)
        self.embedding = embedding

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


def tied():
    """The first and the last stage train the same weights."""
    x = keras.Input((5,), dtype="int64")
    embedding = layers.Embedding(11, 4, name="words")
    y = layers.GlobalAveragePooling1D()(embedding(x))
    for number in range(3):
        y = dense(f"dense_{number}", 4)(y)
    return keras.Model(x, layers.Softmax()(Tied(embedding, name="tied")(y)))


def shared():
    """A layer that is called first, in the middle and last."""
    x = keras.Input((6,))
    again = dense("again", 6)
    y = again(x)
    y = dense("first", 6)(y)
    y = again(y)
    y = dense("second", 6)(y)
    return keras.Model(x, head(again(y)))


def nested():
    """Models inside models, in whose middle a border lies."""
    x = keras.Input((8,))
    inner = keras.Model(x, [dense("inner_1")(dense("inner_0")(x)), dense("inner_side")(x)])
    outer = keras.Sequential([keras.Input((6,)), dense("outer_0"), dense("outer_1")])
    x = keras.Input((6,))
    a, b = inner(outer(x))
    return keras.Model(x, head(layers.Add()([a, b])))


class Penalty(layers.Layer):
    """Adds a mean over the rows to the loss."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def penalties():
    """Every stage adds something to the loss."""
    x = y = keras.Input((6,))
    for number in range(4):
        y = dense(f"dense_{number}", kernel_regularizer="l2", activity_regularizer="l1")(y)
        y = Penalty(name=f"penalty_{number}")(y)
    return keras.Model(x, head(y))


def frozen_start():
    """The first layers do not train: nothing needs their gradient."""
    x = y = keras.Input((6,))
    for number in range(5):
        y = dense(f"dense_{number}", trainable=number > 2)(y)
    return keras.Model(x, head(y))


def confident_early(activation=layers.Softmax):
    """An early output whose loss is computed from its logits, and that is returned twice."""
    x = keras.Input((6,))
    wide = keras.initializers.RandomNormal(stddev=12.0)
    y = dense("first")(x)
    early = activation(name="early")(layers.Dense(3, kernel_initializer=wide, name="logits")(y))
    y = layers.Concatenate()([y, early])
    for number in range(3):
        y = dense(f"dense_{number}")(y)
    return keras.Model(x, [early, early, head(y)])


def branches():
    """Two towers that meet at the end."""
    x = keras.Input((6,))
    left = right = x
    for number in range(3):
        left = dense(f"left_{number}")(left)
        right = layers.Dense(8, activation="relu", name=f"right_{number}")(right)
    return keras.Model(x, head(layers.Multiply()([left, right]) + left))


class Block(layers.Layer):
    """A layer with an attention inside."""

    def __init__(self, name):
        super().__init__(name=name)
        self.attention = layers.MultiHeadAttention(2, 4, name=f"{name}_attention")
        self.supports_masking = True

    def call(self, x, words):
        return x + self.attention(x, words)


def attended():
    """Attentions that look at the same words, whose mask the first one takes away in Keras."""
    x = keras.Input((5,), dtype="int64")
    words = layers.Embedding(11, 8, mask_zero=True, name="words")(x)
    y = layers.Embedding(11, 8, name="queries")(x)
    for number in range(3):
        y = Block(f"block_{number}")(y, words)
    y = layers.Add(name="join")([y, words])
    y = layers.GlobalAveragePooling1D(name="mean")(y)
    return keras.Model(x, head(y))


def attended_nested():
    """The same, where a model inside a model does it to what is used around it too."""
    queries, words = keras.Input((None, 8)), keras.Input((None, 8))
    y = queries
    for number in range(2):
        y = Block(f"block_{number}")(y, words)
    inner = keras.Model([queries, words], y, name="inner")
    x = keras.Input((5,), dtype="int64")
    words = layers.Embedding(11, 8, mask_zero=True, name="words")(x)
    y = inner([layers.Embedding(11, 8, name="queries")(x), words])
    y = layers.GlobalAveragePooling1D(name="mean")(layers.Add(name="join")([words, y]))
    y = y + layers.GlobalAveragePooling1D(name="mean_of_words")(words)
    return keras.Model(x, head(y))


class AddIfThere(layers.Layer):
    """Takes a second value that may be nothing."""

    def call(self, x, other=None):
        return x if other is None else x + other


def optional_input():
    """An input of the last stage that may be left out."""
    x, other = keras.Input((6,), name="x"), keras.Input((8,), optional=True, name="other")
    y = x
    for number in range(4):
        y = dense(f"dense_{number}")(y)
    return keras.Model({"x": x, "other": other}, head(AddIfThere(name="add")(y, other)))
