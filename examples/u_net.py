"""A U-Net over three stages: its skip connections pass a stage by.

What goes down is on the first stage, the bottom on the second, what comes up on the third;
the outputs of the first stage that the third needs are sent there straight.

    KERAS_BACKEND=tensorflow python examples/u_net.py
    KERAS_BACKEND=torch python examples/u_net.py
"""

import sys

import keras
import numpy as np
from keras import layers

import parallel_keras as pk


def convolve(x, filters):
    x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return layers.Conv2D(filters, 3, padding="same", activation="relu")(x)


def u_net():
    image = keras.Input((32, 32, 1))
    with pk.place(0):
        large = convolve(image, 8)
        small = convolve(layers.MaxPooling2D()(large), 16)
    with pk.place(1):
        x = convolve(layers.MaxPooling2D()(small), 32)
    with pk.place(2):
        x = layers.Concatenate()([layers.UpSampling2D()(x), small])
        x = layers.Concatenate()([layers.UpSampling2D()(convolve(x, 16)), large])
        mask = layers.Conv2D(1, 1, activation="sigmoid")(convolve(x, 8))
    return pk.ParallelModel(image, mask)


def discs(count):
    """Noisy pictures of a disc, and where it is."""
    rng = np.random.default_rng(0)
    centre = rng.uniform(8, 24, size=(count, 2, 1, 1))
    down, right = np.mgrid[:32, :32]
    distance = np.hypot(down - centre[:, 0], right - centre[:, 1])
    mask = (distance < rng.uniform(4, 8, size=(count, 1, 1))).astype("float32")[..., None]
    return mask + rng.normal(scale=0.5, size=mask.shape).astype("float32"), mask


def train(strategy):
    keras.utils.set_random_seed(0)
    model = u_net()
    model.compile(
        keras.optimizers.Adam(0.002),
        loss="binary_crossentropy",
        metrics=["accuracy"],
        strategy=strategy,
    )
    x, y = discs(100)
    # 36 rows in the last batch, and batches that do not divide by the micro-batches.
    model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=2)
    return model


def main():
    plain = train(None)
    pipelined = train(pk.PipelineParallel(3, microbatches=6))
    print(pipelined.plan(batch_size=64))
    difference = max(
        float(np.abs(a - b).max())
        for a, b in zip(plain.get_weights(), pipelined.get_weights(), strict=True)
    )
    print(f"largest weight difference to plain Keras {difference:.1e}")
    if difference > 1e-5:
        sys.exit(f"The weights differ by {difference:.1e}.")


if __name__ == "__main__":
    main()
