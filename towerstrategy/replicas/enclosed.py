"""Traces the towers' ops into a function body of their own, called by one op of the caller's graph.

Goes in: a Python function that makes tensors.  Comes out: what it returns, with the tensors of the
op that calls it.

So a trace that is given up leaves no ops behind, and a gradient tape around the call records one
op, whatever threads the towers are traced in.  On several machines the order of the collectives
must be the same everywhere: in a loop, TensorFlow orders those of a function body otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import results


def run(strategy: tf.distribute.Strategy, make: Callable[[], Any], compiles: bool = False) -> Any:
    """What ``make`` returns, called in a function body where one is needed; XLA may compile it."""
    if not (compiles or _tf.may_be_recorded() or strategy.extended.workers is not None):
        return make()
    returned: list[Any] = []

    @tf.function(autograph=False)
    def run_towers() -> list[tf.Tensor]:
        _tf.call_once()
        with _tf.as_in_caller():
            returned.append(make())
        if compiles:
            strategy.extended.xla.mark(tf.compat.v1.get_default_graph())
        return results.tensors_in(returned[0])

    outputs = list(run_towers())
    call = outputs[0].op if outputs else None
    outer = dict(zip(map(id, results.tensors_in(returned[0])), outputs))
    return results.map_tensors(lambda leaf: call if isinstance(leaf, tf.Operation)
                               else outer.get(id(leaf), leaf), returned[0])
