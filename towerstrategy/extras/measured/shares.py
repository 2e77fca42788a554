"""Shares that change while a strategy trains.

Goes in: what was found of the towers' times.  Comes out: the shares that batches are split by from
then on, in eager code and in pipelines and functions that were traced before.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib


class MeasuredShares:
    """The shares of all towers, as they are now.

    Args:
      towers: how many towers there are, on all machines.
      here: how many this machine has.

    Attributes:
      units: as :func:`rows.units_of` has them; equal ones until others are chosen.
    """

    def __init__(self, towers: int, here: int) -> None:
        self.units: tuple[int, ...] = (1,) * towers
        with tf.init_scope(), tf.device("CPU:0"):
            # Not tf.Variable: they must not become variables of a strategy.
            self._variable = _tf.ResourceVariable(tf.ones([towers], tf.int64), trainable=False)
            # The rows of a batch, then those of each tower here.
            self._split = _tf.ResourceVariable(tf.zeros([1 + here], tf.int64), trainable=False)

    def choose(self, units: Sequence[int]) -> None:
        """From now on rows are split by ``units``."""
        self.units = tuple(units)
        self._variable.assign(tf.constant(self.units, tf.int64))
        self._split.assign(tf.zeros_like(self._split))

    def now(self) -> rows_lib.Units:
        """The units: numbers in eager code, in a function a tensor that is read when it runs."""
        return self.units if tf.executing_eagerly() else self._variable.read_value()

    def of_iterator(self) -> tf.data.Dataset:
        """The units, without end: in each iterator as they are when it begins."""
        begin = tf.data.Dataset.range(1).map(lambda _: self._variable.read_value())
        return begin.flat_map(lambda units: tf.data.Dataset.from_tensors(units).repeat())

    def note(self, rows: rows_lib.Rows, sizes: rows_lib.Sizes) -> None:
        """Remembers how many rows of ``rows`` this machine's towers got.

        Pipelines run ahead, and the last batch of many has fewer rows: the largest one counts.
        """
        now = tf.concat([tf.cast([rows], tf.int64), tf.cast(sizes, tf.int64)], 0)
        before = self._split.read_value()
        self._split.assign(tf.where(now[0] >= before[0], now, before), read_value=False)

    def rows(self) -> list[int]:
        """The rows of this machine's towers, of the largest batch since shares have changed."""
        return self._split.numpy().tolist()[1:]

    def cut(self, rows: rows_lib.Rows) -> tuple[rows_lib.Sizes, slice, None]:
        """Cuts a batch that stays on this machine, see :data:`rows.CutRows`."""
        sizes = rows_lib.split_rows(rows, len(self.units), self.now())
        self.note(rows, sizes)
        return sizes, slice(None), None

    def left_out_of_checkpoints(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """``dataset``, whose iterators can be saved in a checkpoint, which has no shares.

        TensorFlow refuses pipelines that have state of other kinds, unless asked; now it warns.
        """
        if dataset.options().experimental_external_state_policy is not None:
            return dataset
        options = tf.data.Options()
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.WARN
        return dataset.with_options(options)


def rows_for(rates: Sequence[float], rows: int) -> list[int]:
    """``rows`` split so that towers of these ``rates`` (rows a second) end together.

    None gets less than one.

    >>> rows_for([3., 1.], 8), rows_for([1000., 1.], 8)
    ([6, 2], [7, 1])
    """
    sizes = rows_lib.split_rows(rows, len(rates), rows_lib.units_of(rates))
    while min(sizes) < 1 and rows >= len(rates):
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(min(sizes))] += 1
    return sizes


def slowest(sizes: Sequence[int], rates: Sequence[float]) -> float:
    """The seconds after which all towers have ended."""
    return max(size / rate for size, rate in zip(sizes, rates))
