"""What `rates` measures, as TensorFlow computes it: in graphs."""

import contextlib

import tensorflow as tf

from parallel_keras import devices as device_names


@contextlib.contextmanager
def computing(devices):
    """Compute as one of these devices does; gives how many do at full speed together."""
    # Logical CPU devices share the threads of the process, of which each takes all.
    yield 1 if device_names.is_simulated(devices) else None


def compiled(function):
    """A function without arguments, as the backend runs it."""
    return tf.function(function, jit_compile=False)


def with_backward(function, weights):
    """A function and its gradients with respect to weights."""

    def run():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function())
        gradients = tape.gradient(loss, [weight._value for weight in weights])
        with tf.control_dependencies(gradients):
            return tf.identity(gradients[0])

    return run


def wait(tensor):
    """Until a tensor has been computed."""
    tensor[..., :1].numpy()
