"""The methods that a parallel model has over a plain one."""

import numbers

from parallel_keras import backends, capabilities, features, planning, prediction
from parallel_keras.backends.lowering import SingleLowering
from parallel_keras.keras_internals import STATE
from parallel_keras.strategies import SingleDevice, parse
from parallel_keras.timeline import Timeline


def set_strategy(self, strategy):
    """Change the strategy, at any time, and nothing else.

    Weights, optimizer state, iterations, loss scale and metrics stay, and
    references such as `layer.kernel` stay valid.

    Args:
        strategy: As in `parallelize`.
    """
    vars(self)[STATE].set_strategy(strategy)


def plan(self, batch_size=32, strategy=None, devices=None, input_shape=None):
    """What lies on which device, before anything runs.

    Args:
        batch_size: Int. The rows of a global batch. Defaults to `32`.
        strategy: As in `parallelize`. Defaults to the model's own.
        devices: String such as `"4x80GB"`, for devices that are not there, with
            the memory of each. Defaults to the devices of the strategy.
        input_shape: Shape of the inputs with the batch's entry, as for
            `model.build`, where the model does not know it.

    Returns:
        A `Plan`, which prints as a table, is one in a notebook, and has
        `save(path)` for a picture.

    Raises:
        ValueError: If the shape of the inputs is not known, `batch_size` is no number of
            rows, or `devices` is no such string.

    Example:

    >>> import keras, parallel_keras as pk
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="head")])
    >>> plan = pk.parallelize(model).plan(batch_size=8, strategy="model", devices="2x80GB")
    >>> plan.devices, plan.layers[0].parameters
    (['gpu:0', 'gpu:1'], 20)
    """
    chosen = self.strategy if strategy is None else parse(strategy)
    _check_rows(batch_size)
    return planning.make(self, chosen, batch_size, devices, input_shape)


def timeline(self, batch_size=None, strategy=None, devices=None, input_shape=None, predicted=False):
    """What each device does when in a training step.

    Without arguments: what was measured in the last training step under the model's
    strategy. With any of them: what is predicted.

    Args:
        batch_size: Int. The rows of a global batch, for a prediction. Defaults to those of
            the last training step.
        strategy: As in `parallelize`. Defaults to the model's own.
        devices: As in `model.plan`. Defaults to the devices of the strategy.
        input_shape: As in `model.plan`.
        predicted: Bool. Whether to predict though nothing else is asked for. Defaults to
            `False`.

    Returns:
        A `Timeline`, which prints as a table, is one in a notebook, and has `save(path)`
        for a picture, or for a trace that https://ui.perfetto.dev opens. A pipeline has
        forward, backward and update of each stage and micro-batch. A replica has its
        compute (forward and backward), the part of the all-reduce that its backward pass
        does not hide, waiting for data (all between two steps, callbacks too; not
        predicted), and update. A prediction is made of layer costs and of rates that are
        measured here in about a second; after a step under a pipeline, of that step's
        times. On GPUs the TensorFlow backend takes down when work was handed to the GPU.

    Raises:
        ValueError: If there was no training step under the strategy yet and no
            `batch_size` is given, or it is no number of rows.
        UnsupportedError: If there is nothing measured under the strategy, which is so for
            `None` and `"model"`.

    Example:

    >>> import keras, numpy as np, parallel_keras as pk
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    >>> model = pk.parallelize(model, pk.PipelineParallel(2, microbatches=4))
    >>> model.compile("sgd", "mse")
    >>> model.timeline(batch_size=8).is_predicted
    True
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    >>> timeline = model.timeline()
    >>> [(event.stage, event.microbatch) for event in timeline.events[:1]], timeline.kinds
    ([(0, 0)], ('forward', 'backward', 'update'))
    >>> pk.shutdown()
    """
    chosen = self.strategy if strategy is None else parse(strategy)
    lowering = vars(self)[STATE].lowering
    _check_rows(batch_size)
    arguments = batch_size, devices, input_shape
    asked = any(one is not None for one in arguments) or chosen != self.strategy
    if predicted or asked:
        return _predicted(self, lowering, chosen, batch_size, devices, input_shape)
    if isinstance(lowering, SingleLowering):
        capabilities.check("measured_timeline", SingleDevice(), backends.name(), repr(chosen))
    capabilities.check("measured_timeline", chosen, backends.name(), repr(chosen))
    if "train" in features.own_steps(self):
        capabilities.check("own_timeline", chosen, backends.name(), repr(chosen))
    events = lowering.events()
    if not events:
        raise ValueError(
            "There has been no training step under this strategy that could be shown. Call "
            "fit() first, or have it predicted: model.timeline(batch_size=...). "
            f"Received: strategy={chosen!r}"
        )
    return Timeline(events, lowering.devices, title=repr(chosen))


def _check_rows(batch_size):
    if batch_size is None or (isinstance(batch_size, numbers.Integral) and int(batch_size) > 0):
        return
    raise ValueError(
        "`batch_size` is the number of rows of a global batch, an integer of one or more. "
        f"Received: batch_size={batch_size!r}"
    )


def _predicted(model, lowering, strategy, batch_size, devices, input_shape):
    rows = lowering.trained_rows
    last = None
    if rows is not None and (events := lowering.events()):
        last = prediction.LastStep(model.strategy, int(rows), events)
        batch_size = batch_size or last.rows
    if batch_size is None:
        raise ValueError(
            "Before the first training step a timeline is predicted, for a batch of how many "
            "rows? Write model.timeline(batch_size=32). "
            f"Received: batch_size=None, strategy={strategy!r}"
        )
    return prediction.make(model, strategy, batch_size, devices, input_shape, last)
