"""What the package watches while a model's own `train_step` and the like run."""

import contextlib
import functools
import threading

import keras
from keras.src.backend.common import variables as keras_variables

from parallel_keras.keras_internals.layers import flatten_layers, own_metrics
from parallel_keras.keras_internals.optimizers import inner_optimizers, with_inner_optimizers
from parallel_keras.keras_internals.patching import patch_once
from parallel_keras.keras_internals.training import (
    compile_metrics_of,
    loss_tracker,
    output_loss_metrics,
)
from parallel_keras.logs import leaves_by_path

# ---- optimizers ------------------------------------------------------------------


def optimizers_of(model):
    """All Keras optimizers that a model and its layers hold as attributes.

    The compiled one, those of a model with a step of its own (`self.d_optimizer`), those in
    lists and dicts.

    Args:
        model: A Keras model.

    Returns:
        A list of optimizers, each once, without those that others of them wrap.
    """
    compiled = getattr(model, "optimizer", None)
    found = [] if compiled is None else [compiled]
    for layer in flatten_layers(model):
        for value in vars(layer).values():
            if isinstance(value, keras.optimizers.Optimizer):
                found.append(value)
            elif isinstance(value, (list, tuple, dict)):
                inside = value.values() if isinstance(value, dict) else value
                found += [v for v in inside if isinstance(v, keras.optimizers.Optimizer)]
    wrapped, outer = set(), {id(optimizer): optimizer for optimizer in found}
    remaining = list(outer.values())
    while remaining:
        inner = inner_optimizers(remaining.pop())
        wrapped |= {id(optimizer) for optimizer in inner}
        remaining += inner
    return [optimizer for key, optimizer in outer.items() if key not in wrapped]


def every_optimizer(model):
    """A model's optimizers, and those that they wrap; inner ones first."""
    return with_inner_optimizers(optimizers_of(model))[::-1]


class _Scope(threading.local):
    hook = None
    watch = None


_scope = _Scope()


@contextlib.contextmanager
def synchronizing(hook):
    """Have a function decide what each `optimizer.apply` of this thread does.

    base_optimizer.py, loss_scale_optimizer.py, multi_optimizer.py, 3.15.1. Of optimizers
    inside others the outermost counts. Nothing changes outside of the scope.

    Args:
        hook: Called with `(optimizer, gradients, variables, apply)` instead: a list of
            gradients with `None` among them, a list of variables, and the stock update as
            a function of a list of gradients.
    """
    for cls in _OPTIMIZERS:
        _hook_into(cls)
    before, _scope.hook = _scope.hook, hook
    try:
        yield
    finally:
        _scope.hook = before


_OPTIMIZERS = (
    keras.optimizers.Optimizer,
    keras.optimizers.LossScaleOptimizer,
    keras.optimizers.MultiOptimizer,
)


def _hook_into(cls):
    cls = next(base for base in cls.__mro__ if "apply" in vars(base))

    @patch_once(cls, "apply")
    def _with_hook(stock):
        def apply(self, grads, trainable_variables=None):
            hook = _scope.hook
            if hook is None or len(grads) == 0:
                return stock(self, grads, trainable_variables)
            if trainable_variables is None and not self.built:
                return stock(self, grads)  # an error of Keras's own
            every = self._trainable_variables
            known = every if trainable_variables is None else trainable_variables

            def update(gradients):
                with synchronizing(None):
                    return stock(self, gradients, trainable_variables)

            return hook(self, list(grads), list(known), update)

        return apply


# ---- metrics ---------------------------------------------------------------------


def every_metric(model):
    """The metrics that a step can update, each once.

    Also those that a model's own `metrics` leaves out. trainer.py, layer.py, 3.15.1.
    """
    found = [*model.metrics, loss_tracker(model), compile_metrics_of(model)]
    found += output_loss_metrics(model)
    for layer in flatten_layers(model):
        if layer is model or not isinstance(layer, keras.Model):
            found += own_metrics(layer)
    return list({id(metric): metric for metric in found if metric is not None}.values())


def untrack(metric, value):
    """Have a metric forget what was an attribute of it. metrics/metric.py, 3.15.1."""
    metric._tracker.untrack(value)


@contextlib.contextmanager
def results_of_metrics(model):
    """Tell which values are what a metric's `result()` has returned.

    metrics/metric.py, trainers/compile_utils.py, 3.15.1.

    Args:
        model: A Keras model.

    Yields:
        A `Results`.
    """
    metrics = every_metric(model)
    container = compile_metrics_of(model)
    if container is not None:
        metrics += list(container.metrics)
    results = Results()
    metrics = list({id(metric): metric for metric in metrics}.values())
    for metric in metrics:
        vars(metric)["result"] = results.watched(metric)
        vars(metric)["update_state"] = results.watched_update(metric)
    try:
        yield results
    finally:
        for metric in metrics:
            vars(metric).pop("result", None)
            vars(metric).pop("update_state", None)


class Results:
    """What the metrics of a model have returned in a scope.

    Attributes:
        updated: List of the metrics whose `update_state` was called.
    """

    def __init__(self):
        self._found = {}
        self.updated = []

    def watched_update(self, metric):
        """A metric's `update_state`, which remembers that it was called."""
        stock = metric.update_state

        @functools.wraps(stock)
        def update_state(*args, **kwargs):
            if not any(metric is one for one in self.updated):
                self.updated.append(metric)
            return stock(*args, **kwargs)

        return update_state

    def watched(self, metric):
        """A metric's `result`, which remembers what it returns."""
        stock = metric.result

        @functools.wraps(stock)
        def result():
            value = stock()
            for path, leaf in leaves_by_path(value).items():
                # The leaf is kept, so that its id stays its own. Whole numbers of Python's
                # own are one object wherever they come from.
                if leaf is not None and not isinstance(leaf, int):
                    self._found[id(leaf)] = metric, path, leaf
            return value

        return result

    def metric_of(self, leaf):
        """The metric whose result this very object is, or is part of; else `None`."""
        return self._found.get(id(leaf), (None,))[0]

    def again(self, leaf):
        """The same part of the result of the same metric, from its state as it is now."""
        metric, path, _ = self._found[id(leaf)]
        return leaves_by_path(type(metric).result(metric))[path]


# ---- variables -------------------------------------------------------------------


@contextlib.contextmanager
def noting_new_variables(note, making=contextlib.nullcontext):
    """Have a function see each Keras variable that is made. common/variables.py, 3.15.1.

    Args:
        note: Function of the variable, which has its first value.
        making: Makes a context that surrounds the making.
    """
    cls = keras_variables.Variable
    stock = cls.__init__

    @functools.wraps(stock)
    def __init__(self, *args, **kwargs):
        with making():
            stock(self, *args, **kwargs)
        note(self)

    cls.__init__ = __init__
    try:
        yield
    finally:
        cls.__init__ = stock


@contextlib.contextmanager
def watching_assigns(watch):
    """Have a function see each Keras variable that this thread assigns, before it does.

    backend/torch/core.py, backend/tensorflow/core.py, 3.15.1: all of a variable's assigns go
    through `_direct_assign`. On torch the updates of most optimizers do not, which change
    many tensors at once.

    Args:
        watch: Function of the variable.
    """
    _watch_assigns()
    before, _scope.watch = _scope.watch, watch
    try:
        yield
    finally:
        _scope.watch = before


def _watch_assigns():
    @patch_once(keras.Variable, "_direct_assign")
    def _watched(stock):
        def direct_assign(variable, value):
            if _scope.watch is not None:
                _scope.watch(variable)
            return stock(variable, value)

        return direct_assign
