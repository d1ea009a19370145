"""The steps of torch's own optimizers, which a `train_step` may call."""

import contextlib

from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallel_keras import capabilities
from parallel_keras.strategies import DataParallel


@contextlib.contextmanager
def synchronizing(hook):
    """Have a function see the gradients of each `torch.optim` step before it is taken.

    torch's hook is one for the whole process: it is there while the scope is open.

    Args:
        hook: Called with `(optimizer, gradients, parameters, apply)`. The step is taken
            afterwards, with the gradients that `apply` was called with.
    """

    def before_step(optimizer, args, kwargs):
        closures = [value for value in (*args[1:], *kwargs.values()) if value is not None]
        if closures:
            capabilities.check(
                "step_closure", DataParallel(), "torch", f"{type(optimizer).__name__}.step(closure)"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def apply(gradients):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()

        hook(optimizer, [p.grad for p in parameters], parameters, apply)

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()
