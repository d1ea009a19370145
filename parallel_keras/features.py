"""Which features of the capability table a model asks for.

Reads the model; decides nothing. Each function yields pairs of a feature's name
and what exactly was met.
"""

import inspect

import keras
from keras import tree

from parallel_keras import keras_internals, loss_state, raw_variables

_MAKERS = ("make_train_function", "make_test_function", "make_predict_function")
# Keras's two names for the mean over the rows.
_MEANS = ("sum_over_batch_size", "mean")


def is_keras(thing):
    """Whether a class, a function or an object comes from Keras itself."""
    if inspect.isfunction(thing) or inspect.isclass(thing) or inspect.isbuiltin(thing):
        module = getattr(thing, "__module__", None) or ""
    else:
        module = type(thing).__module__ or ""
    return module == "keras" or module.startswith(("keras.", "parallel_keras."))


def of_model(model):
    """Features of the model's class, layers and variables."""
    for name in _own_step_names(model):
        yield name, f"{type(model).__name__}.{name}"
    for name in _MAKERS:
        if not is_keras(_owner(type(model), name)):
            yield "own_train_function", f"{type(model).__name__}.{name}"
    trains_itself = "train" in own_steps(model)
    for layer in keras_internals.flatten_layers(model):
        yield from _of_layer(layer)
        if trains_itself and getattr(layer, "synchronized", False) is True:
            yield "step_synchronized", f"layer {layer.name} ({type(layer).__name__})"
    for variable in model.variables:
        if getattr(variable, "overwrite_with_gradient", False):
            yield "overwrite_with_gradient", f"variable {variable.path}"
    own = (v.regularizer for v in model.variables)
    penalized = [v for v, r in zip(model.variables, own, strict=True) if r and not is_keras(r)]
    for received in loss_state.of_penalties(penalized):
        yield "penalty_state", received


def own_steps(model):
    """The kinds of step that are the model's own, not Keras's.

    Returns:
        A set of `"train"`, `"test"` and `"predict"`. A `compute_loss` or a `compute_metrics`
        of the model's own is called by Keras's steps to train and to test.
    """
    return {kind for name in _own_step_names(model) for kind in _KINDS[name]}


def _own_step_names(model):
    return [
        name for name in _KINDS if name in vars(model) or not is_keras(_owner(type(model), name))
    ]


_KINDS = {
    "train_step": ("train",),
    "test_step": ("test",),
    "predict_step": ("predict",),
    "compute_loss": ("train", "test"),
    "compute_metrics": ("train", "test"),
}


def of_compile(model):
    """Features of what `compile` was given, or was set without it."""
    if model.jit_compile:
        yield "jit_compile", f"jit_compile={model.jit_compile}"
    if not model.compiled:
        return
    for loss in user_losses(model):
        if _reduction(loss) in ("none", None):
            yield "loss_none", f"loss={loss!r} with reduction={loss.reduction!r}"
    for received in own_updates(model.optimizer):
        yield "own_update", received
    if model.steps_per_execution > 1:
        yield "steps_per_execution", f"steps_per_execution={model.steps_per_execution}"
    if model.run_eagerly:
        yield "run_eagerly", f"run_eagerly={model.run_eagerly}"


def own_updates(optimizer):
    """What in an optimizer may look at all variables together, as far as it is not Keras's own.

    Yields:
        Strings: methods that are given all gradients, and, once it is built, numbers that
        belong to no variable.
    """
    if optimizer is None:
        return
    for one in keras_internals.with_inner_optimizers([optimizer]):
        kind = type(one).__name__
        yield from (f"{kind}.{name}" for name in sorted(own_methods(one)))
        yield from (f"{kind}, variable {variable.path}" for variable in own_numbers(one))


def own_methods(optimizer):
    """The methods of an optimizer that are given all gradients and are not Keras's.

    Returns:
        A set of names. Those of the optimizers that it wraps do not count.
    """
    own = [
        vars(base) for base in type(optimizer).__mro__ if base is not object and not is_keras(base)
    ]
    own.append(vars(optimizer))
    return {
        name
        for name in keras_internals.METHODS_OF_ALL_GRADIENTS
        if any(name in members for members in own)
    }


def own_numbers(optimizer):
    """The state of an optimizer of the user's own that belongs to no variable."""
    return [] if is_keras(type(optimizer)) else keras_internals.numbers_of_no_variable(optimizer)


def user_losses(model):
    """The losses that `compile` was given, flat, as they were given."""
    if model.loss is None:
        return []
    return [loss for loss in tree.flatten(model.loss) if loss is not None]


def adds_up_by_rows(model):
    """Whether the compiled loss of a batch is known to be the mean of its rows' losses."""
    return not loss_of_the_batch(model)


def loss_of_the_batch(model):
    """Which of the compiled losses is no mean over the rows, as far as its arguments tell.

    Returns:
        A string with the loss and the argument, empty where there is none.
    """
    for loss in user_losses(model):
        if _reduction(loss) not in _MEANS:
            return f"loss={_name(loss)} with reduction={loss.reduction!r}"
        if getattr(loss, "ignore_class", None) is not None:
            return f"loss={_name(loss)} with ignore_class={loss.ignore_class}"
    return ""


def _reduction(loss):
    return getattr(loss, "reduction", _MEANS[0])


def _name(loss):
    return getattr(loss, "name", None) or type(loss).__name__


def _of_layer(layer):
    if is_torch_module(layer):
        for name, module in layer.module.named_modules():
            yield from _of_torch_module(module, f"{name or 'the module'} of layer {layer.name}")
    for name in _untracked_modules(layer):
        yield "torch_untracked_module", f"layer {layer.name}, attribute {name}"
    if isinstance(layer, keras.layers.RNN) and layer.stateful:
        yield "stateful_rnn", f"layer {layer.name}"
    if isinstance(layer, keras.layers.BatchNormalization) and layer.renorm:
        yield "batch_renorm", f"layer {layer.name}"
    if not isinstance(layer, keras.Model) and keras_internals.own_metrics(layer):
        yield "layer_metric", f"layer {layer.name} ({type(layer).__name__})"
    is_of_keras = is_keras(type(layer)) and not isinstance(layer, keras.layers.Lambda)
    for attribute in raw_variables.of_layer(layer, is_of_keras):
        yield "raw_variable", f"layer {layer.name}, attribute {attribute}"


def _untracked_modules(layer):
    """The names under which a layer holds modules of torch that Keras does not see."""
    if keras.backend.backend() != "torch":
        return
    for name, value in vars(layer).items():
        if isinstance(value, (list, tuple, dict)) and name != "_modules":
            inside = value.values() if isinstance(value, dict) else value
            if any(_is_bare_torch_module(one) for one in inside):
                yield name
    if not is_torch_module(layer):
        for name, module in layer._modules.items():  # as `add_module` puts them there
            if name != "_torch_params" and _is_bare_torch_module(module):
                yield name


def _is_bare_torch_module(value):
    return not isinstance(value, keras_internals.KerasSaveable) and any(
        base.__module__ == "torch.nn.modules.module" for base in type(value).__mro__
    )


def _of_torch_module(module, where):
    kinds = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.")}
    if "SyncBatchNorm" in kinds:
        yield "torch_sync_batch_norm", f"{where} ({type(module).__name__})"
    for hook in module._forward_pre_hooks.values():
        if type(hook).__name__ in ("SpectralNorm", "WeightNorm") and not is_keras(hook):
            yield "torch_weight_hook", f"{type(hook).__name__} on {where}"


def _owner(cls, name):
    """The class that defines a method."""
    for base in cls.__mro__:
        if name in vars(base):
            return base
    return cls


def keeps_rows_apart(layer):
    """Whether a layer is known to compute each row's output, and loss, from that row alone."""
    if isinstance(layer, keras.layers.Lambda) or is_torch_module(layer):
        return False
    if not is_keras(type(layer)) or not is_keras(type(layer).call):
        return False
    if getattr(layer, "activity_regularizer", None) is not None and not isinstance(
        layer.activity_regularizer, _BY_ROWS
    ):
        return False
    functions = (f for name, f in vars(layer).items() if name.endswith("activation"))
    of_keras = all(is_keras(f) for f in functions if f is not None)
    return of_keras and not may_be_over_rows(getattr(layer, "axis", None))


_BY_ROWS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def may_be_over_rows(axes):
    """Whether an axis, or one of some, may be that of the rows."""
    axes = axes if isinstance(axes, (list, tuple)) else [axes]
    return any(isinstance(axis, int) and (axis == 0 or axis < -1) for axis in axes)


def has_user_layers(model):
    """Whether some layer's `call` is not Keras's own, or calls a module that is not."""
    return any(
        not is_keras(type(layer).call) or is_torch_module(layer)
        for layer in keras_internals.flatten_layers(model)
    )


def assigns_weights(model):
    """Whether a layer of Keras's own assigns weights that train in its `call`."""
    return any(
        isinstance(layer, keras.layers.SpectralNormalization)
        for layer in keras_internals.flatten_layers(model)
    )


def is_torch_module(layer):
    """Whether a layer wraps a `torch.nn.Module`."""
    return isinstance(layer, keras.layers.TorchModuleWrapper)


def has_user_code(model):
    """Whether a model runs functions that are not Keras's own."""
    layers = keras_internals.flatten_layers(model)
    if (
        has_user_layers(model)
        or own_steps(model)
        or any("Lambda" in type(layer).__name__ for layer in layers)
    ):
        return True
    return any(not (isinstance(loss, str) or is_keras(loss)) for loss in user_losses(model))
