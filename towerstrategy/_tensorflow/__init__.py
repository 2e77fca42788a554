"""Every private TensorFlow name that the package uses, by subject.

Goes in: the installed TensorFlow.  Comes out: the names below, for the rest of the package.
Nothing else in ``towerstrategy`` imports ``tensorflow.python``; each name is checked by
``tests/_tensorflow/tensorflow_names_test.py``, so that a TensorFlow release that moves one fails
loudly and here.
"""

from towerstrategy._tensorflow.compiling import PRIVATE_NAMES as _COMPILING
from towerstrategy._tensorflow.compiling import (
    compile_by_xla as compile_by_xla,
)
from towerstrategy._tensorflow.compiling import (
    hand_on_functions as hand_on_functions,
)
from towerstrategy._tensorflow.compiling import (
    has_xla_kernel as has_xla_kernel,
)
from towerstrategy._tensorflow.compiling import (
    line_of as line_of,
)
from towerstrategy._tensorflow.compiling import (
    set_control_inputs as set_control_inputs,
)
from towerstrategy._tensorflow.compiling import (
    tracing_for_xla as tracing_for_xla,
)
from towerstrategy._tensorflow.data import PRIVATE_NAMES as _DATA
from towerstrategy._tensorflow.data import (
    OwnedIterator as OwnedIterator,
)
from towerstrategy._tensorflow.data import (
    Trackable as Trackable,
)
from towerstrategy._tensorflow.data import (
    loop_over as loop_over,
)
from towerstrategy._tensorflow.data import (
    map_in_place as map_in_place,
)
from towerstrategy._tensorflow.data import (
    over_devices as over_devices,
)
from towerstrategy._tensorflow.data import (
    read_profile as read_profile,
)
from towerstrategy._tensorflow.devices import PRIVATE_NAMES as _DEVICES
from towerstrategy._tensorflow.devices import (
    current_device as current_device,
)
from towerstrategy._tensorflow.devices import (
    memory_limits as memory_limits,
)
from towerstrategy._tensorflow.draws import PRIVATE_NAMES as _DRAWS
from towerstrategy._tensorflow.draws import (
    RESERVED as RESERVED,
)
from towerstrategy._tensorflow.draws import (
    count_up as count_up,
)
from towerstrategy._tensorflow.draws import (
    counts as counts,
)
from towerstrategy._tensorflow.draws import (
    draw_by_counter as draw_by_counter,
)
from towerstrategy._tensorflow.draws import (
    is_philox as is_philox,
)
from towerstrategy._tensorflow.draws import (
    key_and_counter as key_and_counter,
)
from towerstrategy._tensorflow.draws import (
    known_shape as known_shape,
)
from towerstrategy._tensorflow.draws import (
    wrap_draws as wrap_draws,
)
from towerstrategy._tensorflow.ends import PRIVATE_NAMES as _ENDS
from towerstrategy._tensorflow.ends import (
    wait_by_device as wait_by_device,
)
from towerstrategy._tensorflow.errors import PRIVATE_NAMES as _ERRORS
from towerstrategy._tensorflow.errors import (
    add_note as add_note,
)
from towerstrategy._tensorflow.errors import (
    noting as noting,
)
from towerstrategy._tensorflow.functions import PRIVATE_NAMES as _FUNCTIONS
from towerstrategy._tensorflow.functions import (
    Function as Function,
)
from towerstrategy._tensorflow.functions import (
    asserts as asserts,
)
from towerstrategy._tensorflow.functions import (
    autograph_convert as autograph_convert,
)
from towerstrategy._tensorflow.functions import (
    capture_at_call as capture_at_call,
)
from towerstrategy._tensorflow.functions import (
    clone_function as clone_function,
)
from towerstrategy._tensorflow.functions import (
    forget_trace as forget_trace,
)
from towerstrategy._tensorflow.functions import (
    function_definition as function_definition,
)
from towerstrategy._tensorflow.functions import (
    function_graph as function_graph,
)
from towerstrategy._tensorflow.functions import (
    functions_in_attributes as functions_in_attributes,
)
from towerstrategy._tensorflow.functions import (
    functions_of as functions_of,
)
from towerstrategy._tensorflow.functions import (
    graph_of_call as graph_of_call,
)
from towerstrategy._tensorflow.functions import (
    is_compiled_here as is_compiled_here,
)
from towerstrategy._tensorflow.functions import (
    is_in_control_flow as is_in_control_flow,
)
from towerstrategy._tensorflow.functions import (
    is_jit_compiled as is_jit_compiled,
)
from towerstrategy._tensorflow.functions import (
    light_graph_optimizer as light_graph_optimizer,
)
from towerstrategy._tensorflow.functions import (
    may_be_recorded as may_be_recorded,
)
from towerstrategy._tensorflow.functions import (
    nested_function as nested_function,
)
from towerstrategy._tensorflow.functions import (
    not_recorded as not_recorded,
)
from towerstrategy._tensorflow.functions import (
    variables_of_caller as variables_of_caller,
)
from towerstrategy._tensorflow.functions import (
    without_xla as without_xla,
)
from towerstrategy._tensorflow.functions import (
    wrap_cond as wrap_cond,
)
from towerstrategy._tensorflow.functions import (
    wrap_gradient_functions as wrap_gradient_functions,
)
from towerstrategy._tensorflow.functions import (
    writers_of as writers_of,
)
from towerstrategy._tensorflow.graphs import PRIVATE_NAMES as _GRAPHS
from towerstrategy._tensorflow.graphs import (
    add_control_input as add_control_input,
)
from towerstrategy._tensorflow.graphs import (
    capture as capture,
)
from towerstrategy._tensorflow.graphs import (
    captures_of as captures_of,
)
from towerstrategy._tensorflow.graphs import (
    control_dependencies_of as control_dependencies_of,
)
from towerstrategy._tensorflow.graphs import (
    copy_handle_data as copy_handle_data,
)
from towerstrategy._tensorflow.graphs import (
    crosses_machines as crosses_machines,
)
from towerstrategy._tensorflow.graphs import (
    operation_count as operation_count,
)
from towerstrategy._tensorflow.graphs import (
    set_device as set_device,
)
from towerstrategy._tensorflow.graphs import (
    set_input as set_input,
)
from towerstrategy._tensorflow.graphs import (
    touched_resources as touched_resources,
)
from towerstrategy._tensorflow.graphs import (
    use_instead as use_instead,
)
from towerstrategy._tensorflow.graphs import (
    written_resources as written_resources,
)
from towerstrategy._tensorflow.importing import PRIVATE_NAMES as _IMPORTING
from towerstrategy._tensorflow.importing import (
    import_nodes as import_nodes,
)
from towerstrategy._tensorflow.losses import PRIVATE_NAMES as _LOSSES
from towerstrategy._tensorflow.losses import (
    give_moving_averages as give_moving_averages,
)
from towerstrategy._tensorflow.losses import (
    tell_unique as tell_unique,
)
from towerstrategy._tensorflow.losses import (
    wrap_derivatives as wrap_derivatives,
)
from towerstrategy._tensorflow.losses import (
    wrap_losses as wrap_losses,
)
from towerstrategy._tensorflow.machines import PRIVATE_NAMES as _MACHINES
from towerstrategy._tensorflow.machines import (
    all_gather as all_gather,
)
from towerstrategy._tensorflow.machines import (
    all_reduce as all_reduce,
)
from towerstrategy._tensorflow.machines import (
    ask_worker as ask_worker,
)
from towerstrategy._tensorflow.machines import (
    call_once as call_once,
)
from towerstrategy._tensorflow.machines import (
    collective_launcher as collective_launcher,
)
from towerstrategy._tensorflow.machines import (
    end_collectives as end_collectives,
)
from towerstrategy._tensorflow.machines import (
    hand_keys_to_branches as hand_keys_to_branches,
)
from towerstrategy._tensorflow.machines import (
    start_worker as start_worker,
)
from towerstrategy._tensorflow.partitioning import PRIVATE_NAMES as _PARTITIONING
from towerstrategy._tensorflow.partitioning import (
    add_function as add_function,
)
from towerstrategy._tensorflow.partitioning import (
    body_of as body_of,
)
from towerstrategy._tensorflow.partitioning import (
    constant_value as constant_value,
)
from towerstrategy._tensorflow.partitioning import (
    hand_on_all_functions as hand_on_all_functions,
)
from towerstrategy._tensorflow.partitioning import (
    new_function_graph as new_function_graph,
)
from towerstrategy._tensorflow.partitioning import (
    op_def as op_def,
)
from towerstrategy._tensorflow.partitioning import (
    placeholder_like as placeholder_like,
)
from towerstrategy._tensorflow.partitioning import (
    trace as trace,
)
from towerstrategy._tensorflow.partitioning import (
    value_as_shape as value_as_shape,
)
from towerstrategy._tensorflow.seeds import PRIVATE_NAMES as _SEEDS
from towerstrategy._tensorflow.seeds import (
    SEED_STEP as SEED_STEP,
)
from towerstrategy._tensorflow.seeds import (
    OperationSeeds as OperationSeeds,
)
from towerstrategy._tensorflow.seeds import (
    eager_seeds_apart as eager_seeds_apart,
)
from towerstrategy._tensorflow.seeds import (
    global_seed as global_seed,
)
from towerstrategy._tensorflow.seeds import (
    graph_seed as graph_seed,
)
from towerstrategy._tensorflow.seeds import (
    graph_seeded as graph_seeded,
)
from towerstrategy._tensorflow.seeds import (
    operation_seeds_of_caller as operation_seeds_of_caller,
)
from towerstrategy._tensorflow.seeds import (
    seed_of_first as seed_of_first,
)
from towerstrategy._tensorflow.strategies import PRIVATE_NAMES as _STRATEGIES
from towerstrategy._tensorflow.strategies import (
    Options as Options,
)
from towerstrategy._tensorflow.strategies import (
    StrategyExtended as StrategyExtended,
)
from towerstrategy._tensorflow.strategies import (
    UpdateContext as UpdateContext,
)
from towerstrategy._tensorflow.strategies import (
    asked_by_library as asked_by_library,
)
from towerstrategy._tensorflow.strategies import (
    cross_replica_context as cross_replica_context,
)
from towerstrategy._tensorflow.strategies import (
    no_strategy as no_strategy,
)
from towerstrategy._tensorflow.threads import PRIVATE_NAMES as _THREADS
from towerstrategy._tensorflow.threads import (
    ThreadState as ThreadState,
)
from towerstrategy._tensorflow.threads import (
    eager_if as eager_if,
)
from towerstrategy._tensorflow.values import PRIVATE_NAMES as _VALUES
from towerstrategy._tensorflow.values import (
    CompositeTensor as CompositeTensor,
)
from towerstrategy._tensorflow.values import (
    Mirrored as Mirrored,
)
from towerstrategy._tensorflow.values import (
    NoneTensorSpec as NoneTensorSpec,
)
from towerstrategy._tensorflow.values import (
    PerReplica as PerReplica,
)
from towerstrategy._tensorflow.values import (
    PerReplicaSpec as PerReplicaSpec,
)
from towerstrategy._tensorflow.values import (
    ReduceOp as ReduceOp,
)
from towerstrategy._tensorflow.values import (
    flatten_with_paths as flatten_with_paths,
)
from towerstrategy._tensorflow.values import (
    is_eager as is_eager,
)
from towerstrategy._tensorflow.values import (
    regroup as regroup,
)
from towerstrategy._tensorflow.values import (
    select_replica as select_replica,
)
from towerstrategy._tensorflow.values import (
    update_regroup as update_regroup,
)
from towerstrategy._tensorflow.values import (
    value_container as value_container,
)
from towerstrategy._tensorflow.variables import PRIVATE_NAMES as _VARIABLES
from towerstrategy._tensorflow.variables import (
    BaseResourceVariable as BaseResourceVariable,
)
from towerstrategy._tensorflow.variables import (
    DistributedVariable as DistributedVariable,
)
from towerstrategy._tensorflow.variables import (
    ResourceVariable as ResourceVariable,
)
from towerstrategy._tensorflow.variables import (
    SyncOnReadSaveable as SyncOnReadSaveable,
)
from towerstrategy._tensorflow.variables import (
    SyncOnReadVariable as SyncOnReadVariable,
)
from towerstrategy._tensorflow.variables import (
    VariableWatcher as VariableWatcher,
)
from towerstrategy._tensorflow.variables import (
    anonymous_variable as anonymous_variable,
)
from towerstrategy._tensorflow.variables import (
    is_checkpoint_value as is_checkpoint_value,
)
from towerstrategy._tensorflow.variables import (
    is_saving_one_copy as is_saving_one_copy,
)
from towerstrategy._tensorflow.variables import (
    is_unread_variable as is_unread_variable,
)
from towerstrategy._tensorflow.variables import (
    is_variable as is_variable,
)
from towerstrategy._tensorflow.variables import (
    replace_resource as replace_resource,
)
from towerstrategy._tensorflow.variables import (
    share_dependencies as share_dependencies,
)
from towerstrategy._tensorflow.variables import (
    shared_variable_creator_for as shared_variable_creator_for,
)
from towerstrategy._tensorflow.variables import (
    tell_read as tell_read,
)
from towerstrategy._tensorflow.variables import (
    variable_creator_scope as variable_creator_scope,
)
from towerstrategy._tensorflow.wrapping import (
    wrap as wrap,
)

PRIVATE_NAMES: dict[str, str] = {
    **_COMPILING,
    **_DATA,
    **_DRAWS,
    **_ENDS,
    **_ERRORS,
    **_FUNCTIONS,
    **_GRAPHS,
    **_IMPORTING,
    **_LOSSES,
    **_DEVICES,
    **_MACHINES,
    **_PARTITIONING,
    **_SEEDS,
    **_STRATEGIES,
    **_THREADS,
    **_VALUES,
    **_VARIABLES,
}
