"""Every private Keras name that the package touches, in one place.

Each one carries the Keras version that it was read from. When Keras moves, this
is the file to look at.
"""

import contextlib
import functools
import gc
import random
import weakref

import keras
import numpy as np
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state, masking
from keras.src.losses import loss as loss_module
from keras.src.models import model as keras_model
from keras.src.models.functional import Functional
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator
from keras.src.saving import object_registration
from keras.src.saving.keras_saveable import KerasSaveable as KerasSaveable
from keras.src.utils.backend_utils import DynamicBackend as DynamicBackend
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedOrderedDict, TrackedSet
from keras.src.utils.tracking import Tracker as Tracker

# utils/tracking.py, 3.15.1: what an attribute that is a container becomes.
TRACKED_CONTAINERS = (TrackedDict, TrackedList, TrackedOrderedDict, TrackedSet)

# Read from Keras 3.15.1: the makers that fit, evaluate and predict call on the
# instance, and what else `model.py` puts into the instance's __dict__. None of
# these may travel to a worker or into a file.
INSTANCE_OVERRIDES = (
    "_parallel_keras",
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
    "_symbolic_build",
    "_maybe_symbolic_build",
    "reset_metrics",
    "save",
    "summary",
    "plan",
)


def flatten_layers(model, include_self=True):
    """A model and all its layers, nested ones too. Layer._flatten_layers, 3.15.1."""
    return list(model._flatten_layers(include_self=include_self, recursive=True))


def direct_layers(layer):
    """The layers inside one, one level deep, in the order of their making. layer.py, 3.15.1."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def nodes_in_order(model):
    """The nodes of a functional model in the order in which they run. function.py, 3.15.1."""
    depths = sorted(model._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in model._nodes_by_depth[depth] if node.operation]


def watch_operations(made, called):
    """Have functions called with each operation that is made, or called in a graph.

    ops/operation.py and layers/layer.py, 3.15.1: `__new__` makes every layer and
    every operation, `symbolic_call` records it in a graph. Nothing changes before
    this is called.
    """
    cls = keras.Operation
    if hasattr(cls, "_parallel_keras_watched"):
        return
    cls._parallel_keras_watched = True
    new = cls.__new__

    @functools.wraps(new)
    def watched_new(cls, *args, **kwargs):
        instance = new(cls, *args, **kwargs)
        made(instance)
        return instance

    def watched(symbolic_call):
        @functools.wraps(symbolic_call)
        def call(self, *args, **kwargs):
            called(self)
            return symbolic_call(self, *args, **kwargs)

        return call

    cls.__new__ = staticmethod(watched_new)
    for owner in (cls, keras.Layer):
        if "symbolic_call" in vars(owner):
            owner.symbolic_call = watched(vars(owner)["symbolic_call"])


def is_raw_tf_variable(value):
    """Whether a value is a `tf.Variable` and no `keras.Variable`, without loading TensorFlow."""
    if not hasattr(value, "assign") or isinstance(value, keras.Variable):
        return False
    return any(
        base.__module__.startswith("tensorflow.")
        and base.__name__ in ("Variable", "BaseResourceVariable")
        for base in type(value).__mro__
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


def has_bare_operations(model):
    """Whether a functional model holds operations (`a + b`) that are no layers. function.py."""
    return any(
        not isinstance(operation, keras.Layer)
        for part in flatten_layers(model)
        if isinstance(part, Functional)
        for operation in part._operations
    )


def flat_losses(compile_loss):
    """The built losses as (path, loss, weight, name). compile_utils.py, 3.15.1."""
    return list(compile_loss._flat_losses or [])


def compile_metrics_of(model):
    """The container of the metrics that `compile` was given, or None. trainer.py, 3.15.1."""
    return model._compile_metrics


def compile_loss_of(model):
    """The container of the losses that `compile` was given, or None. trainer.py, 3.15.1."""
    return model._compile_loss


def set_keras_mask(tensor, mask):
    """Give a tensor a mask. backend/common/masking.py, 3.15.1."""
    masking.set_keras_mask(tensor, mask)


def keras_mask(tensor):
    """The mask that Keras carries along with a tensor, or None. backend/common/masking.py."""
    return masking.get_keras_mask(tensor)


def tf_distribute_strategy(model):
    """The tf.distribute strategy that a model was made under, or None. trainer.py, 3.15.1."""
    return getattr(model, "_distribute_strategy", None)


def own_state(layer):
    """A layer's own non-trainable variables, without those of its sublayers. layer.py, 3.15.1."""
    seeds = {id(generator.state) for generator in layer._seed_generators}
    return [v for v in layer._non_trainable_variables if id(v) not in seeds]


def own_variables(layer):
    """All of a layer's own variables, without those of its sublayers. layer.py, 3.15.1."""
    seeds = [generator.state for generator in layer._seed_generators]
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]


def seed_generators(layer):
    """A layer's own seed generators. layer.py, 3.15.1."""
    return list(layer._seed_generators)


def clear_losses(model):
    """Forget the losses that the last call of a model added. layer.py, 3.15.1."""
    model._clear_losses()


def call_has_training(model):
    """Whether a model's `call` takes `training=`. layer.py, 3.15.1."""
    return model._call_has_training_arg


def no_gradient():
    """A scope in which the backend records no gradients."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.no_grad()
    return contextlib.nullcontext()


def compute_loss(model, x, y, y_pred, sample_weight, training):
    """A model's loss by Keras's own rule, regularizers included. trainer.py, 3.15.1."""
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def loss_tracker(model):
    """The metric behind the logs' "loss". trainer.py, 3.15.1."""
    return model._loss_tracker


def raw_iterations(optimizer):
    """The count of calls of `apply`, whatever accumulates. base_optimizer.py, 3.15.1."""
    return optimizer._iterations.value


def accumulated_gradients(optimizer):
    """The variables of gradient accumulation, `None` among them. base_optimizer.py, 3.15.1."""
    return list(getattr(optimizer, "_accumulated_gradients", ()))


def optimizer_index(optimizer, variable):
    """The place of a trainable variable in an optimizer's slots. base_optimizer.py, 3.15.1."""
    return optimizer._get_variable_index(variable)


# The streams of two ranks start this far apart in the first word of the seed.
_SEED_STRIDE = 0x9E3779B1


def offset_seed(state, rank):
    """Move a seed generator's state, (seed, counter), to another stream. 3.15.1."""
    seed, counter = (int(word) for word in keras.ops.convert_to_numpy(state.value))
    moved = (seed + rank * _SEED_STRIDE) % 2**31
    state.assign(np.array([moved, counter], dtype="int64"))


def global_seed():
    """The state of the random draws that name no seed, or None. seed_generator.py, 3.15.1."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else keras.ops.convert_to_numpy(generator.state.value).tolist()


def set_global_seed(state, rank):
    """Give a worker the caller's stream of such draws, moved by its rank."""
    if state is not None:
        generator = global_seed_generator()
        generator.state.assign(np.array(state))
        offset_seed(generator.state, rank)


def registered_objects():
    """Custom objects known by name: the registered ones, those of a scope around us.

    saving/object_registration.py, 3.15.1.
    """
    scope = global_state.get_global_attribute(_SCOPE_OF_OBJECTS) or {}
    return {"registered": dict(object_registration.GLOBAL_CUSTOM_OBJECTS), "scope": dict(scope)}


def register_objects(objects):
    """Have the custom objects known that `registered_objects` named in the caller."""
    for name, thing in objects["registered"].items():
        object_registration.GLOBAL_CUSTOM_OBJECTS[name] = thing
        object_registration.GLOBAL_CUSTOM_NAMES[thing] = name
    global_state.set_global_attribute(_SCOPE_OF_OBJECTS, objects["scope"])


_SCOPE_OF_OBJECTS = "custom_objects_scope_dict"


def global_state_snapshot():
    """Keras's global attributes of this thread. backend/common/global_state.py, 3.15.1."""
    return dict(vars(global_state.GLOBAL_STATE_TRACKER))


def with_global_state(state, function):
    """`function`, to be run in another thread under this thread's global attributes."""

    def run():
        vars(global_state.GLOBAL_STATE_TRACKER).update(state)
        function()

    return run


def inject_functional(cls):
    """Give an imported class the functional base again. models/model.py, 3.15.1."""
    from parallel_keras import model

    if issubclass(cls, model.ParallelModel):
        inject_functional_into(cls, model.ParallelModel, model._FunctionalParallelModel)
    else:
        keras_model.inject_functional_model_class(cls)


def optimizer_variables(optimizer):
    """All variables of an optimizer and of the one that it wraps. base_optimizer.py, 3.15.1."""
    return list(optimizer.variables)


def optimizer_trainables(optimizer):
    """The variables that an optimizer was built for. base_optimizer.py, 3.15.1."""
    return list(optimizer._trainable_variables)


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


def every_optimizer(model):
    """A model's optimizers, and those that they wrap; inner ones first.

    The compiled one, and the ones that a model with a `train_step` of its own holds
    as attributes.
    """
    held = [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    compiled = [model.optimizer] if model.compiled and model.optimizer is not None else []
    return _with_inner(list({id(o): o for o in (*compiled, *held)}.values()))


def _with_inner(found):
    for optimizer in found:  # grows while it is read
        found += inner_optimizers(optimizer)
    return found[::-1]


def slots(optimizer):
    """Pairs of an optimizer's per-variable state and the variable it belongs to.

    base_optimizer.py, 3.15.1: such state is in lists as long as that of the
    variables, or is named after the variable's path.
    """
    trainables = list(getattr(optimizer, "_trainable_variables", ()))
    found = {}
    for value in vars(optimizer).values():
        if isinstance(value, list) and value is not trainables and len(value) == len(trainables):
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


def is_in_call():
    """Whether some layer's `call` is running. layers/layer.py, 3.15.1."""
    return global_state.get_global_attribute("current_call_ctx") is not None


def torch_device():
    """The current device of Keras on torch, as a string. backend/torch/core.py, 3.15.1."""
    from keras.src.backend.torch import core

    return str(core.get_device())


def default_torch_device():
    """The device of Keras on torch outside of any scope."""
    from keras.src.backend.torch import core

    return str(core.DEFAULT_DEVICE)


def set_torch_device(device):
    """Make a device the current one; returns what was current, `None` for the default."""
    before = global_state.get_global_attribute("torch_device", None)
    global_state.set_global_attribute("torch_device", device)
    return before


def untracked_variables(optimizer):
    """Variables that an optimizer holds and does not list, as Nadam does. nadam.py, 3.15.1."""
    return [v for v in vars(optimizer).values() if isinstance(v, keras.Variable)]


def let_optimizers_update_across_replicas():
    """Let an optimizer's updates run where all replicas have joined.

    backend/tensorflow/optimizer.py, 3.15.1: they go through `maybe_merge_call`, which
    joins the replicas first and fails where they have joined already. Only what
    would fail is changed.
    """
    import tensorflow as tf

    module = tf.__internal__.distribute.interim
    stock = module.maybe_merge_call
    if hasattr(stock, "is_of_parallel_keras"):
        return

    def maybe_merge_call(function, strategy, *args, **kwargs):
        if tf.distribute.in_cross_replica_context():
            return function(strategy, *args, **kwargs)
        return stock(function, strategy, *args, **kwargs)

    vars(maybe_merge_call)["is_of_parallel_keras"] = True
    module.maybe_merge_call = maybe_merge_call


def apply_across_replicas(optimizer, gradients, variables):
    """Apply an optimizer that is built, where all replicas have joined.

    loss_scale_optimizer.py, 3.15.1: one that scales the loss asks for a replica first.
    """
    if hasattr(optimizer, "inner_optimizer"):
        optimizer._common_apply(gradients, variables)
    else:
        optimizer.apply(gradients, variables)


def unpack(data):
    """A batch as `(x, y, sample_weight)`, by Keras's own rule."""
    return keras.utils.unpack_x_y_sample_weight(data)


def global_seed_state():
    """The state of the random draws that name no seed, as a variable, or None. 3.15.1."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def ensure_global_seed():
    """Make that state now, outside of any graph, where the first draw would be inside.

    It is the state that a first draw would make, and Python's own random numbers go on
    as if it had not been made.
    """
    import tensorflow as tf

    if global_seed_state() is None:
        stream = random.getstate()
        with tf.init_scope():
            global_seed_generator()
        random.setstate(stream)


class _Token:
    """An object that can be referred to weakly."""


SESSION = "parallel_keras_session"


def tie_to_session(callback):
    """Have `callback` called when `keras.utils.clear_session()` drops the global state.

    backend/common/global_state.py, 3.15.1: the state is one thread-local object,
    which clear_session replaces.

    Args:
        callback: A weak reference to a function.
    """

    def call():
        function = callback()
        # One that was replaced by a newer one says nothing, and may go late:
        # the traceback of an exception can hold it.
        if function is not None and global_state.get_global_attribute(SESSION) is None:
            function()

    token = _Token()
    weakref.finalize(token, call).atexit = False
    global_state.set_global_attribute(SESSION, token)


def moved_seed(state, replica):
    """The value of a seed generator's state in the stream of another replica."""
    value = keras.ops.convert_to_tensor(state.value)
    offset = np.array([replica * _SEED_STRIDE % 2**31, 0])
    return (value + keras.ops.cast(offset, value.dtype)) % 2**31


def leave_losses_unscaled(is_ours):
    """Keep Keras from dividing losses by the number of replicas under our strategies.

    losses/loss.py, 3.15.1: a Keras loss is divided inside `strategy.run`, what is
    written by hand is not, so a sum of both would be another objective. Nothing
    changes for anybody else's strategy.

    Args:
        is_ours: Function of the current tf.distribute strategy.
    """
    import tensorflow as tf

    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        stock = getattr(loss_module, name)
        if hasattr(stock, "is_of_parallel_keras"):
            continue

        def scale(value, stock=stock):
            return value if is_ours(tf.distribute.get_strategy()) else stock(value)

        vars(scale)["is_of_parallel_keras"] = True
        setattr(loss_module, name, scale)


def set_optimizer_strategy(optimizer, strategy):
    """Tell an optimizer where its variables live. backend/tensorflow/optimizer.py, 3.15.1."""
    optimizer._distribution_strategy = strategy
    index_trainables(optimizer)


def tf_aggregation(variable):
    """A Keras variable's aggregation as TensorFlow's. backend/tensorflow/core.py, 3.15.1."""
    return variable._map_aggregation(variable.aggregation)


def tf_synchronization(variable):
    """The same of its synchronization."""
    return variable._map_synchronization(variable.synchronization)


def tf_variable(variable):
    """The tf.Variable inside a Keras variable. backend/tensorflow/core.py, 3.15.1."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def symbolic_build(model, data, kind):
    """Build what a kind of step needs, for batches like this one. trainer.py, 3.15.1.

    Args:
        model: A Keras model.
        data: `(x, y, sample_weight)` of tensors or symbolic inputs; `(x,)` to
            predict.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    if kind == "predict":
        symbols = keras.tree.map_structure(
            lambda leaf: None if leaf is None else keras.KerasTensor(leaf.shape, leaf.dtype), data
        )
        keras.src.backend.compute_output_spec(model, symbols[0], training=False)
        return
    optimizer = model.optimizer
    if kind == "test":
        # Keras would build it too; in plain evaluate it stays as it is.
        vars(model)["optimizer"] = None
    try:
        model._symbolic_build(data_batch=data)
    finally:
        vars(model)["optimizer"] = optimizer


def build_optimizer(model):
    """Make an optimizer's slots for a model. trainer.py, 3.15.1."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def is_built(model, kind):
    """Whether a model is built as far as a kind of step needs. trainer.py, 3.15.1."""
    parts = list(flatten_layers(model))
    if kind != "predict":
        parts += [model._compile_loss, model._compile_metrics]
    if kind == "train":
        parts.append(model.optimizer)
    return all(part is None or part.built for part in parts)


def output_loss_metrics(model):
    """The metrics of the single outputs' losses. compile_utils.py, 3.15.1."""
    return [] if model._compile_loss is None else list(model._compile_loss.metrics)


def replace_synchronized_moments(moments):
    """Compute synchronized moments by another function, given Keras's own as `stock=`.

    backend/tensorflow/nn.py, 3.15.1.
    """
    from keras.src.backend.tensorflow import nn

    stock = nn._compute_moments_sync
    if not hasattr(stock, "is_of_parallel_keras"):

        def compute(x, axes, keepdims):
            return moments(x, axes, keepdims, stock)

        vars(compute)["is_of_parallel_keras"] = True
        nn._compute_moments_sync = compute


def replace_masked_moments(moments):
    """Compute the moments of a masked batch by another function, given Keras's own as `stock=`.

    layers/normalization/batch_normalization.py, 3.15.1.
    """
    stock = keras.layers.BatchNormalization._moments
    if not hasattr(stock, "is_of_parallel_keras"):

        def compute(layer, x, mask):
            if mask is None or not layer.synchronized:
                return stock(layer, x, mask)
            return moments(layer, x, mask, stock)

        vars(compute)["is_of_parallel_keras"] = True
        keras.layers.BatchNormalization._moments = compute


def let_distributed_variables_be_numbers():
    """Let `float(optimizer.learning_rate)` work where the variable has copies.

    KerasVariable.__float__ asks the tf.Variable inside, which converts, but not
    with copies. tensorflow/python/distribute/values.py, 2.21.
    """
    from tensorflow.python.distribute import values

    for name, kind in (("__float__", float), ("__int__", int)):
        if name not in vars(values.DistributedVariable):

            def convert(variable, kind=kind):
                return kind(variable.numpy())

            setattr(values.DistributedVariable, name, convert)


class ObservingScope(keras.StatelessScope):
    """A stateless scope that remembers what was assigned, and reads all else as it stands.

    Keras asks the scope for each regularized weight and takes no for an answer only
    from `Variable.value`. layers/layer.py, 3.15.1.
    """

    def __init__(self, state_mapping=None):
        super().__init__(state_mapping, collect_losses=True, initialize_variables=False)
        self.assigned = {}

    def add_update(self, update):
        variable, _ = update
        self.assigned[id(variable)] = variable
        super().add_update(update)

    def get_current_value(self, variable):
        return self.state_mapping.get(id(variable), variable._value)

    def assigned_value(self, variable):
        """What a variable was assigned, or None."""
        return self.state_mapping.get(id(variable)) if id(variable) in self.assigned else None


def accumulators(optimizer):
    """The variables of gradient accumulation, without the gaps."""
    return [v for v in accumulated_gradients(optimizer) if v is not None]


def is_array_adapter(adapter):
    """Whether a fit's data are arrays. trainers/data_adapters/array_data_adapter.py, 3.15.1."""
    return type(adapter).__name__ == "ArrayDataAdapter"


def shuffle_of(adapter):
    """The `shuffle=` of an array adapter. array_data_adapter.py, 3.15.1."""
    return adapter._shuffle


def loader_of(adapter):
    """The DataLoader of an adapter, or None. torch_data_loader_adapter.py, 3.15.1."""
    return getattr(adapter, "_dataloader", None)


def wrap_batches(epoch_iterator, wrap):
    """Have an epoch iterator's batches pass through `wrap`. trainers/epoch_iterator.py, 3.15.1."""
    stock = epoch_iterator._get_iterator
    epoch_iterator._get_iterator = lambda: wrap(stock())


def stock_symbolic_build(model, *args, **kwargs):
    """Keras's own building from a fit's iterator. trainers/trainer.py, 3.15.1."""
    return type(model)._symbolic_build(model, *args, **kwargs)


def every_variable(model):
    """All variables of a model, its metrics and its optimizers that are made, each once."""
    found = [*model.variables, *(v for metric in model.metrics for v in metric.variables)]
    for optimizer in every_optimizer(model):
        found += [*optimizer_variables(optimizer), *untracked_variables(optimizer)]
    return list({id(v): v for v in found if v._value is not None}.values())


def batch_spec(epoch_iterator):
    """Shapes and types of a fit's batches, or None where a rank is not known.

    backend/tensorflow/trainer.py, 3.15.1. Nothing is read: a generator runs once.
    """
    spec = epoch_iterator._distributed_dataset.element_spec
    leaves = keras.tree.flatten(spec)
    if any(getattr(leaf, "shape", None) is None or leaf.shape.rank is None for leaf in leaves):
        return None
    return keras.tree.map_structure(
        lambda leaf: keras.KerasTensor(tuple(leaf.shape), leaf.dtype.name), spec
    )


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
    types = set(map(type, everything))
    of_models = {t for t in types if issubclass(t, keras.Model)}
    of_optimizers = {t for t in types if issubclass(t, keras.optimizers.Optimizer)}
    models = [o for o in everything if type(o) in of_models]
    optimizers = [o for o in everything if type(o) in of_optimizers]
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


def compute_output_spec(function, *args, **kwargs):
    """Traces a function with shapes only. backend/*/core.py, 3.15.1."""
    return keras_backend.compute_output_spec(function, *args, **kwargs)


def map_shapes(function, structure):
    """A function of each shape in a nested structure of shapes. tree/tree_api.py, 3.15.1."""
    return keras.tree.map_shape_structure(function, structure)


def run_graph_symbolically(model, inputs):
    """Shapes through each node of a functional model or a Sequential with known inputs.

    Function.compute_output_spec would answer inputs of the shapes it was made
    with from memory, and call no layer. ops/function.py, models/sequential.py,
    3.15.1.
    """
    graph = getattr(model, "_functional", None) or model
    return graph._run_through_graph(inputs, operation_fn=lambda op: op.compute_output_spec)


def optimizer_of_variable(optimizer, variable):
    """The optimizer inside wrappers that updates a variable.

    loss_scale_optimizer.py, multi_optimizer.py, 3.15.1.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer_of_variable(optimizer.inner_optimizer, variable)
    choose = getattr(optimizer, "_optimizer_map", None)
    return choose(variable) if callable(choose) else optimizer
