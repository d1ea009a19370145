"""Small models whose costs are measured, each with the batch size to measure at."""

import keras

L = keras.layers


def mlp():
    layers = [keras.Input((64,)), L.Dense(128, activation="relu"), L.Dropout(0.2)]
    return keras.Sequential([*layers, L.Dense(10, activation="softmax")])


def cnn():
    x = inputs = keras.Input((32, 32, 3))
    for filters in (8, 16):
        x = L.Conv2D(filters, 3, padding="same")(x)
        x = L.ReLU()(L.BatchNormalization()(x))
        x = L.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = L.MaxPooling2D()(x)
    return keras.Model(inputs, L.Dense(10)(L.Flatten()(x)))


def separable():
    x = inputs = keras.Input((32, 32, 3))
    for filters in (8, 16):
        x = L.SeparableConv2D(filters, 3, padding="same")(x)
        x = L.Activation("swish")(L.BatchNormalization()(x))
        x = L.AveragePooling2D(2)(x)
    return keras.Model(inputs, L.Dense(10)(L.GlobalAveragePooling2D()(x)))


def transformer(dropout=0.0):
    inputs = keras.Input((32,), dtype="int32")
    x = L.Embedding(90, 64)(inputs)
    for _ in range(2):
        y = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(4, 16, dropout=dropout)(y, y)
        y = L.Dense(256, activation="gelu")(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dropout(dropout)(L.Dense(64)(y))])
    return keras.Model(inputs, L.Dense(90)(x))


def transformer_with_dropout():
    return transformer(0.1)


def lstm():
    layers = [keras.Input((12,), dtype="int32"), L.Embedding(90, 16)]
    return keras.Sequential([*layers, L.LSTM(24, return_sequences=True), L.LSTM(24), L.Dense(1)])


def bidirectional():
    layers = [keras.Input((12, 8)), L.Bidirectional(L.GRU(16, return_sequences=True))]
    steps = L.TimeDistributed(L.Dense(8, activation="relu"))
    return keras.Sequential([*layers, steps, L.Bidirectional(L.LSTM(16)), L.Dense(1)])


class Block(keras.Layer):
    def __init__(self):
        super().__init__()
        self.norms = [L.LayerNormalization(), L.LayerNormalization()]
        self.attention = L.MultiHeadAttention(4, 16)
        self.mlp = keras.Sequential([L.Dense(256, activation="gelu"), L.Dense(64)])

    def call(self, x, training=None):
        y = self.norms[0](x)
        x = x + self.attention(y, y)
        return x + self.mlp(self.norms[1](x))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = L.Dense(90)  # made first, called last
        self.embedding = L.Embedding(90, 64)
        self.blocks = [Block(), Block()]

    def call(self, x, training=None):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def subclassed():
    model = Subclassed()
    model(keras.ops.zeros((1, 32), dtype="int32"))
    return model


def blocks():
    inputs = keras.Input((32,), dtype="int32")
    x = L.Embedding(90, 64)(inputs)
    return keras.Model(inputs, L.Dense(90)(Block()(Block()(x))))


def frozen():
    base = keras.Sequential([keras.Input((64,)), L.Dense(128, activation="relu"), L.Dense(32)])
    base.trainable = False
    return keras.Sequential([keras.Input((64,)), base, L.Dense(64, activation="relu"), L.Dense(3)])


def shared():
    encoder = keras.Sequential([keras.Input((16,)), L.Dense(64, activation="relu"), L.Dense(32)])
    pair = [keras.Input((16,)), keras.Input((16,))]
    return keras.Model(pair, L.Dense(1)(L.Multiply()([encoder(x) for x in pair])))


MODELS = [
    *(mlp, cnn, separable, transformer, transformer_with_dropout, lstm, bidirectional),
    *(subclassed, blocks, frozen, shared),
]
