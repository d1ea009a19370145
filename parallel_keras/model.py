"""A Keras model with a strategy: `parallelize`, `ParallelModel`, `load_model`.

A parallel model is the user's own model. What differs from plain Keras is put
into the instance's `__dict__`: the three makers of step functions, `compile`
(which takes `strategy=` off), and thin wraps of fit, evaluate, predict and the
on_batch methods that open a session. The class is never touched, so saving,
loading, registered names, cloning and pickling see a plain Keras model.
"""

import contextlib
import functools
import inspect
import os
from typing import Any

import keras
from keras import tree

from parallel_keras import (
    backends,
    capabilities,
    features,
    files,
    keras_internals,
    placement,
    planning,
    prediction,
)
from parallel_keras import devices as device_names
from parallel_keras.backends.lowering import KINDS, SingleLowering
from parallel_keras.errors import UnsupportedError
from parallel_keras.log import say
from parallel_keras.strategies import SingleDevice, parse
from parallel_keras.timeline import Timeline

_UNSET = object()
_STATE = "_parallel_keras"
_RUNS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


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
    state = vars(model).get(_STATE)
    if state is None:
        state = _State(model)
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
    state = vars(model).get(_STATE)
    return parallelize(copy, None if state is None else state.strategy)


class _State:
    """What the package knows of one model. Lives in the instance's `__dict__`."""

    def __init__(self, model):
        self.model = model
        self.strategy = SingleDevice()
        self.lowering = SingleLowering(model, self.strategy)
        self.depth = 0
        self.announced = False

    # ---- the instance's overrides ----

    def install(self):
        members = vars(self.model)
        members[_STATE] = self
        members["strategy"] = self.strategy
        members["set_strategy"] = self._as_method(self.set_strategy, _set_strategy)
        members["compile"] = self._compile()
        members["_resolve_auto_jit_compile"] = self._resolve_auto_jit_compile
        for kind in KINDS:
            members[f"make_{kind}_function"] = functools.partial(self._make_function, kind)
        for name in _RUNS:
            members[name] = self._run(name)
        members["save"] = self._save()
        members["summary"] = self._summary()
        members["plan"] = self._as_method(self._plan, plan)
        members["timeline"] = self._as_method(self._timeline, timeline)

    def _compile(self):
        stock = type(self.model).compile

        @functools.wraps(stock)
        def compile(*args, strategy=_UNSET, **kwargs):
            # Parsed first: a wrong strategy leaves the model as it was.
            chosen = self.strategy if strategy is _UNSET else parse(strategy)
            chosen.devices  # noqa: B018  raises where a device is not there
            _lower(self.model, chosen).check()
            with self._choosing(chosen):
                type(self.model).compile(self.model, *args, **kwargs)
            self.set_strategy(chosen)
            self._check_features()

        return self._as_method(compile, stock)

    def _run(self, name):
        stock = getattr(type(self.model), name)

        @functools.wraps(stock)
        def run(*args, **kwargs):
            method = getattr(type(self.model), name)
            with self._session(name, method, args, kwargs):
                return method(self.model, *args, **kwargs)

        return self._as_method(run, stock)

    def _save(self):
        stock = type(self.model).save

        @functools.wraps(stock)
        def save(filepath, *args, **kwargs):
            result = type(self.model).save(self.model, filepath, *args, **kwargs)
            files.write_places(filepath, self.model)
            return result

        return self._as_method(save, stock)

    def _summary(self):
        stock = type(self.model).summary

        @functools.wraps(stock)
        def summary(*args, **kwargs):
            type(self.model).summary(self.model, *args, **kwargs)
            lines = placement.as_lines(self.model)
            if lines:
                write = inspect.signature(stock).bind(self.model, *args, **kwargs).arguments
                (write.get("print_fn") or print)("\n".join(["Places:", *lines]))

        return self._as_method(summary, stock)

    def _plan(self, batch_size=32, strategy=None, devices=None, input_shape=None):
        chosen = self.strategy if strategy is None else parse(strategy)
        return planning.make(self.model, chosen, batch_size, devices, input_shape)

    def _timeline(
        self, batch_size=None, strategy=None, devices=None, input_shape=None, predicted=False
    ):
        chosen = self.strategy if strategy is None else parse(strategy)
        asked = batch_size is not None or devices is not None or chosen != self.strategy
        if predicted or asked:
            return self._predicted(chosen, batch_size, devices, input_shape)
        if isinstance(self.lowering, SingleLowering):
            capabilities.check("measured_timeline", SingleDevice(), backends.name(), repr(chosen))
        capabilities.check("measured_timeline", chosen, backends.name(), repr(chosen))
        if "train" in features.own_steps(self.model):
            capabilities.check("own_timeline", chosen, backends.name(), repr(chosen))
        lowering: Any = self.lowering
        events = lowering.events()
        if not events:
            raise ValueError(
                "There has been no training step under this strategy that could be shown. Call "
                "fit() first, or have it predicted: model.timeline(batch_size=...). "
                f"Received: strategy={chosen!r}"
            )
        return Timeline(events, lowering.devices, title=repr(chosen))

    def _predicted(self, strategy, batch_size, devices, input_shape):
        rows = self.lowering.trained_rows
        last = None
        if rows is not None and (events := self.lowering.events()):
            last = prediction.LastStep(self.strategy, int(rows), events)
            batch_size = batch_size or last.rows
        if batch_size is None:
            raise ValueError(
                "Before the first training step a timeline is predicted, for a batch of how many "
                "rows? Write model.timeline(batch_size=32). "
                f"Received: batch_size=None, strategy={strategy!r}"
            )
        return prediction.make(self.model, strategy, batch_size, devices, input_shape, last)

    @staticmethod
    def _as_method(function, stock):
        """Show the signature that the bound method of the class would show."""

        @functools.wraps(stock)
        def method(*args, **kwargs):
            return function(*args, **kwargs)

        parameters = list(inspect.signature(stock).parameters.values())[1:]
        vars(method)["__signature__"] = inspect.Signature(parameters)
        return method

    # ---- the strategy ----

    def set_strategy(self, strategy):
        chosen = parse(strategy)
        if chosen == self.strategy:
            return
        chosen.devices  # noqa: B018  raises where a device is not there
        if chosen.name != "single":
            _refuse_foreign(self.model, chosen)
        lowering = _lower(self.model, chosen)
        before = self.strategy, self.lowering
        self.lowering.detach()
        try:
            self._use(chosen, lowering)
        except Exception:
            lowering.detach()
            self._use(*before)  # as it was: a place may be on a device that is not there
            raise
        self.announced = False
        for kind in KINDS:
            if getattr(self.model, f"{kind}_function") is not None:
                setattr(self.model, f"{kind}_function", None)
                if self.depth:
                    # A callback changed the strategy in mid-fit.
                    self._make_function(kind)

    def _use(self, strategy, lowering):
        self.strategy = vars(self.model)["strategy"] = strategy
        self.lowering = lowering
        lowering.chosen()

    @contextlib.contextmanager
    def _choosing(self, chosen):
        """`compile` runs with the new strategy in place, and is undone if it fails."""
        self.choosing = chosen
        try:
            yield
        finally:
            del self.choosing

    def _resolve_auto_jit_compile(self):
        # Keras turns XLA on where there is a GPU and no tf.distribute
        # strategy that it knows of: ours it does not know.
        strategy = getattr(self, "choosing", self.strategy)
        if strategy.name == "single":
            return type(self.model)._resolve_auto_jit_compile(self.model)
        return False

    # ---- the three functions ----

    def _make_function(self, kind, force=False):
        name = f"{kind}_function"
        if getattr(self.model, name) is not None and not force:
            return getattr(self.model, name)
        self._prepare()
        setattr(self.model, name, self.lowering.make_function(kind))
        return None

    def _prepare(self):
        if vars(self.model).get("strategy") is not self.strategy:
            raise ValueError(
                "`model.strategy` can be read, not set: call model.set_strategy(...) or "
                "model.compile(..., strategy=...). Received: "
                f"model.strategy={vars(self.model).get('strategy')!r}"
            )
        self._check_features()
        if self.strategy.name != "single":
            _refuse_foreign(self.model, self.strategy)
        self.lowering.attach()

    def _check_features(self):
        if isinstance(self.lowering, SingleLowering):
            return
        for feature, received in (
            *features.of_model(self.model),
            *features.of_compile(self.model),
        ):
            capabilities.check(feature, self.strategy, backends.name(), received)

    # ---- sessions ----

    @contextlib.contextmanager
    def _session(self, name, method, args, kwargs):
        if self.depth:  # evaluate inside fit
            yield
            return
        self._prepare()
        self.lowering.prepare(name)
        self.depth += 1
        try:
            if name == "fit" and not self.announced:
                self._announce(method, args, kwargs)
            with self.lowering.session():
                yield
        finally:
            self.depth -= 1

    def _announce(self, method, args, kwargs):
        if self.strategy.name == "single":
            return
        try:
            bound = inspect.signature(method).bind(self.model, *args, **kwargs).arguments
        except TypeError:
            return  # the call itself will say what is wrong
        if bound.get("verbose", "auto") in (0, False, "0"):
            return
        self.announced = self.lowering.speaks = True
        names = getattr(self.lowering, "devices", ()) or self.strategy.devices
        text = f"{self.strategy!r} on {', '.join(names)}"
        if device_names.is_simulated(names):
            text += " (parts of one CPU, which simulate devices)"
        rows = _rows_of_a_batch(bound.get("x"), bound.get("batch_size"))
        clauses = self.strategy.describe(rows, names), self.lowering.remark()
        say(f"{text}: {'; '.join(clause for clause in clauses if clause)}")


def _set_strategy(self, strategy):
    """Change the strategy, at any time, and nothing else.

    Weights, optimizer state, iterations, loss scale and metrics stay, and
    references such as `layer.kernel` stay valid.

    Args:
        strategy: As in `parallelize`.
    """


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
        ValueError: If the shape of the inputs is not known, or `devices` is no
            such string.

    Example:

    >>> import keras, parallel_keras as pk
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="head")])
    >>> plan = pk.parallelize(model).plan(batch_size=8, strategy="model", devices="2x80GB")
    >>> plan.devices, plan.layers[0].parameters
    (['gpu:0', 'gpu:1'], 20)
    """


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
            `batch_size` is given.
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


def _lower(model, strategy):
    if strategy.lowering == "single":
        return SingleLowering(model, strategy)
    if strategy.lowering == "model":
        # A place that is out of range is an error on one device, too.
        needed = placement.devices_needed(model)
        placement.assign(model, strategy.devices_for(needed))
    if strategy.devices_for(placement.devices_needed(model)) == (
        backends.current().devices.available()[0],
    ):
        # One replica on the default device is plain Keras.
        return SingleLowering(model, strategy)
    return backends.room(strategy.lowering).Lowering(model, strategy)


def _refuse_foreign(model, strategy):
    """Refuse what another launcher or strategy has set up already."""
    if keras_internals.tf_distribute_strategy(model) is not None:
        raise UnsupportedError(
            "The model was made inside a tf.distribute strategy's scope. Make it outside of "
            f"`with strategy.scope():`; parallel_keras places its variables itself. Received: "
            f"strategy={strategy!r}"
        )
    if keras.distribution.distribution() is not None:
        raise UnsupportedError(
            "A keras.distribution is set, which would lay the variables out a second time. "
            "Call keras.distribution.set_distribution(None) before the model is made. "
            f"Received: strategy={strategy!r}"
        )
    launched = [name for name in ("TF_CONFIG", "TORCHELASTIC_RUN_ID") if os.environ.get(name)]
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        launched.append("RANK and WORLD_SIZE")
    if launched:
        raise UnsupportedError(
            "Several processes that call fit() themselves (torchrun, TF_CONFIG) are not "
            f"supported yet: start one process, it uses all devices. Received: {launched[0]} "
            "in the environment"
        )


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
