"""What a fresh worker has to see as the caller does.

Keras's and torch's global settings, the import path, the working directory and the
warnings filters: a worker is a new process with the defaults of all of them.
torch's are a table by themselves, in `torch_settings.py`.
"""

import hashlib
import os
import random
import sys
import warnings

import cloudpickle
import keras
import numpy as np
import torch

from parallel_keras import keras_internals
from parallel_keras.backends.torch import shipping, torch_settings


def read():
    """The caller's configuration, as bytes.

    Raises:
        UnsupportedError: If a registered custom object cannot be sent.
    """
    registered = keras_internals.registered_objects()
    objects, tensors = shipping.split(registered, "What is registered as a custom object of Keras")
    return cloudpickle.dumps(
        {
            "path": list(sys.path),
            "directory": _directory(),
            "environment": dict(os.environ),
            "warnings": list(warnings.filters),
            "floatx": keras.config.floatx(),
            "epsilon": keras.config.epsilon(),
            "image_data_format": keras.config.image_data_format(),
            "dtype_policy": keras.config.dtype_policy(),
            "flash_attention": keras.config.is_flash_attention_enabled() is not False,
            "traceback_filtering": keras.config.is_traceback_filtering_enabled(),
            "custom_objects": (objects, [tensor.detach() for tensor in tensors]),
            "seed": keras_internals.global_seed(),
            "torch": torch_settings.read(),
        }
    )


def apply(configuration, rank):
    """Make a worker see what the caller saw in `read`."""
    # The path comes first: the rest may need the user's modules.
    values = cloudpickle.loads(configuration)
    sys.path[:] = values["path"]
    if values["directory"] is not None:
        os.chdir(values["directory"])
    for name in set(os.environ) - set(values["environment"]) - set(_OWN):
        del os.environ[name]
    os.environ.update({k: v for k, v in values["environment"].items() if k not in _OWN})
    warnings.filters = values["warnings"]
    keras.config.set_floatx(values["floatx"])
    keras.config.set_epsilon(values["epsilon"])
    keras.config.set_image_data_format(values["image_data_format"])
    keras.config.set_dtype_policy(values["dtype_policy"])
    (
        keras.config.enable_flash_attention
        if values["flash_attention"]
        else keras.config.disable_flash_attention
    )()
    (
        keras.config.enable_traceback_filtering
        if values["traceback_filtering"]
        else keras.config.disable_traceback_filtering
    )()
    keras_internals.register_objects(shipping.join(*values["custom_objects"]))
    keras_internals.set_global_seed(values["seed"], rank)
    torch_settings.apply(values["torch"])


def seed_for_workers():
    """A number that follows from torch's random state here, without drawing from it.

    Unseeded Dropout draws from that state: setting it makes the workers' masks
    repeat as the caller's do.
    """
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def seed_everything(seed):
    """Seed a worker's global random states."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# A worker's own share of the machine.
_OWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KERAS_BACKEND", "PYTHONPATH")


def _directory():
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed under the caller's feet
        return None
