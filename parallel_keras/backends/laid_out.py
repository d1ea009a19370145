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

from parallel_keras import features, keras_internals, layout, placement
from parallel_keras.backends.lowering import Lowering, stock_function

_STEPS = ("train_step", "test_step", "predict_step")


class LaidOut(Lowering):
    """One model with its parts on several devices.

    Attributes:
        devices: Tuple of device names.
        numbers: Dict from the id of a unit to the number of its device.
        own_steps_build: Bool. Whether Keras leaves it to a step of the model's own to build
            the optimizer, on this backend.
    """

    own_steps_build = False

    def __init__(self, model, strategy):
        super().__init__(model, strategy)
        self.devices: tuple = ()
        self.numbers: dict = {}
        self.free: set = set()
        self.last = 0
        self.homes: dict = {}  # by id: the number of a variable's device
        self._split = layout.Split(model, strategy)
        self._wrapped: dict = {}  # by id: the unit, which so stays alive
        self._tuned: list = []  # pairs of an optimizer and its replaced methods, by name

    # ---- what a backend adds ----

    def computing(self, number):
        """A scope in which everything computes on a device."""
        raise NotImplementedError

    def bring(self, structure, number):
        """Tensors of a structure, on a device."""
        raise NotImplementedError

    def brought(self, given, taken):
        """What was computed with may have changed, where it is another tensor than was given."""

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
            Whether what knew the variable has to be told, as `moved` does.
        """
        raise NotImplementedError

    def moved(self, variables):
        """Called with the variables of which `move` said so."""

    def tune_optimizer(self, optimizer):
        """Dict of methods that replace an optimizer's own, by name."""
        raise NotImplementedError

    def making_slots(self):
        """A scope in which an optimizer makes its variables, while a step runs or before."""
        return contextlib.nullcontext()

    # ---- life ----

    def check(self):
        devices = self._devices()
        self._split.check(devices)
        placement.assign(self.model, devices)

    def chosen(self):
        self.attach()

    def _devices(self):
        return self.strategy.devices_for(placement.devices_needed(self.model))

    def attach(self):
        model = self.model
        self.devices = self._devices()
        self.changed_devices()
        assigned = placement.assign(model, self.devices, self._split.numbers(self.devices))
        self.numbers, self.free, self.last = assigned.numbers, assigned.free, assigned.last
        for unit in placement.units(model):
            self._wrap(unit)
        for name in _STEPS:
            self._replace(model, name, self._step)
        self._replace(model, "_symbolic_build", self._building)
        self._settle()

    def changed_devices(self):
        """Called when `devices` has been read."""

    def prepare(self, name):
        if self.own_steps_build and "train" in features.own_steps(self.model):
            return  # for which variables is the step's to say
        if name in ("fit", "train_on_batch") and self.model.compiled:
            keras_internals.build_optimizer(self.model)
            self._settle()

    def detach(self):
        for unit in self._wrapped.values():
            for name, replacement in list(vars(unit).items()):
                if getattr(replacement, _LOWERING, None) is self:
                    own = getattr(replacement, _OWN)
                    if own is None:
                        del vars(unit)[name]
                    else:
                        vars(unit)[name] = own
        self._wrapped.clear()
        self._move((v, None) for v in keras_internals.every_variable(self.model))
        self._untune()

    def make_function(self, kind):
        return stock_function(self.model, kind)

    def _building(self, model, stock):
        def symbolic_build(*args, **kwargs):
            stock(*args, **kwargs)
            self.attach()  # what was built now has a place too

        return symbolic_build

    def _replace(self, unit, name, make):
        """Put a function where a method was, on one instance, until `detach`.

        What the instance had of its own there (Keras's wrapper of `build`, a
        method that the user has put in) is called by it, and put back. Where
        several models share a layer, the one that was attached last has it.
        """
        members = vars(unit)
        own = members.get(name)
        if getattr(own, _LOWERING, None) is self:
            return
        own = getattr(own, _OWN, own)
        stock = functools.partial(getattr(type(unit), name), unit) if own is None else own
        function = make(unit, stock)
        function = _like(function, own or getattr(type(unit), name).__get__(unit))
        vars(function)[_LOWERING], vars(function)[_OWN] = self, own
        members[name] = function
        self._wrapped[id(unit)] = unit

    # ---- computing ----

    def _wrap(self, unit):
        if isinstance(unit, keras.layers.InputLayer):
            return
        if unit is not self.model and isinstance(
            unit, (keras_internals.Functional, keras.Sequential)
        ):
            return  # what is inside computes
        self._replace(unit, "call", self._call)
        if hasattr(unit, "quantized_call"):
            self._replace(unit, "quantized_call", self._call)
        if isinstance(unit, keras.Layer) and not unit.built and unit is not self.model:
            self._replace(unit, "build", self._build)

    def _call(self, unit, stock):
        is_model = unit is self.model

        def call(*args, **kwargs):
            number = self._number(unit)
            if self.is_symbolic():
                return stock(*args, **kwargs)
            if is_model:
                with self.running():
                    return stock(*args, **kwargs)
            if id(unit) in self.free:
                return stock(*args, **kwargs)
            with self.computing(number):
                given = args, kwargs
                args, kwargs = self.bring(given, number)
                outputs = stock(*args, **kwargs)
                self.brought(given, (args, kwargs))
            if placement.running.get() is not None:
                self.stay(number)
            return outputs

        return call

    def _build(self, unit, stock):
        def build(*args, **kwargs):
            if self.is_symbolic():
                return stock(*args, **kwargs)
            with self.computing(self._number(unit)):
                return stock(*args, **kwargs)

        return build

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
        """The scope of a `with` block inside `call`."""
        return self.computing(placement.device_number(target, self.devices))

    def _step(self, model, stock):
        def step(*args, **kwargs):
            with self.running():
                return stock(*args, **kwargs)

        return step

    # ---- variables ----

    def _settle(self):
        """Bring every variable to its device."""
        self.homes = self._homes_of_weights()
        for metric in self.model.metrics:
            for variable in metric.variables:
                self.homes.setdefault(id(variable), self.last)
        for optimizer in keras_internals.every_optimizer(self.model):
            self._house(optimizer)
        self._tune()
        self._move((v, self.home(v)) for v in keras_internals.every_variable(self.model))

    def home(self, variable):
        """The number of a variable's device."""
        return self.homes.get(id(variable), 0)

    def _homes_of_weights(self):
        """Dict from the id of a weight to the number of its device."""
        homes: dict = {}
        for unit in placement.units(self.model):
            if isinstance(unit, keras.Layer):
                for variable in keras_internals.own_variables(unit):
                    homes.setdefault(id(variable), self.numbers.get(id(unit), 0))
        return homes

    def _house(self, optimizer):
        """Slots are where their variables are."""
        for slot, reference in keras_internals.slots(optimizer):
            self.homes[id(slot)] = self.home(reference)

    def _build_optimizer(self, optimizer):
        """Replaces `build` of one that a model's own `train_step` builds as it goes."""

        def build(variables):
            with self.making_slots():
                type(optimizer).build(optimizer, variables)
            self.homes.update(self._homes_of_weights())  # the step may have built layers too
            self._house(optimizer)
            own = keras_internals.optimizer_variables(optimizer)
            own += keras_internals.untracked_variables(optimizer)
            for variable in own:
                self.move(variable, self.home(variable))  # nobody knows it yet: none is told

        return build

    def _move(self, pairs):
        moved = [variable for variable, number in pairs if self.move(variable, number)]
        if moved:
            self.moved(moved)

    def _tune(self):
        self._untune()  # an optimizer that was built, or replaced, since then needs other methods
        for optimizer in keras_internals.every_optimizer(self.model):
            methods = self.tune_optimizer(optimizer)
            if not optimizer.built:
                methods["build"] = self._build_optimizer(optimizer)
            vars(optimizer).update(methods)
            self._tuned.append((optimizer, methods))

    def _untune(self):
        for optimizer, methods in self._tuned:
            for name, method in methods.items():
                if vars(optimizer).get(name) is method:
                    del vars(optimizer)[name]
        self._tuned.clear()


# On a function that replaces a method: whose it is, and what the instance had before.
_LOWERING, _OWN = "_parallel_keras_lowering", "_parallel_keras_own"


def _like(function, method):
    """Show the name and the signature of a bound method."""
    function = functools.wraps(method)(function)
    vars(function)["__signature__"] = inspect.signature(method)
    del function.__wrapped__
    return function
