"""The one copy, and tower-local variables.

Goes in: what TensorFlow's variable creators pass on, and the strategy's placement.  Comes out: for
a variable that is not tower-local a :class:`TowerVariable`, one real resource variable at its home;
for a tower-local one (``synchronization=ON_READ``, metrics) a :class:`TowerLocalVariable` with a
part on every tower.

A write to a :class:`TowerVariable` inside a tower is merged with the other towers' and done once:

=====================  ===================================================================
aggregation            what is written
=====================  ===================================================================
NONE, MEAN (floats)    the mean over the towers, each counted by its share of the batch
NONE (other dtypes)    tower 0's value
NONE (of gradients)    what one device would make of the merged ones
SUM                    the sum over the towers that have rows
ONLY_FIRST_REPLICA     tower 0's value
=====================  ===================================================================

Scatter writes follow the same rules, slice by slice: SUM writes the slices of all towers, in
order, as one device would have done; NONE of ``scatter_update``, ``_min`` and ``_max`` does so too
(doing it twice changes nothing), and of ``scatter_mul`` and ``_div`` takes tower 0's.
``scatter_nd_*`` and ``batch_scatter_update`` do as their namesakes.  A slice (``v[a:b].assign``)
follows the table element by element, over the towers that have rows and wrote it.

A per-replica value that is written from outside the towers is what ``strategy.run`` returned, so it
is merged by the rule of NONE, unless the aggregation is ONLY_FIRST_REPLICA: towers that agree write
what they agree on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import merging
from towerstrategy.merge import shares as shares_lib
from towerstrategy.placement import homes as homes_lib
from towerstrategy.towers import contexts
from towerstrategy.variables import by_gradients, pieces

Aggregation = tf.VariableAggregation

_REPLACING = ("scatter_update", "scatter_min", "scatter_max", "scatter_nd_update",
              "scatter_nd_min", "scatter_nd_max", "batch_scatter_update")
_STEPPING = ("scatter_add", "scatter_sub", "scatter_nd_add", "scatter_nd_sub")


class TowerVariable(_tf.ResourceVariable):
    """A variable of which there is one copy, at its home, whatever the number of towers.

    It is a real ``tf.Variable``: reads, gradients, checkpoints and SavedModel are TensorFlow's own.
    Only the writes differ, see the module.
    """

    _home_may_change = False
    _extreme: str | None = None  # "max" or "min", see rules
    holds_gradients = False  # whether towers have written what they made of gradients

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("a TowerVariable is made by tf.Variable in the scope of a TowerStrategy.")

    @property
    def handle(self) -> tf.Tensor:
        """The resource; a function that holds it would go on reading it after a move."""
        if self._home_may_change and homes_lib.may_be_captured():
            self._home_may_change = False
        value = self._compiled_value()
        return super().handle if value is None else value

    def _compiled_value(self) -> tf.Tensor | None:
        """What stands for this variable in a compiled function that a tower calls; else None.

        XLA reads no variable of another device, so the function is given the value, which is read
        at each call where the variable lives.  It stands for the handle, too: tapes inside of the
        function watch that.
        """
        if not _tf.is_compiled_here():
            return None
        tower = contexts.current_tower()
        nested = None if tower is None else _tf.nested_function(tower.graph)
        if nested is None:
            return None if tower is None else tower.value_in_branch(self)
        return _tf.capture_at_call(nested, f"towerstrategy/value of {id(self)}", self.value,
                                   tf.TensorSpec(self.shape, self.dtype))

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        value = self._compiled_value()
        if value is None:
            return super()._read_variable_op(no_copy)
        _tf.tell_read(self)
        return tf.identity(value)

    def sparse_read(self, indices: Any, name: Any = None) -> tf.Tensor:
        if self._compiled_value() is None:
            return super().sparse_read(indices, name)
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices: Any, name: Any = None) -> tf.Tensor:
        if self._compiled_value() is None:
            return super().gather_nd(indices, name)
        return tf.gather_nd(self.value(), indices, name=name)

    def assign(self, value: Any, use_locking: Any = None, name: Any = None,
               read_value: bool = True) -> Any:
        return self._write(_tf.ResourceVariable.assign, value, use_locking, name, read_value)

    def assign_add(self, delta: Any, use_locking: Any = None, name: Any = None,
                   read_value: bool = True) -> Any:
        return self._write(_tf.ResourceVariable.assign_add, delta, use_locking, name, read_value)

    def assign_sub(self, delta: Any, use_locking: Any = None, name: Any = None,
                   read_value: bool = True) -> Any:
        return self._write(_tf.ResourceVariable.assign_sub, delta, use_locking, name, read_value)

    def scatter_add(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        return self._scatter("scatter_add", sparse_delta, use_locking, name)

    def scatter_sub(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        return self._scatter("scatter_sub", sparse_delta, use_locking, name)

    def scatter_mul(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        return self._scatter("scatter_mul", sparse_delta, use_locking, name)

    def scatter_div(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        return self._scatter("scatter_div", sparse_delta, use_locking, name)

    def scatter_min(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        return self._scatter("scatter_min", sparse_delta, use_locking, name)

    def scatter_max(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        return self._scatter("scatter_max", sparse_delta, use_locking, name)

    def scatter_update(self, sparse_delta: Any, use_locking: bool = False,
                       name: Any = None) -> Any:
        return self._scatter("scatter_update", sparse_delta, use_locking, name)

    def batch_scatter_update(self, sparse_delta: Any, use_locking: bool = False,
                             name: Any = None) -> Any:
        if not self._merges(sparse_delta):
            return super().batch_scatter_update(sparse_delta, use_locking, name)
        return self._scatter_pieces("batch_scatter_update", (sparse_delta,), lambda delta: (
            pieces.batch_indices(delta.indices), delta.values))

    def scatter_nd_add(self, indices: Any, updates: Any, name: Any = None) -> Any:
        return self._scatter_nd("scatter_nd_add", indices, updates, name)

    def scatter_nd_sub(self, indices: Any, updates: Any, name: Any = None) -> Any:
        return self._scatter_nd("scatter_nd_sub", indices, updates, name)

    def scatter_nd_update(self, indices: Any, updates: Any, name: Any = None) -> Any:
        return self._scatter_nd("scatter_nd_update", indices, updates, name)

    def scatter_nd_max(self, indices: Any, updates: Any, name: Any = None) -> Any:
        return self._scatter_nd("scatter_nd_max", indices, updates, name)

    def scatter_nd_min(self, indices: Any, updates: Any, name: Any = None) -> Any:
        return self._scatter_nd("scatter_nd_min", indices, updates, name)

    @property
    def distribute_strategy(self) -> tf.distribute.Strategy:
        """The strategy whose variable this is."""
        return self._distribute_strategy

    def __deepcopy__(self, memo: dict[int, Any]) -> TowerVariable:
        with tf.device(self.device):
            copied = super().__deepcopy__(memo)
        memo[id(self)] = copied
        return into_tower_variable(copied, self._distribute_strategy)

    def __repr__(self) -> str:
        value = ""
        if tf.executing_eagerly() and not self._in_graph_mode:
            value = f", numpy={self.read_value().numpy()!r}"
        return (f"<TowerVariable {self.name!r} shape={self.shape} dtype={self.dtype.name}, one "
                f"copy on {self.device or 'its home'}{value}>")

    def _write(self, method: Callable[..., Any], value: Any, use_locking: Any, name: Any,
               read_value: bool) -> Any:
        plain = functools.partial(method, self, use_locking=use_locking, name=name,
                                  read_value=read_value)
        tower = contexts.writer_of(self)
        if tower is None:
            return plain(self._one(value))
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        if not tower.can_merge:
            tower.refuse_compiled_write(self)
            return self._write_alone(tower, plain, value)

        # A given name may hold the tower's name scope, and the write is on the merge device.
        plain.keywords["name"] = None
        made = by_gradients.find(tower, self, value)
        if made is not None:
            return by_gradients.write(tower, self, made, plain)

        def merged(_: Any, values: Any) -> Any:
            values = contexts.all_values(values, tower.count)
            by_gradients.check_eager(tower, self, values)
            return plain(self._aggregate(values, tower.shares))

        return tower.merge_call(merged, args=(value,))

    def _scatter(self, method_name: str, slices: tf.IndexedSlices, use_locking: bool,
                 name: Any) -> Any:
        plain = functools.partial(getattr(_tf.ResourceVariable, method_name), self,
                                  use_locking=use_locking, name=name)
        tower = contexts.writer_of(self)
        if tower is None:
            return plain(self._one_of_slices(method_name, slices))
        slices = tf.IndexedSlices(tf.convert_to_tensor(slices.values, dtype=self.dtype),
                                  tf.convert_to_tensor(slices.indices), slices.dense_shape)
        if not tower.can_merge:
            tower.refuse_compiled_write(self)
            return self._scatter_alone(tower, method_name, plain, slices)
        made = by_gradients.find(tower, self, slices)
        if made is not None:
            return by_gradients.write(tower, self, made, plain)

        def merged(_: Any, values: Any) -> Any:
            parts = contexts.all_values(values, tower.count)
            return plain(self._aggregate_slices(method_name, self.aggregation, parts, tower.shares))

        return tower.merge_call(merged, args=(slices,))

    @property
    def merges_extremes(self) -> bool:
        """Whether of the towers' values the largest, or smallest, counts."""
        return self._extreme is not None

    def _merges(self, *arguments: Any) -> bool:
        """Whether a write of ``arguments`` is that of several towers, here or from outside."""
        tower = contexts.writer_of(self)
        if tower is not None:
            return tower.several
        return any(isinstance(leaf, tf.distribute.DistributedValues) and not _tf.is_variable(leaf)
                   for leaf in tf.nest.flatten(arguments))

    def _scatter_nd(self, method_name: str, indices: Any, updates: Any, name: Any) -> Any:
        if not self._merges(indices, updates):
            return getattr(super(), method_name)(indices, updates, name)
        return self._scatter_pieces(method_name, (indices, updates), lambda *pair: pair)

    def _scatter_pieces(self, method_name: str, arguments: Any,
                        located: Callable[..., tuple[Any, Any]]) -> Any:
        """``scatter_nd_*`` of what ``located`` (indices, updates) makes of a tower's arguments."""
        name = "scatter_nd_update" if method_name == "batch_scatter_update" else method_name
        plain = functools.partial(getattr(_tf.ResourceVariable, name), self)

        def sliced(*own: Any) -> tf.IndexedSlices:
            indices, updates = located(*own)
            return pieces.flat_slices(self._sizes(), indices,
                                      tf.convert_to_tensor(updates, dtype=self.dtype))

        def write(slices: tf.IndexedSlices) -> Any:
            with tf.device(homes_lib.home_of(self)):
                depth = tf.size(self._sizes()) + 1 - tf.rank(slices.values)
                indices = pieces.nd_indices(self._sizes(), depth, slices.indices)
            return plain(indices, slices.values)

        tower = contexts.writer_of(self)
        if tower is None:
            values = [leaf for leaf in tf.nest.flatten(arguments)
                      if isinstance(leaf, tf.distribute.DistributedValues)]
            parts = [sliced(*_tf.select_replica(number, arguments))
                     for number in range(len(values[0].values))]
            shares = self._shares_of(values[0])
            return write(self._one_of_slices(method_name, contexts.TowerResults(parts, shares)))
        if not tower.can_merge:
            raise RuntimeError(contexts.NESTED_MERGE)

        def merged(_: Any, values: Any) -> Any:
            parts = contexts.all_values(values, tower.count)
            return write(self._aggregate_slices(method_name, self.aggregation, parts, tower.shares))

        return tower.merge_call(merged, args=(sliced(*arguments),))

    def _strided_slice_assign(self, begin: Any, end: Any, strides: Any, value: Any, name: Any,
                              **masks: Any) -> Any:
        plain = functools.partial(_tf.ResourceVariable._strided_slice_assign, self, name=name)
        where = {"begin": begin, "end": end, "strides": strides, **masks}
        tower = contexts.writer_of(self)
        if tower is None:
            return plain(value=self._one(value), **where)
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        if not tower.several:
            return plain(value=value, **where)
        if not tower.can_merge:
            raise RuntimeError(contexts.NESTED_MERGE)
        plain.keywords["name"] = None

        def merged(_: Any, where: Any, value: Any) -> Any:
            parts = {key: contexts.all_values(part, tower.count) for key, part in where.items()}
            places = [dict(zip(parts, own)) for own in zip(*parts.values())]
            values = contexts.all_values(value, tower.count)
            if self.shape.rank == 0 or tower.shares.workers is None and pieces.are_alike(places):
                return plain(value=self._aggregate(values, tower.shares), **places[0])
            return self._write_elements(places, values, tower.shares)

        return tower.merge_call(merged, args=(where, value))

    def _write_elements(self, places: list[Any], values: list[tf.Tensor],
                        shares: shares_lib.Shares) -> Any:
        """Writes the slices of the towers at ``places`` that are not known to be the same."""
        with tf.device(homes_lib.home_of(self)):
            sizes = self._sizes()
            parts = [pieces.elements(sizes, place, value) for place, value in zip(places, values)]
            if self.aggregation is Aggregation.ONLY_FIRST_REPLICA:
                written = shares.firsts(parts[0])
            elif self.aggregation is Aggregation.SUM:
                written = pieces.total(parts, shares)
            else:
                written = (pieces.mean if self._is_floating() else pieces.first)(parts, shares)
            indices = pieces.nd_indices(sizes, tf.size(sizes), written.indices)
        return _tf.ResourceVariable.scatter_nd_update(self, indices, written.values)

    def _sizes(self) -> tf.Tensor:
        """The shape as an int64 vector."""
        if self.shape.is_fully_defined():
            return tf.constant(self.shape.as_list(), tf.int64)
        return tf.shape(self.read_value(), out_type=tf.int64)

    def _aggregate_slices(self, method_name: str, aggregation: tf.VariableAggregation,
                          parts: list[tf.IndexedSlices],
                          shares: shares_lib.Shares) -> tf.IndexedSlices:
        """The slices to write from those of the towers, on this variable's home."""
        replaces = method_name in _REPLACING
        if replaces and aggregation in (Aggregation.SUM, Aggregation.MEAN):
            raise NotImplementedError(
                f"{method_name} is only supported for mirrored variable (variable created within "
                "certain `tf.distribute.Strategy` scope) with NONE or `ONLY_FIRST_REPLICA` "
                f"aggregation, got: {aggregation}.")
        if len(parts) == 1 and shares.workers is None:
            return parts[0]
        if aggregation is Aggregation.ONLY_FIRST_REPLICA:
            return shares.firsts(parts[0])
        with tf.device(homes_lib.home_of(self)):
            kept = [merging.filled_slices(part, tower, shares) for tower, part in enumerate(parts)]
            if replaces or aggregation is Aggregation.SUM:
                return shares.across(merging.total(kept))
            steps = method_name in _STEPPING and self._is_floating()
            if steps or aggregation is Aggregation.MEAN:
                return merging.weighted_mean(kept, shares)
            return shares.firsts(kept[0])

    def _aggregate(self, values: list[Any], shares: shares_lib.Shares) -> Any:
        """The one value to write from one a tower, on this variable's home."""
        if len(values) == 1 and shares.workers is None:
            return values[0]
        with tf.device(homes_lib.home_of(self)):
            if self._extreme is not None:
                return merging.extreme(self._extreme, values, shares)
            if self.aggregation is Aggregation.SUM:
                return merging.total_of_filled(values, shares)
            if self._is_floating() and self.aggregation is not Aggregation.ONLY_FIRST_REPLICA:
                return merging.weighted_mean(values, shares)
            return self._first_of(values[0], shares)

    def _first_of(self, value: Any, shares: shares_lib.Shares) -> Any:
        """The value of the first tower of all machines."""
        if self._distribute_strategy.extended.alike_on_all:
            return value
        return shares.firsts(value)

    def _one(self, value: Any) -> Any:
        """A value written from outside the towers; per-replica values merged into one."""
        if not isinstance(value, tf.distribute.DistributedValues) or _tf.is_variable(value):
            return value
        if isinstance(value, _tf.Mirrored):
            return value.values[0]
        if self.aggregation is Aggregation.ONLY_FIRST_REPLICA or not self._is_floating():
            return self._first_of(value.values[0], self._shares_of(value))
        parts = [tf.convert_to_tensor(part, dtype=self.dtype) for part in value.values]
        with tf.device(homes_lib.home_of(self)):
            return merging.weighted_mean(parts, self._shares_of(value))

    def _shares_of(self, value: Any) -> shares_lib.Shares:
        """The shares with which ``strategy.run`` computed a per-replica value; else equal ones."""
        extended = self._distribute_strategy.extended
        if isinstance(value, contexts.TowerResults):
            return value.shares_among(extended.workers)
        return extended.equal_shares()

    def _one_of_slices(self, method_name: str, slices: Any) -> Any:
        if not isinstance(slices, tf.distribute.DistributedValues):
            return slices
        parts = list(slices.values)
        if isinstance(slices, _tf.Mirrored):
            return parts[0]
        shares = self._shares_of(slices)
        if self.aggregation is Aggregation.ONLY_FIRST_REPLICA:
            return shares.firsts(parts[0])
        return self._aggregate_slices(method_name, Aggregation.NONE, parts, shares)

    def _is_floating(self) -> bool:
        return self.dtype.is_floating or self.dtype.is_complex

    def _scatter_alone(self, tower: contexts.TowerContext, method_name: str,
                       plain: Callable[..., Any], slices: tf.IndexedSlices) -> Any:
        """A scatter inside control flow, where the towers cannot meet: each writes its part."""
        if not tower.several:
            return plain(slices)
        self._check_alone(tower)
        if self.aggregation not in (Aggregation.NONE, Aggregation.ONLY_FIRST_REPLICA):
            raise RuntimeError(contexts.NESTED_MERGE)
        if method_name in _REPLACING and self.aggregation is Aggregation.NONE:
            return plain(shares_lib.slices_if(tower.filled, slices))
        tower.writes_alone(self)
        return plain(slices)

    def _check_alone(self, tower: contexts.TowerContext, first: bool = False) -> None:
        """Machines cannot meet in control flow either; a first tower's write is each machine's."""
        if tower.strategy.extended.workers is not None and not first:
            raise RuntimeError(contexts.NESTED_MERGE)

    def _write_alone(self, tower: contexts.TowerContext, plain: Callable[..., Any],
                     value: tf.Tensor) -> Any:
        """A write inside control flow, where the towers cannot meet.

        Each tower writes for itself, and they merge where they meet next, see :mod:`alone`.
        """
        if not tower.several:
            return plain(value)
        first = self._takes_firsts()
        self._check_alone(tower, first)
        if self.aggregation is Aggregation.SUM:  # of values or of steps: that cannot be told later
            raise RuntimeError(contexts.NESTED_MERGE)
        tower.writes_alone(self)
        return plain(value)

    def _takes_firsts(self) -> bool:
        """Whether the rule for writes is tower 0's value."""
        return self.aggregation is Aggregation.ONLY_FIRST_REPLICA or (
            self.aggregation is Aggregation.NONE and not self._is_floating())

    def merged_alone(self, values: list[Any], shares: shares_lib.Shares, before: tf.Tensor) -> Any:
        """The one value to write where each tower has written one for itself.

        Args:
          values: one a tower.
          shares: those of the towers' batch.
          before: the value that the variable had when the towers last met.
        """
        if self._extreme is not None:
            return merging.extreme(self._extreme, [*values, before], shares)
        if not self._is_floating() or self._takes_firsts():
            return values[0]
        if shares.may_be_empty:
            values = [tf.where(shares.filled(tower), value, before)
                      for tower, value in enumerate(values)]
        return merging.agreed(values, shares)


def into_tower_variable(variable: tf.Variable, strategy: tf.distribute.Strategy,
                        home: str | None = None) -> TowerVariable:
    """Turns a resource variable into ``strategy``'s own, in place: same object, value and place."""
    variable.__class__ = TowerVariable
    variable._distribute_strategy = strategy
    variable._home = home or variable.device
    strategy.extended.track(variable)
    return variable
