"""TensorFlow's devices, its cluster and its collective operations."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.client import device_lib
from tensorflow.python.distribute import collective_util, cross_device_utils
from tensorflow.python.eager import context as eager_context

from towerstrategy._tensorflow.strategies import Options

# Shared by all strategies of this process; MultiWorkerMirroredStrategy's keys start elsewhere.
_collective_keys = cross_device_utils.CollectiveKeys(group_key_start=7000)


class CollectiveLauncher(cross_device_utils.CollectiveReplicaLauncher):
    """Makes collective ops as MultiWorkerMirroredStrategy does, on one device per worker.

    The ops have the same order on every worker.  Values with one key must have one shape, so each
    op takes a new key whenever it runs.  TensorFlow hands keys to a function when it is called, not
    to each iteration of a loop, nor to functions called in a branch; so a graph counts its keys.
    """

    def __init__(self, device: str, workers: int, options: collective_util.Options | None) -> None:
        super().__init__(_collective_keys.get_group_key([device]), workers, _collective_keys,
                         device, options or Options())
        with tf.device("CPU:0"):  # the next key of a graph; those of eager code are positive
            self._next_key = tf.Variable(tf.int32.min, trainable=False)

    # Concatenates the workers' values, which have the same shape; works in eager code, too.
    all_gather = cross_device_utils.CollectiveReplicaLauncher._all_gather

    def _next_instance_key(self) -> Any:
        if tf.executing_eagerly():
            return super()._next_instance_key()
        with tf.device(self._next_key.device):
            return tf.raw_ops.ResourceCountUpTo(
                resource=self._next_key.handle, limit=tf.int32.max, T=tf.int32)


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
