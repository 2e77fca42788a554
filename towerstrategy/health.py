"""Whether the other workers still answer, so that none waits for one that is gone.

Goes in: a cluster whose workers have met.  Comes out: nothing, until one of them stops answering:
from then on everything that crosses machines, waiting already or still to come, raises
``tf.errors.UnavailableError``, whose message names that worker.

What asks is TensorFlow's own check, a call that the other worker's server answers whatever its
Python is at.
"""

from __future__ import annotations

import atexit
import threading
from typing import Any

from towerstrategy import _tensorflow as _tf

# Seconds between two questions, seconds to answer one, and how many in a row may stay unanswered.
INTERVAL, ANSWER, TRIES = 5.0, 10.0, 3


def bound() -> float:
    """After how many seconds at most a worker that does not answer has stopped the others."""
    return TRIES * (INTERVAL + ANSWER)


def silent(cluster: Any, seconds: float = ANSWER) -> list[str]:
    """The names of the other workers that do not answer now."""
    return [cluster.named(index) for index in _others(cluster)
            if _tf.ask_worker(cluster.task_of(index), seconds) is not None]


def watch(cluster: Any) -> None:
    """Keeps asking all other workers, each from a thread, until the process ends."""
    ended = threading.Event()
    failing: dict[int, str] = {}
    threads = [threading.Thread(target=_watch, args=(cluster, index, failing, ended), daemon=True,
                                name=f"towerstrategy health of worker {index}")
               for index in _others(cluster)]

    def end() -> None:
        # A thread inside TensorFlow while that is taken down would crash the process.
        ended.set()
        for thread in threads:
            thread.join(2 * ANSWER)

    atexit.register(end)
    for thread in threads:
        thread.start()


def _watch(cluster: Any, index: int, failing: dict[int, str], ended: threading.Event) -> None:
    tries = 0
    while not ended.wait(INTERVAL):
        reason = _tf.ask_worker(cluster.task_of(index), ANSWER)
        if reason is None:
            tries = 0
            failing.pop(index, None)
            continue
        tries += 1
        failing[index] = reason
        if tries == TRIES:
            _tf.end_collectives(_message(cluster, dict(failing)))
            return


def _message(cluster: Any, failing: dict[int, str]) -> str:
    named = "; ".join(f"{cluster.named(index)} ({failing[index]})" for index in sorted(failing))
    return (f"no answer from {named}: ended, stopped or cut off. A step needs all {cluster.count} "
            f"workers. Start all of them again; this one is {cluster.named(cluster.index)}.")


def _others(cluster: Any) -> list[int]:
    return [index for index in range(cluster.count) if index != cluster.index]
