"""The one copy of a variable, on its home, for all towers.

Goes in: a resource variable and its strategy.  Comes out: the same object as a
:class:`TowerVariable`.  The towers' writes are merged, then written once, see :mod:`written`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.merge import shares as shares_lib
from towerstrategy.placement import homes as homes_lib
from towerstrategy.variables import written

Aggregation = tf.VariableAggregation


class TowerVariable(_tf.ResourceVariable):
    """A resource variable whose writes in towers are merged; all else is TensorFlow's own."""

    _home_may_change = False
    _written_alone = False  # whether a function that towers call writes it, see alone
    _warned_of = ""  # the reason why a gradient of it is not one device's, see contract
    _extreme: str | None = None  # "max" or "min", see rules
    _alike_on_all = False  # whether the first towers of all machines write the same value

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("a TowerVariable is made by tf.Variable in the scope of a TowerStrategy.")

    @property
    def handle(self) -> tf.Tensor:
        """The resource handle; once a function may have captured it, the variable cannot move."""
        if self._home_may_change and homes_lib.may_be_captured():
            self._home_may_change = False
        value = self._compiled_value()
        return super().handle if value is None else value

    def _compiled_value(self) -> tf.Tensor | None:
        """The captured value, in a compiled function that a tower calls; elsewhere None.

        XLA cannot read a variable of another device, so the function gets the value as an input; it
        is read on the variable's home at each call.  It replaces the handle, too, because tapes
        inside of the function watch the handle.
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
        _tf.note_read(self)
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
        return self._assign(_tf.ResourceVariable.assign, value, use_locking, name, read_value)

    def assign_add(self, delta: Any, use_locking: Any = None, name: Any = None,
                   read_value: bool = True) -> Any:
        return self._assign(_tf.ResourceVariable.assign_add, delta, use_locking, name, read_value)

    def assign_sub(self, delta: Any, use_locking: Any = None, name: Any = None,
                   read_value: bool = True) -> Any:
        return self._assign(_tf.ResourceVariable.assign_sub, delta, use_locking, name, read_value)

    def batch_scatter_update(self, sparse_delta: Any, use_locking: bool = False,
                             name: Any = None) -> Any:
        del use_locking
        return self.scatter_nd_update(
            written.batch_indices(sparse_delta.indices), sparse_delta.values, name)

    @property
    def distribute_strategy(self) -> tf.distribute.Strategy:
        """The strategy whose variable this is."""
        return self._distribute_strategy

    def __deepcopy__(self, memo: dict[int, Any]) -> TowerVariable:
        with tf.device(self.device):
            copied = super().__deepcopy__(memo)
        memo[id(self)] = copied
        copied = into_tower_variable(copied, self._distribute_strategy)
        copied._extreme = self._extreme
        return copied

    def __repr__(self) -> str:
        value = ""
        if tf.executing_eagerly() and not self._in_graph_mode:
            value = f", numpy={self.read_value().numpy()!r}"
        return (f"<TowerVariable {self.name!r} shape={self.shape} dtype={self.dtype.name}, one "
                f"copy on {self.device or 'its home'}{value}>")

    def _write(self, value: Any, to_tensors: Callable[[Any], Any], plain: Callable[[Any], Any],
               merged: Callable[..., Any],
               nested: Callable[[contexts.TowerContext], Any] | None = None) -> Any:
        """Writes a value, merged if several towers write.

        Args:
          value: a nest; outside of towers it may have per-replica values.
          to_tensors: converts one tower's value to a nest of tensors.
          plain: writes a value as on one device.
          merged: merges and writes; its arguments are the towers' tensors, the shares, and whether
            the write is from outside of the towers.
          nested: writes in a tower that cannot sync; None if such a write is not supported.
        """
        tower = contexts.writer_of(self)
        if tower is None:
            per_replica = next(filter(_tf.is_per_replica, tf.nest.flatten(value)), None)
            if per_replica is None:
                return plain(value)
            if isinstance(per_replica, _tf.Mirrored):
                return plain(_tf.select_replica(0, value))
            parts = [to_tensors(_tf.select_replica(number, value))
                     for number in range(len(per_replica.values))]
            return merged(parts, written.shares_of(self, per_replica), True)
        if not tower.can_merge and _tf.is_compiled_here() \
                and _tf.nested_function(tower.graph) is not None:
            raise RuntimeError(
                f"variable {self.name!r} is written in a tf.function that a tower calls and that "
                "XLA compiles (jit_compile=True). Such a function gets the variable's value and "
                "cannot write it. Write it outside of that function, or leave jit_compile out.")
        if not tower.several:
            return plain(value)
        if not tower.can_merge:
            if nested is None:
                raise RuntimeError(contexts.NESTED_MERGE)
            return nested(tower)
        return tower.merge_call(lambda _, tensors: merged(
            [_tf.select_replica(number, tensors) for number in range(tower.count)], tower.shares,
            False), args=(to_tensors(value),))

    def _assign(self, method: Callable[..., Any], value: Any, use_locking: Any, name: Any,
                read_value: bool) -> Any:
        # A merged write gets no name: the user's may contain a tower's name scope.
        def plain(value: Any, name: Any = None) -> Any:
            return method(self, value, use_locking=use_locking, name=name, read_value=read_value)

        def nested(tower: contexts.TowerContext) -> Any:
            with_others = tower.shares.workers is not None and written.rule_of(self) != "first"
            # For SUM, the next sync point could not tell values (assign) from steps (assign_add).
            if with_others or self.aggregation is Aggregation.SUM:
                raise RuntimeError(contexts.NESTED_MERGE)
            tower.call.note_written(self)
            return plain(value, name)

        def merged(value: Any, shares: Any) -> Any:
            return plain(written.unless_empty(value, shares, self.value())
                         if method is _tf.ResourceVariable.assign else value)

        tower = contexts.writer_of(self)
        if tower is not None and tower.several and tower.can_merge and not tf.executing_eagerly():
            shares, total = tower.shares, written.total(self, tower, value)
            if total is not None:
                return tower.merge_call(
                    lambda _, total: merged(shares.across(total), shares), (total,))
        return self._write(
            value, functools.partial(tf.convert_to_tensor, dtype=self.dtype),
            lambda value: plain(value, name),
            lambda values, shares, outside: merged(
                written.value(self, values, shares, outside), shares), nested)

    def _scatter(self, method_name: str, sparse_delta: Any, use_locking: bool = False,
                 name: Any = None) -> Any:
        plain = functools.partial(getattr(_tf.ResourceVariable, method_name), self,
                                  use_locking=use_locking, name=name)

        def to_tensors(slices: Any) -> tf.IndexedSlices:
            return tf.IndexedSlices(tf.convert_to_tensor(slices.values, dtype=self.dtype),
                                    tf.convert_to_tensor(slices.indices))

        def nested(tower: contexts.TowerContext) -> Any:
            if tower.shares.workers is not None or self.aggregation not in (
                    Aggregation.NONE, Aggregation.ONLY_FIRST_REPLICA):
                raise RuntimeError(contexts.NESTED_MERGE)
            if method_name in written.REPLACING and self.aggregation is Aggregation.NONE:
                return plain(shares_lib.slices_if(tower.filled, to_tensors(sparse_delta)))
            tower.call.note_written(self)
            return plain(sparse_delta)

        return self._write(sparse_delta, to_tensors, plain, lambda *towers: plain(
            written.slices(self, method_name, *towers)), nested)

    def _scatter_nd(self, method_name: str, indices: Any, updates: Any, name: Any = None) -> Any:
        plain = functools.partial(getattr(_tf.ResourceVariable, method_name), self)

        def to_tensors(pair: Any) -> tf.IndexedSlices:
            return written.nd_slices(written.sizes_of(self), pair[0],
                                     tf.convert_to_tensor(pair[1], dtype=self.dtype))

        def merged(*towers: Any) -> Any:
            slices = written.slices(self, method_name, *towers)
            return plain(slices.indices, slices.values)

        return self._write((indices, updates), to_tensors, lambda pair: plain(*pair, name), merged)

    def _strided_slice_assign(self, begin: Any, end: Any, strides: Any, value: Any, name: Any,
                              **masks: Any) -> Any:
        plain = functools.partial(_tf.ResourceVariable._strided_slice_assign, self)
        arguments = {"begin": begin, "end": end, "strides": strides, **masks}

        def merged(parts: Any, shares: shares_lib.Shares, outside: bool) -> Any:
            slices, values = zip(*parts)
            if outside or self.shape.rank == 0 or (
                    shares.workers is None and written.are_same(slices)):
                return plain(value=written.value(self, values, shares, outside), name=None,
                             **slices[0])
            return _tf.ResourceVariable.assign(
                self, written.value_of_pieces(self, slices, values, shares))

        return self._write(
            (arguments, value),
            lambda pair: (pair[0], tf.convert_to_tensor(pair[1], dtype=self.dtype)),
            lambda pair: plain(value=pair[1], name=name, **pair[0]), merged)


for _kind in ("add", "sub", "mul", "div", "min", "max", "update"):
    setattr(TowerVariable, f"scatter_{_kind}",
            functools.partialmethod(TowerVariable._scatter, f"scatter_{_kind}"))
for _kind in ("add", "sub", "min", "max", "update"):
    setattr(TowerVariable, f"scatter_nd_{_kind}",
            functools.partialmethod(TowerVariable._scatter_nd, f"scatter_nd_{_kind}"))


def into_tower_variable(variable: tf.Variable,
                        strategy: tf.distribute.Strategy) -> TowerVariable:
    """Makes a resource variable ``strategy``'s own, in place: same object, value and device."""
    variable.__class__ = TowerVariable
    variable._distribute_strategy = strategy
    strategy.extended.track(variable)
    return variable
