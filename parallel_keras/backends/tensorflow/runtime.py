"""What lives as long as the process: the strategies of tf.distribute."""

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, values

from parallel_keras import devices as device_names, keras_internals
from parallel_keras.backends.tensorflow.devices import tf_device

_strategies: dict = {}


def prepare():
    """Called when the package is imported."""


def shutdown():
    """Nothing to end: the replicas live in this process."""


def mirrored_strategy(devices):
    """The one `MirroredStrategy` over these devices."""
    if devices not in _strategies:
        if all(device_names.kind_of(name) == "gpu" for name in devices):
            reduction = tf.distribute.NcclAllReduce()
        else:
            # The default is a collective, of which one process can have one.
            reduction = tf.distribute.ReductionToOneDevice()
        strategy = tf.distribute.MirroredStrategy(
            [tf_device(name) for name in devices], cross_device_ops=reduction
        )
        _strategies[devices] = strategy
        keras_internals.leave_losses_unscaled(_is_ours)
        keras_internals.let_optimizers_update_across_replicas()
        keras_internals.let_distributed_variables_be_numbers()
    return _strategies[devices]


def mirrored(copies):
    """Equal values on the devices of a strategy, as one. distribute_utils.py, TensorFlow 2.21."""
    return distribute_utils.regroup(tuple(copies), wrap_class=values.Mirrored)


def per_replica(values):
    """Nests of values, one for each replica, as one nest. distribute_utils.py, TensorFlow 2.21."""
    return distribute_utils.regroup(tuple(values))


def _is_ours(strategy):
    return any(strategy is ours for ours in _strategies.values())
