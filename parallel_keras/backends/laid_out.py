"""ModelParallel, as far as it is the same on both backends.

Every layer and operation of the model gets a `call` in its `__dict__` that brings
its inputs to its device and computes there; variables, metrics and optimizer slots
are moved, in place. Keras's own step functions then run as they are, a model's own
`train_step` too. A backend adds what "computing there" means.
"""

import contextlib
import functools
import inspect

import keras
from keras.src.models.functional import Functional

from parallel_keras import keras_internals, layout, placement
from parallel_keras.backends.lowering import KINDS, Lowering, stock_function

_STEPS = ("train_step", "test_step", "predict_step")


class LaidOut(Lowering):
    """One model with its parts on several devices.

    Attributes:
        devices: Tuple of device names.
        numbers: Dict from the id of a unit to the number of its device.
    """

    def __init__(self, model, strategy):
        super().__init__(model, strategy)
        self.devices: tuple = ()
        self.numbers: dict = {}
        self.free: set = set()
        self.last = 0
        self._is_inside = False  # a call of fit or the like
        self._wrapped: dict = {}  # by id: the unit, which so stays alive, and its call

    # ---- what a backend adds ----

    def computing(self, number):
        """A scope in which everything computes on a device."""
        raise NotImplementedError

    def bring(self, structure, number):
        """Tensors of a structure, on a device."""
        raise NotImplementedError

    def stay(self, number):
        """What follows without a place of its own computes where this was computed."""

    def stepping(self):
        """A scope around a whole step."""
        return contextlib.nullcontext()

    def is_symbolic(self):
        """Whether only shapes are being computed."""
        return False

    def move(self, variable, number):
        """Bring a variable to a device, or to the default one for `None`.

        Returns:
            Bool. Whether it is another object of the backend now.
        """
        raise NotImplementedError

    def tune_optimizer(self, optimizer):
        """Dict of methods that replace an optimizer's own, by name."""
        raise NotImplementedError

    # ---- life ----

    def check(self):
        self._assign()

    def chosen(self):
        self.attach()

    def _assign(self):
        self.devices = self.strategy.devices_for(placement.devices_needed(self.model))
        default = layout.split(self.model, self.strategy, self.devices)
        return placement.assign(self.model, self.devices, default)

    def attach(self):
        if self._is_inside:
            return  # functions have been traced with the variables where they are
        if self._attach():
            # They have been traced with the variables where they were.
            for kind in KINDS:
                setattr(self.model, f"{kind}_function", None)

    def _attach(self):
        model = self.model
        assigned = self._assign()
        self.changed_devices()
        self.numbers, self.free, self.last = assigned.numbers, assigned.free, assigned.last
        for unit in placement.units(model):
            self._wrap(unit)
        for name in _STEPS:
            vars(model)[name] = self._step(name)
        vars(model)["_symbolic_build"] = self._symbolic_build
        return self._settle()

    def changed_devices(self):
        """Called when `devices` has been read."""

    @contextlib.contextmanager
    def session(self):
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def prepare(self, name):
        if name in ("fit", "train_on_batch") and self.model.compiled and self.model.built:
            keras_internals.build_optimizer(self.model)
            self._settle()

    def detach(self):
        for unit, call in self._wrapped.values():
            if vars(unit).get("call") is call:
                for name in ("call", "quantized_call", "build"):
                    vars(unit).pop(name, None)
        self._wrapped.clear()
        for name in (*_STEPS, "_symbolic_build"):
            vars(self.model).pop(name, None)
        self._move_all(lambda variable: None)
        for optimizer in self._optimizers():
            for name in self.tune_optimizer(optimizer):
                vars(optimizer).pop(name, None)

    def make_function(self, kind):
        return stock_function(self.model, kind)

    def _symbolic_build(self, *args, **kwargs):
        keras_internals.stock_symbolic_build(self.model, *args, **kwargs)
        self.built()

    def built(self):
        """What was built just now, before anything is traced, gets a place too."""
        self._attach()

    # ---- computing ----

    def _wrap(self, unit):
        members = vars(unit)
        if isinstance(unit, keras.layers.InputLayer):
            return
        if id(unit) in self._wrapped and members.get("call") is self._wrapped[id(unit)][1]:
            return  # and no other model that shares it has been laid out since
        if unit is not self.model and isinstance(unit, (Functional, keras.Sequential)):
            return  # what is inside computes
        names = ["call", "quantized_call"] if hasattr(unit, "quantized_call") else ["call"]
        for name in names:
            members[name] = self._call(unit, getattr(type(unit), name))
        self._wrapped[id(unit)] = unit, members["call"]
        if isinstance(unit, keras.Layer) and not unit.built and unit is not self.model:
            members["build"] = self._build(unit, type(unit).build)

    def _call(self, unit, stock):
        is_model = unit is self.model

        def call(*args, **kwargs):
            number = self._number(unit)
            if self.is_symbolic():
                return stock(unit, *args, **kwargs)
            if is_model:
                with self.running():
                    return stock(unit, *args, **kwargs)
            if id(unit) in self.free:
                return stock(unit, *args, **kwargs)
            with self.computing(number):
                args, kwargs = self.bring((args, kwargs), number)
                outputs = stock(unit, *args, **kwargs)
            self.stay(number)
            return outputs

        return _like(call, stock)

    def _build(self, unit, stock):
        def build(*args, **kwargs):
            if self.is_symbolic():
                return stock(unit, *args, **kwargs)
            with self.computing(self._number(unit)):
                return stock(unit, *args, **kwargs)

        return _like(build, stock)

    def _number(self, unit):
        """The number of a unit's device; one that was met in a block is there from now on."""
        target = placement.current_block()
        if target is not None and placement.own_place(unit) is None and unit is not self.model:
            placement.mark(unit, target, placement.BLOCK)
            self.numbers[id(unit)] = placement.device_number(target, self.devices)
        return self.numbers.get(id(unit), 0)

    @contextlib.contextmanager
    def running(self):
        """While the model computes, `with pk.place(...)` is where it does."""
        if placement.running.get() is not None:
            yield
            return
        token = placement.running.set(self._block)
        try:
            with self.stepping():
                yield
        finally:
            placement.running.reset(token)

    def _block(self, target):
        return self.block(placement.device_number(target, self.devices))

    def block(self, number):
        """The scope of a `with` block inside `call`."""
        return self.computing(number)

    def _step(self, name):
        stock = getattr(type(self.model), name)

        def step(*args, **kwargs):
            with self.running():
                return stock(self.model, *args, **kwargs)

        return _like(step, stock)

    # ---- variables ----

    def _settle(self):
        """Bring every variable to its device; returns whether any is another object now."""
        model = self.model
        self.homes: dict = {}
        for unit in placement.units(model):
            if isinstance(unit, keras.Layer):
                for variable in keras_internals.own_variables(unit):
                    self.homes.setdefault(id(variable), self.numbers.get(id(unit), 0))
        for metric in model.metrics:
            for variable in metric.variables:
                self.homes.setdefault(id(variable), self.last)
        for optimizer in self._optimizers():
            for slot, reference in keras_internals.slots(optimizer):
                self.homes[id(slot)] = self.homes.get(id(reference), 0)
            vars(optimizer).update(self.tune_optimizer(optimizer))
        return self._move_all(lambda variable: self.homes.get(id(variable), 0))

    def _move_all(self, number_of):
        moved = [self.move(v, number_of(v)) for v in self._all_variables()]
        if any(moved):
            for optimizer in self._optimizers():
                keras_internals.index_trainables(optimizer)
        return any(moved)

    def home(self, variable):
        """The number of a variable's device."""
        return self.homes.get(id(variable), 0)

    def _all_variables(self):
        found = [*self.model.variables, *(v for m in self.model.metrics for v in m.variables)]
        for optimizer in self._optimizers():
            found += keras_internals.optimizer_variables(optimizer)
            found += keras_internals.untracked_variables(optimizer)
        return list({id(v): v for v in found if v._value is not None}.values())

    def _optimizers(self):
        return keras_internals.all_optimizers(self.model)


def _like(function, stock):
    """Show the signature that the bound method of the class would show."""
    function = functools.wraps(stock)(function)
    parameters = list(inspect.signature(stock).parameters.values())[1:]
    vars(function)["__signature__"] = inspect.Signature(parameters)
    del function.__wrapped__
    return function
