"""The tutorials' conceptual pipeline, made real: two stages that work at the same time.

Tutorials draw a pipeline as two halves of a model with an arrow between them, and then
train it one half after the other. Here the same two marks and `strategy="pipeline"` cut
each batch into micro-batches that follow one another through the stages. The weights are
those of plain Keras.

    KERAS_BACKEND=tensorflow python examples/pipeline.py
    KERAS_BACKEND=torch python examples/pipeline.py
"""

import sys

import keras
import numpy as np

import parallel_keras as pk


@pk.place(0)
def encoder(x):
    x = keras.layers.Dense(512, activation="relu")(x)
    return keras.layers.Dense(512, activation="relu")(x)


@pk.place(1)
def decoder(x):
    x = keras.layers.Dense(512, activation="relu")(x)
    return keras.layers.Dense(10, activation="softmax")(x)


def make():
    x = keras.Input((64,))
    return pk.ParallelModel(x, decoder(encoder(x)))


def train(strategy):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(
        keras.optimizers.Adam(0.001),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        strategy=strategy,
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 64)).astype("float32")
    y = x[:, :10].argmax(axis=1)
    model.fit(x, y, batch_size=512, epochs=2, shuffle=False, verbose=2)
    return model


def main():
    plain, pipelined = train(None), train("pipeline")
    print(pipelined.timeline())
    difference = max(
        float(np.abs(a - b).max())
        for a, b in zip(plain.get_weights(), pipelined.get_weights(), strict=True)
    )
    print(f"largest weight difference to plain Keras {difference:.1e}")
    if difference > 1e-5:
        sys.exit(f"The weights differ by {difference:.1e}.")


if __name__ == "__main__":
    main()
