"""What a tower knows of itself: its number, its rows, its share, its seed.

Goes in: the shares of the batch of this call, for all towers.  Comes out: a tower's own of each: a
number, or a tensor.

These belong to the call of the replica function.  A ``tf.function`` that is called inside of it is
traced once and called again, by other towers and for other batches, so in there each of them is a
capture whose value is asked for at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.contexts import call as call_lib
from towerstrategy.merge import shares as shares_lib


class Fact(NamedTuple):
    """Something that a tower knows of itself.

    Attributes:
      dtype: the type of its tensor.
      outside: what a nested function that a tower has traced finds where no tower calls it.
      of_all: what the towers of this machine know, given any one's context.
    """

    dtype: tf.DType
    outside: Any
    of_all: Callable[[Known], list[Any]]


class Known:
    """The part of a tower's context that tells what it knows of itself.

    Attributes:
      shares: the shares of all towers, for at sync points.
    """

    shares: shares_lib.Shares
    _strategy: tf.distribute.Strategy
    _tower: int
    _call: call_lib.Call
    graph: tf.Graph | None
    _found: dict[str, Any]

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """This tower's number, a scalar int32 tensor."""
        return tf.convert_to_tensor(self._known("number"), name="replica_id_in_sync_group")

    @property
    def share(self) -> Any:
        """The tower's rows over all rows of the global batch: a float or a scalar tensor."""
        return self._known("share")

    @property
    def filled(self) -> Any:
        """Whether this tower has rows: a bool, or a scalar bool tensor."""
        return self._known("filled")

    @property
    def rows(self) -> Any:
        """The rows that this tower works on: an int or an int64 scalar.

        In a nested function 0 where the caller has no batch.
        """
        return self._known("rows")

    @property
    def first_row(self) -> Any:
        """How many rows of the whole batch come before this tower's."""
        return self._known("first_row")

    @property
    def may_be_empty(self) -> bool:
        """Whether some tower has, or may turn out to have, no rows."""
        return _tf.nested_function(self.graph) is not None or self.shares.may_be_empty

    def own_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """``seed`` (integers), made this tower's own."""
        return tf.bitwise.bitwise_xor(seed, tf.cast(self._known("seed_step"), seed.dtype))

    def _known(self, name: str) -> Any:
        """One of :data:`FACTS`, as this tower has it in this call."""
        nested = _tf.nested_function(self.graph)
        if nested is not None:
            return _tf.capture_at_call(nested, f"towerstrategy/{name}",
                                       functools.partial(_known_of_caller, name),
                                       tf.TensorSpec([], FACTS[name].dtype))
        if name not in self._found:
            self._found[name] = self._call.own(
                self._tower, name, FACTS[name].of_all(self), FACTS[name].dtype)
        return self._found[name]


def _numbers(tower: Known) -> list[np.int32]:
    first = tower._strategy.extended.first_replica
    return [np.int32(first + number) for number in range(len(tower.shares.here))]


FACTS = {
    "share": Fact(tf.float64, 1., lambda tower: tower.shares.shares_here),
    "filled": Fact(tf.bool, True, lambda tower: tower.shares.filled_here),
    "number": Fact(tf.int32, 0, _numbers),
    "seed_step": Fact(tf.int64, 0, lambda tower: [
        np.int64(int(number) * _tf.SEED_STEP % 2**31) for number in _numbers(tower)]),
    "rows": Fact(tf.int64, 0, lambda tower: tower.shares.here),
    "first_row": Fact(tf.int64, 0, lambda tower: tower.shares.starts)}


def _known_of_caller(name: str) -> Any:
    """What the tower knows that calls a nested function, or that traces one which does."""
    tower = tf.distribute.get_replica_context()
    return tower._known(name) if isinstance(tower, Known) else FACTS[name].outside
