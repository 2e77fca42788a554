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
import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy import machines, merge, pieces, towers

Aggregation = tf.VariableAggregation

_REPLACING = ("scatter_update", "scatter_min", "scatter_max", "scatter_nd_update",
              "scatter_nd_min", "scatter_nd_max", "batch_scatter_update")
_KERAS_GRAPH = re.compile(r"(^|_)(scratch_graph|keras_graph|build_graph)(_\d+)?$")
_STEPPING = ("scatter_add", "scatter_sub", "scatter_nd_add", "scatter_nd_sub")


class Homes:
    """Chooses the device on which each variable lives.

    With a fixed merge device that is the home of all.  ``balanced`` gives a new variable to the
    tower that holds the fewest bytes.
    """

    def __init__(self, devices: Iterable[str], balanced: bool) -> None:
        self._bytes = dict.fromkeys(devices, 0)
        self._balanced = balanced

    @property
    def balanced(self) -> bool:
        return self._balanced

    def choose(self, size: int) -> str:
        """The home of a new variable of ``size`` bytes."""
        home = min(self._bytes, key=self._bytes.__getitem__)
        self._bytes[home] += size
        return home

    def spread(self, variables: Iterable[TowerVariable]) -> None:
        """Chooses anew, the largest first, for variables that were made one by one.

        A variable is moved once at the most, before it has slots, and not where a traced function
        may have it already.
        """
        movable = [variable for variable in variables
                   if self._balanced and getattr(variable, "_home_may_change", False)]
        for variable in movable:
            self._bytes[home_of(variable)] -= size_of(variable)
            variable._home_may_change = False
        for variable in sorted(movable, key=size_of, reverse=True):
            home = self.choose(size_of(variable))
            if home != home_of(variable):
                move(variable, home)

    def add(self, device: str, size: int) -> None:
        """Counts a variable that lives on ``device`` for another reason."""
        if device in self._bytes:
            self._bytes[device] += size


class TowerVariable(_tf.ResourceVariable):
    """A variable of which there is one copy, at its home, whatever the number of towers.

    It is a real ``tf.Variable``: reads, gradients, checkpoints and SavedModel are TensorFlow's own.
    Only the writes differ, see the module.
    """

    _home_may_change = False

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("a TowerVariable is made by tf.Variable in the scope of a TowerStrategy.")

    @property
    def handle(self) -> tf.Tensor:
        """The resource; a function that holds it would go on reading it after a move."""
        if self._home_may_change and _is_captured():
            self._home_may_change = False
        return super().handle

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
        tower = _tower_of(self)
        if tower is None:
            return plain(self._one(value))
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        if not tower.can_merge:
            return self._write_alone(tower, plain, value)

        # A given name may hold the tower's name scope, and the write is on the merge device.
        plain.keywords["name"] = None

        def merged(_: Any, values: Any) -> Any:
            return plain(self._aggregate(towers.all_values(values, tower.count), tower.shares))

        return tower.merge_call(merged, args=(value,))

    def _scatter(self, method_name: str, slices: tf.IndexedSlices, use_locking: bool,
                 name: Any) -> Any:
        plain = functools.partial(getattr(_tf.ResourceVariable, method_name), self,
                                  use_locking=use_locking, name=name)
        tower = _tower_of(self)
        if tower is None:
            return plain(self._one_of_slices(method_name, slices))
        slices = tf.IndexedSlices(tf.convert_to_tensor(slices.values, dtype=self.dtype),
                                  tf.convert_to_tensor(slices.indices), slices.dense_shape)
        if not tower.can_merge:
            return self._scatter_alone(tower, method_name, plain, slices)

        def merged(_: Any, values: Any) -> Any:
            parts = towers.all_values(values, tower.count)
            return plain(self._aggregate_slices(method_name, self.aggregation, parts, tower.shares))

        return tower.merge_call(merged, args=(slices,))

    def _merges(self, *arguments: Any) -> bool:
        """Whether a write of ``arguments`` is that of several towers, here or from outside."""
        tower = _tower_of(self)
        if tower is not None:
            return tower.several
        return any(isinstance(leaf, tf.distribute.DistributedValues) and not _is_variable(leaf)
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
            with tf.device(home_of(self)):
                depth = tf.size(self._sizes()) + 1 - tf.rank(slices.values)
                indices = pieces.nd_indices(self._sizes(), depth, slices.indices)
            return plain(indices, slices.values)

        tower = _tower_of(self)
        if tower is None:
            values = [leaf for leaf in tf.nest.flatten(arguments)
                      if isinstance(leaf, tf.distribute.DistributedValues)]
            parts = [sliced(*_tf.select_replica(number, arguments))
                     for number in range(len(values[0].values))]
            shares = self._shares_of(values[0])
            return write(self._one_of_slices(method_name, towers.TowerResults(parts, shares)))
        if not tower.can_merge:
            raise RuntimeError(towers.NESTED_MERGE)

        def merged(_: Any, values: Any) -> Any:
            parts = towers.all_values(values, tower.count)
            return write(self._aggregate_slices(method_name, self.aggregation, parts, tower.shares))

        return tower.merge_call(merged, args=(sliced(*arguments),))

    def _strided_slice_assign(self, begin: Any, end: Any, strides: Any, value: Any, name: Any,
                              **masks: Any) -> Any:
        plain = functools.partial(_tf.ResourceVariable._strided_slice_assign, self, name=name)
        where = {"begin": begin, "end": end, "strides": strides, **masks}
        tower = _tower_of(self)
        if tower is None:
            return plain(value=self._one(value), **where)
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        if not tower.several:
            return plain(value=value, **where)
        if not tower.can_merge:
            raise RuntimeError(towers.NESTED_MERGE)
        plain.keywords["name"] = None

        def merged(_: Any, where: Any, value: Any) -> Any:
            parts = {key: towers.all_values(part, tower.count) for key, part in where.items()}
            places = [dict(zip(parts, own)) for own in zip(*parts.values())]
            values = towers.all_values(value, tower.count)
            if self.shape.rank == 0 or tower.shares.workers is None and pieces.are_alike(places):
                return plain(value=self._aggregate(values, tower.shares), **places[0])
            return self._write_elements(places, values, tower.shares)

        return tower.merge_call(merged, args=(where, value))

    def _write_elements(self, places: list[Any], values: list[tf.Tensor],
                        shares: merge.Shares) -> Any:
        """Writes the slices of the towers at ``places`` that are not known to be the same."""
        with tf.device(home_of(self)):
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
                          shares: merge.Shares) -> tf.IndexedSlices:
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
        with tf.device(home_of(self)):
            kept = [merge.filled_slices(part, tower, shares) for tower, part in enumerate(parts)]
            if replaces or aggregation is Aggregation.SUM:
                return shares.across(merge.total(kept))
            steps = method_name in _STEPPING and self._is_floating()
            if steps or aggregation is Aggregation.MEAN:
                return merge.weighted_mean(kept, shares)
            return shares.firsts(kept[0])

    def _aggregate(self, values: list[Any], shares: merge.Shares) -> Any:
        """The one value to write from one a tower, on this variable's home."""
        if len(values) == 1 and shares.workers is None:
            return values[0]
        with tf.device(home_of(self)):
            if self.aggregation is Aggregation.SUM:
                return merge.total_of_filled(values, shares)
            if self._is_floating() and self.aggregation is not Aggregation.ONLY_FIRST_REPLICA:
                return merge.weighted_mean(values, shares)
            return self._first_of(values[0], shares)

    def _first_of(self, value: Any, shares: merge.Shares) -> Any:
        """The value of the first tower of all machines."""
        if self._distribute_strategy.extended.alike_on_all:
            return value
        return shares.firsts(value)

    def _one(self, value: Any) -> Any:
        """A value written from outside the towers; per-replica values merged into one."""
        if not isinstance(value, tf.distribute.DistributedValues) or _is_variable(value):
            return value
        if isinstance(value, _tf.Mirrored):
            return value.values[0]
        if self.aggregation is Aggregation.ONLY_FIRST_REPLICA or not self._is_floating():
            return self._first_of(value.values[0], self._shares_of(value))
        parts = [tf.convert_to_tensor(part, dtype=self.dtype) for part in value.values]
        with tf.device(home_of(self)):
            return merge.weighted_mean(parts, self._shares_of(value))

    def _shares_of(self, value: Any) -> merge.Shares:
        """The shares with which ``strategy.run`` computed a per-replica value; else equal ones."""
        extended = self._distribute_strategy.extended
        if isinstance(value, towers.TowerResults):
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

    def _scatter_alone(self, tower: towers.TowerContext, method_name: str,
                       plain: Callable[..., Any], slices: tf.IndexedSlices) -> Any:
        """A scatter inside control flow, where the towers cannot meet: each writes its part."""
        if not tower.several:
            return plain(slices)
        self._check_alone(tower)
        if self.aggregation not in (Aggregation.NONE, Aggregation.ONLY_FIRST_REPLICA):
            raise RuntimeError(towers.NESTED_MERGE)
        if method_name in _REPLACING and self.aggregation is Aggregation.NONE:
            return plain(merge.slices_if(tower.filled, slices))
        tower.writes_alone(self)
        return plain(slices)

    def _check_alone(self, tower: towers.TowerContext, first: bool = False) -> None:
        """Machines cannot meet in control flow either; a first tower's write is each machine's."""
        if tower.strategy.extended.workers is not None and not first:
            raise RuntimeError(towers.NESTED_MERGE)

    def _write_alone(self, tower: towers.TowerContext, plain: Callable[..., Any],
                     value: tf.Tensor) -> Any:
        """A write inside control flow, where the towers cannot meet.

        Each tower writes for itself, and they merge where they meet next, see :mod:`alone`.
        """
        if not tower.several:
            return plain(value)
        first = self._takes_firsts()
        self._check_alone(tower, first)
        if self.aggregation is Aggregation.SUM:  # of values or of steps: that cannot be told later
            raise RuntimeError(towers.NESTED_MERGE)
        tower.writes_alone(self)
        return plain(value)

    def _takes_firsts(self) -> bool:
        """Whether the rule for writes is tower 0's value."""
        return self.aggregation is Aggregation.ONLY_FIRST_REPLICA or (
            self.aggregation is Aggregation.NONE and not self._is_floating())

    def merged_alone(self, values: list[Any], shares: merge.Shares, before: tf.Tensor) -> Any:
        """The one value to write where each tower has written one for itself.

        Args:
          values: one a tower.
          shares: those of the towers' batch.
          before: the value that the variable had when the towers last met.
        """
        if not self._is_floating() or self._takes_firsts():
            return values[0]
        if shares.may_be_empty:
            values = [tf.where(shares.filled(tower), value, before)
                      for tower, value in enumerate(values)]
        return merge.agreed(values, shares)


class _TowerLocalSaveable(_tf.SyncOnReadSaveable):
    """A tower-local variable in a checkpoint: one value, as of a variable on one device."""

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        del restored_shapes
        value, = restored_tensors
        writes = self._sync_on_read_variable.spread(value)
        return tf.group(*(write for write in writes if write is not None))


class TowerLocalVariable(_tf.SyncOnReadVariable):
    """A variable with a part on every tower, aggregated when it is read outside of them.

    Differs from TensorFlow's ``SyncOnReadVariable`` in two things: a tower without rows leaves its
    part as it is, and a value given to a SUM variable from outside, or restored, goes to tower
    0's part whole (not 1/R to each), so that counts stay exact.
    """

    def _get(self) -> Any:
        tower = towers.current_tower()
        return tower.part_of(self._values) if tower is not None else super()._get()

    def _get_cross_replica(self) -> Any:
        read = self._distribute_strategy.extended.total_read(self)
        return super()._get_cross_replica() if read is None else read

    def _get_on_device_or_primary(self) -> Any:
        tower = towers.current_tower()
        if tower is not None:
            return tower.part_of(self._values)
        return super()._get_on_device_or_primary()

    def assign(self, value: Any, use_locking: bool = False, name: Any = None,
               read_value: bool = True) -> Any:
        if not self._assigned_from_outside():
            kept = self._kept_if_empty(value, lambda: self._get().value())
            return super().assign(kept, use_locking, name, read_value)
        self.spread(tf.cast(tf.convert_to_tensor(value), self.dtype))
        return self if read_value else None

    def spread(self, value: tf.Tensor) -> list[Any]:
        """Writes the parts so that reading them together gives ``value``; returns the writes."""
        whole = self.aggregation is Aggregation.SUM
        writes = []
        for number, part in enumerate(self._values):
            with tf.device(part.device):
                first = self._distribute_strategy.extended.first_replica + number == 0
                kept = value if first or not whole else tf.zeros_like(value)
                writes.append(part.assign(kept, read_value=False))
        return writes

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return dict.fromkeys(super()._gather_saveables_for_checkpoint(), self._saveable)

    def _saveable(self, name: str | None = None) -> _TowerLocalSaveable:
        return _TowerLocalSaveable(self, name or self._common_name)

    def assign_add(self, value: Any, use_locking: bool = False, name: Any = None,
                   read_value: bool = True) -> Any:
        if self._assigned_from_outside():
            return self._first(_tf.ResourceVariable.assign_add, value, read_value)
        kept = self._kept_if_empty(value, lambda: tf.zeros([], self.dtype))
        return super().assign_add(kept, use_locking, name, read_value)

    def assign_sub(self, value: Any, use_locking: bool = False, name: Any = None,
                   read_value: bool = True) -> Any:
        if self._assigned_from_outside():
            return self._first(_tf.ResourceVariable.assign_sub, value, read_value)
        kept = self._kept_if_empty(value, lambda: tf.zeros([], self.dtype))
        return super().assign_sub(kept, use_locking, name, read_value)

    def _first(self, method: Callable[..., Any], value: Any, read_value: bool) -> Any:
        """A step of a sum from outside the towers: the first tower's part takes it."""
        if self._distribute_strategy.extended.first_replica > 0:
            return self if read_value else None
        part = self._values[0]
        with tf.device(part.device):
            method(part, tf.cast(value, self.dtype), read_value=False)
        return self if read_value else None

    def _kept_if_empty(self, value: Any, neutral: Callable[[], tf.Tensor]) -> Any:
        """``value``, or what changes nothing in a tower that has no rows."""
        tower = towers.current_tower()
        if tower is None or not tower.may_be_empty:
            return value
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        return tf.where(tower.filled, value, neutral())

    def _assigned_from_outside(self) -> bool:
        _tower_of(self)  # which raises in a tower of another strategy
        if _tf.is_saving_one_copy() or self.aggregation is not Aggregation.SUM:
            return False
        context = tf.distribute.get_replica_context()
        return context is None or context.strategy is not self._distribute_strategy

    def __repr__(self) -> str:
        parts = ", ".join(part.device for part in self._values)
        return (f"<TowerLocalVariable {self.name!r} shape={self.shape} dtype={self.dtype.name} "
                f"aggregation={self.aggregation.name}, a part on each of {parts}>")

    __str__ = __repr__


def mean_of_towers(value: Any) -> Any:
    """In a tower, the mean over all towers by share of rows; elsewhere ``value``."""
    tower = towers.current_tower()
    if tower is None or not tower.several:
        return value

    def merged(_: Any, values: Any) -> Any:
        return merge.weighted_mean(towers.all_values(values, tower.count), tower.shares)

    return tower.merge_call(merged, args=(tf.convert_to_tensor(value),))


def create(strategy: tf.distribute.Strategy, homes: Homes, next_creator: Callable[..., Any],
           **kwargs: Any) -> Any:
    """Makes a variable of ``strategy``; the arguments are those of a variable creator.

    Raises:
      ValueError: ``synchronization=NONE``, which no strategy can honour, or an unknown value.
    """
    kwargs.pop("experimental_batch_initialization", None)
    kwargs.pop("caching_device", None)
    colocate_with = kwargs.pop("colocate_with", None)
    on_read = _check_modes(kwargs)
    devices = strategy.extended.worker_devices
    workers = strategy.extended.workers
    if on_read and (len(devices) > 1 or workers is not None):
        return _create_tower_local(strategy, devices, next_creator, kwargs)
    if workers is not None:
        kwargs["initial_value"] = _chiefs_initial_value(workers, **kwargs)
    home = _home_for(homes, colocate_with, kwargs)
    with tf.device(home), _outside_tower_scope():
        variable = next_creator(**kwargs)
    if not isinstance(variable, _tf.BaseResourceVariable):
        return variable
    if workers is not None and not tf.executing_eagerly():
        variable.chiefs_initial_value = kwargs["initial_value"]
    _check_mean(kwargs["aggregation"], variable.dtype)
    variable._home_may_change = colocate_with is None and tf.executing_eagerly()
    return into_tower_variable(variable, strategy, home)


def into_tower_variable(variable: tf.Variable, strategy: tf.distribute.Strategy,
                        home: str | None = None) -> TowerVariable:
    """Turns a resource variable into ``strategy``'s own, in place: same object, value and place."""
    variable.__class__ = TowerVariable
    variable._distribute_strategy = strategy
    variable._home = home or variable.device
    strategy.extended.track(variable)
    return variable


def make_tower_local(strategy: tf.distribute.Strategy,
                     variable: tf.Variable) -> TowerLocalVariable:
    """A tower-local variable around an existing one: that becomes tower 0's part, state and all."""
    parts = [variable]
    for number, device in enumerate(strategy.extended.worker_devices[1:], start=1):
        zero = variable.aggregation is Aggregation.SUM
        value = tf.zeros_like(variable) if zero else tf.identity(variable)
        with tf.device(device), tf.init_scope():
            # Not tf.Variable: in the scope it would become one with a copy of its own.
            parts.append(_tf.ResourceVariable(
                value, trainable=variable.trainable, dtype=variable.dtype,
                name=f"{variable.name.split(':')[0]}/tower_{number}"))
    return _tower_local(strategy, parts, variable.aggregation)


def move(variable: tf.Variable, device: str) -> None:
    """Moves a resource variable to ``device``: same object, name and value.

    A ``tf.function`` traced before holds the resource that the variable had; trace it anew.

    Raises:
      TypeError: ``variable`` is no resource variable, or tower-local.
    """
    if not isinstance(variable, _tf.BaseResourceVariable):
        raise TypeError("only a variable with one copy can be moved, but got "
                        f"{variable!r} of type {type(variable).__name__}.")
    with tf.init_scope(), tf.device(device):
        # Not tf.Variable: a strategy whose scope is entered would choose another device.
        moved = _tf.ResourceVariable(variable.read_value(), trainable=False, dtype=variable.dtype,
                                     shape=variable.shape, name=variable.name.split(":")[0])
    _tf.replace_resource(variable, moved)
    if isinstance(variable, TowerVariable):
        variable._home = variable.device


def _is_captured() -> bool:
    """Whether what is used here may be captured by a function that stays.

    Keras builds and measures models in graphs of its own, which it throws away.
    """
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    # Branches and loops are graphs of subclasses, which go with the function around them.
    while type(graph) is not tf.__internal__.FuncGraph and hasattr(graph, "outer_graph"):
        graph = graph.outer_graph
    return _KERAS_GRAPH.search(getattr(graph, "name", "")) is None


def home_of(variable: tf.Variable) -> str:
    """The device on which ``variable`` lives."""
    return getattr(variable, "_home", None) or variable.device


def size_of(variable: tf.Variable) -> int:
    """Bytes of ``variable``; 0 where its shape or item size is not known."""
    count = variable.shape.num_elements()
    try:
        return int(count or 0) * variable.dtype.size
    except TypeError:  # strings and variants have no item size
        return 0


def _tower_of(variable: TowerVariable) -> towers.TowerContext | None:
    """The tower that writes to ``variable``, or None where the write is a plain one."""
    tower = towers.current_tower()
    if tower is None:
        return None
    if tower.strategy is not variable._distribute_strategy:
        raise ValueError(
            f"variable {variable.name!r} belongs to another strategy: it was made in the scope of "
            f"{variable._distribute_strategy!r}, but is written in a tower of {tower.strategy!r}.")
    return tower


def _is_variable(value: Any) -> bool:
    return isinstance(value, (tf.Variable, _tf.DistributedVariable))


def _check_modes(kwargs: dict[str, Any]) -> bool:
    """Checks and completes synchronization and aggregation; True for a tower-local variable."""
    name = kwargs.get("name")
    synchronization = kwargs.get("synchronization") or tf.VariableSynchronization.AUTO
    if synchronization is tf.VariableSynchronization.NONE:
        raise ValueError("`NONE` variable synchronization mode is not supported with a strategy. "
                         f"Please change the `synchronization` for variable: {name}")
    if not isinstance(synchronization, tf.VariableSynchronization):
        raise ValueError(f"Invalid variable synchronization mode: {synchronization} for variable: "
                         f"{name}")
    aggregation = kwargs.get("aggregation") or Aggregation.NONE
    if not isinstance(aggregation, (Aggregation, tf.compat.v1.VariableAggregation)):
        raise ValueError(f"Invalid variable aggregation mode: {aggregation} for variable: {name}")
    if synchronization is tf.VariableSynchronization.AUTO:
        synchronization = tf.VariableSynchronization.ON_WRITE
    kwargs["synchronization"] = synchronization
    kwargs["aggregation"] = Aggregation(aggregation.value)
    return synchronization is tf.VariableSynchronization.ON_READ


def _check_mean(aggregation: tf.VariableAggregation, dtype: tf.DType) -> None:
    """Raises ``ValueError`` for a mean of values that have none, as TensorFlow does."""
    if aggregation is Aggregation.MEAN and not (dtype.is_floating or dtype.is_complex):
        raise ValueError(
            "creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype is "
            f"not supported, please use a different aggregation or dtype (got {dtype.name})")


def _create_tower_local(strategy: tf.distribute.Strategy, devices: tuple[str, ...],
                        next_creator: Callable[..., Any],
                        kwargs: dict[str, Any]) -> TowerLocalVariable:
    parts: list[tf.Variable] = []
    name = kwargs.get("name")
    workers = strategy.extended.workers
    if workers is not None:
        kwargs["initial_value"] = _chiefs_initial_value(workers, **kwargs)
    for number, device in enumerate(devices):
        if parts:
            if workers is None:
                kwargs["initial_value"] = functools.partial(_value_of, parts[0])
            first = (parts[0].name or name or "Variable").split(":")[0]
            kwargs["name"] = f"{first}/tower_{number}/"
        with tf.device(device), _outside_tower_scope():
            parts.append(next_creator(**kwargs))
    variable = _tower_local(strategy, parts, kwargs["aggregation"])
    if workers is not None and not tf.executing_eagerly():
        variable.chiefs_initial_value = kwargs["initial_value"]
    return variable


def _chiefs_initial_value(workers: machines.Machines, initial_value: Any, dtype: Any = None,
                          name: str | None = None, **_: Any) -> Any:
    """``initial_value`` as worker 0 has it, asked for when the variable is made."""
    if tf.is_tensor(initial_value) and not _tf.is_eager(initial_value):
        return initial_value  # computed in a function, and so on every worker

    @functools.cache  # asked for once a part, and workers may have different numbers of towers
    def chiefs() -> Any:
        # Out of a function that is being traced: it is not run by making its variables.
        with tf.init_scope():
            value = initial_value() if callable(initial_value) else initial_value
            if _tf.is_checkpoint_value(value):  # read from a file, and so on every worker
                return value
            own = tf.convert_to_tensor(value, dtype=dtype)
            try:
                return workers.chiefs([own])[0]
            except (tf.errors.InvalidArgumentError, tf.errors.InternalError) as error:
                raise ValueError(
                    f"worker {workers.index} makes a variable {name!r} of shape {own.shape} and "
                    f"dtype {own.dtype.name} where another worker does not. All workers must make "
                    f"the same model and optimizer, in the same order. ({error.message})"
                ) from error

    def made() -> Any:
        value = chiefs()
        return _constant(value) if tf.is_tensor(value) and not tf.executing_eagerly() else value

    return made


def _constant(value: tf.Tensor) -> tf.Tensor:
    """An eager tensor as a constant of the graph.

    A function whose variables start from anything else cannot initialize them before it runs, and
    runs in a tf.cond, in which collective ops get no key.
    """
    return tf.constant(value.numpy(), value.dtype)


def _value_of(variable: tf.Variable) -> tf.Tensor:
    return tf.identity(variable.value())


def _tower_local(strategy: tf.distribute.Strategy, parts: list[tf.Variable],
                 aggregation: tf.VariableAggregation) -> TowerLocalVariable:
    variable = TowerLocalVariable(strategy, parts, aggregation)
    strategy.extended.track(variable)
    return variable


def _outside_tower_scope() -> Any:
    """The name scope without the strategy's parts, so that names are those of a single device."""
    parts = tf.get_current_name_scope().split("/")
    kept = "/".join(part for part in parts if part and not towers.OWN_SCOPE.fullmatch(part))
    return tf.name_scope(f"{kept}/" if kept else "")


def _home_for(homes: Homes, colocate_with: Any, kwargs: dict[str, Any]) -> str:
    size = _bytes_of(kwargs) if homes.balanced else 0
    if colocate_with is not None:
        if isinstance(colocate_with, _tf.DistributedVariable):
            colocate_with = colocate_with._primary
        home = home_of(colocate_with)
        colocate_with._home_may_change = False
        homes.add(home, size)
        return home
    return homes.choose(size)


def _bytes_of(kwargs: dict[str, Any]) -> int:
    """Bytes of a variable to be made; an initializer whose result is not known is run for it."""
    shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
    value = kwargs.get("initial_value")
    if shape is None or not tf.TensorShape(shape).is_fully_defined() or dtype is None:
        if callable(value) and not tf.is_tensor(value):
            if tf.executing_eagerly():
                value = kwargs["initial_value"] = value()
            else:
                with tf.__internal__.FuncGraph("initial_value").as_default():
                    value = tf.convert_to_tensor(value())
        value = tf.convert_to_tensor(value, dtype=dtype) if value is not None else None
        shape = value.shape if value is not None else ()
        dtype = value.dtype if value is not None else tf.float32
    dtype = tf.as_dtype(dtype)
    elements = tf.TensorShape(shape).num_elements() or 0
    return 0 if dtype in (tf.string, tf.variant, tf.resource) else elements * dtype.size
