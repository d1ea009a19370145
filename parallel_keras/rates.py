"""How fast a device of this machine is, measured once by short computations.

That takes a second or two. What is measured: the matrix products of a large `Dense` layer
and a convolution, forward and backward; copying memory; a chain of layers so small that
only their number counts; and an update by an optimizer like the model's.
"""

import math
import threading
import time

import keras
import numpy as np

from parallel_keras import backends, keras_internals
from parallel_keras.costs.times import Rates

_ROWS, _UNITS = 512, 1024  # of the layer whose products are measured
_IMAGES, _FILTERS = (8, 32, 32), 64  # of the convolution
_BYTES = 1 << 24  # of what is copied, and of the variable that is updated
_LAYERS = 12

_measured: dict = {}
_per_layer: dict = {}  # of a device by itself


def of(devices, dtype, optimizer):
    """The `Rates` of each of some devices of this machine.

    Args:
        devices: Tuple of device names: how many share the machine.
        dtype: String, in which the model computes.
        optimizer: The model's optimizer, or `None`.
    """
    room = backends.room("stopwatch")
    kind = None if optimizer is None else type(optimizer)
    key = backends.name(), tuple(devices), dtype, kind
    if key not in _measured:
        with keras_internals.keeping_names(), room.computing(devices) as together:
            # Devices that are parts of one machine compete for its memory.
            others = round(min(together, len(devices))) - 1 if together else 0
            _measured[key] = Rates(
                products=_products(room, dtype, others),
                convolutions=_convolutions(room, dtype, others),
                bytes=_copying(room, others),
                per_layer=_small_layers(room, devices[0]),
                update=_updating(room, optimizer, others),
                together=together,
            )
    return _measured[key]


def _products(room, dtype, others):
    shapes = (_ROWS, _UNITS), (_UNITS, _UNITS), (_ROWS, _UNITS)
    x, weight, gradient = (_filled(shape, dtype) for shape in shapes)
    flops = 2 * _ROWS * _UNITS * _UNITS
    forward = room.compiled(lambda: keras.ops.matmul(x, weight))
    of_x = room.compiled(lambda: keras.ops.matmul(gradient, keras.ops.transpose(weight)))
    of_weight = room.compiled(lambda: keras.ops.matmul(keras.ops.transpose(x), gradient))
    backward = _seconds(room, of_x, others) + _seconds(room, of_weight, others)
    return flops / _seconds(room, forward, others), 2 * flops / backward


def _convolutions(room, dtype, others):
    layer = keras.layers.Conv2D(
        *(_FILTERS, 3), padding="same", activation="relu", kernel_initializer="ones", dtype=dtype
    )
    x = keras.Variable(np.ones((*_IMAGES, _FILTERS)), dtype=dtype)
    layer.build(x.shape)

    def forward():
        return layer(x.value)

    flops = 2 * math.prod(_IMAGES) * 9 * _FILTERS * _FILTERS
    alone = _seconds(room, room.compiled(forward), others)
    weights = [x, *layer.trainable_variables]
    both = _seconds(room, room.compiled(room.with_backward(forward, weights)), others)
    return flops / alone, 2 * flops / max(both - alone, alone)


def _filled(shape, dtype):
    return keras.ops.convert_to_tensor(np.random.default_rng(0).normal(size=shape), dtype=dtype)


def _copying(room, others):
    x = keras.ops.ones((_BYTES // 4,), "float32")
    return 2 * _BYTES / _seconds(room, room.compiled(lambda: keras.ops.add(x, 1.0)), others)


def _small_layers(room, device):
    """Seconds of a layer with next to nothing to compute, forward and backward.

    They are the same in company, so they are measured once: a machine that is busy at one of
    two times would make one device seem faster or slower than the same with others.
    """
    key = backends.name(), device
    if key not in _per_layer:
        _per_layer[key] = _time_small_layers(room)
    return _per_layer[key]


def _time_small_layers(room):
    # Constant numbers, so that nothing is drawn.
    layers = [
        keras.layers.Dense(8, "relu", kernel_initializer="ones", dtype="float32")
        for _ in range(_LAYERS)
    ]
    x = keras.ops.ones((8, 8), "float32")
    for layer in layers:
        layer.build(x.shape)

    def forward():
        y = x
        for layer in layers:
            y = layer(y)
        return y

    weights = [w for layer in layers for w in layer.trainable_variables]
    alone = _seconds(room, room.compiled(forward))
    both = _seconds(room, room.compiled(room.with_backward(forward, weights)))
    return alone / _LAYERS, max(0.0, both - alone) / _LAYERS


def _updating(room, optimizer, others):
    """Seconds for each byte of a weight, for an optimizer like this one."""
    if optimizer is None:
        return 0.0
    copy = type(optimizer).from_config(optimizer.get_config())
    weight = keras.Variable(np.ones(_BYTES // 4, "float32"), dtype="float32")
    copy.build([weight])
    gradient = keras.ops.ones(weight.shape, "float32")

    def update():
        copy.apply([gradient], [weight])
        return weight.value[:1]

    return _seconds(room, room.compiled(update), others) / _BYTES


def _seconds(room, function, others=0):
    """How long a function takes that gives a tensor: the middle one of some tries.

    Args:
        room: The backend's `stopwatch`.
        function: Without arguments.
        others: Int. How many more threads do the same meanwhile.
    """
    room.wait(function())
    is_over = threading.Event()

    def keep_busy():
        while not is_over.is_set():
            room.wait(function())

    threads = [threading.Thread(target=keep_busy, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    found: list = []
    begin = time.perf_counter()
    while len(found) < 3 or (time.perf_counter() - begin < 0.05 and len(found) < 50):
        start = time.perf_counter()
        room.wait(function())
        found.append(time.perf_counter() - start)
    is_over.set()
    for thread in threads:
        thread.join()
    return sorted(found)[len(found) // 2]
