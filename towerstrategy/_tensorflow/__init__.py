"""Every private TensorFlow name that the package uses, by subject.

Goes in: the installed TensorFlow.  Comes out: the names below, for the rest of the package.
Nothing else in ``towerstrategy`` imports ``tensorflow.python``; each name is checked by
``tests/_tensorflow/tensorflow_names_test.py``, so that a TensorFlow release that moves one fails
loudly and here.
"""

from towerstrategy._tensorflow import functions, losses, machines, seeds
from towerstrategy._tensorflow.compiling import (
    PRIVATE_NAMES as _COMPILING,
    compile_by_xla as compile_by_xla,
    has_xla_kernel as has_xla_kernel,
    line_of as line_of,
)
from towerstrategy._tensorflow.data import (
    PRIVATE_NAMES as _DATA,
    OwnedIterator as OwnedIterator,
    Trackable as Trackable,
    enumerate_with as enumerate_with,
    loop_over as loop_over,
    map_in_place as map_in_place,
    over_devices as over_devices,
    read_profile as read_profile,
)
from towerstrategy._tensorflow.devices import (
    PRIVATE_NAMES as _DEVICES,
    current_device as current_device,
    memory_limits as memory_limits,
)
from towerstrategy._tensorflow.ends import (
    PRIVATE_NAMES as _ENDS,
    wait_by_device as wait_by_device,
)
from towerstrategy._tensorflow.errors import (
    PRIVATE_NAMES as _ERRORS,
    add_note as add_note,
    noting as noting,
    with_short_tracebacks as with_short_tracebacks,
)
from towerstrategy._tensorflow.functions import (
    PRIVATE_NAMES as _FUNCTIONS,
    Function as Function,
    asserts as asserts,
    autograph_convert as autograph_convert,
    capture_at_call as capture_at_call,
    clone_function as clone_function,
    forget_trace as forget_trace,
    function_definition as function_definition,
    functions_in_attributes as functions_in_attributes,
    functions_of as functions_of,
    is_compiled_here as is_compiled_here,
    is_in_control_flow as is_in_control_flow,
    is_jit_compiled as is_jit_compiled,
    light_graph_optimizer as light_graph_optimizer,
    may_be_recorded as may_be_recorded,
    nested_function as nested_function,
    not_recorded as not_recorded,
    variables_of_caller as variables_of_caller,
    without_xla as without_xla,
    wrap_gradient_functions as wrap_gradient_functions,
    writers_of as writers_of,
)
from towerstrategy._tensorflow.graphs import (
    PRIVATE_NAMES as _GRAPHS,
    add_control_input as add_control_input,
    capture as capture,
    captures_of as captures_of,
    control_dependencies_of as control_dependencies_of,
    copy_handle_data as copy_handle_data,
    crosses_machines as crosses_machines,
    operation_count as operation_count,
    set_device as set_device,
    set_input as set_input,
    touched_resources as touched_resources,
    written_resources as written_resources,
)
from towerstrategy._tensorflow.importing import (
    PRIVATE_NAMES as _IMPORTING,
    import_nodes as import_nodes,
)
from towerstrategy._tensorflow.losses import (
    PRIVATE_NAMES as _LOSSES,
    wrap_losses as wrap_losses,
)
from towerstrategy._tensorflow.machines import (
    PRIVATE_NAMES as _MACHINES,
    all_gather as all_gather,
    all_reduce as all_reduce,
    ask_worker as ask_worker,
    call_once as call_once,
    collective_launcher as collective_launcher,
    end_collectives as end_collectives,
    hand_keys_to_branches as hand_keys_to_branches,
    start_worker as start_worker,
)
from towerstrategy._tensorflow.partitioning import (
    PRIVATE_NAMES as _PARTITIONING,
    add_function as add_function,
    body_of as body_of,
    called_body as called_body,
    constant_value as constant_value,
    hand_on_all_functions as hand_on_all_functions,
    new_function_graph as new_function_graph,
    op_def as op_def,
    placeholder_like as placeholder_like,
    trace as trace,
    value_as_shape as value_as_shape,
)
from towerstrategy._tensorflow.seeds import (
    PRIVATE_NAMES as _SEEDS,
    SEED_STEP as SEED_STEP,
    OperationSeeds as OperationSeeds,
    global_seed as global_seed,
    graph_seed as graph_seed,
    graph_seeded as graph_seeded,
    operation_seeds_of_caller as operation_seeds_of_caller,
    wrap_generators as wrap_generators,
)
from towerstrategy._tensorflow.strategies import (
    PRIVATE_NAMES as _STRATEGIES,
    Options as Options,
    StrategyExtended as StrategyExtended,
    UpdateContext as UpdateContext,
    cross_replica_context as cross_replica_context,
    no_strategy as no_strategy,
)
from towerstrategy._tensorflow.threads import (
    PRIVATE_NAMES as _THREADS,
    ThreadState as ThreadState,
    eager_if as eager_if,
)
from towerstrategy._tensorflow.values import (
    PRIVATE_NAMES as _VALUES,
    CompositeTensor as CompositeTensor,
    Mirrored as Mirrored,
    NoneTensorSpec as NoneTensorSpec,
    PerReplica as PerReplica,
    PerReplicaSpec as PerReplicaSpec,
    ReduceOp as ReduceOp,
    flatten_with_paths as flatten_with_paths,
    is_eager as is_eager,
    regroup as regroup,
    select_replica as select_replica,
    update_regroup as update_regroup,
    value_container as value_container,
)
from towerstrategy._tensorflow.variables import (
    PRIVATE_NAMES as _VARIABLES,
    BaseResourceVariable as BaseResourceVariable,
    DistributedVariable as DistributedVariable,
    ResourceVariable as ResourceVariable,
    SyncOnReadSaveable as SyncOnReadSaveable,
    SyncOnReadVariable as SyncOnReadVariable,
    anonymous_variable as anonymous_variable,
    is_checkpoint_value as is_checkpoint_value,
    is_saving_one_copy as is_saving_one_copy,
    is_unread_variable as is_unread_variable,
    is_variable as is_variable,
    replace_resource as replace_resource,
    share_dependencies as share_dependencies,
    shared_variable_creator_for as shared_variable_creator_for,
    tell_read as tell_read,
    variable_creator_scope as variable_creator_scope,
)
from towerstrategy._tensorflow.wrapping import (
    Place as Place,
    at_work as at_work,
    enter_work as enter_work,
    keep_wrapped as keep_wrapped,
    leave_work as leave_work,
    owner_name as owner_name,
)

# The functions of TensorFlow that the package replaces.
PLACES = (losses.AVERAGE, losses.REGULARIZATION, seeds.KEYS, functions.RECORD, machines.CAPTURE)
PRIVATE_NAMES: dict[str, str] = {
    **_COMPILING,
    **_DATA,
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
