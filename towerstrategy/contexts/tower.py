"""The replica context of a tower: what it is, what it knows of its rows, and its sync points.

Goes in: a tower's number, the shares of the batch for all towers, and the call that it belongs to.
Comes out: what ``tf.distribute.get_replica_context()`` gives there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import shares as shares_lib

NESTED_MERGE = (
    "`merge_call` called while defining a new graph or a tf.function. This happens if the function "
    "passed to `strategy.run()` contains a nested `@tf.function` or a control flow statement "
    "(tf.cond, tf.while_loop, a converted `if` or `for`) with a synchronization point inside, such "
    "as apply_gradients, all_reduce or a write to a variable with aggregation. The towers cannot "
    "sync there. Move the synchronization point out of the nested function, or put the whole "
    "`strategy.run` inside the tf.function or the control flow.")


class Call:
    """A call of a replica function: that of a lone tower; ``replicas`` has those of several.

    Attributes:
      asked: whether the replica function knows how many replicas there are.
    """

    asked = False

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy

    def sync(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``merge_call``: runs ``merge_fn`` once, with what all towers have brought."""
        with _tf.cross_replica_context(self._strategy), \
                tf.device(self._strategy.extended.merge_device):
            return merge_fn(self._strategy, *args, **kwargs)

    def own(self, tower: int, name: str, values: Sequence[Any]) -> Any:
        """What ``tower`` has of values, one a tower, that are known by a name."""
        del name
        return values[tower]

    def total(self, value: Any, device: str) -> tf.Tensor | None:
        """The sum over this machine's towers, on ``device``, of what a tower has; None where only
        a sync point can give it."""
        del value, device
        return None

    def ask(self) -> None:
        """A tower looks at its number as a Python number."""

    def note_written(self, variable: Any) -> None:
        """A tower writes ``variable``, or traces a write to it, where the towers cannot sync."""
        variable._written_alone = True

    def check_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Warns, once, where the sum of the towers' gradients is not one device's gradient."""


# What a nested function that a tower has traced finds, by name, where no tower calls it.
_OUTSIDE = {"share": np.float64(1), "filled": np.bool_(True), "number": np.int32(0),
            "seed": np.int32(0)}


class TowerContext(tf.distribute.ReplicaContext):
    """The replica context of one tower.

    What it knows of itself are numbers or scalar tensors.  A ``tf.function`` that is called inside
    of it is called again by other towers and for other batches, so in there each is a capture whose
    value is asked for at each call.

    Attributes:
      index: this tower's number on this machine, for callers that treat all towers alike.
      shares: the shares of all towers, for at sync points.
      call: the call of the replica function.
      graph: the graph in which the replica function is traced; None where it runs eagerly.
      stage_run: the run of the model that runs, see _keras/stages.py.
      share: the tower's rows over all rows of the global batch.
      filled: whether it has rows.
    """

    share = property(lambda self: self.known("share"))
    filled = property(lambda self: self.known("filled"))

    def __init__(self, strategy: tf.distribute.Strategy, index: int, shares: shares_lib.Shares,
                 call: Call) -> None:
        super().__init__(strategy, index)
        self.index, self.shares, self.call = index, shares, call
        self.graph: tf.Graph | None = None
        self.stage_run: Any = None
        self._found: dict[str, Any] = {}

    def __enter__(self) -> None:
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        super().__enter__()

    # What the tower is.

    @property
    def tower(self) -> int:
        """This tower's number, a Python int; a function that asks is traced for each tower."""
        self.call.ask()
        return self.index

    # TensorFlow picks a replica's part of a distributed value by it.
    _replica_id = tower

    @property
    def devices(self) -> list[str]:
        return [self._strategy.extended.worker_devices[self.tower]]

    @property
    def count(self) -> int:
        """How many towers there are on this machine."""
        return len(self._strategy.extended.worker_devices)

    @property
    def several(self) -> bool:
        """Whether there is more to a step than one device: towers, stages, machines."""
        extended = self._strategy.extended
        return self.count > 1 or extended.workers is not None or bool(extended.placement.rows)

    # What it knows of itself.

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """This tower's number, a scalar int32 tensor."""
        return tf.convert_to_tensor(self.known("number"), name="replica_id_in_sync_group")

    @property
    def may_be_empty(self) -> bool:
        """Whether some tower has, or may turn out to have, no rows."""
        return _tf.nested_function(self.graph) is not None or self.shares.may_be_empty

    def own_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """``seed`` (integers), made this tower's own."""
        step = tf.cast(self.known("seed"), tf.int64) * _tf.SEED_STEP % 2**31
        return tf.bitwise.bitwise_xor(seed, tf.cast(step, seed.dtype))

    def known(self, name: str) -> Any:
        """Its ``"share"``, whether it is ``"filled"``, its ``"number"`` or that as a ``"seed"``."""
        nested = _tf.nested_function(self.graph)
        if nested is not None:
            return _tf.capture_at_call(nested, f"towerstrategy/{name}", functools.partial(
                _known_of_caller, name), tf.TensorSpec([], _OUTSIDE[name].dtype))
        if name not in self._found:
            self._found[name] = self.call.own(self.index, name, self._of_each_tower(name))
        return self._found[name]

    def _of_each_tower(self, name: str) -> list[Any]:
        if name in ("share", "filled"):
            return self.shares.each if name == "share" else self.shares.filled
        return list(np.arange(self.count, dtype="i") + self._strategy.extended.first_replica)

    # Its sync points.

    @property
    def can_merge(self) -> bool:
        """Whether the towers can sync here: not inside a nested function or control flow."""
        return tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self.graph

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.can_merge:
            raise RuntimeError(NESTED_MERGE)
        if tf.executing_eagerly():
            return self.call.sync(merge_fn, args, kwargs)
        return self.call.sync(lambda *args, **kwargs: tf.nest.map_structure(
            _without_gradient, merge_fn(*args, **kwargs)), args, kwargs)


def _known_of_caller(name: str) -> Any:
    """What the tower knows that calls a nested function, or that traces one which does."""
    tower = tf.distribute.get_replica_context()
    return tower.known(name) if isinstance(tower, TowerContext) else _OUTSIDE[name]


def _without_gradient(leaf: Any) -> Any:
    """A result of a sync point, behind which TensorFlow does not look for variables.

    No tape sees what is done at a sync point.  TensorFlow would walk back from there, and, by the
    other towers' inputs, through all of their graph, for each gradient of ``all_reduce`` anew.
    """
    if isinstance(leaf, (_tf.Mirrored, _tf.PerReplica)) and not _tf.is_variable(leaf):
        return type(leaf)(tuple(map(_without_gradient, leaf.values)))
    return tf.stop_gradient(leaf) if isinstance(leaf, tf.Tensor) else leaf
