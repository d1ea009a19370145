"""The line that the first `fit` logs."""

import inspect

from keras import tree

from parallel_keras import devices as device_names
from parallel_keras.log import say


def announce(model, strategy, lowering, call):
    """Say once how the work is spread, unless `verbose=0`.

    Args:
        model: The Keras model.
        strategy: Its `Strategy`.
        lowering: Its lowering, which may speak from now on.
        call: The method that was called, its arguments and its keyword arguments.

    Returns:
        Bool. Whether it has been said.
    """
    if strategy.name == "single":
        return False
    method, args, kwargs = call
    try:
        bound = inspect.signature(method).bind(model, *args, **kwargs).arguments
    except TypeError:
        return False  # the call itself will say what is wrong
    if bound.get("verbose", "auto") in (0, False, "0"):
        return False
    lowering.speaks = True
    names = getattr(lowering, "devices", ()) or strategy.devices
    text = f"{strategy!r} on {', '.join(names)}"
    if device_names.is_simulated(names):
        text += " (parts of one CPU, which simulate devices)"
    rows = _rows_of_a_batch(bound.get("x"), bound.get("batch_size"))
    clauses = strategy.describe(rows, names), lowering.remark()
    say(f"{text}: {'; '.join(clause for clause in clauses if clause)}")
    return True


def _rows_of_a_batch(x, batch_size):
    """The rows of fit's global batches, or None where it cannot be told beforehand."""
    spec = getattr(x, "element_spec", None)
    if spec is not None:  # tf.data
        shape = getattr(tree.flatten(spec)[0], "shape", None)
        return shape[0] if shape is not None and shape.rank else None
    if hasattr(x, "dataset") and hasattr(x, "batch_size"):  # torch DataLoader
        return x.batch_size
    leaves = [leaf for leaf in tree.flatten(x) if getattr(leaf, "shape", ())]
    return min(batch_size or 32, leaves[0].shape[0]) if leaves else None
