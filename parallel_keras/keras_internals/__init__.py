"""Every private Keras name that the package touches, in one place.

Each one carries the Keras version that it was read from. When Keras moves, this
is the folder to look at.
"""

from keras.src.models.functional import Functional as Functional
from keras.src.saving.keras_saveable import KerasSaveable as KerasSaveable
from keras.src.utils.backend_utils import DynamicBackend as DynamicBackend
from keras.src.utils.tracking import Tracker as Tracker

from parallel_keras.keras_internals.graphs import (
    Call as Call,
    Graph as Graph,
    calling as calling,
    graph_of_model as graph_of_model,
    take_losses as take_losses,
)
from parallel_keras.keras_internals.layers import (
    call_has_training as call_has_training,
    call_model as call_model,
    compute_output_spec as compute_output_spec,
    direct_layers as direct_layers,
    flatten_layers as flatten_layers,
    graph_of as graph_of,
    has_bare_operations as has_bare_operations,
    is_batch_norm as is_batch_norm,
    is_in_call as is_in_call,
    is_raw_tf_variable as is_raw_tf_variable,
    keras_mask as keras_mask,
    logits as logits,
    map_shapes as map_shapes,
    nodes_in_order as nodes_in_order,
    noting_moments as noting_moments,
    own_metrics as own_metrics,
    own_state as own_state,
    own_variables as own_variables,
    replace_masked_moments as replace_masked_moments,
    run_graph_symbolically as run_graph_symbolically,
    seed_generators as seed_generators,
    seed_states as seed_states,
    set_keras_mask as set_keras_mask,
    set_logits as set_logits,
    watch_operations as watch_operations,
)
from parallel_keras.keras_internals.models import (
    INSTANCE_OVERRIDES as INSTANCE_OVERRIDES,
    RULES as RULES,
    STATE as STATE,
    TRACKED_CONTAINERS as TRACKED_CONTAINERS,
    every_variable as every_variable,
    inject_functional as inject_functional,
    inject_functional_into as inject_functional_into,
    is_functional_call as is_functional_call,
    tf_distribute_strategy as tf_distribute_strategy,
    users_of as users_of,
)
from parallel_keras.keras_internals.optimizers import (
    METHODS_OF_ALL_GRADIENTS as METHODS_OF_ALL_GRADIENTS,
    accumulated_gradients as accumulated_gradients,
    accumulators as accumulators,
    check_variables_are_known as check_variables_are_known,
    compiled_optimizer as compiled_optimizer,
    hold_keras_variables as hold_keras_variables,
    index_trainables as index_trainables,
    inner_optimizers as inner_optimizers,
    moving_averages as moving_averages,
    numbers_of_no_variable as numbers_of_no_variable,
    optimizer_index as optimizer_index,
    optimizer_key as optimizer_key,
    optimizer_of_variable as optimizer_of_variable,
    optimizer_trainables as optimizer_trainables,
    optimizer_variables as optimizer_variables,
    optimizers_by_name as optimizers_by_name,
    overridden as overridden,
    own_scalars as own_scalars,
    raw_iterations as raw_iterations,
    schedule_of as schedule_of,
    slots as slots,
    untracked_variables as untracked_variables,
    with_inner_optimizers as with_inner_optimizers,
    with_moving_averages as with_moving_averages,
)
from parallel_keras.keras_internals.own_steps import (
    every_metric as every_metric,
    every_optimizer as every_optimizer,
    noting_new_variables as noting_new_variables,
    optimizers_of as optimizers_of,
    results_of_metrics as results_of_metrics,
    synchronizing as synchronizing,
    untrack as untrack,
    watching_assigns as watching_assigns,
)
from parallel_keras.keras_internals.randomness import (
    ensure_global_seed as ensure_global_seed,
    global_seed as global_seed,
    global_seed_state as global_seed_state,
    is_seed_state as is_seed_state,
    moved_seed as moved_seed,
    offset_seed as offset_seed,
    replacing_draws as replacing_draws,
    set_global_seed as set_global_seed,
)
from parallel_keras.keras_internals.session import (
    SESSION as SESSION,
    default_torch_device as default_torch_device,
    global_state_snapshot as global_state_snapshot,
    keeping_names as keeping_names,
    register_objects as register_objects,
    registered_objects as registered_objects,
    set_torch_device as set_torch_device,
    tie_to_session as tie_to_session,
    torch_device as torch_device,
    with_global_state as with_global_state,
)
from parallel_keras.keras_internals.tensorflow import (
    ObservingScope as ObservingScope,
    apply_across_replicas as apply_across_replicas,
    leave_losses_unscaled as leave_losses_unscaled,
    let_distributed_variables_be_numbers as let_distributed_variables_be_numbers,
    let_optimizers_update_across_replicas as let_optimizers_update_across_replicas,
    making_put_off_variables as making_put_off_variables,
    replace_assign as replace_assign,
    replace_synchronized_moments as replace_synchronized_moments,
    set_optimizer_strategy as set_optimizer_strategy,
    tf_aggregation as tf_aggregation,
    tf_synchronization as tf_synchronization,
    tf_variable as tf_variable,
)
from parallel_keras.keras_internals.torch import (
    allow_synchronized_batch_norm as allow_synchronized_batch_norm,
    replace_torch_moments as replace_torch_moments,
)
from parallel_keras.keras_internals.training import (
    add_up_losses as add_up_losses,
    added_by_layers as added_by_layers,
    added_losses as added_losses,
    batches_of as batches_of,
    build_optimizer as build_optimizer,
    clear_losses as clear_losses,
    compile_loss_of as compile_loss_of,
    compile_metrics_of as compile_metrics_of,
    compiled_loss as compiled_loss,
    compute_loss as compute_loss,
    is_array_adapter as is_array_adapter,
    is_built as is_built,
    loader_of as loader_of,
    loss_tracker as loss_tracker,
    no_gradient as no_gradient,
    output_loss_metrics as output_loss_metrics,
    shuffle_of as shuffle_of,
    stock_symbolic_build as stock_symbolic_build,
    symbolic_build as symbolic_build,
    unpack as unpack,
    update_metrics as update_metrics,
    wrap_batches as wrap_batches,
)
