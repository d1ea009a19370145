"""Models: their classes, their containers, who knows their variables."""

import gc

import keras
from keras.src.models import model as keras_model
from keras.src.models.functional import Functional
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedOrderedDict, TrackedSet

from parallel_keras.keras_internals.optimizers import optimizer_variables, untracked_variables
from parallel_keras.keras_internals.own_steps import every_metric, every_optimizer

# utils/tracking.py, 3.15.1: what an attribute that is a container becomes.
TRACKED_CONTAINERS = (TrackedDict, TrackedList, TrackedOrderedDict, TrackedSet)

# What of a variable decides how it is trained: its penalty is added to the loss, its
# constraint is kept after each update. backend/common/variables.py, 3.15.1.
RULES = ("_regularizer", "_constraint")

# Under this name a model's `__dict__` holds what the package knows of it.
STATE = "_parallel_keras"

# Read from Keras 3.15.1: the makers that fit, evaluate and predict call on the
# instance, and what else `state.py` puts into the instance's __dict__. None of
# these may travel to a worker or into a file.
INSTANCE_OVERRIDES = (
    STATE,
    "strategy",
    "set_strategy",
    "compile",
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "_resolve_auto_jit_compile",
    "_setattr_hook",
    "_symbolic_build",
    "_maybe_symbolic_build",
    "reset_metrics",
    "save",
    "summary",
    "plan",
    "timeline",
)


def is_functional_call(args, kwargs):
    """Whether Model(...) was called as `Model(inputs, outputs)`. models/model.py, 3.15.1."""
    return keras_model.functional_init_arguments(args, kwargs)


def inject_functional_into(cls, stop, twin):
    """Give a Model subclass that was called as `Cls(inputs, outputs)` a functional base.

    What `inject_functional_model_class` of models/model.py (3.15.1) does, but a
    base `stop` is replaced by `twin` instead of being changed itself: Keras's own
    function would change `stop` for every other class of the process.
    """
    if cls is stop:
        return twin
    if cls is keras.Model:
        return Functional
    if cls is object:
        return object
    if not issubclass(cls, keras.Model) or issubclass(cls, Functional):
        return cls
    cls.__bases__ = tuple(inject_functional_into(base, stop, twin) for base in cls.__bases__)
    # As in Keras: triggers any class swapping of __new__ for the changed class.
    cls.__new__(cls)
    return cls


def tf_distribute_strategy(model):
    """The tf.distribute strategy that a model was made under, or None. trainer.py, 3.15.1."""
    return getattr(model, "_distribute_strategy", None)


def inject_functional(cls):
    """Give an imported class the functional base again. models/model.py, 3.15.1."""
    from parallel_keras import model

    if issubclass(cls, model.ParallelModel):
        inject_functional_into(cls, model.ParallelModel, model._FunctionalParallelModel)
    else:
        keras_model.inject_functional_model_class(cls)


def every_variable(model):
    """All variables of a model, its metrics and its optimizers that are made, each once."""
    found = [*model.variables, *(v for metric in every_metric(model) for v in metric.variables)]
    for optimizer in every_optimizer(model):
        found += [*optimizer_variables(optimizer), *untracked_variables(optimizer)]
    return list({id(v): v for v in found if v._value is not None}.values())


def users_of(variables):
    """All models and all optimizers of the process that know one of some variables.

    Found by the garbage collector: a plain model can share a layer with one of ours.

    Args:
        variables: List of Keras variables.

    Returns:
        A pair of lists, of models and of optimizers.
    """
    ids = {id(v) for v in variables}
    # By their types: asking some objects for their class has effects.
    everything = gc.get_objects()
    users = (keras.Model, keras.optimizers.Optimizer)
    types = {t for t in set(map(type, everything)) if issubclass(t, users)}
    found = [o for o in everything if type(o) in types]
    models = [o for o in found if isinstance(o, keras.Model)]
    optimizers = [o for o in found if isinstance(o, keras.optimizers.Optimizer)]
    return (
        [m for m in models if _is_made(m) and any(id(v) in ids for v in every_variable(m))],
        [
            o
            for o in optimizers
            if any(id(v) in ids for v in getattr(o, "_trainable_variables", ()))
        ],
    )


def _is_made(model):
    """Whether a model's `__init__` has run. layer.py, 3.15.1."""
    return "_tracker" in vars(model) and hasattr(model, "train_function")
