"""The one copy of a variable, at its home, whatever the number of towers.

Goes in: a resource variable and its strategy.  Comes out: the same object as a
:class:`TowerVariable`.  A write inside a tower is merged with the other towers' and done once, see
:mod:`written`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.merge import results, shares as shares_lib
from towerstrategy.placement import homes as homes_lib
from towerstrategy.variables import pieces, written

Aggregation = tf.VariableAggregation


class TowerVariable(_tf.ResourceVariable):
    """A variable of which there is one copy, at its home, whatever the number of towers.

    It is a real ``tf.Variable``: reads, gradients, checkpoints and SavedModel are TensorFlow's own.
    Only the writes differ, see the module.
    """

    _home_may_change = False
    _written_alone = False  # by a function that towers call, see alone
    _extreme: str | None = None  # "max" or "min", see rules
    _alike_on_all = False  # whether the first towers of all machines write the same

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
            return None
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

    def batch_scatter_update(self, sparse_delta: Any, use_locking: bool = False,
                             name: Any = None) -> Any:
        if not self._merges(sparse_delta):
            return super().batch_scatter_update(sparse_delta, use_locking, name)
        return self._scatter_nd("batch_scatter_update", lambda delta: (
            pieces.batch_indices(delta.indices), delta.values), sparse_delta)

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
            return plain(written.value_from_outside(self, value))
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        if not tower.can_merge:
            with_others = _has_workers(tower) and not written.takes_firsts(self)
            # Of a sum it could not be told later whether it was of values or of steps.
            self._alone(tower, with_others or self.aggregation is Aggregation.SUM)
            return plain(value)

        # A given name may hold the tower's name scope, and the write is on the merge device.
        plain.keywords["name"] = None
        return _merged(tower, value, lambda values: plain(
            written.value(self, values, tower.shares)))

    def _scatter(self, method_name: str, slices: Any, plain: Callable[[Any], Any]) -> Any:
        tower = contexts.writer_of(self)
        if tower is None:
            return plain(written.slices_from_outside(self, method_name, slices))
        slices = tf.IndexedSlices(tf.convert_to_tensor(slices.values, dtype=self.dtype),
                                  tf.convert_to_tensor(slices.indices))
        if not tower.can_merge:
            replaces = method_name in written.REPLACING and self.aggregation is Aggregation.NONE
            self._alone(tower, _has_workers(tower) or self.aggregation not in (
                Aggregation.NONE, Aggregation.ONLY_FIRST_REPLICA), merges=not replaces)
            return plain(shares_lib.slices_if(tower.filled, slices)
                         if replaces and tower.several else slices)
        return _merged(tower, slices, lambda parts: plain(
            written.slices(self, method_name, parts, tower.shares)))

    def _merges(self, *arguments: Any) -> bool:
        """Whether a write of ``arguments`` is that of several towers, here or from outside."""
        tower = contexts.writer_of(self)
        if tower is not None:
            return tower.several
        return any(isinstance(leaf, tf.distribute.DistributedValues) and not _tf.is_variable(leaf)
                   for leaf in tf.nest.flatten(arguments))

    def _scatter_nd(self, method_name: str, located: Callable[..., tuple[Any, Any]],
                    *arguments: Any) -> Any:
        """``scatter_nd_*`` of what ``located`` (indices, updates) makes of a tower's arguments."""
        def slices(own: Any) -> tf.IndexedSlices:
            indices, updates = located(*own)
            return pieces.nd_slices(written.sizes_of(self), indices,
                                    tf.convert_to_tensor(updates, dtype=self.dtype))

        tower = contexts.writer_of(self)
        if tower is None:
            values = [leaf for leaf in tf.nest.flatten(arguments)
                      if isinstance(leaf, tf.distribute.DistributedValues)]
            given = results.TowerResults([slices(_tf.select_replica(number, arguments)) for number
                                          in range(len(values[0].values))],
                                         written.shares_of(self, values[0]))
        elif not tower.can_merge:
            raise RuntimeError(contexts.NESTED_MERGE)
        else:
            given = slices(arguments)
        name = method_name.replace("batch_scatter", "scatter_nd")
        return self._scatter(method_name, given, lambda merged: getattr(
            _tf.ResourceVariable, name)(self, merged.indices, merged.values))

    def _strided_slice_assign(self, begin: Any, end: Any, strides: Any, value: Any, name: Any,
                              **masks: Any) -> Any:
        plain = functools.partial(_tf.ResourceVariable._strided_slice_assign, self, name=name)
        where = {"begin": begin, "end": end, "strides": strides, **masks}
        tower = contexts.writer_of(self)
        if tower is None:
            return plain(value=written.value_from_outside(self, value), **where)
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
                return plain(value=written.value(self, values, tower.shares), **places[0])
            found = written.elements(self, places, values, tower.shares)
            return _tf.ResourceVariable.scatter_nd_update(self, found.indices, found.values)

        return tower.merge_call(merged, args=(where, value))

    def _alone(self, tower: contexts.TowerContext, refused: bool, merges: bool = True) -> None:
        """A write is being made inside control flow, where the towers cannot sync.

        Each tower writes for itself, and they merge at the next sync point, see :mod:`alone`.
        """
        tower.refuse_compiled_write(self)
        if tower.several and refused:
            raise RuntimeError(contexts.NESTED_MERGE)
        if tower.several and merges:
            tower.writes_alone(self)


def _has_workers(tower: contexts.TowerContext) -> bool:
    """Whether there are other machines, which cannot sync in control flow either."""
    return tower.strategy.extended.workers is not None


def _merged(tower: contexts.TowerContext, value: Any, write: Callable[[list[Any]], Any]) -> Any:
    """What ``write`` makes, at the sync point, of the value that each of them brings."""
    return tower.merge_call(lambda _, values: write(contexts.all_values(values, tower.count)),
                            args=(value,))


def _scattering(method_name: str) -> Callable[..., Any]:
    """``scatter_add`` and the like."""
    def scatter(variable: TowerVariable, sparse_delta: Any, use_locking: bool = False,
                name: Any = None) -> Any:
        return variable._scatter(method_name, sparse_delta, functools.partial(
            getattr(_tf.ResourceVariable, method_name), variable, use_locking=use_locking,
            name=name))

    return scatter


def _scattering_nd(method_name: str) -> Callable[..., Any]:
    """``scatter_nd_add`` and the like."""
    def scatter_nd(variable: TowerVariable, indices: Any, updates: Any, name: Any = None) -> Any:
        if not variable._merges(indices, updates):
            return getattr(_tf.ResourceVariable, method_name)(variable, indices, updates, name)
        return variable._scatter_nd(method_name, lambda *pair: pair, indices, updates)

    return scatter_nd


for _kind in ("add", "sub", "mul", "div", "min", "max", "update"):
    setattr(TowerVariable, f"scatter_{_kind}", _scattering(f"scatter_{_kind}"))
for _kind in ("add", "sub", "min", "max", "update"):
    setattr(TowerVariable, f"scatter_nd_{_kind}", _scattering_nd(f"scatter_nd_{_kind}"))


def into_tower_variable(variable: tf.Variable, strategy: tf.distribute.Strategy,
                        home: str | None = None) -> TowerVariable:
    """Turns a resource variable into ``strategy``'s own, in place: same object, value and place."""
    variable.__class__ = TowerVariable
    variable._distribute_strategy = strategy
    variable._home = variable.device or home  # TensorFlow keeps int32 on the host, say
    strategy.extended.track(variable)
    return variable
