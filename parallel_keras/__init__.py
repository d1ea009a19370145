"""Train one Keras 3 model on several devices, with the numbers of one device.

Example:

>>> import keras, parallel_keras as pk
>>> x = keras.Input((4,))
>>> model = pk.ParallelModel(x, keras.layers.Dense(1)(x))
>>> model.compile("sgd", "mse", strategy="data")
"""

from parallel_keras import backends as _backends

_backends.prepare()  # refuses a backend that is not supported, at import

# E402: what follows is imported only after that check.
from parallel_keras.api import list_devices, set_cpu_devices, shutdown  # noqa: E402
from parallel_keras.errors import UnsupportedError, WorkerError  # noqa: E402
from parallel_keras.logs import reduce_logs  # noqa: E402
from parallel_keras.model import ParallelModel, clone_model, load_model, parallelize  # noqa: E402
from parallel_keras.placement import host, place, place_layers  # noqa: E402
from parallel_keras.strategies import (  # noqa: E402
    DataParallel,
    ModelParallel,
    PipelineParallel,
    SingleDevice,
    Strategy,
)

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "ModelParallel",
    "ParallelModel",
    "PipelineParallel",
    "SingleDevice",
    "Strategy",
    "UnsupportedError",
    "WorkerError",
    "clone_model",
    "host",
    "list_devices",
    "load_model",
    "parallelize",
    "place",
    "place_layers",
    "reduce_logs",
    "set_cpu_devices",
    "shutdown",
]
