"""What another launcher or strategy has set up already, and we refuse."""

import os

import keras

from parallel_keras import keras_internals
from parallel_keras.errors import UnsupportedError


def refuse(model, strategy):
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
