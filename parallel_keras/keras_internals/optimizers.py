"""What an optimizer keeps, and for which variable."""

import contextlib
import inspect

import keras


def raw_iterations(optimizer):
    """The count of calls of `apply`, whatever accumulates. base_optimizer.py, 3.15.1."""
    return optimizer._iterations.value


def accumulated_gradients(optimizer):
    """The variables of gradient accumulation, `None` among them. base_optimizer.py, 3.15.1."""
    return list(getattr(optimizer, "_accumulated_gradients", ()))


def optimizer_index(optimizer, variable):
    """The place of a trainable variable in an optimizer's slots. base_optimizer.py, 3.15.1."""
    return optimizer._get_variable_index(variable)


def optimizer_variables(optimizer):
    """All variables of an optimizer and of the one that it wraps. base_optimizer.py, 3.15.1."""
    return list(optimizer.variables)


def optimizer_trainables(optimizer):
    """The variables that an optimizer was built for. base_optimizer.py, 3.15.1."""
    return list(optimizer._trainable_variables)


def check_variables_are_known(optimizer, variables):
    """Raise where an optimizer was not built for some variables, as its `apply` does.

    base_optimizer.py, loss_scale_optimizer.py, multi_optimizer.py, 3.15.1.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        check_variables_are_known(optimizer.inner_optimizer, variables)
        return
    optimizer._check_variables_are_known(variables)
    known = optimizer._trainable_variables_indices
    if inner_optimizers(optimizer) and len(variables) != len(known):
        raise ValueError(
            "Gradients must match trainable variables one-to-one. "
            f"Received {len(variables)} gradients and {len(known)} variables."
        )


def optimizer_key(optimizer, variable):
    """What an optimizer keys a variable by. base_optimizer.py, 3.15.1."""
    return optimizer._var_key(variable)


def index_trainables(optimizer):
    """Make an optimizer's index of its variables anew: it is keyed by id.

    base_optimizer.py and, for one optimizer for each variable, multi_optimizer.py, 3.15.1.
    """
    optimizer._trainable_variables_indices = {
        optimizer._var_key(v): number for number, v in enumerate(optimizer._trainable_variables)
    }
    if hasattr(optimizer, "_var_to_optimizer_idx"):
        optimizer._var_to_optimizer_idx = {
            optimizer._var_key(v): number
            for number, inner in enumerate(optimizer._inner_optimizers)
            for v in inner._trainable_variables
        }


def inner_optimizers(optimizer):
    """The optimizers that one wraps. loss_scale_optimizer.py and multi_optimizer.py, 3.15.1."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [inner] if inner is not None else list(getattr(optimizer, "_inner_optimizers", ()))


def learning_rate_variable(optimizer):
    """That of a learning rate without a schedule, or None. base_optimizer.py, 3.15.1."""
    rate = vars(optimizer).get("_learning_rate")
    return rate if isinstance(rate, keras.Variable) else None


def schedule_of(optimizer):
    """The schedule of an optimizer's learning rate, or None. base_optimizer.py, 3.15.1."""
    rate = vars(optimizer).get("_learning_rate")
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def compiled_optimizer(model):
    """The optimizer that `compile` was given, or None. trainer.py, 3.15.1.

    On torch, a model that was not compiled has no attribute of the name.
    """
    return model.optimizer if model.compiled else None


def with_inner_optimizers(optimizers):
    """Optimizers, then the ones that they wrap."""
    found = list(optimizers)
    for optimizer in found:  # grows while it is read
        found += inner_optimizers(optimizer)
    return found


_TRAINABLES = "_trainable_variables"


def hold_keras_variables(optimizer, by_value):
    """Have an optimizer that was built for what is in Keras variables hold these themselves.

    base_optimizer.py, 3.15.1.

    Args:
        optimizer: A Keras optimizer.
        by_value: Dict from the id of what is in a Keras variable to the variable.
    """
    held = list(getattr(optimizer, _TRAINABLES, []))
    if any(id(variable) in by_value for variable in held):
        # Past what tracks attributes.
        vars(optimizer)[_TRAINABLES] = [by_value.get(id(v), v) for v in held]


def slots(optimizer):
    """Pairs of an optimizer's per-variable state and the variable it belongs to.

    base_optimizer.py, 3.15.1: such state is in lists as long as that of the
    variables, or is named after the variable's path.
    """
    trainables = list(getattr(optimizer, _TRAINABLES, ()))
    found = {}
    for name, value in vars(optimizer).items():
        # Of `_variables`, the list of all of them, the length says nothing.
        is_by_variable = isinstance(value, list) and name not in ("_variables", _TRAINABLES)
        if is_by_variable and len(value) == len(trainables):
            for slot, reference in zip(value, trainables, strict=True):
                if isinstance(slot, keras.Variable) and slot is not reference:
                    found[id(slot)] = slot, reference
    by_path = sorted(trainables, key=lambda v: -len(v.path))
    for slot in optimizer.variables:
        if id(slot) not in found:
            owner = next(
                (v for v in by_path if slot.name.startswith(v.path.replace("/", "_"))), None
            )
            if owner is not None:
                found[id(slot)] = slot, owner
    return list(found.values())


# What an optimizer's methods are called that are given the gradients, or the variables, of
# all. base_optimizer.py, loss_scale_optimizer.py, 3.15.1.
METHODS_OF_ALL_GRADIENTS = (
    "apply",
    "apply_gradients",
    "_apply_weight_decay",
    "_backend_apply_gradients",
    "_backend_increment_gradient_accumulators",
    "_backend_reset_gradient_accumulators",
    "_backend_update_step",
    "_clip_gradients",
    "_filter_empty_gradients",
    "_overwrite_model_variables_with_average_value",
    "_overwrite_variables_directly_with_gradients",
    "_update_model_variables_moving_average",
    "check_finite",
)

# Numbers of Keras's own that one update of any variables moves alike: base_optimizer.py,
# nadam.py, 3.15.1.
_NUMBERS = ("_iterations", "_learning_rate", "_u_product")


def numbers_of_no_variable(optimizer):
    """The state of an optimizer that belongs to none of its variables, Keras's own aside.

    None before it is built.
    """
    if not optimizer.built:
        return []
    known = {id(slot) for slot, _ in slots(optimizer)}
    known |= {id(vars(optimizer).get(name)) for name in _NUMBERS}
    found = [*optimizer.variables, *untracked_variables(optimizer)]
    return [v for v in {id(v): v for v in found}.values() if id(v) not in known]


def moving_averages(optimizer):
    """An optimizer's averages of its variables. base_optimizer.py, 3.15.1."""
    return optimizer._model_variables_moving_average


@contextlib.contextmanager
def with_moving_averages(optimizer, averages):
    """An optimizer that knows these averages only."""
    members, name = vars(optimizer), "_model_variables_moving_average"
    before = members[name]
    members[name] = averages
    try:
        yield
    finally:
        members[name] = before


@contextlib.contextmanager
def overridden(optimizer, methods):
    """An optimizer with other methods, for as long as the scope is open."""
    members = vars(optimizer)
    before = {name: members[name] for name in methods if name in members}
    members.update(methods)
    try:
        yield
    finally:
        for name in methods:
            members.pop(name, None)
        members.update(before)


def own_scalars(optimizer):
    """The numbers of an optimizer itself: those of no variable and of no inner optimizer.

    base_optimizer.py, 3.15.1.
    """
    slot_ids = {id(slot) for slot, _ in slots(optimizer)}
    found = [*optimizer._variables, *untracked_variables(optimizer)]
    unique = {id(v): v for v in found}.values()
    return [v for v in unique if not tuple(v.shape) and id(v) not in slot_ids]


def untracked_variables(optimizer):
    """Variables that an optimizer holds and does not list, as Nadam does. nadam.py, 3.15.1."""
    return [v for v in vars(optimizer).values() if isinstance(v, keras.Variable)]


def accumulators(optimizer):
    """The variables of gradient accumulation, without the gaps."""
    return [v for v in accumulated_gradients(optimizer) if v is not None]


def optimizer_of_variable(optimizer, variable):
    """The optimizer inside wrappers that updates a variable.

    loss_scale_optimizer.py, multi_optimizer.py, 3.15.1.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer_of_variable(optimizer.inner_optimizer, variable)
    choose = getattr(optimizer, "_optimizer_map", None)
    return choose(variable) if callable(choose) else optimizer


def optimizers_by_name():
    """Keras's optimizers, for files that name the class of a backend.

    On torch Keras writes `keras.src.backend.torch.optimizers.torch_adam` into its files, which
    trains on torch only. optimizers/base_optimizer.py, 3.15.1.
    """
    found = vars(keras.optimizers).values()
    return {
        one.__name__: one
        for one in found
        if inspect.isclass(one) and issubclass(one, keras.optimizers.Optimizer)
    }
