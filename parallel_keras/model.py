"""A Keras model with a strategy: `parallelize`, `ParallelModel`, `load_model`.

A parallel model is the user's own model; `state.py` says what it is given.
"""

import keras

from parallel_keras import files, keras_internals, placement
from parallel_keras.keras_internals import STATE
from parallel_keras.state import State


def parallelize(model, strategy=None):
    """Give a Keras model a strategy, in place.

    The model stays the same object of the same class with the same layers,
    weights and references; a compiled model stays compiled.

    Args:
        model: A `keras.Model`: Sequential, Functional or subclassed, built or
            not, compiled or not.
        strategy: `None`, a string such as `"data"`, or a strategy such as
            `pk.DataParallel(2)`. Defaults to `None`, a single device.

    Returns:
        `model` itself. It now has `model.strategy`, `model.set_strategy(...)`
        and `model.compile(..., strategy=...)`.

    Raises:
        ValueError: If `model` is no Keras model, or `strategy` is none of
            these, or asks for devices that are not there.
        UnsupportedError: If the strategy is known but not supported yet, or
            the model was made inside another library's strategy.

    Example:

    >>> import keras, parallel_keras as pk
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> pk.parallelize(model, "data") is model
    True
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            "parallelize takes a keras.Model (Sequential, Functional or subclassed). "
            f"Received: {model!r} of type {type(model).__name__}"
        )
    state = vars(model).get(STATE)
    if state is None:
        state = State(model)
        state.install()
    state.set_strategy(strategy)
    return model


class ParallelModel(keras.Model):
    """A `keras.Model` that takes `strategy=` in `compile`.

    `ParallelModel(inputs, outputs)` gives what `keras.Model(inputs, outputs)`
    gives, parallelized. Subclass it as you would subclass `keras.Model`.

    Args:
        inputs: Input tensors, as for `keras.Model`.
        outputs: Output tensors, as for `keras.Model`.

    Example:

    >>> import keras, parallel_keras as pk
    >>> x = keras.Input((4,))
    >>> model = pk.ParallelModel(x, keras.layers.Dense(1)(x))
    >>> model.compile("sgd", "mse", strategy="data")
    >>> model.strategy
    DataParallel(devices=None)
    """

    def __new__(cls, *args, **kwargs):
        if cls is ParallelModel and keras_internals.is_functional_call(args, kwargs):
            # Not an instance of this class: files name a plain Keras model.
            return parallelize(keras.Model(*args, **kwargs))
        return super().__new__(cls)

    def __init__(self, *args, **kwargs):
        if keras_internals.is_functional_call(args, kwargs):
            keras_internals.inject_functional_into(
                type(self), stop=ParallelModel, twin=_FunctionalParallelModel
            )
            keras_internals.Functional.__init__(self, *args, **kwargs)
        else:
            keras.Model.__init__(self, *args, **kwargs)
        parallelize(self)


class _FunctionalParallelModel(ParallelModel, keras_internals.Functional):
    """Base of a ParallelModel subclass that was called as `Cls(inputs, outputs)`.

    Keras would put its functional class into the bases of `ParallelModel`
    itself, which breaks every later subclass of it.
    """


def load_model(filepath, strategy=None, custom_objects=None, compile=True, safe_mode=True):
    """Load a model from a stock Keras file and give it a strategy.

    Args:
        filepath: String or path, a `.keras` file, whichever strategy, device
            count or backend it was saved under.
        strategy: As in `parallelize`. Defaults to `None`.
        custom_objects: As in `keras.models.load_model`.
        compile: Bool. Whether to compile the model as it was saved, with its
            optimizer's state. Defaults to `True`.
        safe_mode: As in `keras.models.load_model`.

    Returns:
        A Keras model, parallelized.

    Raises:
        ValueError: As `keras.models.load_model` and `parallelize`.

    Example:

    >>> import keras, parallel_keras as pk, tempfile, os
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> path = os.path.join(tempfile.mkdtemp(), "model.keras")
    >>> model.save(path)
    >>> pk.load_model(path, strategy="data").strategy
    DataParallel(devices=None)
    """
    model = keras.models.load_model(
        filepath,
        custom_objects={**keras_internals.optimizers_by_name(), **(custom_objects or {})},
        compile=compile,
        safe_mode=safe_mode,
    )
    files.read_places(filepath, model)
    return parallelize(model, strategy)


def clone_model(model, **arguments):
    """Copy a model as `keras.models.clone_model` does, with its places and its strategy.

    Args:
        model: A `keras.Model`. Its weights are not copied, as in Keras.
        **arguments: As in `keras.models.clone_model`.

    Returns:
        A Keras model, parallelized.

    Raises:
        ValueError: As `keras.models.clone_model`.

    Example:

    >>> import keras, parallel_keras as pk
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> pk.clone_model(pk.parallelize(model, "data")).strategy
    DataParallel(devices=None)
    """
    copy = keras.models.clone_model(model, **arguments)
    placement.restore(copy, placement.places_of(model))
    state = vars(model).get(STATE)
    return parallelize(copy, None if state is None else state.strategy)
