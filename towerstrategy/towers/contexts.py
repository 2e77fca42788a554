"""The replica context of a tower: what it knows of itself, and where it meets the others.

Goes in: a tower's number, the shares of the batch, and the call it belongs to (:mod:`once` or
:mod:`threads`).  Comes out: what ``tf.distribute.get_replica_context()`` gives there.  Where the
towers meet (``merge_call``) the function given there runs once, in cross-replica context, on the
merge device.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, warned
from towerstrategy.batch import results
from towerstrategy.merge import shares as shares_lib
from towerstrategy.placement import devices as devices_lib, kind
from towerstrategy.sharding import contract
from towerstrategy.sharding.spec import Size
from towerstrategy.towers import known

TowerResults = results.TowerResults

NESTED_MERGE = (
    "`merge_call` called while defining a new graph or a tf.function. This happens if the function "
    "passed to `strategy.run()` contains a nested `@tf.function` or a control flow statement "
    "(tf.cond, tf.while_loop, a converted `if` or `for`) with a synchronization point inside, such "
    "as apply_gradients, all_reduce or a write to a variable with aggregation. The towers cannot "
    "meet there. Move the synchronization point out of the nested function, or put the whole "
    "`strategy.run` inside the tf.function or the control flow.")

# What a tower knows of itself, beside one device's.
_STATES = {"share": contract.SHARE, "rows": contract.State(Size()),
           "number": contract.UNKNOWN, "first_row": contract.UNKNOWN}
# Within a merge: what the optimizer does with the merged gradients.
UPDATE_SCOPE = "tower_update"
TOWER_SCOPE = re.compile(r"\btower_(\d+)_[A-Z]+_\d+\b")
OWN_SCOPE = re.compile(r"tower_\d+_[A-Z]+_\d+|merge|tower_update(_\d+)?|tower_stage_\d+(_\d+)?")


def plain_name(name: str) -> str:
    """The name of an operation, or of a scope, as it is on one device.

    >>> plain_name("tower_1_CPU_2/dense/MatMul")
    'dense/MatMul'
    """
    return "/".join(part for part in name.split("/") if part and not OWN_SCOPE.fullmatch(part))


class TowerContext(known.Known, tf.distribute.ReplicaContext):
    """The replica context of one tower; what it knows of itself is in :mod:`known`."""

    def __init__(self, strategy: tf.distribute.Strategy, tower: int, shares: shares_lib.Shares,
                 call: Any = None) -> None:
        tf.distribute.ReplicaContext.__init__(self, strategy, tower)
        self._tower = tower
        self._call = call
        self.shares = shares
        self._graph: tf.Graph | None = None
        self._reducing = False
        self._met: dict[int, Any] = {}
        self._counts: dict[str, Any] = {}
        self.asked = False  # whether the replica function knows how many replicas there are
        self._scaled: dict[int, Any] = {}  # losses that are parts of the batch's, by their ids
        self.stage_run: Any = None  # of the model that runs, see _keras/stages.py

    def __enter__(self) -> None:
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        super().__enter__()

    @property
    def tower(self) -> int:
        """This tower's number, a Python int; a function that asks is traced for each tower."""
        self._ask()
        return self._tower

    @property
    def _replica_id(self) -> int:
        # TensorFlow picks a replica's part of a distributed value by it.
        return self.tower

    @property
    def count(self) -> int:
        """How many towers there are on this machine."""
        return len(self._strategy.extended.worker_devices)

    @property
    def several(self) -> bool:
        """Whether there is more to a step than one device: towers, stages, machines."""
        extended = self._strategy.extended
        return self.count > 1 or extended.workers is not None or bool(extended.placement.rows)

    @property
    def may_be_empty(self) -> bool:
        """Whether some tower has, or may turn out to have, no rows."""
        return self.is_nested or self.shares.may_be_empty

    @property
    def graph(self) -> tf.Graph | None:
        """The graph in which the replica function is traced; None where it runs eagerly."""
        return self._graph

    @property
    def is_nested(self) -> bool:
        """Whether a function is being traced here that the replica function calls."""
        return _tf.nested_function(self._graph) is not None

    def part_of(self, values: Any) -> Any:
        """This tower's part of one part a tower, for callers that treat all towers alike."""
        return values[self._tower]

    def own(self, values: Any) -> Any:
        """What this tower has of one value a tower."""
        return values[self._tower] if self._call is None else self._call.own(self._tower, values)

    def note_known(self, name: str, value: Any) -> None:
        """Tells the contract what ``value``, one of :data:`known.OUTSIDE`, is."""
        if self._call is not None and tf.is_symbolic_tensor(value):
            self._call.contract.put(value, _STATES.get(name, contract.SAME))

    def check_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Warns, once, where the sum of the towers' gradients is not one device's gradient.

        Of what is traced once for all towers; eager code, and what is traced for each tower, does
        not tell.
        """
        if self._call is None or not self._call.copies:
            return
        known = self._strategy.extended.warned
        evenly = self.shares.are_equal or not self.shares.are_known
        for gradient, variable in zip(gradients, variables):
            problem = self._call.contract.problem(gradient, self.asked and evenly)
            if problem and problem not in known:
                known.add(problem)
                warned.warn(
                    f"in the function given to strategy.run, {problem}. Each tower sees its own "
                    "rows there, and the towers' gradients are summed, so the gradient of "
                    f"{variable.name!r} comes out otherwise than on one device. Decorate the step "
                    "with strategy.function in place of tf.function and strategy.run, and it means "
                    "what it means on one device; or scale a mean over the tower's rows by "
                    "strategy.scale_loss, or gather rows by towerstrategy.whole_batch.")
                return

    def mark_scaled(self, loss: Any) -> Any:
        """Remembers that ``loss`` is this tower's part of the whole batch's loss already."""
        self._scaled[id(loss)] = loss
        return loss

    def is_scaled(self, loss: Any) -> bool:
        """Whether ``loss`` went through :meth:`mark_scaled`."""
        return self._scaled.get(id(loss)) is loss

    @property
    def is_copied(self) -> bool:
        """Whether the other towers are copies of what is traced here."""
        return self._call is not None and self._call.copies

    def _ask(self) -> None:
        if self._call is not None:
            self._call.ask()

    def writes_alone(self, variable: Any) -> None:
        """A write to ``variable`` is being traced where the towers cannot meet, see :mod:`alone`.
        """
        self._strategy.extended.note_written_alone(variable)
        if self._call is not None:
            self._call.note_written(variable)

    def refuse_compiled_write(self, variable: Any) -> None:
        """Complains of a write to ``variable`` in a nested function that XLA is to compile."""
        if self.is_nested and _tf.is_compiled_here():
            raise RuntimeError(
                f"variable {variable.name!r} is written in a tf.function that a tower calls and "
                "that XLA is to compile (jit_compile=True). It is given the variable's value and "
                "cannot write it. Write it outside of that function, or leave jit_compile out.")

    def for_all(self, key: str, make: Callable[[], Any]) -> Any:
        """What ``make``, which is called once, gives: the same for all towers of this call.

        Args:
          key: tells what is asked for from what else is.
          make: called when the first tower asks.
        """
        return make() if self._call is None else self._call.for_all(self._tower, key, make)

    def own_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """``seed`` (integers), made this tower's own."""
        return tf.bitwise.bitwise_xor(seed, tf.cast(self._known("seed_step"), seed.dtype))

    @property
    def device(self) -> str:
        """The full name of this tower's device."""
        self._ask()
        return self._strategy.extended.worker_devices[self._tower]

    @property
    def row(self) -> tuple[str, ...]:
        """The devices of this tower's stages; where the others are copies, those of tower 0."""
        return self._strategy.extended.placement.row(self._tower)

    @property
    def devices(self) -> list[str]:
        return [self.device]

    @property
    def can_merge(self) -> bool:
        """Whether the towers can meet here: not inside a nested function or control flow."""
        if self._graph is None:
            return tf.executing_eagerly()
        return tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self._graph

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """As ``tf.distribute.ReplicaContext.all_reduce``."""
        with self._walks_ended():
            return super().all_reduce(reduce_op, value, options)

    def meet(self, merge_fn: Callable[..., Any], *args: Any) -> Any:
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
            raise RuntimeError(NESTED_MERGE)
        if self._reducing and not tf.executing_eagerly():
            merge_fn = _ending_walks(merge_fn)
        if self._call is not None:
            return self._call.meet(merge_fn, args, kwargs)
        with _tf.cross_replica_context(self._strategy), \
                tf.device(self._strategy.extended.merge_device):
            answer = merge_fn(self._strategy, *args, **kwargs)
        self._met.update((id(leaf), leaf) for leaf in tf.nest.flatten(answer))
        return answer

    def own_result(self, values: tuple[Any]) -> Any:
        """What the only tower of one of several machines returned: its own, unless all met on it.
        """
        value, = values
        differs = isinstance(value, (tf.Tensor, _tf.CompositeTensor)) and id(value) not in self._met
        return TowerResults(values, self.shares) if differs else value


def _ending_walks(merge_fn: Callable[..., Any]) -> Callable[..., Any]:
    """``merge_fn`` with results behind which TensorFlow does not look for variables.

    ``ReplicaContext.all_reduce`` has a gradient of its own, for which TensorFlow walks back from
    the result to the tower's input, and, by the other towers' inputs, through all of their graph:
    with each all-reduce anew.  The walk ends where nothing can be differentiated.
    """
    def ended(leaf: Any) -> Any:
        if isinstance(leaf, (_tf.Mirrored, _tf.PerReplica)):
            return type(leaf)(tuple(ended(part) for part in leaf.values))
        return tf.stop_gradient(leaf) if isinstance(leaf, tf.Tensor) else leaf

    return lambda *args, **kwargs: tf.nest.map_structure(ended, merge_fn(*args, **kwargs))


class MergedContext(tf.distribute.ReplicaContext):
    """The replica context of a step whose gradients are merged already.

    Code written for one replica of many runs in it once, as on a single device: an all-reduce has
    nothing left to reduce, and a ``merge_call`` finds the merged values.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, 0)

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _tf.cross_replica_context(self._strategy):
            return merge_fn(self._strategy, *args, **kwargs)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del reduce_op, options
        return value

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        del axis, options
        return value


class OneReplicaContext(MergedContext):
    """The replica context of a step that is traced once, with all rows: there is one replica.

    A ``merge_call`` runs as in a program without a strategy: so objects that were made in the scope
    and objects that were made outside of it, an optimizer's variables for one, are both served.
    """

    stage_run: Any = None  # of the model that runs, see _keras/stages.py

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _tf.no_strategy():
            return merge_fn(self._strategy, *args, **kwargs)


def current_tower() -> TowerContext | None:
    """The context of the tower that runs here, or None outside of towers."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, TowerContext) else None


def in_merged_context() -> bool:
    """Whether merged gradients are being applied here."""
    return isinstance(tf.distribute.get_replica_context(), MergedContext)


def all_values(value: Any, count: int) -> list[Any]:
    """One value a tower, from what ``merge_call`` grouped (it groups the same object into one)."""
    if isinstance(value, (_tf.PerReplica, _tf.Mirrored)):
        return list(value.values)
    return [value] * count


def error_note(tower: int, placement: devices_lib.Placement, shares: shares_lib.Shares) -> str:
    """What an error says that was raised in a tower."""
    device = placement.towers[tower]
    rows = shares.told(tower)
    none = (" Some operations cannot work on no rows, TensorFlow's convolutions on the CPU among "
            "them: give each batch as many rows as there are towers.")
    return (f"This happened in {placement.name(tower)} on {devices_lib.short_name(device)}"
            + (f", which has {rows}." if rows else ".") + none * rows.startswith("none"))


def merge_error_note(device: str) -> str:
    """What an error says that was raised in the function given to ``merge_call``."""
    return ("This happened where the towers meet (merge_call), on the merge device "
            f"{devices_lib.short_name(device)}.")


def scope_name(tower: int, device: str) -> str:
    """The name scope of a tower's operations, so that TensorFlow's errors name tower and device."""
    return f"tower_{tower}_{devices_lib.short_name(device).replace(':', '_')}"


def writer_of(variable: Any) -> TowerContext | None:
    """The tower that writes to a variable of a strategy; None where the write is a plain one.

    Raises:
      ValueError: a tower of another strategy than the variable's.
    """
    tower = current_tower()
    if tower is None:
        return None
    if tower.strategy is not variable._distribute_strategy:
        raise ValueError(
            f"variable {variable.name!r} belongs to another strategy: it was made in the scope of "
            f"{variable._distribute_strategy!r}, but is written in a tower of {tower.strategy!r}.")
    return tower


def outside_of_towers() -> tf.distribute.Strategy | None:
    """The ``TowerStrategy`` in whose scope, and outside of whose towers, this runs; else None."""
    if not (tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context()):
        return None
    strategy = tf.distribute.get_strategy()
    return strategy if kind.is_tower_strategy(strategy) else None


def splitting_tower() -> TowerContext | None:
    """The current tower where there are several of them, on any machine; None otherwise.

    With one tower Keras' own single-device code is right as it is.
    """
    tower = current_tower()
    return tower if tower is not None and tower.several else None
