"""Replica contexts: of a tower, and of code that runs once; finds the one that code runs in.

Goes in: the call of a replica function, which has the towers' shares, and a tower's number.  Comes
out: the object that ``tf.distribute.get_replica_context()`` returns in a tower, or in a step that
has all rows, and functions that find out which of these code runs in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import results, shares as shares_lib
from towerstrategy.placement import kind

NESTED_MERGE = (
    "`merge_call` called while defining a new graph or a tf.function. This happens if the function "
    "passed to `strategy.run()` contains a nested `@tf.function` or a control flow statement "
    "(tf.cond, tf.while_loop, a converted `if` or `for`) with a synchronization point inside, such "
    "as apply_gradients, all_reduce or a write to a variable with aggregation. The towers cannot "
    "sync there. Move the synchronization point out of the nested function, or put the whole "
    "`strategy.run` inside the tf.function or the control flow.")


class Call:
    """A call of a replica function by a single tower; subclasses in ``replicas`` have several."""

    knows_replica_count = False  # whether the replica function has read the number of replicas

    def __init__(self, strategy: tf.distribute.Strategy, shares: shares_lib.Shares) -> None:
        self._strategy, self.shares = strategy, shares

    def sync(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``merge_call``: runs ``merge_fn`` once, with the arguments of all towers."""
        with _tf.cross_replica_context(self._strategy), \
                tf.device(self._strategy.extended.merge_device):
            return merge_fn(self._strategy, *args, **kwargs)

    def of_tower(self, tower: int, name: str, values: Sequence[Any]) -> Any:
        """The value of ``tower`` among ``values``, one for each tower, of the fact ``name``."""
        del name
        return values[tower]

    def total(self, value: Any, device: str) -> tf.Tensor | None:
        """The sum of a value over this machine's towers, on ``device``; None if it takes a sync."""
        del value, device
        return None

    def note_number_read(self) -> None:
        """Called where a tower's number is read as a Python int."""

    def note_written(self, variable: Any) -> None:
        """Called where a tower writes ``variable``, or traces a write, and towers cannot sync."""
        variable._written_alone = True

    def check_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Warns, once, where the sum of the towers' gradients is not one device's gradient."""


# The facts that a nested function, traced by a tower, gets if it is called outside of towers.
_DEFAULTS = {"share": np.float64(1), "filled": np.bool_(True), "number": np.int32(0),
             "seed": np.int32(0)}


class TowerContext(tf.distribute.ReplicaContext):
    """The replica context of one tower.

    The facts about a tower are numbers or scalar tensors.  A ``tf.function`` that this tower traces
    may be called by other towers and for other batches, so a fact in it is a capture that is
    evaluated at each call.

    Attributes:
      index: this tower's number on this machine, for callers that treat all towers alike.
      shares: the shares of all towers, for use at sync points.
      call: the call of the replica function.
      graph: the graph in which the replica function is traced; None if it runs eagerly.
      share: the tower's rows over all rows of the global batch.
      filled: whether the tower has rows.
    """

    share = property(lambda self: self.fact("share"))
    filled = property(lambda self: self.fact("filled"))

    def __init__(self, call: Call, index: int) -> None:
        super().__init__(call._strategy, index)
        self.index, self.shares, self.call = index, call.shares, call
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._facts: dict[str, Any] = {}

    # The tower and its devices.

    @property
    def tower(self) -> int:
        """This tower's number, a Python int; a function that reads it is traced for each tower."""
        self.call.note_number_read()
        return self.index

    # By this attribute TensorFlow selects a replica's part of a distributed value.
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
        """Whether a step runs on several devices: there are several towers, stages or machines."""
        extended = self._strategy.extended
        return self.count > 1 or extended.workers is not None or bool(extended.placement.rows)

    # Facts about the tower.

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """This tower's number, a scalar int32 tensor."""
        return tf.convert_to_tensor(self.fact("number"), name="replica_id_in_sync_group")

    @property
    def may_be_empty(self) -> bool:
        """Whether it is possible that a tower has no rows."""
        return _tf.nested_function(self.graph) is not None or self.shares.may_be_empty

    def own_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """``seed`` (integers), changed to a seed of this tower's own."""
        step = tf.cast(self.fact("seed"), tf.int64) * _tf.SEED_STEP % 2**31
        return tf.bitwise.bitwise_xor(seed, tf.cast(step, seed.dtype))

    def fact(self, name: str) -> Any:
        """The tower's value of a fact in ``_DEFAULTS``; the number is the seed for draws, too."""
        nested = _tf.nested_function(self.graph)
        if nested is not None:
            def of_caller() -> Any:  # of the tower that calls the function, or traces such a call
                tower = current_tower()
                return _DEFAULTS[name] if tower is None else tower.fact(name)

            return _tf.capture_at_call(nested, f"towerstrategy/{name}", of_caller,
                                       tf.TensorSpec([], _DEFAULTS[name].dtype))
        if name not in self._facts:
            self._facts[name] = self.call.of_tower(self.index, name, self._of_all_towers(name))
        return self._facts[name]

    def _of_all_towers(self, name: str) -> list[Any]:
        if name in ("share", "filled"):
            return self.shares.each if name == "share" else self.shares.filled
        return list(np.arange(self.count, dtype="i") + self._strategy.extended.first_replica)

    # Sync points.

    @property
    def can_merge(self) -> bool:
        """Whether the towers can sync here: not inside a nested function or control flow."""
        return tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self.graph

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if str(getattr(reduce_op, "name", reduce_op)).upper() == "MEAN":
            self.call.knows_replica_count = True  # it divides by it
        return super().all_reduce(reduce_op, value, options)

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.can_merge:
            raise RuntimeError(NESTED_MERGE)
        if tf.executing_eagerly():
            return self.call.sync(merge_fn, args, kwargs)
        # No tape records a sync point.  Without this op TensorFlow would walk back from its result,
        # through the inputs of all towers, looking for variables, for each gradient.
        return self.call.sync(lambda *args, **kwargs: results.map_tensors(
            lambda leaf: tf.stop_gradient(leaf) if isinstance(leaf, tf.Tensor) else leaf,
            merge_fn(*args, **kwargs)), args, kwargs)


class OneReplicaContext(tf.distribute.ReplicaContext):
    """The replica context of code that runs once: a step that has all rows, or an update.

    There is one replica, so ``all_reduce`` and ``all_gather`` return their argument.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, 0)

    @property
    def can_merge(self) -> bool:
        """Whether this code is outside of branches and loops."""
        return not _tf.is_in_control_flow()

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del reduce_op, options
        return value

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        del axis, options
        return value

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._strategy.extended.modes.within(one_replica=True):
            return super()._merge_call(merge_fn, args, kwargs)


def current() -> TowerContext | OneReplicaContext | None:
    """The context of the current tower, or of the current step with all rows; else None."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, (TowerContext, OneReplicaContext)) else None


def current_tower() -> TowerContext | None:
    """The context of the current tower; None outside of towers."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, TowerContext) else None


def splitting_tower() -> TowerContext | None:
    """The current tower if a step runs on several devices; else None.

    On one device Keras' own code is right as it is.
    """
    tower = current_tower()
    return tower if tower is not None and tower.several else None


def has_all_rows() -> bool:
    """Whether this code is in a step that is written for one device and has all rows."""
    return isinstance(tf.distribute.get_replica_context(), OneReplicaContext)


def outside_of_towers() -> tf.distribute.Strategy | None:
    """The ``TowerStrategy`` whose scope this code is in, if it is outside of its towers."""
    strategy = tf.distribute.get_strategy()
    outside = kind.is_tower_strategy(strategy) and tf.distribute.in_cross_replica_context()
    return strategy if outside else None


def writer_of(variable: Any) -> TowerContext | None:
    """The current tower, which writes ``variable``; None outside of towers.

    Raises:
      ValueError: the tower and the variable belong to different strategies.
    """
    tower = current_tower()
    if tower is None:
        return None
    if tower.strategy is not variable._distribute_strategy:
        raise ValueError(
            f"variable {variable.name!r} belongs to another strategy: it was made in the scope of "
            f"{variable._distribute_strategy!r}, but is written in a tower of {tower.strategy!r}.")
    return tower
