"""MobileNet from `keras.applications`, laid out over two devices with one added line.

KERAS_BACKEND=tensorflow python examples/mobilenet.py
KERAS_BACKEND=torch python examples/mobilenet.py
"""

import sys

import keras
import numpy as np

import parallel_keras as pk


def train(strategy):
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNet(
        input_shape=(32, 32, 3), alpha=0.25, weights=None, classes=10
    )
    model.compile(keras.optimizers.SGD(0.01), loss="sparse_categorical_crossentropy")
    model = pk.parallelize(model, strategy)  # the added line
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 32, 32, 3)).astype("float32")
    history = model.fit(x, rng.integers(0, 10, 48), batch_size=16, shuffle=False, verbose=0)
    return model, history.history["loss"][-1]


def main():
    (plain, loss), (laid_out, other_loss) = train(None), train("model")
    # Without places the package splits the layers by their cost.
    plan = laid_out.plan(batch_size=16)
    for total in plan.totals:
        print(f"{total['device']}: {total['layers']} layers, {total['bytes'] / 1e6:.1f} MB")
    weights = max(
        float(np.abs(a - b).max())
        for a, b in zip(plain.get_weights(), laid_out.get_weights(), strict=True)
    )
    print(f"loss {other_loss:.6f}, plain Keras {loss:.6f}; largest weight difference {weights:.1e}")
    # The weights may differ by more than the loss: ReLU and BatchNormalization of small
    # batches enlarge the rounding of another order of operations.
    if abs(loss - other_loss) > 1e-5:
        sys.exit("The losses differ.")


if __name__ == "__main__":
    main()
