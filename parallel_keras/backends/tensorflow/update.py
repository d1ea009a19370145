"""The optimizer's update, made once from the gradient of the global batch.

Keras's optimizer runs in a replica and reduces inside; here it runs across the
replicas with gradients that are reduced already, so that clipping, accumulation,
moving averages and the overflow check see what one device would see.
"""

import tensorflow as tf

from parallel_keras import keras_internals


def apply(strategy, optimizer, gradients, variables):
    """Reduce the replicas' gradients and update all copies of the variables.

    Args:
        strategy: A `MirroredStrategy`, in cross-replica context.
        optimizer: A Keras optimizer whose variables live under the strategy.
        gradients: List of per-replica gradients, `None` where there is none.
        variables: List of Keras variables.

    Returns:
        List of the reduced gradients that there are, as values of all replicas.
    """
    present = [(g, v._value) for g, v in zip(gradients, variables, strict=True) if g is not None]
    reduced = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, present)
    waiting = iter(reduced)
    if _computes_with_gradients(optimizer):
        waiting = (strategy.experimental_local_results(g)[0] for g in reduced)
    combined = [None if g is None else next(waiting) for g in gradients]
    keras_internals.apply_across_replicas(optimizer, combined, variables)
    return reduced


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
