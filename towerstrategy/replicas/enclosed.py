"""The towers' work as a function of its own, inside of the one that is being traced.

Goes in: what makes tensors, as a Python function.  Comes out: what it returned, with tensors of the
caller's graph, in which one operation calls it.

So a trace that is of no use leaves nothing behind, and a gradient tape around the call sees one
operation, whatever threads the towers were traced in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import results

Finish = Callable[[tf.Graph], None]


def run(make: Callable[[], Any], finish: Finish | None = None) -> Any:
    """What ``make`` returns.

    Args:
      make: makes tensors.
      finish: called with the function's graph when all is made, or None.
    """
    results_: list[Any] = []

    @tf.function(autograph=False)
    def run_towers() -> list[tf.Tensor]:
        _tf.call_once()
        with _tf.variables_of_caller(), _tf.operation_seeds_of_caller():
            results_.append(make())
        if finish is not None:
            finish(tf.compat.v1.get_default_graph())
        return results.tensors_in(results_[0])

    outer = list(run_towers())
    call = outer[0].op if outer else None
    given = dict(zip(map(id, results.tensors_in(results_[0])), outer))
    return results.map_tensors(lambda leaf: call if isinstance(leaf, tf.Operation)
                               else given.get(id(leaf), leaf), results_[0])
