"""Small seeded data sets: the arguments of `fit` that hold rows.

Values are of the size of one, so that 1e-5 is a hundred roundings of float32.
"""

import numpy as np

N = 49  # three batches of 16 and one row


def classes(n=N, features=6, kinds=3):
    """Rows with integer labels."""
    rng = np.random.default_rng(0)
    return {"x": _normal(rng, n, features), "y": rng.integers(0, kinds, n)}


def one_hot(n=N, features=6, kinds=3):
    """Rows with one-hot labels."""
    data = classes(n, features, kinds)
    return {"x": data["x"], "y": np.eye(kinds, dtype="float32")[data["y"]]}


def regression(n=N, features=6, outputs=1):
    """Rows with targets between 0.7 and 1.9: their ratios and variances are near one."""
    rng = np.random.default_rng(1)
    return {"x": _normal(rng, n, features), "y": 1.2 * _uniform(rng, n, outputs) + np.float32(0.7)}


def binary(n=N, features=6, outputs=1):
    """Rows with targets 0 or 1."""
    rng = np.random.default_rng(2)
    y = rng.integers(0, 2, (n, outputs)).astype("float32")
    return {"x": _normal(rng, n, features), "y": y}


def signs(n=N):
    """Rows with targets -1 or 1."""
    data = binary(n)
    return {"x": data["x"], "y": 2 * data["y"] - 1}


def images(n=N, size=8, channels=2, kinds=3):
    """Pictures with integer labels."""
    rng = np.random.default_rng(3)
    return {"x": _normal(rng, n, size, size, channels), "y": rng.integers(0, kinds, n)}


def tokens(n=N, length=5, words=11, kinds=3):
    """Rows of word numbers, in which words repeat within and across rows."""
    rng = np.random.default_rng(4)
    return {"x": rng.integers(0, words, (n, length)), "y": rng.integers(0, kinds, n)}


def films(n=N):
    """Sequences of small images."""
    rng = np.random.default_rng(8)
    return {
        "x": rng.normal(size=(n, 3, 4, 4, 2)).astype("float32"),
        "y": rng.integers(0, 3, size=n),
    }


def series(n=N, length=4, features=3, kinds=3):
    """Sequences of vectors with integer labels."""
    rng = np.random.default_rng(5)
    return {"x": _normal(rng, n, length, features), "y": rng.integers(0, kinds, n)}


def steps(n=N, length=4, features=3, kinds=3):
    """Sequences with a label for each step."""
    rng = np.random.default_rng(10)
    return {"x": _normal(rng, n, length, features), "y": rng.integers(0, kinds, (n, length))}


def weighted_steps():
    """Each step has a weight; many are zero, as in padded sequences."""
    data = steps()
    rng = np.random.default_rng(11)
    weights = _uniform(rng, *data["y"].shape) * (rng.uniform(size=data["y"].shape) > 0.4)
    return {**data, "sample_weight": weights.astype("float32")}


def padded():
    """Sentences of very different lengths: some parts of a batch count many words, some few."""
    data = tokens()
    rng = np.random.default_rng(13)
    # Of 16 rows those of the first replica of three are long.
    is_short = np.arange(N) % 16 >= 6
    lengths = np.where(is_short, rng.integers(1, 3, N), rng.integers(4, 6, N))
    x = np.where(np.arange(5) < lengths[:, None], data["x"] % 10 + 1, 0)
    return {"x": x, "y": rng.integers(0, 3, x.shape)}


def weighted_padded():
    """The same, and each step has a weight."""
    data = padded()
    rng = np.random.default_rng(14)
    return {**data, "sample_weight": _uniform(rng, *data["y"].shape) * 2}


def labels_of_steps():
    """Two labels, none of them 0 (the mask of CTC), for the eight steps of a sequence."""
    rng = np.random.default_rng(12)
    return {"x": _normal(rng, N, 8, 3), "y": rng.integers(1, 4, (N, 2))}


def weighted(data):
    """The same rows, with very different weights, some of them zero."""
    rng = np.random.default_rng(6)
    weights = _uniform(rng, len(data["y"])) * 2
    weights[::7] = 0
    return {**data, "sample_weight": weights}


def two_outputs(n=N):
    """One input, targets for two outputs as a dict."""
    data = classes(n)
    return {"x": data["x"], "y": {"label": data["y"], "amount": regression(n)["y"]}}


def two_outputs_list(n=N):
    """One input, targets for two outputs as a list."""
    data = two_outputs(n)
    return {"x": data["x"], "y": [data["y"]["label"], data["y"]["amount"]]}


def two_outputs_weighted(n=N):
    """Each output with row weights of its own."""
    rng = np.random.default_rng(7)
    weights = {"label": _uniform(rng, n), "amount": _uniform(rng, n) * 3}
    return {**two_outputs(n), "sample_weight": weights}


def two_inputs_dict(n=N):
    """Two inputs by name, of different type and rank."""
    return {
        "x": {"features": classes(n)["x"], "words": tokens(n)["x"]},
        "y": classes(n)["y"],
    }


def two_inputs_tuple(n=N):
    """Two inputs by position."""
    return {"x": (classes(n)["x"], series(n)["x"]), "y": classes(n)["y"]}


def with_validation(data, rows=23):
    """The same rows, with others (an awkward number of them) to validate on."""
    rng = np.random.default_rng(8)
    x, y = data["x"], data["y"]
    chosen = rng.integers(0, len(y), rows)
    return {**data, "validation_data": (x[chosen] + np.float32(0.1), y[chosen])}


def with_weighted_validation(data, rows=23):
    """The rows to validate on have weights."""
    rng = np.random.default_rng(9)
    data = with_validation(data, rows)
    return {**data, "validation_data": (*data["validation_data"], _uniform(rng, rows))}


def _normal(rng, *shape):
    return rng.normal(size=shape).astype("float32")


def _uniform(rng, *shape):
    return rng.uniform(size=shape).astype("float32")
