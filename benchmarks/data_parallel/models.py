"""The three models, their data and their batch sizes, the same for every side."""

import keras
import numpy as np

LAYERS = keras.layers


def mlp():
    """784-512-512-10 at batch 256."""
    return keras.Sequential(
        [
            keras.Input((784,)),
            LAYERS.Dense(512, activation="relu"),
            LAYERS.Dense(512, activation="relu"),
            LAYERS.Dense(10, activation="softmax"),
        ]
    )


def cnn():
    """Two convolutions on 28 × 28 images at batch 64."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            LAYERS.Conv2D(32, 3, activation="relu"),
            LAYERS.MaxPooling2D(),
            LAYERS.Conv2D(64, 3, activation="relu"),
            LAYERS.MaxPooling2D(),
            LAYERS.Flatten(),
            LAYERS.Dense(10, activation="softmax"),
        ]
    )


def transformer(vocabulary=5000, length=64, width=128, heads=4):
    """Two blocks over 64 tokens at batch 32."""
    tokens = keras.Input((length,), dtype="int32")
    x = LAYERS.Embedding(vocabulary, width)(tokens)
    for _ in range(2):
        h = LAYERS.LayerNormalization()(x)
        x = x + LAYERS.MultiHeadAttention(heads, width // heads)(h, h)
        h = LAYERS.LayerNormalization()(x)
        x = x + LAYERS.Dense(width)(LAYERS.Dense(4 * width, activation="relu")(h))
    x = LAYERS.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, LAYERS.Dense(10, activation="softmax")(x))


def torch_mlp():
    """The same in pure torch."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def torch_cnn():
    """The same in pure torch, with torch's own layout of channels."""
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        nn.Flatten(3),
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1600, 10),
    )


def torch_transformer(vocabulary=5000, width=128, heads=4):
    """The same in pure torch."""
    from torch import nn

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(width, 10)

        def forward(self, tokens):
            return self.head(self.blocks(self.embedding(tokens)).mean(1))

    return Blocks()


BATCH = {"mlp": 256, "cnn": 64, "transformer": 32}
KERAS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
TORCH = {"mlp": torch_mlp, "cnn": torch_cnn, "transformer": torch_transformer}


def data(name, steps):
    """Random rows for so many batches."""
    rng = np.random.default_rng(0)
    rows = BATCH[name] * steps
    y = rng.integers(0, 10, rows).astype("int64")
    if name == "transformer":
        return rng.integers(0, 5000, (rows, 64)).astype("int32"), y
    shape = (rows, 784) if name == "mlp" else (rows, 28, 28, 1)
    return rng.random(shape, dtype="float32"), y
