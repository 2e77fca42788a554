"""written: writes to parts of a variable (``v[i].assign``, ``scatter_nd_*``) are merged, too.

The reference is one device, which does the write once for all rows of the batch.
"""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
import wide
from peers import per_replica, plain
from towerstrategy import contexts
from towerstrategy.batch import sub_batches
from towerstrategy.merge import shares as shares_lib
from towerstrategy.variables import written as merging_of_towers

Aggregation = tf.VariableAggregation
START = np.arange(12, dtype="f").reshape([4, 3])


def written(strategy, aggregation, write, rows, eager=False, start=START):
    """What a variable holds after ``write(v, x)``; x are 0., 1., … , one a row."""
    x = tf.range(rows, dtype=tf.float32)
    if strategy is None:
        v = tf.Variable(start)
        write(v, x)
        return v.numpy()
    with strategy.scope():
        v = tf.Variable(start, aggregation=aggregation, trainable=False)

    def replica(x):
        write(v, x)

    parts = strategy.split(x)
    strategy.run(replica if eager else tf.function(replica), (parts,))
    return v.numpy()


def _scatter_nd(method):
    def write(v, x):
        rows = tf.cast(x, tf.int32)
        getattr(v, method)(tf.stack([rows % 4, rows % 3], 1), 10 * x - 20)
    return write


def _scatter_nd_rows(method):
    def write(v, x):
        getattr(v, method)(tf.cast(x, tf.int64)[:, None] % 4, 10 * x[:, None] - [[20., 0, 9]])
    return write


def _batch_scatter(v, x):
    rows = tf.cast(x, tf.int32) % 3
    v.batch_scatter_update(tf.IndexedSlices(x + tf.range(4.)[:, None] * 10,
                                            tf.tile(rows[None], [4, 1])))


ALL_ROWS = {
    **{f"{method}_{kind.__name__}": (aggregation, kind(method))
       for kind in (_scatter_nd, _scatter_nd_rows)
       for method, aggregation in (
           ("scatter_nd_add", Aggregation.SUM), ("scatter_nd_sub", Aggregation.SUM),
           ("scatter_nd_max", Aggregation.NONE), ("scatter_nd_min", Aggregation.NONE))},
    "scatter_nd_update": (Aggregation.NONE, _scatter_nd("scatter_nd_update")),
    "batch_scatter_update": (Aggregation.NONE, _batch_scatter),
    "item": (Aggregation.NONE, lambda v, x: v[1].assign([tf.reduce_mean(x), 2, 3])),
    "item_of_mean": (Aggregation.MEAN, lambda v, x: v[1, 2].assign(tf.reduce_mean(x))),
    "slice": (Aggregation.SUM, lambda v, x: v[1:3, ::2].assign(tf.fill([2, 2], tf.reduce_sum(x)))),
    "all": (Aggregation.NONE, lambda v, x: v[...].assign(tf.fill([4, 3], tf.reduce_mean(x)))),
    "computed_item": (Aggregation.NONE, lambda v, x: v[tf.size(v[0]) - 1].assign(
        tf.fill([3], tf.reduce_mean(x)))),
}


class PiecesTest(parameterized.TestCase):

    @wide.product(case=list(ALL_ROWS), count=[1, 3, 4])
    def test_as_one_device(self, case, count):
        """Else rows written in towers count R times, or the last tower's replace the others'."""
        aggregation, write = ALL_ROWS[case]
        strategy = towerstrategy.TowerStrategy(count)
        for rows, eager in ((7, False), (7, True), (2, False), (2, True)):
            with self.subTest(rows=rows, eager=eager):
                np.testing.assert_allclose(written(strategy, aggregation, write, rows, eager),
                                           written(None, None, write, rows), rtol=1e-6)

    @parameterized.product(
        case=[(Aggregation.NONE, "f", 4.), (Aggregation.MEAN, "f", 4.),
              (Aggregation.SUM, "f", 10.), (Aggregation.ONLY_FIRST_REPLICA, "f", 2.),
              (Aggregation.NONE, "int32", 2)],
        eager=[True, False])
    def test_towers_write_other_places(self, case, eager):
        """Else of two towers that write one element one wins, or empty ones wipe out a value."""
        aggregation, dtype, middle = case
        strategy = towerstrategy.TowerStrategy(3)

        def replica(x):
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            value = tf.cast(tf.constant([2, 8, 100])[number], v.dtype)
            v[number:number + 2].assign(tf.fill([2], value))

        with strategy.scope():
            v = tf.Variable(np.arange(20, 25).astype(dtype), aggregation=aggregation)
        strategy.run(replica if eager else tf.function(replica), (split_of([4, 2, 0]),))
        third = 22 if aggregation is Aggregation.ONLY_FIRST_REPLICA else 8
        self.assertEqual(v.numpy().tolist(), [2, middle, third, 23, 24])

    @parameterized.parameters(.1, np.inf)
    def test_agreed_elements_stay_exact(self, value):
        """Else writing one value from all towers rounds it, and a buffer drifts."""
        strategy = towerstrategy.TowerStrategy(3)
        with strategy.scope():
            v = tf.Variable(tf.zeros([8]), trainable=False)

        def replica(x):
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            v[:4 + number].assign(tf.fill([4 + number], value) + 0 * x[0])

        strategy.run(tf.function(replica), (split_of([3, 2, 2]),))
        self.assertEqual(v.numpy().tolist(), [np.float32(value)] * 6 + [0, 0])

    def test_towers_of_other_machines(self):
        """Else machines that write other places each keep their own towers' values."""
        class Other:  # has one tower, which writes what this machine's first does
            here = slice(0, 2)

            def gather(self, value, axis=0):
                return tf.concat([value, value[:1]], axis)

        strategy = towerstrategy.TowerStrategy(2)
        with strategy.scope():
            v = tf.Variable(tf.range(6.), trainable=False)
        places = [{"begin": [first], "end": [first + 3], "strides": [1]} for first in (0, 2)]
        values = [tf.fill([3], 10.), tf.fill([3], 20.)]
        shares = shares_lib.Shares([1, 2, 1], Other())
        value = merging_of_towers.value_of_pieces(v, places, values, shares)
        self.assertEqual(plain(value), [10., 10., 15., 20., 20., 5.])

    def test_index_out_of_range_is_an_error(self):
        """Else a wrong index writes somewhere else without a word."""
        strategy = towerstrategy.TowerStrategy(2)
        with strategy.scope():
            v = tf.Variable(START)
        with self.assertRaisesRegex(Exception, "ndices|ndex"):
            strategy.run(lambda: v.scatter_nd_update([[0, 7]], [1.]))
        np.testing.assert_array_equal(v.numpy(), START)

    def test_replacing_with_sum_is_refused(self):
        """Else code made for one rule silently gets another."""
        strategy = towerstrategy.TowerStrategy(2)
        with strategy.scope():
            v = tf.Variable(START, aggregation=Aggregation.SUM)
        for method in ("scatter_nd_update", "scatter_nd_max", "scatter_nd_min"):
            with self.assertRaisesRegex(NotImplementedError, f"{method} is only supported"):
                strategy.run(lambda method=method: getattr(v, method)([[0, 1]], [1.]))

    @parameterized.parameters(
        lambda v: v[1].assign([1., 2, 3]), lambda v: v.scatter_nd_add([[0, 1]], [1.]),
        lambda v: v.batch_scatter_update(tf.IndexedSlices(np.zeros([4, 1], "f"),
                                                          np.zeros([4, 1], "i"))))
    def test_in_control_flow(self, write):
        """Else a write that the towers cannot merge is done R times."""
        strategy = towerstrategy.TowerStrategy(2)
        with strategy.scope():
            v = tf.Variable(START)

        def replica(x):
            def do():
                write(v)
                return 0
            return tf.cond(tf.reduce_sum(x) > 0, do, lambda: 1)

        with self.assertRaisesRegex(RuntimeError, contexts.NESTED_MERGE[:40]):
            tf.function(lambda x: strategy.run(replica, (x,)))(strategy.split(tf.ones([4])))
        alone = towerstrategy.TowerStrategy(1)
        with alone.scope():
            v = tf.Variable(START)
        tf.function(lambda x: alone.run(replica, (x,)))(tf.ones([4]))

    def test_from_outside(self):
        """Else what the towers returned cannot be written, or one tower's is."""
        strategy = towerstrategy.TowerStrategy(2)
        with strategy.scope():
            v = tf.Variable(tf.zeros([3]))
        v[1].assign(2.)
        v.scatter_nd_add([[0]], [1.])
        self.assertEqual(plain(v), [1., 2., 0.])
        v[2].assign(per_replica(strategy, 1., 3.))
        v.scatter_nd_update(per_replica(strategy, [[0]], [[1]]), per_replica(strategy, [5.], [6.]))
        self.assertEqual(plain(v), [5., 6., 2.])


def split_of(rows):
    """A batch of sub-batches with so many rows."""
    return sub_batches.SubBatches([tf.ones([count]) for count in rows])
