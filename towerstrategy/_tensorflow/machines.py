"""TensorFlow's devices, its cluster and its collective operations."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.client import device_lib
from tensorflow.python.distribute import collective_util, cross_device_utils
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import control_flow_util_v2

from towerstrategy._tensorflow import wrapping
from towerstrategy._tensorflow.strategies import Options

CAPTURE = wrapping.Place(
    [control_flow_util_v2.CondBranchFuncGraph], "capture_call_time_value",
    "does not hand keys of collective operations to a function that is called in a branch")
_LOOPS = control_flow_util_v2.WhileBodyFuncGraph, control_flow_util_v2.WhileCondFuncGraph
_called_once: weakref.WeakKeyDictionary[tf.Graph, bool] = weakref.WeakKeyDictionary()


def call_once(in_loop: bool = False) -> None:
    """Notes that the function being traced is called once, where it is traced.

    So its collective ops take their keys from the functions around it.  TensorFlow hands keys to a
    function that is called in a loop, but not to one that is called in a branch.

    ``in_loop``: it is called in a loop body, though it is not traced there.
    """
    _called_once[tf.compat.v1.get_default_graph()] = in_loop


# Shared by all strategies of this process; MultiWorkerMirroredStrategy's keys start elsewhere.
_collective_keys = cross_device_utils.CollectiveKeys(group_key_start=7000)


class CollectiveLauncher(cross_device_utils.CollectiveReplicaLauncher):
    """Makes collective ops as MultiWorkerMirroredStrategy does, on one device per worker.

    The ops have the same order on every worker, and a new key for each call of a tf.function and
    each iteration of a loop: all values with one key must have one shape.  They also work in
    branches and in functions called there, to which TensorFlow hands no keys.
    """

    def __init__(self, device: str, workers: int, options: collective_util.Options | None) -> None:
        CAPTURE.wrap(_capture_from_outer)
        super().__init__(_collective_keys.get_group_key([device]), workers, _collective_keys,
                         device, options or Options())
        with tf.device("CPU:0"):  # the next key in a loop; all others are positive
            self.next_in_loops = tf.Variable(tf.int32.min, trainable=False)

    # Concatenates the workers' values, which have the same shape; works in eager code, too.
    all_gather = cross_device_utils.CollectiveReplicaLauncher._all_gather

    def _next_instance_key(self) -> Any:
        graph = _graph_called()
        if graph is not None:
            with contextlib.nullcontext() if tf.executing_eagerly() else graph.as_default():
                return super()._next_instance_key()
        with tf.device(self.next_in_loops.device):
            return tf.raw_ops.ResourceCountUpTo(
                resource=self.next_in_loops.handle, limit=tf.int32.max, T=tf.int32)


def _graph_called() -> tf.Graph | None:
    """The function around the current graph that takes keys when it is called; None in a loop."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, func_graph.FuncGraph) and isinstance(
            graph.outer_graph, func_graph.FuncGraph) and (
            graph.is_control_flow_graph or graph in _called_once):
        if isinstance(graph, _LOOPS) or _called_once.get(graph):
            return None
        graph = graph.outer_graph
    return graph


def _capture_from_outer(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(self.outer_graph, func_graph.FuncGraph):
        return original(self, *args, **kwargs)
    outer = self.outer_graph.capture_call_time_value(*args, **kwargs)
    return tf.nest.map_structure(self.capture, outer)


def start_worker(server: tf.train.ServerDef, leader: str) -> None:
    """Makes this process the worker of ``server``, as MultiWorkerMirroredStrategy does.

    ``leader`` is the task that numbers the groups of collective ops.  Raises ``RuntimeError`` if
    TensorFlow has already started.
    """
    context = eager_context.context()
    context.configure_collective_ops(
        collective_leader=leader,
        device_filters=(f"/job:{server.job_name}/task:{server.task_index}",))
    server.default_session_config.CopyFrom(context.config)
    context.enable_collective_ops(server)
    eager_context.ensure_initialized()


def ask_worker(task: str, seconds: float) -> str | None:
    """Asks a worker of the cluster whether it is alive; returns None, or the reason why not."""
    try:
        eager_context.context().check_collective_ops_peer_health(task, int(1000 * seconds))
    except tf.errors.OpError as error:
        return {tf.errors.DeadlineExceededError: f"silent for {seconds:g} s",
                tf.errors.FailedPreconditionError: "started anew",
                tf.errors.UnavailableError: "it cannot be reached"}.get(type(error), error.message)
    return None


def end_collectives(message: str) -> None:
    """Makes all pending and later collective ops raise UnavailableError with ``message``."""
    eager_context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def current_device() -> str:
    """The full name of the device of the enclosing ``tf.device`` in eager code; "" if none."""
    return eager_context.context().device_name or ""


def memory_limits() -> dict[int, int]:
    """The bytes that each logical GPU may use, by index; tf.config only has the memory in use."""
    devices = device_lib.list_local_devices(eager_context.context().config)
    gpus = (device for device in devices if device.device_type == "GPU")
    return {int(device.name.rpartition(":")[2]): device.memory_limit for device in gpus}
