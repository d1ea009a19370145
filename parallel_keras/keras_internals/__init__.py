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
)
from parallel_keras.keras_internals.graphs import (
    Graph as Graph,
)
from parallel_keras.keras_internals.graphs import (
    calling as calling,
)
from parallel_keras.keras_internals.graphs import (
    graph_of_model as graph_of_model,
)
from parallel_keras.keras_internals.graphs import (
    take_losses as take_losses,
)
from parallel_keras.keras_internals.layers import (
    call_has_training as call_has_training,
)
from parallel_keras.keras_internals.layers import (
    call_model as call_model,
)
from parallel_keras.keras_internals.layers import (
    compute_output_spec as compute_output_spec,
)
from parallel_keras.keras_internals.layers import (
    direct_layers as direct_layers,
)
from parallel_keras.keras_internals.layers import (
    flatten_layers as flatten_layers,
)
from parallel_keras.keras_internals.layers import (
    graph_of as graph_of,
)
from parallel_keras.keras_internals.layers import (
    has_bare_operations as has_bare_operations,
)
from parallel_keras.keras_internals.layers import (
    is_batch_norm as is_batch_norm,
)
from parallel_keras.keras_internals.layers import (
    is_in_call as is_in_call,
)
from parallel_keras.keras_internals.layers import (
    is_raw_tf_variable as is_raw_tf_variable,
)
from parallel_keras.keras_internals.layers import (
    keras_mask as keras_mask,
)
from parallel_keras.keras_internals.layers import (
    logits as logits,
)
from parallel_keras.keras_internals.layers import (
    map_shapes as map_shapes,
)
from parallel_keras.keras_internals.layers import (
    nodes_in_order as nodes_in_order,
)
from parallel_keras.keras_internals.layers import (
    noting_moments as noting_moments,
)
from parallel_keras.keras_internals.layers import (
    own_metrics as own_metrics,
)
from parallel_keras.keras_internals.layers import (
    own_state as own_state,
)
from parallel_keras.keras_internals.layers import (
    own_variables as own_variables,
)
from parallel_keras.keras_internals.layers import (
    replace_masked_moments as replace_masked_moments,
)
from parallel_keras.keras_internals.layers import (
    run_graph_symbolically as run_graph_symbolically,
)
from parallel_keras.keras_internals.layers import (
    seed_generators as seed_generators,
)
from parallel_keras.keras_internals.layers import (
    seed_states as seed_states,
)
from parallel_keras.keras_internals.layers import (
    set_keras_mask as set_keras_mask,
)
from parallel_keras.keras_internals.layers import (
    set_logits as set_logits,
)
from parallel_keras.keras_internals.layers import (
    watch_operations as watch_operations,
)
from parallel_keras.keras_internals.models import (
    INSTANCE_OVERRIDES as INSTANCE_OVERRIDES,
)
from parallel_keras.keras_internals.models import (
    RULES as RULES,
)
from parallel_keras.keras_internals.models import (
    STATE as STATE,
)
from parallel_keras.keras_internals.models import (
    TRACKED_CONTAINERS as TRACKED_CONTAINERS,
)
from parallel_keras.keras_internals.models import (
    every_variable as every_variable,
)
from parallel_keras.keras_internals.models import (
    inject_functional as inject_functional,
)
from parallel_keras.keras_internals.models import (
    inject_functional_into as inject_functional_into,
)
from parallel_keras.keras_internals.models import (
    is_functional_call as is_functional_call,
)
from parallel_keras.keras_internals.models import (
    tf_distribute_strategy as tf_distribute_strategy,
)
from parallel_keras.keras_internals.models import (
    users_of as users_of,
)
from parallel_keras.keras_internals.optimizers import (
    METHODS_OF_ALL_GRADIENTS as METHODS_OF_ALL_GRADIENTS,
)
from parallel_keras.keras_internals.optimizers import (
    accumulated_gradients as accumulated_gradients,
)
from parallel_keras.keras_internals.optimizers import (
    accumulators as accumulators,
)
from parallel_keras.keras_internals.optimizers import (
    check_variables_are_known as check_variables_are_known,
)
from parallel_keras.keras_internals.optimizers import (
    compiled_optimizer as compiled_optimizer,
)
from parallel_keras.keras_internals.optimizers import (
    hold_keras_variables as hold_keras_variables,
)
from parallel_keras.keras_internals.optimizers import (
    index_trainables as index_trainables,
)
from parallel_keras.keras_internals.optimizers import (
    inner_optimizers as inner_optimizers,
)
from parallel_keras.keras_internals.optimizers import (
    learning_rate_variable as learning_rate_variable,
)
from parallel_keras.keras_internals.optimizers import (
    moving_averages as moving_averages,
)
from parallel_keras.keras_internals.optimizers import (
    numbers_of_no_variable as numbers_of_no_variable,
)
from parallel_keras.keras_internals.optimizers import (
    optimizer_index as optimizer_index,
)
from parallel_keras.keras_internals.optimizers import (
    optimizer_key as optimizer_key,
)
from parallel_keras.keras_internals.optimizers import (
    optimizer_of_variable as optimizer_of_variable,
)
from parallel_keras.keras_internals.optimizers import (
    optimizer_trainables as optimizer_trainables,
)
from parallel_keras.keras_internals.optimizers import (
    optimizer_variables as optimizer_variables,
)
from parallel_keras.keras_internals.optimizers import (
    optimizers_by_name as optimizers_by_name,
)
from parallel_keras.keras_internals.optimizers import (
    overridden as overridden,
)
from parallel_keras.keras_internals.optimizers import (
    own_scalars as own_scalars,
)
from parallel_keras.keras_internals.optimizers import (
    raw_iterations as raw_iterations,
)
from parallel_keras.keras_internals.optimizers import (
    schedule_of as schedule_of,
)
from parallel_keras.keras_internals.optimizers import (
    slots as slots,
)
from parallel_keras.keras_internals.optimizers import (
    untracked_variables as untracked_variables,
)
from parallel_keras.keras_internals.optimizers import (
    with_inner_optimizers as with_inner_optimizers,
)
from parallel_keras.keras_internals.optimizers import (
    with_moving_averages as with_moving_averages,
)
from parallel_keras.keras_internals.own_steps import (
    every_metric as every_metric,
)
from parallel_keras.keras_internals.own_steps import (
    every_optimizer as every_optimizer,
)
from parallel_keras.keras_internals.own_steps import (
    noting_new_variables as noting_new_variables,
)
from parallel_keras.keras_internals.own_steps import (
    optimizers_of as optimizers_of,
)
from parallel_keras.keras_internals.own_steps import (
    results_of_metrics as results_of_metrics,
)
from parallel_keras.keras_internals.own_steps import (
    synchronizing as synchronizing,
)
from parallel_keras.keras_internals.own_steps import (
    untrack as untrack,
)
from parallel_keras.keras_internals.own_steps import (
    watching_assigns as watching_assigns,
)
from parallel_keras.keras_internals.randomness import (
    ensure_global_seed as ensure_global_seed,
)
from parallel_keras.keras_internals.randomness import (
    global_seed as global_seed,
)
from parallel_keras.keras_internals.randomness import (
    global_seed_state as global_seed_state,
)
from parallel_keras.keras_internals.randomness import (
    is_seed_state as is_seed_state,
)
from parallel_keras.keras_internals.randomness import (
    moved_seed as moved_seed,
)
from parallel_keras.keras_internals.randomness import (
    offset_seed as offset_seed,
)
from parallel_keras.keras_internals.randomness import (
    replacing_draws as replacing_draws,
)
from parallel_keras.keras_internals.randomness import (
    set_global_seed as set_global_seed,
)
from parallel_keras.keras_internals.session import (
    SESSION as SESSION,
)
from parallel_keras.keras_internals.session import (
    default_torch_device as default_torch_device,
)
from parallel_keras.keras_internals.session import (
    global_state_snapshot as global_state_snapshot,
)
from parallel_keras.keras_internals.session import (
    keeping_names as keeping_names,
)
from parallel_keras.keras_internals.session import (
    register_objects as register_objects,
)
from parallel_keras.keras_internals.session import (
    registered_objects as registered_objects,
)
from parallel_keras.keras_internals.session import (
    set_torch_device as set_torch_device,
)
from parallel_keras.keras_internals.session import (
    tie_to_session as tie_to_session,
)
from parallel_keras.keras_internals.session import (
    torch_device as torch_device,
)
from parallel_keras.keras_internals.session import (
    with_global_state as with_global_state,
)
from parallel_keras.keras_internals.tensorflow import (
    ObservingScope as ObservingScope,
)
from parallel_keras.keras_internals.tensorflow import (
    ReadingScope as ReadingScope,
)
from parallel_keras.keras_internals.tensorflow import (
    apply_across_replicas as apply_across_replicas,
)
from parallel_keras.keras_internals.tensorflow import (
    leave_losses_unscaled as leave_losses_unscaled,
)
from parallel_keras.keras_internals.tensorflow import (
    let_distributed_variables_be_numbers as let_distributed_variables_be_numbers,
)
from parallel_keras.keras_internals.tensorflow import (
    let_optimizers_update_across_replicas as let_optimizers_update_across_replicas,
)
from parallel_keras.keras_internals.tensorflow import (
    making_put_off_variables as making_put_off_variables,
)
from parallel_keras.keras_internals.tensorflow import (
    replace_assign as replace_assign,
)
from parallel_keras.keras_internals.tensorflow import (
    replace_synchronized_moments as replace_synchronized_moments,
)
from parallel_keras.keras_internals.tensorflow import (
    set_optimizer_strategy as set_optimizer_strategy,
)
from parallel_keras.keras_internals.tensorflow import (
    tf_aggregation as tf_aggregation,
)
from parallel_keras.keras_internals.tensorflow import (
    tf_synchronization as tf_synchronization,
)
from parallel_keras.keras_internals.tensorflow import (
    tf_variable as tf_variable,
)
from parallel_keras.keras_internals.torch import (
    allow_synchronized_batch_norm as allow_synchronized_batch_norm,
)
from parallel_keras.keras_internals.torch import (
    replace_torch_moments as replace_torch_moments,
)
from parallel_keras.keras_internals.training import (
    add_up_losses as add_up_losses,
)
from parallel_keras.keras_internals.training import (
    added_by_layers as added_by_layers,
)
from parallel_keras.keras_internals.training import (
    added_losses as added_losses,
)
from parallel_keras.keras_internals.training import (
    batches_of as batches_of,
)
from parallel_keras.keras_internals.training import (
    build_optimizer as build_optimizer,
)
from parallel_keras.keras_internals.training import (
    clear_losses as clear_losses,
)
from parallel_keras.keras_internals.training import (
    compile_loss_of as compile_loss_of,
)
from parallel_keras.keras_internals.training import (
    compile_metrics_of as compile_metrics_of,
)
from parallel_keras.keras_internals.training import (
    compiled_loss as compiled_loss,
)
from parallel_keras.keras_internals.training import (
    compute_loss as compute_loss,
)
from parallel_keras.keras_internals.training import (
    is_about_no_batch as is_about_no_batch,
)
from parallel_keras.keras_internals.training import (
    is_array_adapter as is_array_adapter,
)
from parallel_keras.keras_internals.training import (
    is_built as is_built,
)
from parallel_keras.keras_internals.training import (
    loader_of as loader_of,
)
from parallel_keras.keras_internals.training import (
    loss_tracker as loss_tracker,
)
from parallel_keras.keras_internals.training import (
    no_gradient as no_gradient,
)
from parallel_keras.keras_internals.training import (
    output_loss_metrics as output_loss_metrics,
)
from parallel_keras.keras_internals.training import (
    shuffle_of as shuffle_of,
)
from parallel_keras.keras_internals.training import (
    stock_symbolic_build as stock_symbolic_build,
)
from parallel_keras.keras_internals.training import (
    symbolic_build as symbolic_build,
)
from parallel_keras.keras_internals.training import (
    unpack as unpack,
)
from parallel_keras.keras_internals.training import (
    update_metrics as update_metrics,
)
from parallel_keras.keras_internals.training import (
    wrap_batches as wrap_batches,
)
