"""The cluster in which this process is one worker.

Goes in: ``TF_CONFIG`` or a cluster resolver.  Comes out: a :class:`Cluster`, this process' place in
it; :func:`join` starts TensorFlow's gRPC server and collective ops.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, refused

CHIEF, WORKER = "chief", "worker"
_EXAMPLE = ('{"cluster": {"worker": ["10.0.0.1:2345", "10.0.0.2:2345"]}, '
            '"task": {"type": "worker", "index": 0}}')


@dataclasses.dataclass(frozen=True)
class Cluster:
    """This process' place in a cluster."""

    # Of each worker, the chief first, its type, its number in that and its address (host:port).
    tasks: tuple[tuple[str, int, str], ...]
    index: int  # this process' number among all workers; files of 0 are kept

    @property
    def addresses(self) -> list[str]:
        return [address for *_, address in self.tasks]

    @property
    def jobs(self) -> dict[str, list[str]]:
        return {job: [address for kind, _, address in self.tasks if kind == job]
                for job, *_ in self.tasks}

    @property
    def others(self) -> list[int]:
        return [index for index in range(len(self.tasks)) if index != self.index]

    def server(self, resolver: Any) -> tf.train.ServerDef:
        """What is to answer for this process."""
        job, number, _ = self.tasks[self.index]
        return tf.train.ServerDef(
            cluster=tf.train.ClusterSpec(self.jobs).as_cluster_def(), job_name=job,
            task_index=number, protocol=resolver.rpc_layer or "grpc",
            port=getattr(resolver, "port", None) or 0)

    def task_of(self, index: int) -> str:
        """The start of a worker's device names."""
        job, number, _ = self.tasks[index]
        return f"/job:{job}/replica:0/task:{number}"

    def named(self, index: int) -> str:
        """A worker as errors name it."""
        return f"worker {index} ({self.task_of(index)} at {self.addresses[index]})"


_joined: list[Cluster] = []


def resolver_of_environment() -> tf.distribute.cluster_resolver.ClusterResolver | None:
    """What ``TF_CONFIG`` says, or None where it is not set."""
    config = os.environ.get("TF_CONFIG")
    if not config:
        return None
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()  # reads it when asked
    try:
        json.loads(config).keys()
        resolver.cluster_spec(), resolver.task_type, resolver.task_id
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"TF_CONFIG must be JSON such as {_EXAMPLE}, but got {config!r}: "
                         f"{error}") from error
    return resolver


def join(resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
         stages: int = 1) -> Cluster | None:
    """Makes this process a worker of the resolver's cluster, once; None without several workers."""
    if resolver is None:
        return None
    refused.check_type("cluster_resolver", resolver,
                       tf.distribute.cluster_resolver.ClusterResolver,
                       "None or a tf.distribute.cluster_resolver.ClusterResolver")
    cluster = place_in(resolver)
    if cluster is not None and stages > 1:  # before anything has started
        raise ValueError(
            f"devices gives each tower {stages} stages, which does not go with several machines, "
            f"but the cluster (cluster_resolver or TF_CONFIG) has {len(cluster.tasks)} workers: "
            f"{', '.join(cluster.addresses)}. Give each tower one device, or train on one machine.")
    if cluster is None or cluster in _joined:
        return cluster
    if _joined:
        raise RuntimeError(
            f"this process is {_joined[0].named(_joined[0].index)} of {_joined[0].addresses} "
            f"already, but a strategy was asked for {cluster.named(cluster.index)} of "
            f"{cluster.addresses}. "
            "A process belongs to one cluster; start another process.")
    try:
        _tf.start_worker(cluster.server(resolver), cluster.task_of(0))
    except RuntimeError as error:
        raise RuntimeError(
            "a TowerStrategy of several machines was made after TensorFlow had started in this "
            "process, and a worker's server starts with TensorFlow. Make the strategy first thing "
            "after `import tensorflow` (and split_cpu, where it is used), before any tensor, "
            "variable, dataset, model or other strategy is made and before devices are "
            f"listed. ({error})") from error
    except tf.errors.UnknownError as error:
        raise RuntimeError(
            f"{cluster.named(cluster.index)} cannot listen on its port. Another process has it, an "
            "earlier run that has not ended perhaps; end that, or give the cluster another port. "
            f"({error.message})") from error
    _joined.append(cluster)
    return cluster


def place_in(resolver: Any) -> Cluster | None:
    """This process' place, as :func:`join` finds it; nothing is started."""
    spec = resolver.cluster_spec()
    jobs = spec.as_dict()
    if not jobs:
        return None
    given = f"The cluster is {jobs!r}, this task {resolver.task_type!r} {resolver.task_id!r}."
    if "ps" in jobs:
        raise ValueError("the cluster has parameter servers (\"ps\"), but a TowerStrategy has "
                         f"none: every worker keeps the weights. Leave them out. {given}")
    tasks = [(job, number, spec.task_address(job, number)) for job in (CHIEF, WORKER)
             if job in jobs for number in spec.task_indices(job)]
    task_type, task_id = resolver.task_type, resolver.task_id
    if len(tasks) < 2 and task_type in (None, CHIEF, WORKER):
        return None
    if task_type not in (CHIEF, WORKER):
        said = "no task type" if task_type is None else f"task type {task_type!r}"
        raise ValueError(f"cluster_resolver (or TF_CONFIG) gives this process {said}, but it must "
                         f'be "{WORKER}" or "{CHIEF}". {given}')
    places = [task[:2] for task in tasks]
    if (task_type, task_id) not in places:
        there = sum(kind == task_type for kind, _ in places)
        raise ValueError(
            f"cluster_resolver (or TF_CONFIG) says that this process is {task_type} {task_id!r}, "
            f"but the cluster has {there} of type {task_type!r}, numbered from 0. {given}")
    _check_addresses(tasks, given)
    return Cluster(tuple(tasks), places.index((task_type, task_id)))


def _check_addresses(tasks: list[tuple[str, int, str]], given: str) -> None:
    """Raises ``ValueError`` where workers could not reach each other, and would wait for ever."""
    seen: set[str] = set()
    for job, number, address in tasks:
        port = address.rpartition(":")[2] if ":" in address else ""
        if not port.isdecimal() or not 0 < int(port) < 1 << 16 or address in seen:
            what = "of another, too" if address in seen else "without a port from 1 to 65535"
            raise ValueError(
                f"cluster_resolver (or TF_CONFIG) gives {job} {number} the address {address!r}, "
                f"{what}. Each needs its own, such as '10.0.0.1:2345'. {given}")
        seen.add(address)
