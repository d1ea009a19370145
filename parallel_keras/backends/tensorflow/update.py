"""The optimizer's update, made once from the gradient of the global batch.

Keras's optimizer runs in a replica and reduces inside; here it runs across the
replicas with gradients that are reduced already, so that clipping, accumulation,
moving averages and the overflow check see what one device would see.
"""

import contextlib

import tensorflow as tf

from parallel_keras import keras_internals


def apply(strategy, optimizer, gradients, variables):
    """Reduce the replicas' gradients and update all copies of the variables.

    Args:
        strategy: A `MirroredStrategy`, in cross-replica context.
        optimizer: A Keras optimizer whose variables live under the strategy.
        gradients: List of per-replica gradients, `None` where there is none.
        variables: List of Keras variables.
    """
    present = [(g, v._value) for g, v in zip(gradients, variables, strict=True) if g is not None]
    reduced = iter(strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, present))
    if _computes_with_gradients(optimizer):
        reduced = (strategy.experimental_local_results(g)[0] for g in reduced)
    combined = [None if g is None else next(reduced) for g in gradients]
    with _across_replicas(strategy, optimizer):
        optimizer.apply(combined, variables)


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
    )


@contextlib.contextmanager
def _across_replicas(strategy, optimizer):
    """Let an optimizer's updates run in cross-replica context, while a step is traced."""
    wrapped = []
    for one in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if one is not None:
            members = vars(one)
            methods = _methods(strategy, one)
            members.update(methods)
            wrapped.append((members, methods))
    try:
        yield
    finally:
        for members, methods in wrapped:
            for name in methods:
                members.pop(name, None)


def _methods(strategy, optimizer):
    """What Keras does inside `merge_call` (backend/tensorflow/optimizer.py, 3.15.1)."""

    def update_step(gradients, variables, learning_rate):
        variables = [keras_internals.tf_variable(v) for v in variables]
        optimizer._distributed_tf_update_step(
            strategy, zip(gradients, variables, strict=True), learning_rate
        )

    def apply_weight_decay(variables):
        if optimizer.weight_decay is None:
            return

        def decay(variable):
            if optimizer._use_weight_decay(variable):
                rate = tf.cast(optimizer.learning_rate, variable.dtype)
                variable.assign_sub(variable * tf.cast(optimizer.weight_decay, rate.dtype) * rate)

        for variable in variables:
            strategy.extended.update(keras_internals.tf_variable(variable), decay, group=False)

    def increment_accumulators(gradients, accumulators):
        for gradient, accumulator in zip(gradients, accumulators, strict=True):
            strategy.extended.update(
                accumulator._value,
                lambda held, new: held.assign_add(new),
                args=(gradient,),
                group=False,
            )

    methods = {
        "_backend_update_step": update_step,
        "_apply_weight_decay": apply_weight_decay,
        "_backend_increment_gradient_accumulators": increment_accumulators,
    }
    if hasattr(optimizer, "inner_optimizer"):
        methods["_tf_apply"] = optimizer._common_apply
    return methods
