"""The replica context of a tower: what it is, and its sync points.

Goes in: a tower's number, the shares of the batch, and the call it belongs to (:mod:`call`).  Comes
out: what ``tf.distribute.get_replica_context()`` gives there.  At their sync points
(``merge_call``) the function given there runs once, in cross-replica context, on the merge device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.contexts import call as call_lib, known
from towerstrategy.merge import shares as shares_lib


class TowerContext(known.Known, tf.distribute.ReplicaContext):
    """The replica context of one tower; what it knows of its rows is in :mod:`known`.

    Attributes:
      graph: the graph in which the replica function is traced; None where it runs eagerly.
      asked: whether the replica function knows how many replicas there are.
      stage_run: the run of the model that runs, see _keras/stages.py.
    """

    def __init__(self, strategy: tf.distribute.Strategy, tower: int, shares: shares_lib.Shares,
                 call: call_lib.Call) -> None:
        tf.distribute.ReplicaContext.__init__(self, strategy, tower)
        self._tower, self.shares = tower, shares
        self._call = call
        self.graph: tf.Graph | None = None
        self._reducing = self.asked = False
        self._found: dict[str, Any] = {}
        self._scaled: dict[int, Any] = {}  # losses that are parts of the batch's, by their ids
        self.stage_run: Any = None

    def __enter__(self) -> None:
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        super().__enter__()

    # What the tower is.

    @property
    def tower(self) -> int:
        """This tower's number, a Python int; a function that asks is traced for each tower."""
        self._call.ask()
        return self._tower

    @property
    def _replica_id(self) -> int:
        # TensorFlow picks a replica's part of a distributed value by it.
        return self.tower

    @property
    def device(self) -> str:
        """The full name of this tower's device."""
        self._call.ask()
        return self._strategy.extended.worker_devices[self._tower]

    @property
    def devices(self) -> list[str]:
        return [self.device]

    @property
    def row(self) -> tuple[str, ...]:
        """The devices of this tower's stages; where the others are copies, those of tower 0."""
        return self._strategy.extended.placement.row(self._tower)

    @property
    def count(self) -> int:
        """How many towers there are on this machine."""
        return len(self._strategy.extended.worker_devices)

    @property
    def several(self) -> bool:
        """Whether there is more to a step than one device: towers, stages, machines."""
        extended = self._strategy.extended
        return self.count > 1 or extended.workers is not None or bool(extended.placement.rows)

    def part_of(self, values: Any) -> Any:
        """This tower's part of one part a tower, for callers that treat all towers alike."""
        return values[self._tower]

    # What is traced in it.

    @property
    def is_nested(self) -> bool:
        """Whether a function is being traced here that the replica function calls."""
        return _tf.nested_function(self.graph) is not None

    def mark_scaled(self, loss: Any) -> Any:
        """Remembers that ``loss`` is this tower's part of the whole batch's loss already."""
        self._scaled[id(loss)] = loss
        return loss

    def is_scaled(self, loss: Any) -> bool:
        """Whether ``loss`` went through :meth:`mark_scaled`."""
        return self._scaled.get(id(loss)) is loss

    def check_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Warns, once, where the sum of the towers' gradients is not one device's gradient."""
        self._call.check_gradients(gradients, variables, self.asked)

    def writes_alone(self, variable: Any) -> None:
        """A write to ``variable`` is being traced where the towers cannot sync."""
        variable._written_alone = True
        self._call.note_written(variable)

    def refuse_compiled_write(self, variable: Any) -> None:
        """Complains of a write to ``variable`` in a nested function that XLA is to compile."""
        if self.is_nested and _tf.is_compiled_here():
            raise RuntimeError(
                f"variable {variable.name!r} is written in a tf.function that a tower calls and "
                "that XLA is to compile (jit_compile=True). It is given the variable's value and "
                "cannot write it. Write it outside of that function, or leave jit_compile out.")

    # Its sync points.

    @property
    def can_merge(self) -> bool:
        """Whether the towers can sync here: not inside a nested function or control flow."""
        if self.graph is None:
            return tf.executing_eagerly()
        return tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self.graph

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """As ``tf.distribute.ReplicaContext.all_reduce``."""
        with self._walks_ended():
            return super().all_reduce(reduce_op, value, options)

    def sync(self, merge_fn: Callable[..., Any], *args: Any) -> Any:
        """``merge_call`` for whoever gives its result a gradient of his own."""
        with self._walks_ended():
            return self.merge_call(merge_fn, args=args)

    @contextlib.contextmanager
    def _walks_ended(self) -> Iterator[None]:
        before, self._reducing = self._reducing, True
        try:
            yield
        finally:
            self._reducing = before

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.can_merge:
            raise RuntimeError(call_lib.NESTED_MERGE)
        if self._reducing and not tf.executing_eagerly():
            merge_fn = call_lib.ending_walks(merge_fn)
        return self._call.sync(merge_fn, args, kwargs)
