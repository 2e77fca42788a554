"""Whether the other workers still answer, so that none waits for one that is gone.

Goes in: a cluster whose workers have started.  Comes out: nothing, until one stops answering:
from then on everything that crosses machines, waiting already or still to come, raises
``tf.errors.UnavailableError``, which names all that are gone: a worker that ended because of
another may be found first, and from outside they look alike.

It asks by TensorFlow's own check, which a worker's server answers whatever its Python is doing.
"""

from __future__ import annotations

import atexit
import collections
import functools
import threading
import time
import types
from collections.abc import Mapping
from typing import Any

from towerstrategy import _tensorflow as _tf

# Seconds between two questions, seconds to answer one, and how many in a row may stay unanswered.
INTERVAL, ANSWER, TRIES = 5.0, 8.0, 3


def silent(cluster: Any, known: Mapping[int, str] = types.MappingProxyType({})) -> list[str]:
    """The other workers that do not answer now, and why.

    ``known`` says why of those that need not be asked.  No more are asked after :data:`ANSWER`.
    """
    reasons, end = dict(known), time.monotonic() + ANSWER
    for index in cluster.others:
        if index not in reasons and time.monotonic() < end:
            reason = _tf.ask_worker(cluster.task_of(index), 2)
            reasons |= {} if reason is None else {index: reason}
    return [f"{cluster.named(index)} ({reason})" for index, reason in sorted(reasons.items())]


@functools.cache
def watch(cluster: Any) -> None:
    """Keeps asking all other workers, from a thread, until the process ends; once a cluster."""
    ended = threading.Event()
    # One thread for all: TensorFlow's check holds Python's lock while it waits for an answer.
    thread = threading.Thread(target=_watch, args=(cluster, ended), daemon=True,
                              name="towerstrategy health")

    def end() -> None:
        # A thread inside TensorFlow while that is taken down would crash the process.
        ended.set()
        thread.join()

    atexit.register(end)
    thread.start()


def _watch(cluster: Any, ended: threading.Event) -> None:
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
            if reason is not None:  # it is asked again before those behind it
                break


def _message(cluster: Any, gone: list[str]) -> str:
    return (f"no answer from {', '.join(gone)}: ended, stopped or cut off. A step "
            f"needs all {len(cluster.tasks)} workers, so that one that fails ends the others; its "
            "own log says why it failed. Start all of them again; this one is "
            f"{cluster.named(cluster.index)}.")
