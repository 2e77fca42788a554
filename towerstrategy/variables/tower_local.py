"""Tower-local variables (``synchronization=ON_READ``, metrics): a part on every tower.

Goes in: one resource variable per tower.  Comes out: one variable.  A tower reads and writes its
own part; a read outside of towers aggregates the parts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.merge import merging
from towerstrategy.variables import one_copy


class _TowerLocalSaveable(_tf.SyncOnReadSaveable):
    """Saves a tower-local variable to a checkpoint as one value, as a variable on one device."""

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        del restored_shapes
        value, = restored_tensors
        return tf.group(*self._sync_on_read_variable.spread(value))


class TowerLocalVariable(_tf.SyncOnReadVariable):
    """TensorFlow's ``SyncOnReadVariable``, with three differences.

    A tower without rows does not change its part.  A value assigned to a SUM variable from outside
    of towers, or restored, goes to tower 0's part whole (not 1/R to each): counts stay exact.  A
    step with all rows reads and writes the aggregate, as one device does.
    """

    _extreme: str | None = None  # "max" or "min", see rules
    _has_parts = True  # whether parts other than the first may be nonzero
    # Whether towers wrote their parts, in `strategy.run`; the graphs of steps that merge them;
    # whether there are steps that do not, which were traced before.
    _towers_wrote = False
    _merged_in: weakref.WeakSet[Any]
    _some_steps_do_not_merge = False

    def __init__(self, strategy: tf.distribute.Strategy, values: list[tf.Variable],
                 aggregation: tf.VariableAggregation, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, values, aggregation, *args, **kwargs)
        self._merged_in = weakref.WeakSet()
        # The part that steps with all rows write: the first one; for SUM with several machines, one
        # that is equal on all machines.
        self._whole = values[0]
        if tf.executing_eagerly():
            self._has_parts = any(part.numpy().any() for part in values[1:])
        if self._is_total and strategy.extended.workers is not None:
            with tf.device(strategy.extended.merge_device), tf.init_scope():
                self._whole = _tf.ResourceVariable(
                    tf.zeros(values[0].shape, values[0].dtype), trainable=False)
        strategy.extended.track(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TowerLocalVariable:
        copied = super().__deepcopy__(memo)
        copied._extreme, copied._towers_wrote = self._extreme, self._towers_wrote
        copied._has_parts |= self._towers_wrote
        copied._whole.assign(self._whole)
        return copied

    def _get(self) -> Any:
        part = self._current_part()
        return super()._get() if part is None else part

    def _current_part(self) -> Any:
        """The part to read and write in the current context; None to let TensorFlow choose."""
        tower = contexts.current_tower()
        if tower is not None:
            return self._values[tower.index]
        if not contexts.has_all_rows():
            return None
        self._merge_parts()
        return self._whole

    def _merge_parts(self) -> None:
        """In a step with all rows, gives the first part the aggregate: once in a graph."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if not self._towers_wrote:
            self._some_steps_do_not_merge = True
            if self._is_total and self._has_parts:
                self._count_first_value_once()
        elif graph not in self._merged_in:
            self._merge()
            if graph is not None:
                self._merged_in.add(graph)

    def _count_first_value_once(self) -> None:
        """Gives a SUM variable the first value of one device, not of each tower."""
        with tf.init_scope():
            if tf.executing_eagerly() and self._values[0].is_initialized():
                self.spread(self._values[0].value())
                self._has_parts = False

    def merge_for_steps(self) -> None:
        """At the end of ``strategy.run``, does so for the steps that do not do it themselves."""
        if self._some_steps_do_not_merge and self._towers_wrote:
            self._merge()

    def _merge(self) -> None:
        mean = self.aggregation is one_copy.Aggregation.MEAN and self.dtype.is_floating
        if self._distribute_strategy.extended.workers is not None:
            return
        if self._extreme:
            self.spread(self._get_cross_replica())
        elif self._is_total or mean:
            total = merging.total([part.value() for part in self._values])
            self.spread(total / len(self._values) if mean else total)

    def _get_cross_replica(self) -> Any:
        if self._extreme is not None:
            workers = self._distribute_strategy.extended.workers
            return merging.extreme_of_parts(self._extreme, [part.value() for part in self._values],
                                            workers)
        read = super()._get_cross_replica()
        return read if self._whole is self._values[0] else read + self._whole

    def _get_on_device_or_primary(self) -> Any:
        part = self._current_part()
        return super()._get_on_device_or_primary() if part is None else part

    def assign(self, value: Any, use_locking: bool = False, name: Any = None,
               read_value: bool = True) -> Any:
        if contexts.has_all_rows() or self._assigned_from_outside():
            self.spread(to_dtype(value, self.dtype))
            return self if read_value else None
        self._has_parts = self._towers_wrote = True
        value = self._neutral_if_empty(value, lambda: self._get().value())
        return super().assign(value, use_locking, name, read_value)

    def spread(self, value: tf.Tensor) -> list[Any]:
        """Writes the parts so that their aggregate is ``value``; returns the writes."""
        writes, whole = [], self._whole
        others_are_zero = contexts.has_all_rows() and self._is_total and not self._has_parts
        rest = [] if others_are_zero else [part for part in self._values if part is not whole]
        for part in [whole, *rest]:
            with tf.device(part.device):
                to_write = value if part is whole or not self._is_total else tf.zeros_like(value)
                writes.append(part.assign(to_write, read_value=False))
        return writes

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return dict.fromkeys(
            super()._gather_saveables_for_checkpoint(),
            lambda name=None: _TowerLocalSaveable(self, name or self._common_name))

    def _step(self, method: str, value: Any, use_locking: bool = False, name: Any = None,
              read_value: bool = True) -> Any:
        if contexts.has_all_rows():
            return self._write_whole(method, value, use_locking, name, read_value)
        if not self._assigned_from_outside():
            self._has_parts = self._towers_wrote = True
            value = self._neutral_if_empty(value, lambda: tf.zeros([], self.dtype))
            return getattr(super(), method)(value, use_locking, name, read_value)
        if not self._distribute_strategy.extended.first_replica:  # the first tower's part only
            part = self._values[0]
            with tf.device(part.device):
                getattr(_tf.ResourceVariable, method)(part, to_dtype(value, self.dtype),
                                                      read_value=False)
        return self if read_value else None

    assign_add = functools.partialmethod(_step, "assign_add")
    assign_sub = functools.partialmethod(_step, "assign_sub")

    def _scatter(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method that writes slices: on the aggregate, in a step with all rows only."""
        if not contexts.has_all_rows():
            raise NotImplementedError(
                f"{self!r}, with synchronization=ON_READ, does not support {method} outside of a "
                "step with all rows (of Keras, or of a function made by strategy.function), as in "
                "MirroredStrategy. Use assign_add(tf.scatter_nd(...)).")
        return self._write_whole(method, *args, **kwargs)

    def _write_whole(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Writes the part that has the aggregate, in a step with all rows, then all other parts."""
        whole = self._current_part()
        with tf.device(whole.device):
            written = getattr(whole, method)(*args, **kwargs)
        if not self._is_total:
            self.spread(whole.value())
        return written

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather_nd(self.read_value(), indices, name=name)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather(self.read_value(), indices, name=name)

    @property
    def _is_total(self) -> bool:
        """Whether a read adds up the parts."""
        return self.aggregation is one_copy.Aggregation.SUM

    def _neutral_if_empty(self, value: Any, neutral: Callable[[], tf.Tensor]) -> Any:
        """``value``; in a tower without rows, ``neutral()``, which changes nothing."""
        tower = contexts.current_tower()
        if tower is None or not tower.may_be_empty:
            return value
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        return tf.where(tower.filled, value, neutral())

    def _assigned_from_outside(self) -> bool:
        contexts.writer_of(self)  # raises in a tower of another strategy
        if _tf.is_saving_one_copy() or not self._is_total:
            return False
        context = tf.distribute.get_replica_context()
        return context is None or context.strategy is not self._distribute_strategy

    def _converted(self, to: type) -> Any:
        return to(self.read_value())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The aggregated value, for NumPy."""
        del copy  # the value is always a new array
        return np.asarray(self.numpy(), dtype)

    def __repr__(self) -> str:
        parts = ", ".join(part.device for part in self._values)
        return (f"<TowerLocalVariable {self.name!r} shape={self.shape} dtype={self.dtype.name} "
                f"aggregation={self.aggregation.name}, a part on each of {parts}>")

    __str__ = __repr__


def to_dtype(value: Any, dtype: tf.DType) -> tf.Tensor:
    """``value`` with a dtype; a number in Python is not rounded to float32 before."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)


for _type in (bool, int, float, complex):  # TensorFlow's SyncOnReadVariable does not become these
    setattr(TowerLocalVariable, f"__{_type.__name__}__",
            functools.partialmethod(TowerLocalVariable._converted, _type))
for _method in dir(_tf.ResourceVariable):
    if _method.startswith(("scatter_", "batch_scatter_")):
        setattr(TowerLocalVariable, _method,
                functools.partialmethod(TowerLocalVariable._scatter, _method))


def make_tower_local(strategy: tf.distribute.Strategy,
                     variable: tf.Variable) -> TowerLocalVariable:
    """A tower-local variable whose part on tower 0 is an existing variable with its value."""
    parts = [variable]
    for number, device in enumerate(strategy.extended.worker_devices[1:], start=1):
        zero = variable.aggregation is one_copy.Aggregation.SUM
        value = tf.zeros_like(variable) if zero else tf.identity(variable)
        with tf.device(device), tf.init_scope():
            # Not tf.Variable: in the scope, that would make another variable of the strategy.
            parts.append(_tf.ResourceVariable(
                value, trainable=variable.trainable, dtype=variable.dtype,
                name=f"{variable.name.split(':')[0]}/tower_{number}"))
    return TowerLocalVariable(strategy, parts, variable.aggregation)
