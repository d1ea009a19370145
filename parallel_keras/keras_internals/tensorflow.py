"""What differs on the TensorFlow backend."""

import contextlib

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.losses import loss as loss_module

from parallel_keras.errors import UnsupportedError
from parallel_keras.keras_internals.optimizers import index_trainables
from parallel_keras.keras_internals.patching import patch_once


def let_optimizers_update_across_replicas():
    """Let an optimizer's updates run where all replicas have joined.

    backend/tensorflow/optimizer.py, 3.15.1: they go through `maybe_merge_call`, which
    joins the replicas first and fails where they have joined already. Only what
    would fail is changed.
    """
    import tensorflow as tf

    @patch_once(tf.__internal__.distribute.interim, "maybe_merge_call")
    def _where_joined(stock):
        def maybe_merge_call(function, strategy, *args, **kwargs):
            if tf.distribute.in_cross_replica_context():
                return function(strategy, *args, **kwargs)
            if not tf.distribute.has_strategy():
                _refuse_variables_of_another(keras.tree.flatten(args))
            return stock(function, strategy, *args, **kwargs)

        return maybe_merge_call


def _refuse_variables_of_another(values):
    """Plain Keras would fail in the depth of TensorFlow."""
    for value in values:
        if getattr(value, "_distribute_strategy", None) is not None:
            raise UnsupportedError(
                "A model without a strategy cannot train a variable that it shares with a model "
                "under strategy='data'. Give both the same one, with "
                f"`compile(..., strategy='data')`. Received: variable {value.name}"
            )


def apply_across_replicas(optimizer, gradients, variables):
    """Apply an optimizer that is built, where all replicas have joined.

    loss_scale_optimizer.py, 3.15.1: one that scales the loss asks for a replica first.
    """
    if hasattr(optimizer, "inner_optimizer"):
        optimizer._common_apply(gradients, variables)
    else:
        optimizer.apply(gradients, variables)


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

        @patch_once(loss_module, name)
        def _unscaled(stock):
            def scale(value):
                return value if is_ours(tf.distribute.get_strategy()) else stock(value)

            return scale


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


def replace_synchronized_moments(moments):
    """Compute synchronized moments by another function, given Keras's own as `stock=`.

    backend/tensorflow/nn.py, 3.15.1.
    """
    from keras.src.backend.tensorflow import nn

    @patch_once(nn, "_compute_moments_sync")
    def _synchronized(stock):
        return lambda x, axes, keepdims: moments(x, axes, keepdims, stock)


def replace_assign(assign):
    """Assign Keras variables by another function, given Keras's own as `stock=`.

    backend/tensorflow/core.py, 3.15.1: all of a variable's assigns go through it.
    """

    @patch_once(keras.Variable, "_direct_assign")
    def _assigning(stock):
        return lambda variable, value: assign(variable, value, stock)


@contextlib.contextmanager
def making_put_off_variables(scope):
    """Have the variables that Keras lists here, and makes later, be made in a scope.

    backend/common/variables.py, backend/tensorflow/core.py, 3.15.1: a layer without a `build`
    is built by calling it on symbols, and what its layers add meanwhile is made when all of
    them have been called.

    Args:
        scope: Function that returns a scope. Of scopes inside each other the inner one counts.
    """
    if not in_stateless_scope():
        yield
        return
    put_off = global_state.get_global_attribute("uninitialized_variables", [], set_to_default=True)
    first = len(put_off)
    try:
        yield
    finally:
        for variable in put_off[first:]:
            if _MAKE not in vars(variable):
                vars(variable)[_MAKE] = _made_in(scope, variable)


_MAKE = "_deferred_initialize"


def _made_in(scope, variable):
    def make():
        del vars(variable)[_MAKE]
        with scope():
            getattr(variable, _MAKE)()

    return make


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


class ReadingScope(ObservingScope):
    """One that remembers what was read, too."""

    def __init__(self):
        super().__init__()
        self.read = {}

    def get_current_value(self, variable):
        self.read[id(variable)] = variable
        return super().get_current_value(variable)
