"""Where the parts of a model live: annotations written on layers, and read off a model.

A place is a plain mark in a layer's or an operation's `__dict__`. It does nothing by
itself: strategies that lay a model out read it, the others ignore it.
"""

import contextlib
import contextvars
import difflib
import functools
import inspect
import re
from collections.abc import Mapping

import keras

from parallel_keras import backends, devices as device_names, keras_internals

# What wins where several marks meet on one layer.
PATTERN, CLASS, BLOCK, INSTANCE = range(4)
_RANK, _TARGET = "_parallel_keras_place_rank", "_parallel_keras_place"
_CLASS_TARGET = "_parallel_keras_class_place"

_blocks: contextvars.ContextVar[tuple] = contextvars.ContextVar("blocks", default=())
# Set while a model runs laid out: a function of a target that gives the scope to enter.
running: contextvars.ContextVar = contextvars.ContextVar("running", default=None)


class place:
    """Say where a part of a model lives.

    Marks are read by the strategies that lay a model out over devices
    (`"model"`), and ignored by definition under `None` and `"data"`: the same
    model runs either way. Where marks meet on one layer, an instance's wins
    over that of the inner block or function, which wins over the outer one's,
    which wins over the class's, which wins over a pattern's.

    Args:
        target: Int or string. The number of a device of the strategy (`-1` is
            the last one), or a device's name, such as `"gpu:1"`.

    Returns:
        An object to use as a decorator of a function that builds layers or of a
        `Layer` or `Model` class, as a function of a layer, or as a `with` block,
        also inside `call`.

    Raises:
        ValueError: If `target` is neither, or what is decorated is none of these.

    Example:

    >>> import keras, parallel_keras as pk
    >>> @pk.place(0)
    ... def encoder(x):
    ...     return keras.layers.Dense(8, activation="relu")(x)
    >>> x = keras.Input((4,))
    >>> with pk.place(1):
    ...     y = keras.layers.Dense(2)(encoder(x))
    >>> model = pk.ParallelModel(x, y)
    >>> model.compile("sgd", "mse", strategy="model")
    """

    def __init__(self, target):
        self.target = check_target(target)
        self._entered: list = []

    def __repr__(self):
        return f"place({self.target!r})"

    # ---- a block ----

    def __enter__(self):
        keras_internals.watch_operations(_made, _called)
        token = _blocks.set((*_blocks.get(), self.target))
        stack = contextlib.ExitStack()
        scope = running.get()
        # While a model runs laid out, the block is where it computes. Where layers
        # are made, that is in host memory, wherever they will live. In a `call` of
        # plain Keras, or one that computes shapes only, it is nothing.
        if scope is not None:
            stack.enter_context(scope(self.target))
        elif not keras_internals.is_in_call():
            stack.enter_context(host())
        self._entered.append((token, stack))
        return self

    def __exit__(self, *exception):
        token, stack = self._entered.pop()
        _blocks.reset(token)
        return stack.__exit__(*exception)

    # ---- a decorator, or a function of a layer ----

    def __call__(self, thing):
        if inspect.isclass(thing) and issubclass(thing, keras.Operation):
            keras_internals.watch_operations(_made, _called)
            setattr(thing, _CLASS_TARGET, self.target)
            return thing
        if isinstance(thing, keras.Operation):
            mark(thing, self.target, INSTANCE)
            return thing
        if callable(thing) and not inspect.isclass(thing):

            @functools.wraps(thing)
            def placed(*args, **kwargs):
                with place(self.target):
                    return thing(*args, **kwargs)

            return placed
        raise ValueError(
            "pk.place(...) decorates a function or a Layer or Model class, takes a layer, or opens "
            f"a `with` block. Received: {thing!r} of type {type(thing).__name__}"
        )


def place_layers(model, places):
    """Say where the layers of a model live, by patterns of their paths.

    Args:
        model: A built `keras.Model`.
        places: Dict from regular expressions to targets, as in `pk.place`. An
            expression has to match a layer's whole path, as in
            `model.layers[0].path` or, for a nested layer, its path inside the
            model (`"encoder/dense_1"`), or its name. A layer that contains
            others places what is inside.

    Returns:
        `model` itself.

    Raises:
        ValueError: If an expression matches no layer, or two match the same one, or
            `places` is no dict.

    Example:

    >>> import keras, parallel_keras as pk
    >>> model = keras.Sequential(
    ...     [keras.Input((4,)), keras.layers.Dense(8, name="first"), keras.layers.Dense(1)])
    >>> pk.place_layers(model, {"first": 0, r"dense.*": 1}) is model
    True
    """
    if not isinstance(model, keras.Model):
        raise ValueError(f"place_layers takes a keras.Model. Received: {model!r}")
    if not isinstance(places, Mapping):
        raise ValueError(
            "place_layers takes a dict from regular expressions of layer paths to places, such as "
            f"{{'encoder': 0, 'head': 1}}. Received: places={places!r}"
        )
    names = {id(layer): names for layer, names in _named(model)}
    matched: dict = {}
    for pattern, target in places.items():
        check_target(target)
        try:
            expression = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"place_layers takes regular expressions. Received: {pattern!r} ({error})"
            ) from error
        hits = [
            layer for layer, names in _named(model) if any(expression.fullmatch(n) for n in names)
        ]
        if not hits:
            every = [n for names in names.values() for n in names]
            near = difflib.get_close_matches(pattern, every, n=3, cutoff=0.4) or every[:5]
            raise ValueError(
                f"The pattern matches no layer of the model. Near are: {', '.join(near)}. "
                f"Received: {pattern!r}"
            )
        for layer in hits:
            if id(layer) in matched:
                raise ValueError(
                    f"Two patterns match the layer {names[id(layer)][0]!r}: "
                    f"{matched[id(layer)][0]!r} and {pattern!r}. Received: places={places!r}"
                )
            matched[id(layer)] = pattern, layer, target
    for _, layer, target in matched.values():
        mark(layer, target, PATTERN)
    return model


@contextlib.contextmanager
def host():
    """Build in host memory, so that a model larger than any device can be made.

    The variables move to their devices when a strategy is set or the model runs.

    Example:

    >>> import keras, parallel_keras as pk
    >>> with pk.host():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    """
    with keras.device(backends.current().devices.HOST):
        yield


# ---- marks -----------------------------------------------------------------------


def check_target(target):
    """A target as an int of -1 or more, or a canonical device name."""
    if isinstance(target, bool) or not isinstance(target, (int, str)):
        raise ValueError(
            "A place is the number of a device (0 is the first, -1 the last) or a device's name "
            f"such as 'gpu:1'. Received: {target!r}"
        )
    if isinstance(target, str):
        return device_names.canonical(target)
    if target < -1:
        raise ValueError(f"A place is a number from 0 up, or -1 for the last. Received: {target}")
    return target


def mark(operation, target, rank):
    """Mark a layer or an operation, unless it has a mark of a higher rank."""
    members = vars(operation)
    if members.get(_RANK, -1) <= rank:
        members[_RANK], members[_TARGET] = rank, target


def own_place(operation):
    """The target that was marked on this very layer or operation, or `None`."""
    return vars(operation).get(_TARGET)


def inner_places(operation):
    """The targets that are marked on the layers inside a layer, as a set."""
    if not isinstance(operation, keras.Layer):
        return set()
    inner = keras_internals.flatten_layers(operation, include_self=False)
    return {own_place(layer) for layer in inner} - {None}


def current_block():
    """The target of the innermost `with` block, or `None`."""
    return _blocks.get()[-1] if _blocks.get() else None


def places_of(model):
    """All marks of a model, by the position of their unit: what files and clones keep."""
    return {
        position: [vars(unit)[_TARGET], vars(unit)[_RANK]]
        for position, unit in enumerate(units(model))
        if _TARGET in vars(unit)
    }


def as_lines(model):
    """The marks of a model as lines of text, one for each layer and operation that has one."""
    paths = {id(layer): names[0] for layer, names in _named(model)}
    return [
        f"  {paths.get(id(unit), unit.name)} ({type(unit).__name__}): {vars(unit)[_TARGET]}"
        for unit in units(model)
        if _TARGET in vars(unit)
    ]


def restore(model, places):
    """Put the marks of `places_of` on a model of the same make."""
    found = units(model)
    for position, (target, rank) in places.items():
        if int(position) < len(found):
            mark(found[int(position)], target, rank)


def units(model):
    """All layers and operations of a model, nested ones too, in one order on every copy."""
    found = {}
    for layer in keras_internals.flatten_layers(model):
        found[id(layer)] = layer
        if isinstance(layer, keras_internals.Functional):
            for operation in layer.operations:
                found[id(operation)] = operation
    return list(found.values())


def _made(operation):
    """A layer or an operation has been made."""
    target = getattr(type(operation), _CLASS_TARGET, None)
    if target is not None:
        mark(operation, target, CLASS)
    if _blocks.get():
        mark(operation, _blocks.get()[-1], BLOCK)


def _called(operation):
    """One is called, in a graph or for real: what has no place has the block's."""
    if _blocks.get() and own_place(operation) is None:
        mark(operation, _blocks.get()[-1], BLOCK)


def _named(model):
    """Each layer inside a model, with the names that a pattern may match."""

    def walk(container, prefix):
        for layer in keras_internals.direct_layers(container):
            if isinstance(layer, keras.layers.InputLayer):
                continue
            path = f"{prefix}{layer.name}"
            names = [path, layer.path, layer.name]  # one that is not built has no path yet
            yield layer, list(dict.fromkeys(name for name in names if name))
            yield from walk(layer, f"{path}/")

    seen = set()
    for layer, names in walk(model, ""):
        if id(layer) not in seen:
            seen.add(id(layer))
            yield layer, names


# ---- reading a model -----------------------------------------------------------------


def has_places(model):
    """Whether any part of a model is marked."""
    return any(own_place(unit) is not None for unit in units(model))


def devices_needed(model):
    """How many devices the numbers of a model's places ask for; zero without any."""
    targets = [own_place(unit) for unit in units(model)]
    return max((t + 1 for t in targets if isinstance(t, int)), default=0)


def device_number(target, devices):
    """The number of a target among a strategy's devices, or a ValueError."""
    if isinstance(target, str):
        if target not in devices:
            raise ValueError(
                f"A part of the model is placed on {target!r}, which is not among the strategy's "
                f"devices. Name it in `devices=`, or place the part by number. "
                f"Received: devices={list(devices)}"
            )
        return devices.index(target)
    if target >= len(devices):
        raise ValueError(
            f"A part of the model is placed on device number {target}, but the strategy has "
            f"{len(devices)}: {', '.join(devices)}. Give it more with `devices=`, or place the "
            f"part on a lower number. Received: place {target}"
        )
    return len(devices) - 1 if target == -1 else target


def assign(model, devices, default=None):
    """The number of the device of each unit of a model.

    Args:
        model: A Keras model.
        devices: Tuple of device names.
        default: Dict from the id of a unit to a number, for a model without places.

    Returns:
        An object with `numbers`, a dict from the id of a layer or an operation to
        an int, `last`, the number of the device of the outputs, and `free`, the ids
        of containers without a place whose parts lie on several devices. A unit
        without a place is where its container is, or where its inputs come from.
    """
    assigner = _Assigner(devices, default or {})
    target = own_place(model)
    inherited = None if target is None else device_number(target, devices)
    assigner.last = assigner.container(model, inherited, inherited or 0)
    return assigner


class _Assigner:
    """Walks a model in the order in which it computes."""

    def __init__(self, devices, default):
        self.devices = devices
        self.default = default
        self.numbers: dict = {}
        self.free: set = set()  # containers without a place whose parts lie on several devices
        self.last = 0

    def unit(self, unit, inherited, inputs):
        """Assign one unit and what is in it.

        Args:
            unit: A layer or an operation.
            inherited: Int or `None`. The number of the container that places it.
            inputs: Int. Where its inputs are.

        Returns:
            Int. Where its outputs are.
        """
        target = own_place(unit)
        if target is not None:
            inherited = device_number(target, self.devices)
        elif id(unit) in self.default:
            inherited = self.default[id(unit)]
        if id(unit) in self.numbers:  # shared: where it is first met
            return self.numbers[id(unit)]
        start = inputs if inherited is None else inherited
        self.numbers[id(unit)] = start
        if isinstance(unit, keras.Layer):
            return self.container(unit, inherited, start)
        return start

    def container(self, layer, inherited, inputs):
        """Assign what is inside a layer; returns where its outputs are."""
        graph = keras_internals.graph_of(layer)
        if graph is not None:
            self.numbers[id(graph)] = inputs
            last = self.graph(graph, inherited, inputs)
        else:
            last, inside = inputs, set()
            for inner in keras_internals.direct_layers(layer):
                last = self.unit(inner, inherited, last)
                inside.add(self.numbers[id(inner)])
            if inherited is None and inside - {inputs}:
                self.free.add(id(layer))
            if not isinstance(layer, keras.Model) and inherited is not None:
                last = inherited  # it computes on by itself after its sublayers
        self.numbers.setdefault(id(layer), inputs)
        return last

    def graph(self, model, inherited, inputs):
        where: dict = {}
        for node in keras_internals.nodes_in_order(model):
            operation = node.operation
            sources = [where.get(id(x), inputs) for x in node.input_tensors]
            if node.is_input:
                number = self.numbers[id(operation)] = inputs
            else:
                # Where its inputs meet: the work moves on, not back.
                number = self.unit(operation, inherited, max(sources, default=inputs))
            where.update((id(x), number) for x in node.outputs)
        return max((where.get(id(x), inputs) for x in model.outputs), default=inputs)
