"""The tutorials' three-layer `BigModel`, laid out over two devices.

Once as a subclass with its layers placed in `__init__`, once in functional form.
Each is trained with `strategy="model"` and in plain Keras; the weights have to agree.

    KERAS_BACKEND=tensorflow python examples/big_model.py
    KERAS_BACKEND=torch python examples/big_model.py
"""

import sys

import keras
import numpy as np

import parallel_keras as pk


class BigModel(pk.ParallelModel):
    """Two layers on the first device, the last one on the second."""

    def __init__(self):
        super().__init__()
        with pk.place(0):
            self.first = keras.layers.Dense(256, activation="tanh")
            self.second = keras.layers.Dense(256, activation="tanh")
        with pk.place(1):
            self.third = keras.layers.Dense(10, activation="softmax")

    def call(self, x):
        return self.third(self.second(self.first(x)))


def functional():
    """The same model as a graph of layers."""
    x = keras.Input((64,))
    with pk.place(0):
        y = keras.layers.Dense(256, activation="tanh")(x)
        y = keras.layers.Dense(256, activation="tanh")(y)
    with pk.place(1):
        y = keras.layers.Dense(10, activation="softmax")(y)
    return pk.ParallelModel(x, y)


def train(make, strategy):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(
        keras.optimizers.Adam(0.001),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        strategy=strategy,
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 64)).astype("float32")
    y = (x[:, :10]).argmax(axis=1)
    model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0)
    return model


def main():
    worst = 0.0
    for make in (BigModel, functional):
        plain, laid_out = train(make, None), train(make, "model")
        print(laid_out.plan(batch_size=64))
        if keras.backend.backend() == "tensorflow":
            for variable in laid_out.trainable_variables:
                print(f"  {variable.path}: {variable.value.device}")
        difference = max(
            float(np.abs(a - b).max())
            for a, b in zip(plain.get_weights(), laid_out.get_weights(), strict=True)
        )
        print(f"{make.__name__}: largest weight difference to plain Keras {difference:.1e}\n")
        worst = max(worst, difference)
    if worst > 1e-5:
        sys.exit(f"The weights differ by {worst:.1e}.")


if __name__ == "__main__":
    main()
