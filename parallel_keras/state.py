"""What is put into the `__dict__` of a model to make it parallel.

The three makers of step functions, `compile` (which takes `strategy=` off), and thin
wraps of fit, evaluate, predict and the on_batch methods that open a session. The class is
never touched, so saving, loading, registered names, cloning and pickling see a plain
Keras model.
"""

import contextlib
import functools
import inspect
import types

from parallel_keras import (
    backends,
    capabilities,
    features,
    files,
    foreign,
    keras_internals,
    methods,
    placement,
)
from parallel_keras.announcement import announce
from parallel_keras.backends.lowering import KINDS, SingleLowering
from parallel_keras.keras_internals import STATE
from parallel_keras.strategies import SingleDevice, parse

_UNSET = object()
RUNS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class State:
    """What the package knows of one model. Lives in the instance's `__dict__`."""

    def __init__(self, model):
        self.model = model
        self.strategy = SingleDevice()
        self.lowering = SingleLowering(model, self.strategy)
        self.depth = 0
        self.announced = False
        # Keras keeps what "auto" became, not that it was asked for: of a model that was
        # compiled before, what "auto" becomes is taken for it.
        self.auto_jit = not model.compiled or (
            model.jit_compile == type(model)._resolve_auto_jit_compile(model)
        )

    # ---- the instance's overrides ----

    def install(self):
        members = vars(self.model)
        members[STATE] = self
        members["strategy"] = self.strategy
        members["compile"] = self._compile()
        members["_resolve_auto_jit_compile"] = self._resolve_auto_jit_compile
        members["_setattr_hook"] = self._setattr_hook
        for kind in KINDS:
            members[f"make_{kind}_function"] = functools.partial(self._make_function, kind)
        for name in RUNS:
            members[name] = self._run(name)
        members["save"] = self._save()
        members["summary"] = self._summary()
        for method in (methods.set_strategy, methods.plan, methods.timeline):
            members[method.__name__] = types.MethodType(method, self.model)

    def _compile(self):
        stock = type(self.model).compile

        @functools.wraps(stock)
        def compile(*args, strategy=_UNSET, **kwargs):
            # Parsed first: a wrong strategy leaves the model as it was.
            chosen = self.strategy if strategy is _UNSET else parse(strategy)
            self._check(chosen)
            # Asked for once, as Keras does at the first `compile`, it stays away from the flag.
            self.model.jit_compile  # noqa: B018  reading it resolves it
            self.auto_jit = False
            with self._choosing(chosen):
                type(self.model).compile(self.model, *args, **kwargs)
            self._change_to(chosen)
            self._check_features()

        return self._as_method(compile, stock)

    def _run(self, name):
        stock = getattr(type(self.model), name)

        @functools.wraps(stock)
        def run(*args, **kwargs):
            method = getattr(type(self.model), name)
            with self._session(name, method, args, kwargs), self._named_if_no_batch(name):
                return method(self.model, *args, **kwargs)

        return self._as_method(run, stock)

    @staticmethod
    @contextlib.contextmanager
    def _named_if_no_batch(name):
        """Say it where `predict` was given no batch: Keras then fails over a name of its own."""
        try:
            yield
        except UnboundLocalError as error:
            if name != "predict" or not keras_internals.is_about_no_batch(error):
                raise
            raise ValueError(
                "`predict` was given no rows, so there is no output that it could return. "
                "Received: data without a batch"
            ) from error

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
        if chosen != self.strategy:
            self._check(chosen)
            self._change_to(chosen)

    def _check(self, chosen):
        """Raise where the model cannot be brought under a strategy. Changes nothing."""
        chosen.devices  # noqa: B018  raises where a device is not there
        _lower(self.model, chosen).check()

    def _change_to(self, chosen):
        if chosen == self.strategy:
            return
        if chosen.name != "single":
            foreign.refuse(self.model, chosen)
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
        if self.model.compiled and self.auto_jit and not self.model.run_eagerly:
            self.model.jit_compile = self._resolve_auto_jit_compile()
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
        self.auto_jit = True
        strategy = getattr(self, "choosing", self.strategy)
        if strategy.name == "single":
            return type(self.model)._resolve_auto_jit_compile(self.model)
        return False

    def _setattr_hook(self, name, value):
        if name == "strategy":
            raise AttributeError(
                "`model.strategy` can be read, not set: call model.set_strategy(...) or "
                f"model.compile(..., strategy=...). Received: model.strategy={value!r}"
            )
        return type(self.model)._setattr_hook(self.model, name, value)

    @property
    def is_xla_without_strategy(self):
        """Whether Keras alone would compile the model's steps with XLA."""
        return self.auto_jit and type(self.model)._resolve_auto_jit_compile(self.model)

    # ---- the three functions ----

    def _make_function(self, kind, force=False):
        name = f"{kind}_function"
        if getattr(self.model, name) is not None and not force:
            return getattr(self.model, name)
        self._prepare()
        setattr(self.model, name, self.lowering.make_function(kind))
        return None

    def _prepare(self):
        self._check_features()
        if self.strategy.name != "single":
            foreign.refuse(self.model, self.strategy)
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
                call = method, args, kwargs
                self.announced = announce(self.model, self.strategy, self.lowering, call)
            with self.lowering.session():
                yield
        finally:
            self.depth -= 1


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
