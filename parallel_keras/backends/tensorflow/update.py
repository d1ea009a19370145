"""The optimizer's update, made once from the gradient of the global batch.

Keras's optimizer runs in a replica and reduces inside; here it runs across the
replicas with gradients that are reduced already, so that clipping, accumulation,
moving averages and the overflow check see what one device would see.
"""

import tensorflow as tf

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow import entries
from parallel_keras.backends.tensorflow.runtime import mirrored


def apply(strategy, optimizer, gradients, variables):
    """Reduce the replicas' gradients and update all copies of the variables.

    Args:
        strategy: A `MirroredStrategy`, in cross-replica context.
        optimizer: A Keras optimizer whose variables live under the strategy.
        gradients: List of lists of `Entries` with per-replica tensors, one for each use of
            a variable; `None` where there is none.
        variables: List of Keras variables, or of what is in them.

    Returns:
        List of the reduced gradients that there are, as values of all replicas.
    """
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    flat = [(use.values, keras_internals.tf_variable(v)) for uses, v in pairs for use in uses]
    reduced = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, flat)
    waiting = iter(reduced)
    whole = iter([_whole(strategy, uses, waiting, tuple(v.shape)) for uses, v in pairs])
    combined = [None if g is None else next(whole) for g in gradients]
    if _computes_with_gradients(optimizer):
        combined = [
            None if g is None else strategy.experimental_local_results(g)[0] for g in combined
        ]
    keras_internals.apply_across_replicas(optimizer, combined, variables)
    return reduced


def _whole(strategy, uses, reduced, shape):
    """The gradient of the batch, with a copy on each device.

    Args:
        strategy: As in `apply`.
        uses: List of `Entries`, all uses of one variable.
        reduced: Iterator of their reduced values.
        shape: Tuple, the variable's.
    """
    values = [next(reduced) for _ in uses]
    if len(uses) == 1 and uses[0].indices is None:
        return values[0]
    copies = []
    for number, device in enumerate(strategy.extended.worker_devices):

        def local(value, number=number):
            return strategy.experimental_local_results(value)[number]

        with tf.device(device):
            found = [_local(use, value, local) for use, value in zip(uses, values, strict=True)]
            copies.append(entries.as_gradient(found, shape))
    return mirrored(copies)


def _local(use, reduced, local):
    reduced = local(reduced)
    if isinstance(reduced, tf.IndexedSlices):
        return use._replace(values=reduced.values, indices=reduced.indices)
    indices = None if use.indices is None else local(use.indices)
    return use._replace(values=reduced, indices=indices)


def _computes_with_gradients(optimizer):
    """Whether gradients are used for more than the update of their own variable.

    If not, each device is handed its own copy of the gradient.
    """
    return (
        hasattr(optimizer, "inner_optimizer")
        or bool(optimizer.gradient_accumulation_steps)
        or any(
            value is not None
            for value in (
                optimizer.clipnorm,
                optimizer.clipvalue,
                optimizer.global_clipnorm,
                optimizer.loss_scale_factor,
            )
        )
        or any(_computes_with_gradients(one) for one in keras_internals.inner_optimizers(optimizer))
    )
