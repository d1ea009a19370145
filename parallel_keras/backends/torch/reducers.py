"""How Keras's own objects are taken apart and put together again.

An object is made without its `__init__` and given its `__dict__`. What Keras keys
by `id()` is made anew when everything is there: the order of loading follows the
references, which run in circles.
"""

import contextlib
import threading
from collections import OrderedDict

import keras
import torch
from torch.nn.utils import parametrize

from parallel_keras import keras_internals

_loading = threading.local()

# Left behind, and not watched for changes: made by Keras for one process or one
# call of fit, or by us for the caller's instance.
BOOKKEEPING = frozenset(
    {
        *keras_internals.INSTANCE_OVERRIDES,
        "train_function",
        "test_function",
        "predict_function",
        "build",  # wraps that Layer.__new__ puts on each instance
        "quantize",
        "history",
        "save_own_variables",
        "stop_training",
        "stop_evaluating",
        "stop_predicting",
        "training",  # torch's flag, which each step's kind implies
        "_eval_epoch_iterator",
        "_initial_epoch",
        "_trainable_variables_indices",
        "_exclude_from_weight_decay_cache",
        "_loss_ids",
        "_losses",
    }
)


def reduce_keras(obj):
    """What pickle needs of a Keras object, or `NotImplemented` for any other."""
    if isinstance(obj, keras_internals.Tracker):
        state = {k: v for k, v in vars(obj).items() if k != "stored_ids"}
        return _new_plain, (type(obj),), state, None, None, _set_tracker
    if isinstance(obj, keras_internals.TRACKED_CONTAINERS):
        content = list(obj.items()) if isinstance(obj, dict) else list(obj)
        return _new_container, (type(obj),), (obj.tracker, content), None, None, _set_container
    if isinstance(obj, keras_internals.DynamicBackend):
        return type(obj), (obj._backend,)
    if isinstance(obj, keras_internals.KerasSaveable):
        state = {key: value for key, value in vars(obj).items() if key not in BOOKKEEPING}
        if isinstance(obj, keras.optimizers.Optimizer):
            _name_excluded_variables(obj, state)
        arguments = (type(obj), isinstance(obj, keras_internals.Functional))
        return _new_saveable, arguments, state, None, None, _set_saveable
    if type(obj) is torch.nn.ParameterDict:
        # Where a layer keeps its weights. torch's flag would differ after each
        # evaluate, and nothing here reads it.
        maker, arguments, state = obj.__reduce_ex__(4)[:3]
        return maker, arguments, {**state, "training": True}
    if isinstance(obj, torch.nn.Module) and parametrize.is_parametrized(obj):
        plain = type(obj).__bases__[0]
        return _new_plain, (plain,), dict(vars(obj)), None, None, _set_parametrized
    return NotImplemented


@contextlib.contextmanager
def finish_loading():
    """Surrounds an unpickling; makes what is keyed by id afterwards."""
    _loading.finish = []
    try:
        yield
        for function, obj in _loading.finish:
            function(obj)
    finally:
        del _loading.finish


def _later(function, obj):
    _loading.finish.append((function, obj))


# ---- trackers ----


def _new_plain(cls):
    return object.__new__(cls)


def _set_tracker(tracker, state):
    vars(tracker).update(state)
    tracker.stored_ids = {}
    _later(_store_ids, tracker)


def _store_ids(tracker):
    tracker.stored_ids = {
        name: {id(value) for value in store} for name, (_, store) in tracker.config.items()
    }


# ---- torch modules whose weights are computed from others (spectral norm) ----


def _set_parametrized(module, state):
    vars(module).update(state)
    _later(_parametrize, module)


def _parametrize(module):
    # nn/utils/parametrize.py of torch 2.13: a class for this one module, with a property
    # for each such weight. torch itself pickles no instance of it.
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


# ---- tracked lists, dicts and sets ----


def _new_container(cls):
    return cls()  # without a tracker: what is filled in has been tracked before


def _set_container(container, state):
    tracker, content = state
    # Past the container's own methods, which track what comes in.
    if isinstance(container, OrderedDict):
        for key, value in content:
            OrderedDict.__setitem__(container, key, value)
    elif isinstance(container, dict):
        dict.update(container, content)
    elif isinstance(container, list):
        list.extend(container, content)
    else:
        set.update(container, content)
    container.tracker = tracker


# ---- layers, models, metrics, losses, optimizers ----


def _new_saveable(cls, functional):
    if functional and not issubclass(cls, keras_internals.Functional):
        # Imported anew here, so without the base that Keras gave it when it
        # was called as `Cls(inputs, outputs)`.
        keras_internals.inject_functional(cls)
    if issubclass(cls, keras.layers.Layer):
        # Puts the wraps of `build` and `quantize` on the instance; passes by a
        # `__new__` of the user's own.
        return keras.layers.Layer.__new__(cls)
    return object.__new__(cls)


def _set_saveable(obj, state):
    excluded = state.pop(_EXCLUDED, None)
    vars(obj).update(state)
    if isinstance(obj, keras.layers.Layer):
        vars(obj).update(_losses=[], _loss_ids=set(), training=True)
    if isinstance(obj, keras.Model):
        vars(obj).update(stop_training=False, _initial_epoch=None)
        for kind in ("train", "test", "predict"):
            vars(obj)[f"{kind}_function"] = None
    if isinstance(obj, keras.optimizers.Optimizer):
        if excluded is not None:
            vars(obj)["_exclude_from_weight_decay"] = excluded
            _later(_exclude_variables, obj)
        _later(keras_internals.index_trainables, obj)


_EXCLUDED = "excluded variables"


def _name_excluded_variables(optimizer, state):
    """Send the variables that weight decay leaves out, instead of their ids."""
    excluded = state.pop("_exclude_from_weight_decay", None)
    if excluded is not None:
        known = keras_internals.optimizer_trainables(optimizer)
        keys = {keras_internals.optimizer_key(optimizer, v): v for v in known}
        state[_EXCLUDED] = [keys[key] for key in excluded if key in keys]


def _exclude_variables(optimizer):
    variables = optimizer._exclude_from_weight_decay
    optimizer._exclude_from_weight_decay = {
        keras_internals.optimizer_key(optimizer, v) for v in variables
    }
