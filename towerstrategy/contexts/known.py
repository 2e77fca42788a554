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
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.contexts import call as call_lib
from towerstrategy.merge import shares as shares_lib

# What a nested function that a tower has traced finds where no tower calls it.
OUTSIDE = {"share": (tf.float64, 1.), "filled": (tf.bool, True), "number": (tf.int32, 0),
           "seed_step": (tf.int64, 0), "rows": (tf.int64, 0), "first_row": (tf.int64, 0)}


class Known:
    """The part of a tower's context that tells what it knows of itself.

    Attributes:
      shares: the shares of all towers, for where they meet.
    """

    shares: shares_lib.Shares
    _strategy: tf.distribute.Strategy
    _tower: int
    _call: call_lib.Call
    graph: tf.Graph | None
    _counts: dict[str, Any]

    @property
    def count(self) -> int:
        """How many towers there are on this machine."""
        raise NotImplementedError

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
        """One of :data:`OUTSIDE`, as this tower has it in this call."""
        nested = _tf.nested_function(self.graph)
        if nested is None:
            value = getattr(self, f"_{name}_here")()
            self._call.note_known(name, value)
            return value
        return _tf.capture_at_call(nested, f"towerstrategy/{name}",
                                   functools.partial(_known_of_caller, name),
                                   tf.TensorSpec([], OUTSIDE[name][0]))

    def _own(self, values: list[Any]) -> Any:
        """What this tower has of one value a tower."""
        return self._call.own(self._tower, values)

    def _share_here(self) -> Any:
        shares = [self.shares.of(tower) for tower in range(self.count)]
        if isinstance(shares[0], float) and len(set(shares)) == 1 and not self._call.copies:
            return shares[0]
        return self._own(shares)

    def _filled_here(self) -> Any:
        filled = [self.shares.filled(tower) for tower in range(self.count)]
        return filled[self._tower] if not self.shares.may_be_empty else self._own(filled)

    def _number_here(self) -> Any:
        first = self._strategy.extended.first_replica
        return self._own([np.int32(first + tower) for tower in range(self.count)])

    def _seed_step_here(self) -> Any:
        first = self._strategy.extended.first_replica
        return self._own([np.int64((first + tower) * _tf.SEED_STEP % 2**31)
                          for tower in range(self.count)])

    def _rows_here(self) -> Any:
        return self._counted("rows", lambda: self.shares.here)

    def _first_row_here(self) -> Any:
        return self._counted("first_row", self.shares.starts)

    def _counted(self, name: str, make: Callable[[], list[Any]]) -> Any:
        """This tower's of a count for each, which are made once a call."""
        if name not in self._counts:
            counts = self._call.for_all(self._tower, name, make)
            same = all(count is counts[0] for count in counts) or (
                isinstance(counts[0], int) and len(set(counts)) == 1)
            self._counts[name] = counts[0] if same else self._own(
                [np.int64(count) if self._call.copies and isinstance(count, int) else count
                 for count in counts])
        return self._counts[name]


def _known_of_caller(name: str) -> Any:
    """What the tower knows that calls a nested function, or that traces one which does."""
    tower = tf.distribute.get_replica_context()
    return tower._known(name) if isinstance(tower, Known) else OUTSIDE[name][1]
