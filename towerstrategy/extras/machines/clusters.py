"""Joins this process to a cluster as a worker, and checks that the other workers still answer.

Goes in: ``TF_CONFIG`` or a cluster resolver.  Comes out: a :class:`Cluster`.  :func:`join` starts
TensorFlow's gRPC server and collective ops.  :func:`watch` starts a thread that sends TensorFlow's
health check to the other workers; a worker's server answers it whatever its Python code is doing.
If a worker stops answering, all current and later collectives raise
``tf.errors.UnavailableError``.  The error names all silent workers, because the first one found may
have ended because of another one, and from outside they look alike.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, refused

CHIEF, WORKER = "chief", "worker"
_EXAMPLE = ('{"cluster": {"worker": ["10.0.0.1:2345", "10.0.0.2:2345"]}, '
            '"task": {"type": "worker", "index": 0}}')

# Seconds between two health checks, seconds to answer one, and failures in a row that end it.
INTERVAL, ANSWER, TRIES = 5.0, 8.0, 3


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster, and this process' place in it."""

    # The job, task number and address (host:port) of each worker, the chief first.
    tasks: tuple[tuple[str, int, str], ...]
    index: int  # this process' index in ``tasks``; only worker 0 writes the user's files

    @property
    def addresses(self) -> list[str]:
        return [address for *_, address in self.tasks]

    @property
    def others(self) -> list[int]:
        return [index for index in range(len(self.tasks)) if index != self.index]

    def task_of(self, index: int) -> str:
        """The start of a worker's device names."""
        job, number, _ = self.tasks[index]
        return f"/job:{job}/replica:0/task:{number}"

    def name_of(self, index: int) -> str:
        """The name of a worker in messages."""
        return f"worker {index} ({self.task_of(index)} at {self.addresses[index]})"


_joined: list[Cluster] = []


def resolver_of_environment() -> tf.distribute.cluster_resolver.ClusterResolver | None:
    """The resolver for ``TF_CONFIG``; None if it is not set."""
    config = os.environ.get("TF_CONFIG")
    if not config:
        return None
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()  # parses it on access
    try:
        json.loads(config).keys()
        resolver.cluster_spec(), resolver.task_type, resolver.task_id
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"TF_CONFIG must be JSON such as {_EXAMPLE}, but got {config!r}: "
                         f"{error}") from error
    return resolver


def join(resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
         stages: int = 1) -> Cluster | None:
    """Makes this process a worker of a cluster, once; None if there are not several workers."""
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
            f"this process is {_joined[0].name_of(_joined[0].index)} of {_joined[0].addresses} "
            f"already, but a strategy was asked for {cluster.name_of(cluster.index)} of "
            f"{cluster.addresses}. "
            "A process belongs to one cluster; start another process.")
    try:
        _tf.start_worker(_server(cluster, resolver), cluster.task_of(0))
    except RuntimeError as error:
        raise RuntimeError(
            "a TowerStrategy of several machines was made after TensorFlow had started in this "
            "process, and a worker's server starts with TensorFlow. Make the strategy first thing "
            "after `import tensorflow` (and split_cpu, where it is used), before any tensor, "
            "variable, dataset, model or other strategy is made and before devices are "
            f"listed. ({error})") from error
    except tf.errors.UnknownError as error:
        raise RuntimeError(
            f"{cluster.name_of(cluster.index)} cannot listen on its port. Another process has it, "
            "perhaps an earlier run that has not ended; end it, or give the cluster another port. "
            f"({error.message})") from error
    _joined.append(cluster)
    return cluster


def _server(cluster: Cluster, resolver: Any) -> tf.train.ServerDef:
    """The definition of this process' gRPC server."""
    job, number, _ = cluster.tasks[cluster.index]
    jobs = {kind: [address for other, _, address in cluster.tasks if other == kind]
            for kind, *_ in cluster.tasks}
    return tf.train.ServerDef(
        cluster=tf.train.ClusterSpec(jobs).as_cluster_def(), job_name=job, task_index=number,
        protocol=resolver.rpc_layer or "grpc", port=getattr(resolver, "port", None) or 0)


def place_in(resolver: Any) -> Cluster | None:
    """This process' place in a cluster, without starting anything; None without several workers."""
    spec = resolver.cluster_spec()
    jobs, place = spec.as_dict(), (resolver.task_type, resolver.task_id)
    tasks = [(job, number, spec.task_address(job, number)) for job in (CHIEF, WORKER)
             if job in jobs for number in spec.task_indices(job)]
    if not jobs or len(tasks) < 2 and "ps" not in jobs and place[0] in (None, CHIEF, WORKER):
        return None
    problem = next(_problems(jobs, tasks, place), None)
    if problem is not None:
        raise ValueError(f"{problem}. cluster_resolver (or TF_CONFIG) says that the cluster is "
                         f"{jobs!r}, and this process {place[0]!r} {place[1]!r}.")
    return Cluster(tuple(tasks), [task[:2] for task in tasks].index(place))


def _problems(jobs: dict[str, Any], tasks: list[tuple[str, int, str]],
              place: tuple[Any, Any]) -> Iterator[str]:
    """Errors in a cluster's definition; with wrong addresses workers would wait for each other."""
    if "ps" in jobs:
        yield ('a cluster has parameter servers ("ps"), but a TowerStrategy has none: every worker '
               "keeps the weights. Leave them out")
    if place not in [task[:2] for task in tasks]:
        yield (f'a process must be a "{WORKER}" or "{CHIEF}" of its cluster, each numbered from 0, '
               f"but this one is {place[0]!r} {place[1]!r}")
    addresses = [address for *_, address in tasks]
    for job, number, address in tasks:
        host, _, port = address.rpartition(":")
        if addresses.count(address) > 1 or not (
                host and port.isdecimal() and 0 < int(port) < 1 << 16):
            yield (f"each worker must have an address of its own, with a port from 1 to 65535, as "
                   f"'10.0.0.1:2345', but {job} {number} has {address!r}")


def silent(cluster: Cluster, known: Mapping[int, str]) -> list[str]:
    """The names of the other workers that do not answer now, each with the reason.

    ``known`` has the reasons of silent workers that are not checked again.  Checks stop after
    :data:`ANSWER` seconds.
    """
    reasons, end = dict(known), time.monotonic() + ANSWER
    for index in cluster.others:
        if index not in reasons and time.monotonic() < end:
            reason = _tf.ask_worker(cluster.task_of(index), 2)
            reasons |= {} if reason is None else {index: reason}
    return [f"{cluster.name_of(index)} ({reason})" for index, reason in sorted(reasons.items())]


@functools.cache
def watch(cluster: Cluster) -> None:
    """Starts a thread that checks all other workers until the process ends, once per cluster."""
    ended = threading.Event()
    # One thread for all: TensorFlow's check holds Python's lock while it waits for an answer.
    thread = threading.Thread(target=_watch, args=(cluster, ended), daemon=True,
                              name="towerstrategy health")

    def end() -> None:
        # If the thread were in TensorFlow during the shutdown, the process would crash.
        ended.set()
        thread.join()

    atexit.register(end)
    thread.start()


def _watch(cluster: Cluster, ended: threading.Event) -> None:
    """Checks the other workers in turn; ends the collectives if one stays silent."""
    unanswered: collections.Counter[int] = collections.Counter()
    while not ended.wait(INTERVAL):
        for index in cluster.others:
            reason = _tf.ask_worker(cluster.task_of(index), ANSWER)
            if ended.is_set():
                return
            unanswered[index] = 0 if reason is None else unanswered[index] + 1
            if reason is not None and unanswered[index] == TRIES:
                _tf.end_collectives(_message(cluster, silent(cluster, {index: reason})))
                return
            if reason is not None:  # check it again before the workers after it
                break


def _message(cluster: Cluster, silent_workers: list[str]) -> str:
    return (f"no answer from {', '.join(silent_workers)}: ended, stopped or cut off. A step "
            f"needs all {len(cluster.tasks)} workers, so if one fails, the others end, too; its "
            "own log says why it failed. Start all of them again; this one is "
            f"{cluster.name_of(cluster.index)}.")
