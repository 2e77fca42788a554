"""Every private TensorFlow name the package uses, in one place.

Goes in: the installed TensorFlow.  Comes out: the names below, for the rest of the package.
Nothing else in ``towerstrategy`` imports ``tensorflow.python``; ``tests/tensorflow_names_test.py``
checks each name, so that a TensorFlow release that moves one fails loudly and here.

Each entry of :data:`PRIVATE_NAMES` says where the name stands upstream and why no public name does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.impl import api as autograph_api
from tensorflow.python.data.ops import iterator_ops, map_op
from tensorflow.python.distribute import (
    collective_util,
    cross_device_utils,
    distribute_lib,
    distribute_utils,
    reduce_util,
    shared_variable_creator,
    values_util,
)
from tensorflow.python.distribute import values as values_lib
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import (
    atomic_function,
    concrete_function,
    polymorphic_function,
)
from tensorflow.python.framework import (
    auto_control_deps_utils,
    composite_tensor,
    func_graph,
    none_tensor,
)
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.ops import (
    control_flow_v2_func_graphs,
    handle_data_util,
    nn_impl_distribute,
    resource_variable_ops,
    summary_ops_v2,
    variable_scope,
)
from tensorflow.python.trackable import base as trackable_base
from tensorflow.python.training import moving_averages
from tensorflow.python.util import nest as private_nest

PRIVATE_NAMES: dict[str, str] = {
    "tensorflow.python.distribute.collective_util:Options":
        "tf.distribute.experimental.CommunicationOptions, whose public name is an alias",
    "tensorflow.python.distribute.cross_device_utils:CollectiveKeys":
        "numbers collective ops; no public name",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher":
        "makes collective ops as MultiWorkerMirroredStrategy does: in one order on every worker, "
        "with a new key for each call of a tf.function",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._all_gather":
        "a gather in eager code too, without the padding of all_gather",
    "tensorflow.python.eager.context:Context.configure_collective_ops":
        "makes this process one worker of a cluster, as "
        "CollectiveAllReduceExtended._initialize_multi_worker does; no public name",
    "tensorflow.python.eager.context:Context.enable_collective_ops": "starts its server",
    "tensorflow.python.eager.context:Context.check_collective_ops_peer_health":
        "asks whether another worker answers, as CollectiveAllReduceExtended._check_health does",
    "tensorflow.python.eager.context:Context.abort_collective_ops":
        "ends what waits for a worker that does not; the same",
    "tensorflow.python.distribute.distribute_lib:UpdateContext":
        "tells TensorFlow's variables that StrategyExtended.update runs; no public counterpart",
    "tensorflow.python.distribute.distribute_lib:_CrossReplicaThreadMode":
        "the cross-replica context that merge_call enters; only scope() is public",
    "tensorflow.python.distribute.distribute_lib:_push_per_thread_mode":
        "enters that context on the current graph",
    "tensorflow.python.distribute.distribute_lib:_pop_per_thread_mode": "leaves it",
    "tensorflow.python.distribute.distribute_lib:StrategyExtendedV1":
        "has read_var, update_non_slot and call_for_each_replica; tf.distribute.StrategyExtended "
        "(V2) lacks them although MirroredStrategy offers them",
    "tensorflow.python.distribute.distribute_utils:regroup":
        "groups per-tower results exactly as TensorFlow groups them",
    "tensorflow.python.distribute.distribute_utils:select_replica": "its inverse",
    "tensorflow.python.distribute.distribute_utils:update_regroup": "what extended.update returns",
    "tensorflow.python.distribute.distribute_utils:value_container": "extended.value_container",
    "tensorflow.python.distribute.shared_variable_creator:make_fn":
        "lets towers 1.. find the variables that tower 0 made",
    "tensorflow.python.distribute.values:PerReplica":
        "the concrete class behind tf.types.experimental.distributed.PerReplica",
    "tensorflow.python.distribute.values:PerReplicaSpec": "its type spec",
    "tensorflow.python.distribute.values:Mirrored": "a value that is the same on several devices",
    "tensorflow.python.distribute.values:DistributedVariable": "base of SyncOnReadVariable",
    "tensorflow.python.distribute.values:SyncOnReadVariable":
        "TensorFlow's own tower-local variable; checkpoints and SavedModel know it",
    "tensorflow.python.distribute.values:_SyncOnReadSaveable":
        "how it is written to a checkpoint and read again",
    "tensorflow.python.distribute.values_util:is_saving_non_distributed":
        "asks whether a SavedModel is being written",
    "tensorflow.python.data.ops.iterator_ops:OwnedIterator": "what iter(dataset) makes",
    "tensorflow.python.data.ops.map_op:_MapDataset":
        "Dataset.map that runs its function in the caller's thread: 10 us an element and not 100",
    "tensorflow.tsl.profiler.protobuf.xplane_pb2:XSpace":
        "reads what tf.profiler.experimental.stop() writes; no public reader",
    "tensorflow.python.autograph.impl.api:tf_convert": "keeps autograph on in the replica function",
    "tensorflow.python.autograph.core.ag_ctx:control_status_ctx": "its argument",
    "tensorflow.python.autograph.core.config:CONVERSION_RULES":
        "autograph's list of packages (Keras among them) whose own code it leaves alone",
    "tensorflow.python.autograph.core.config:DoNotConvert": "an entry of that list",
    "tensorflow.python.autograph.pyct.error_utils:ErrorMetadataBase":
        "an error's ag_error_metadata, from which autograph makes the error that users see",
    "tensorflow.python.eager.context:context": "per-thread eager state handed to tower threads",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function":
        "the class of what tf.function returns",
    "tensorflow.python.framework.func_graph:FuncGraph.function_captures":
        "takes a capture whose value is asked for at each call; FuncGraph.capture_call_time_value "
        "asks in eager code only, and a tower's function calls others while it is traced",
    "tensorflow.python.ops.control_flow_v2_func_graphs:ControlFlowFuncGraph":
        "tells a branch or a loop's body, traced anew each time, from a function, which is kept",
    "tensorflow.python.framework.auto_control_deps_utils:get_read_write_resource_inputs":
        "tells which resources an operation writes, as TensorFlow's own ordering of reads and "
        "writes asks",
    "tensorflow.python.framework.auto_control_deps_utils:RESOURCE_READ_OPS":
        "the operations that write none",
    "tensorflow.python.eager.context:anonymous_name":
        "names a variable that lives as long as somebody has its handle, also in a graph",
    "tensorflow.python.framework.ops:Operation._set_device":
        "places an operation that is there; tf.device places only those made within",
    "tensorflow.python.framework.ops:Operation._update_input":
        "gives an operation another input; only whole graphs can be edited publicly",
    "tensorflow.python.framework.ops:inside_function": "asks whether a function is being traced",
    "tensorflow.python.ops.resource_variable_ops:ResourceVariable":
        "the class of tf.Variable's instances",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable":
        "its base, and that of variables made while a tf.function is traced",
    "tensorflow.python.ops.nn_impl_distribute:compute_average_loss":
        "tf.nn.compute_average_loss, which takes all replicas to have as many rows; others take it "
        "from here",
    "tensorflow.python.ops.nn_impl_distribute:scale_regularization_loss":
        "tf.nn.scale_regularization_loss, which counts a replica without rows; the same",
    "tensorflow.python.ops.summary_ops_v2:_summary_state": "per-thread summary state",
    "tensorflow.python.ops.variable_scope:variable_creator_scope":
        "tf.variable_creator_scope without its deprecation of stacked graphs",
    "tensorflow.python.trackable.base:CheckpointInitialValue":
        "an initial value that a checkpoint gives to a variable made after it was restored",
    "tensorflow.python.trackable.base:Trackable._maybe_initialize_trackable":
        "sets the attributes that share_dependencies gives a second handle on a model",
    "tensorflow.python.ops.variable_scope:variable_scope":
        "the v1 variable scope, handed to tower threads",
    "tensorflow.python.ops.variable_scope:get_variable_scope": "reads it",
    "tensorflow.python.ops.handle_data_util:copy_handle_data":
        "tells a resource's shape and dtype to its copy",
    "tensorflow.python.eager.context:global_seed": "what tf.random.set_seed set, if anything",
    "tensorflow.python.eager.context:FunctionCallOptions":
        "turns the graph optimizer off for a call",
    "tensorflow.python.eager.context:eager_mode": "eager mode within a tower's thread",
    "tensorflow.python.eager.context:ensure_initialized": "starts TensorFlow before threads do",
    "tensorflow.python.framework.composite_tensor:CompositeTensor":
        "base of ragged, sparse and other composite values",
    "tensorflow.python.framework.none_tensor:NoneTensorSpec":
        "the spec of an absent component; tf.NoneTensorSpec is not there in every release",
    "tensorflow.python.ops.resource_variable_ops:_UnreadVariable":
        "what an assign in a function returns",
    "tensorflow.python.distribute.reduce_util:ReduceOp":
        "tf.distribute.ReduceOp, whose public name is an alias",
    "tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction._cached_graph":
        "the Python graph of a function, kept although TensorFlow has the function; no public way "
        "to let go of it",
    "tensorflow.python.eager.polymorphic_function.concrete_function:"
    "ConcreteFunction._get_gradient_function":
        "the gradient of a call, from the function's definition; Operation._gradient_function "
        "holds it",
    "tensorflow.python.framework.func_graph:dismantle_func_graph":
        "frees a graph at once; it is full of cycles",
    "tensorflow.python.framework.ops:Graph._get_function": "the function that an operation calls",
    "tensorflow.python.eager.record:could_possibly_record": "whether any gradient tape is active",
    "tensorflow.python.eager.record:stop_recording":
        "keeps tapes from seeing bookkeeping; no public name",
    "tensorflow.python.framework.ops:EagerTensor": "the class of eager tensors",
    "tensorflow.python.training.moving_averages:assign_moving_average":
        "takes the plain mean over the replicas in its own merge_call, behind "
        "tf.compat.v1.train.ExponentialMovingAverage and tf_keras.backend.moving_average_update; "
        "in towers it is given the mean by share of rows",
    "tensorflow.python.util.nest:flatten_with_joined_string_paths": "names components in errors",
}

ResourceVariable = resource_variable_ops.ResourceVariable
BaseResourceVariable = resource_variable_ops.BaseResourceVariable
SyncOnReadVariable = values_lib.SyncOnReadVariable
SyncOnReadSaveable = values_lib._SyncOnReadSaveable
DistributedVariable = values_lib.DistributedVariable
PerReplica = values_lib.PerReplica
PerReplicaSpec = values_lib.PerReplicaSpec
Mirrored = values_lib.Mirrored
StrategyExtended = distribute_lib.StrategyExtendedV1
UpdateContext = distribute_lib.UpdateContext
OwnedIterator = iterator_ops.OwnedIterator
Function = polymorphic_function.Function
ReduceOp = reduce_util.ReduceOp
CompositeTensor = composite_tensor.CompositeTensor
NoneTensorSpec = none_tensor.NoneTensorSpec

Options = collective_util.Options
CollectiveLauncher: TypeAlias = cross_device_utils.CollectiveReplicaLauncher

# Of all strategies in this process; far from where MultiWorkerMirroredStrategy starts counting.
_collective_keys = cross_device_utils.CollectiveKeys(group_key_start=7000)

# An odd number, so that no two towers get the same multiple of it modulo 2**31.
SEED_STEP = 0x1E3779B1

_CALLERS = frozenset({
    "Case", "If", "PartitionedCall", "StatefulPartitionedCall", "StatelessCase", "StatelessIf",
    "StatelessWhile", "While", "RemoteCall", "SymbolicGradient", "MapDefun"})

# Where the arguments begin: behind the number of a branch.
_FIRST_ARGUMENT = {"If": 1, "StatelessIf": 1, "Case": 1, "StatelessCase": 1}

regroup = distribute_utils.regroup
select_replica = distribute_utils.select_replica
update_regroup = distribute_utils.update_regroup
value_container = distribute_utils.value_container
shared_variable_creator_for = shared_variable_creator.make_fn
is_saving_one_copy = values_util.is_saving_non_distributed
inside_function = framework_ops.inside_function
flatten_with_paths = private_nest.flatten_with_joined_string_paths

# Converting the package's own functions would cost most of the time that tracing takes, and put
# them into the tracebacks of users' errors.  Functions that users hand over are converted as ever.
autograph_config.CONVERSION_RULES = (
    autograph_config.DoNotConvert("towerstrategy"), *autograph_config.CONVERSION_RULES)


@contextlib.contextmanager
def cross_replica_context(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Enters the cross-replica context of ``strategy`` on the current graph and thread."""
    distribute_lib._push_per_thread_mode(distribute_lib._CrossReplicaThreadMode(strategy))
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def start_worker(jobs: dict[str, list[str]], task_type: str, task_id: int, leader: str,
                 protocol: str | None, port: int | None) -> None:
    """Makes this process a worker with a server of its own.

    Args:
      jobs: the addresses of each job's tasks.
      task_type: this process' job.
      task_id: its number there.
      leader: the name of the task that numbers the collective ops' groups.
      protocol: None for gRPC.
      port: where to listen; None for the port that ``jobs`` gives.

    Raises:
      RuntimeError: TensorFlow has started already.
    """
    context = eager_context.context()
    context.configure_collective_ops(collective_leader=leader,
                                     device_filters=(f"/job:{task_type}/task:{task_id}",))
    context.enable_collective_ops(tf.train.ServerDef(
        cluster=tf.train.ClusterSpec(jobs).as_cluster_def(), default_session_config=context.config,
        job_name=task_type, task_index=task_id, protocol=protocol or "grpc", port=port or 0))
    eager_context.ensure_initialized()


def collective_launcher(device: str, workers: int,
                        options: collective_util.Options | None) -> CollectiveLauncher:
    """What makes collective ops on ``device``, one device a worker."""
    return CollectiveLauncher(_collective_keys.get_group_key([device]), workers, _collective_keys,
                              device, options or Options())


def all_reduce(launcher: CollectiveLauncher, value: tf.Tensor) -> tf.Tensor:
    """The sum of the workers' values."""
    return launcher.all_reduce(value)


def all_gather(launcher: CollectiveLauncher, value: tf.Tensor,
               options: collective_util.Options | None = None) -> tf.Tensor:
    """The workers' values, all of one shape, put behind one another."""
    return launcher._all_gather(value, options)


def ask_worker(task: str, seconds: float) -> str | None:
    """Asks a worker of the cluster whether it is there; None for yes, else why not."""
    try:
        eager_context.context().check_collective_ops_peer_health(task, int(1000 * seconds))
    except tf.errors.DeadlineExceededError:
        return f"silent for {seconds:g} s"
    except tf.errors.FailedPreconditionError:
        return "started anew"
    except tf.errors.UnavailableError:
        return "it cannot be reached"
    except tf.errors.OpError as error:
        return error.message
    return None


def end_collectives(message: str) -> None:
    """Makes all collective ops, waiting and to come, raise UnavailableError with ``message``."""
    eager_context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def depends_on(value: tf.Tensor, source: tf.Tensor) -> bool:
    """Whether ``value`` is computed from ``source``, in a traced function or in one around it."""
    waiting, seen = [value], set()
    while waiting:
        tensor = waiting.pop()
        if tensor is source:
            return True
        if is_eager(tensor) or (id(tensor.graph), tensor.name) in seen:
            continue
        seen.add((id(tensor.graph), tensor.name))
        waiting.extend(tensor.op.inputs)
        waiting.extend(outer for outer, inner in getattr(tensor.graph, "captures", ())
                       if inner.name == tensor.name)
    return False


def map_in_place(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """``dataset.map(function)`` without another thread; for functions of an operation or two."""
    return map_op._MapDataset(dataset, function, use_inter_op_parallelism=False)


def give_moving_averages(of_all: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """From now on ``assign_moving_average`` moves towards ``of_all(value)``."""
    original = moving_averages.assign_moving_average
    if hasattr(original, "_towerstrategy_original"):
        return

    @functools.wraps(original)
    def assign_moving_average(variable: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return original(variable, of_all(value), *args, **kwargs)

    assign_moving_average._towerstrategy_original = original  # type: ignore[attr-defined]
    moving_averages.assign_moving_average = assign_moving_average
    tf.__internal__.train.assign_moving_average = assign_moving_average


def read_profile(serialized: bytes) -> Any:
    """The ``XSpace`` that TensorFlow's profiler wrote."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)


def add_note(error: BaseException, note: str, traced: bool) -> None:
    """Adds ``note`` to ``error``, and to the error that autograph will raise in its place.

    Args:
      error: what was raised.
      note: what is to be told.
      traced: whether that was in a function that is being traced.  Autograph raises another error
        with the first one's message, but without its notes.
    """
    metadata = getattr(error, "ag_error_metadata", None)
    if metadata is not None:
        metadata.cause_message += f"\n{note}"
    elif traced and type(error) in _PLAIN_ERRORS and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n{note}",)
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        _tell(error, note)


def _tell(error: Any, note: str) -> None:
    """``add_note`` for Python 3.10, which shows no notes: where it can be, in the message."""
    if isinstance(error, tf.errors.OpError):
        error._message = f"{error.message}\n{note}"  # what its property ``message`` reads
    elif error.__class__.__str__ is Exception.__str__ and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n{note}",)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


# Those whose only argument is their message.
_PLAIN_ERRORS = (ArithmeticError, AssertionError, AttributeError, IndexError, NotImplementedError,
                 RuntimeError, TypeError, ValueError, ZeroDivisionError)


@contextlib.contextmanager
def noting(note: str) -> Iterator[None]:
    """Within, an error gets ``note``."""
    try:
        yield
    except Exception as error:
        add_note(error, note, not tf.executing_eagerly())
        raise


def autograph_convert(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` as autograph would call it from here (unchanged outside converted code)."""
    return autograph_api.tf_convert(fn, ag_ctx.control_status_ctx(), convert_by_default=False)


def clone_function(function: polymorphic_function.Function,
                   python_function: Callable[..., Any]) -> polymorphic_function.Function:
    """A ``tf.function`` with the options of ``function`` around another Python function."""
    return function._clone(python_function=python_function)


def is_jit_compiled(function: Any) -> bool:
    """Whether ``function`` is a ``tf.function`` made with ``jit_compile=True``."""
    return isinstance(function, Function) and bool(function._jit_compile)


class ThreadState:
    """What a tower's thread takes over from the thread that starts it.

    TensorFlow keeps the default graph, eager mode, the variable creators, the summary writer and
    the op callbacks per thread (``tensorflow/python/framework/ops.py``,
    ``eager/context.py``, ``ops/summary_ops_v2.py``).  Make it in the starting thread, then
    ``with state.entered(scope):`` in the tower's.
    """

    def __init__(self) -> None:
        self._eager = tf.executing_eagerly()
        if not self._eager:
            # From here on the graph keeps device, name and control scopes per thread.
            tf.compat.v1.get_default_graph().switch_to_thread_local()
        eager_context.ensure_initialized()
        self._graph = tf.compat.v1.get_default_graph()
        with tf.init_scope():
            self._init_eager = tf.executing_eagerly()
            self._init_graph = tf.compat.v1.get_default_graph()
        self._creators = self._graph._variable_creator_stack[:]
        self._variable_scope = variable_scope.get_variable_scope()
        self._name_scope = self._graph.get_name_scope()
        self._op_callbacks = eager_context.context()._thread_local_data.op_callbacks
        summary = summary_ops_v2._summary_state
        self._summary = {
            name: getattr(summary, name)
            for name in ("step", "writer", "is_recording", "is_recording_distribution_strategy")
        }
        self._filters_tracebacks = tf.debugging.is_traceback_filtering_enabled()

    @property
    def eager(self) -> bool:
        """Whether the towers run eagerly."""
        return self._eager

    @property
    def graph(self) -> tf.Graph:
        """The graph in which the towers run (the eager one outside functions)."""
        return self._graph

    @property
    def name_scope(self) -> str:
        """The name scope of the starting thread, without a trailing slash."""
        return self._name_scope

    @contextlib.contextmanager
    def entered(self, reuse: bool) -> Iterator[None]:
        """Takes the state over; ``reuse`` is the v1 variable scope's."""
        for name, value in self._summary.items():
            setattr(summary_ops_v2._summary_state, name, value)
        eager_context.context()._thread_local_data.op_callbacks = self._op_callbacks
        if self._filters_tracebacks:
            tf.debugging.enable_traceback_filtering()
        else:
            tf.debugging.disable_traceback_filtering()
        with _graph_entered(self._init_graph, self._init_eager), \
                _graph_entered(self._graph, self._eager), \
                variable_scope.variable_scope(self._variable_scope, reuse=reuse):
            self._graph._variable_creator_stack = list(self._creators)
            yield


@contextlib.contextmanager
def _graph_entered(graph: tf.Graph, eager: bool) -> Iterator[None]:
    with graph.as_default():
        if not eager:
            yield
            return
        with eager_context.eager_mode():
            yield


variable_creator_scope = variable_scope.variable_creator_scope


def control_dependencies_of(graph: tf.Graph) -> list[Any]:
    """The control inputs that an operation made now in ``graph`` would get."""
    return list(graph._current_control_dependencies())


@contextlib.contextmanager
def eager_if(eager: bool) -> Iterator[None]:
    """Eager mode where ``eager``, nothing otherwise (``tf.init_scope`` inside a tower)."""
    if not eager:
        yield
        return
    with eager_context.eager_mode():
        yield


def replace_resource(variable: Any, other: Any) -> None:
    """Puts the resource of ``other`` behind ``variable``, whose identity and name stay."""
    variable._handle = other._handle


def share_dependencies(copied: Any, original: Any, but: Collection[str]) -> None:
    """Gives ``copied`` the checkpoint dependencies of ``original`` in containers of its own.

    Args:
      copied: a shallow copy of ``original``; dependencies under the names in ``but`` are its own
        and stay as they are.
      original: a ``Trackable``.
      but: names that are not taken over.
    """
    name = "_self_unconditional_checkpoint_dependencies"
    theirs, ours = vars(original).get(name, []), vars(copied).get(name, [])
    taken = [reference for reference in theirs if reference.name not in but]
    own = [] if ours is theirs else [reference for reference in ours if reference.name in but]
    vars(copied).update(
        _self_unconditional_checkpoint_dependencies=taken + own,
        _self_unconditional_dependency_names=dict(taken + own),
        _self_unconditional_deferred_dependencies={},
        _self_update_uid=-1, _self_name_based_restores=set(), _self_saveable_object_factories={})


def is_eager(tensor: tf.Tensor) -> bool:
    """Whether ``tensor`` holds a value now."""
    return isinstance(tensor, framework_ops.EagerTensor)


def is_checkpoint_value(value: Any) -> bool:
    """Whether ``value`` is an initial value from a checkpoint."""
    return isinstance(value, trackable_base.CheckpointInitialValue)


def is_unread_variable(value: Any) -> bool:
    """Whether ``value`` is what a write to a plain variable returns inside a function."""
    return isinstance(value, resource_variable_ops._UnreadVariable)


def not_recorded() -> Any:
    """Within, no gradient tape of this thread records."""
    return record.stop_recording()


# Operations: 10 kB each; looking for cycles takes a quarter of a second.
_LARGE_GRAPH = 2000


def may_be_recorded() -> bool:
    """Whether a gradient tape may record what runs now."""
    return bool(record.could_possibly_record())


def forget_trace(call: tf.Operation) -> None:
    """Frees the Python graph of the function that ``call`` calls; none of its tensors are usable.

    TensorFlow has the function itself, and would keep the graph for a gradient of the call, which
    is made from the function's definition instead.
    """
    function: atomic_function.AtomicFunction = call.graph._get_function(call.get_attr("f").name)
    call._gradient_function = functools.partial(_gradient_of_call, function)
    graph, function._cached_graph = function._cached_graph, None
    count = operation_count(graph)
    func_graph.dismantle_func_graph(graph)
    if count > _LARGE_GRAPH:
        del graph
        gc.collect()  # operations and their outputs are cycles, too


def _gradient_of_call(function: atomic_function.AtomicFunction, call: tf.Operation,
                      *gradients: Any) -> Any:
    whole = concrete_function.ConcreteFunction(function)
    return whole._get_gradient_function()(call, *gradients)


def operation_count(graph: tf.Graph) -> int:
    """How many operations ``graph`` has."""
    return len(graph.get_operations())


def captures_of(graph: tf.Graph) -> list[tuple[Any, tf.Tensor]]:
    """Pairs of a tensor outside of ``graph`` and what stands for it inside."""
    return list(graph.captures)


def capture(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """What stands for ``tensor`` in ``graph``: itself, or a placeholder if it is from outside."""
    return graph.capture(tensor)


def nested_function(own: tf.Graph | None) -> func_graph.FuncGraph | None:
    """The function that is being traced inside of ``own`` (None: inside of eager code).

    Branches and loops belong to the code around them.  None where there is no such function.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while graph is not own and isinstance(graph,
                                          control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph if graph is not own and isinstance(graph, func_graph.FuncGraph) else None


def capture_at_call(graph: func_graph.FuncGraph, key: str, value: Callable[[], tf.Tensor],
                    spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor of ``graph`` that at each call of the function is what ``value`` gives there.

    Args:
      graph: a function that is being traced.
      key: names the capture; asking again gives the same tensor.
      value: called where the function is called, eagerly or while another is traced.
      spec: of the value, a scalar.
    """
    captures = graph.function_captures
    if key not in captures.by_ref_internal:
        with graph.as_default(), tf.control_dependencies(None):
            placeholder = tf.compat.v1.placeholder(spec.dtype, spec.shape)

        def external() -> list[tf.Tensor]:
            return [tf.convert_to_tensor(value(), spec.dtype)]

        captures.add_or_replace(key, external, placeholder, spec, is_by_ref=True)
    return captures.by_ref_internal[key]


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Hands on what is known of the variable or list behind a resource or variant tensor."""
    if source.dtype in (tf.resource, tf.variant):
        handle_data_util.copy_handle_data(source, target)


def add_control_input(operation: tf.Operation, control: tf.Operation) -> None:
    """Makes ``operation`` wait for ``control``."""
    operation._add_control_input(control)


def set_device(operation: tf.Operation, device: str) -> None:
    """Puts ``operation`` on ``device``, a full name."""
    operation._set_device(device)


def use_instead(before: tf.Tensor, now: tf.Tensor) -> None:
    """Hands ``now`` to every operation of the graph that has ``before`` as an input."""
    for consumer in before.consumers():
        for index, tensor in enumerate(consumer.inputs):
            if tensor is before:
                consumer._update_input(index, now)


def set_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Gives ``operation`` another input."""
    operation._update_input(index, tensor)


def anonymous_variable(dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    """The handle of a new variable, which is freed when nothing in the step needs it any more."""
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape,
                                  shared_name=eager_context.anonymous_name())


def written_resources(operation: tf.Operation) -> Collection[tf.Tensor]:
    """The resources among the inputs of ``operation`` that it writes."""
    _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
    return written


def writers_of(graph: tf.Graph, operation: tf.Operation, index: int) -> set[str]:
    """The types of the operations that write input ``index`` of a call, however deep inside."""
    found: set[str] = set()
    waiting = [(name, index - _FIRST_ARGUMENT.get(operation.type, 0))
               for name in functions_of(operation)]
    seen = set()
    while waiting:
        name, argument = waiting.pop()
        definition = function_definition(graph, name)
        if (name, argument) in seen or definition is None or not (
                0 <= argument < len(definition.signature.input_arg)):
            continue
        seen.add((name, argument))
        given = definition.signature.input_arg[argument].name
        for node in definition.node_def:
            data = [part for part in node.input if not part.startswith("^")]
            places = [place for place, part in enumerate(data) if part == given]
            if node.op in _CALLERS:
                waiting += [(called, place - _FIRST_ARGUMENT.get(node.op, 0))
                            for called in functions_in_attributes(node) for place in places]
            elif places and node.op not in auto_control_deps_utils.RESOURCE_READ_OPS:
                found.add(node.op)
    return found


def functions_of(operation: tf.Operation) -> list[str]:
    """The names of the functions that ``operation`` calls."""
    return functions_in_attributes(operation.node_def) if operation.type in _CALLERS else []


def functions_in_attributes(node: Any) -> list[str]:
    """The names of the functions in a node's attributes."""
    names = []
    for value in node.attr.values():
        if value.HasField("func"):
            names.append(value.func.name)
        names.extend(func.name for func in value.list.func)
    return names


def function_definition(graph: tf.Graph, name: str) -> Any:
    """The FunctionDef of a function of ``graph``, or None."""
    function = graph._get_function(name)
    return None if function is None else function.cached_definition


def asserts(graph: tf.Graph, name: str) -> bool:
    """Whether a function of ``graph`` has an assertion of its own that is not Keras'.

    TensorFlow puts each assertion of a traced function into a function that is called where it
    fails, and the error names the operation in there.
    """
    body = getattr(graph._get_function(name), "graph", None)
    for operation in body.get_operations() if body is not None else ():
        if operation.type == "Assert":
            files = [frame.filename for frame in operation.traceback or ()
                     if "/tensorflow/" not in frame.filename]
            return not files or "keras/src/" not in files[-1]
    return False


def function_graph(graph: tf.Graph, name: str) -> tf.Graph:
    """The traced body of a function of ``graph``."""
    return graph._get_function(name).graph


def graph_of_call(call: tf.Operation) -> tf.Graph | None:
    """The traced body of the function that ``call`` calls, so far as TensorFlow has kept it."""
    return getattr(call.graph._get_function(call.get_attr("f").name), "graph", None)


def wrap_losses(average: Callable[..., Any], regularization: Callable[..., Any],
                gradient: Callable[..., Any]) -> None:
    """Wraps what replica functions of one's own make losses with, once.

    Args:
      average: takes ``tf.nn.compute_average_loss`` and returns what is called instead.
      regularization: the same for ``tf.nn.scale_regularization_loss``.
      gradient: the same for ``tf.GradientTape.gradient``.
    """
    places = (nn_impl_distribute, tf.nn, tf.compat.v1.nn, tf.compat.v2.nn)
    for owners, name, make in ((places, "compute_average_loss", average),
                               (places, "scale_regularization_loss", regularization),
                               ((tf.GradientTape,), "gradient", gradient)):
        original = getattr(owners[0], name)
        if not hasattr(original, "_towerstrategy_original"):
            wrapped: Any = functools.wraps(original)(make(original))
            wrapped._towerstrategy_original = original
            for owner in owners:
                setattr(owner, name, wrapped)


def asked_by_library() -> bool:
    """Whether a library, and not the user's code, has asked the strategy that calls this."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _STRATEGIES:
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES


_STRATEGIES = frozenset({"towerstrategy.extended", "tensorflow.python.distribute.distribute_lib"})
_LIBRARIES = frozenset({"keras", "tf_keras", "tensorflow", "towerstrategy"})


@contextlib.contextmanager
def without_graph_optimizer() -> Iterator[None]:
    """Within, functions called by this thread run as they were traced."""
    context = eager_context.context()
    before = context.function_call_options
    context.function_call_options = _unoptimized(before.config_proto_serialized,
                                                 before.executor_type)
    try:
        yield
    finally:
        context.function_call_options = before


@functools.cache
def _unoptimized(config: bytes, executor_type: str | None) -> Any:
    proto = tf.compat.v1.ConfigProto.FromString(config)
    proto.graph_options.rewrite_options.disable_meta_optimizer = True
    return eager_context.FunctionCallOptions(executor_type, proto)


def global_seed() -> int | None:
    """What ``tf.random.set_seed`` was last given; None where it was not called."""
    return eager_context.global_seed()


def graph_seed() -> int | None:
    """The seed of the graph that is being traced; None in eager code and where none is set."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph().seed


@contextlib.contextmanager
def graph_seeded(seed: int | None, tower: int) -> Iterator[None]:
    """Within, stateful random operations that are traced get a seed of ``tower``'s own."""
    if seed is None or tower == 0:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    graph.seed = (seed + tower * SEED_STEP) % 2**31
    try:
        yield
    finally:
        graph.seed = seed
