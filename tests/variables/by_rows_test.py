"""by_rows: what towers write to variables of their rows, made of the rows of all towers."""

import contextlib
import warnings

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy

COLUMNS = 5


def batches():
    random = np.random.default_rng(6)
    for rows in (10, 7, 2):
        yield (random.normal(size=[rows, COLUMNS]),)


def classes(x):
    return tf.cast(tf.round(tf.clip_by_value(x[:, 0], 0., 2.)), tf.int32)


class Counts:
    """What layers and loops of one's own keep of the rows that they have seen."""

    def __init__(self):
        self.each = tf.Variable(np.zeros(3))
        self.whole = tf.Variable(np.zeros(3, "int32"))
        self.bins = tf.Variable(np.zeros(4, "int32"))
        self.rows = tf.Variable(0)
        self.confusion = tf.Variable(np.zeros((6, 6)))

    def update(self, x):
        self.each.assign_add(tf.reduce_sum(tf.one_hot(classes(x), 3, dtype=x.dtype), 0))
        self.whole.assign_add(tf.math.bincount(classes(x), minlength=3, maxlength=3))
        self.bins.assign_add(tf.histogram_fixed_width(x[:, 1], [-1., 1.], 4))
        self.rows.assign_add(tf.shape(x)[0])
        self.confusion.assign_add(tf.math.confusion_matrix(
            classes(x), classes(x[:, 1:]), 6, dtype=x.dtype))


class Codebook:
    """Moving averages of how many rows are near a code, and of their sums."""

    def __init__(self):
        self.codes = tf.Variable(np.random.default_rng(1).normal(size=[3, COLUMNS]))
        self.sums = tf.Variable(np.ones([3, COLUMNS]))
        self.sizes = tf.Variable(np.ones(3))

    def update(self, x):
        near = tf.argmin(tf.reduce_sum(tf.square(x[:, tf.newaxis] - self.codes), -1), 1)
        chosen = tf.one_hot(near, 3, dtype=x.dtype)
        self.sizes.assign(.9 * self.sizes + .1 * tf.reduce_sum(chosen, 0))
        self.sums.assign(.9 * self.sums + .1 * tf.matmul(chosen, x, transpose_a=True))
        self.codes.assign(self.sums / (self.sizes[:, tf.newaxis] + .1))


class LeastSquares:
    """The solution of each batch's normal equations."""

    def __init__(self):
        self.found = tf.Variable(np.zeros([COLUMNS, 1]))

    def update(self, x):
        y = tf.reduce_sum(tf.sin(x), 1, keepdims=True)
        products = tf.matmul(x, x, transpose_a=True) + .1 * tf.eye(COLUMNS, dtype=x.dtype)
        self.found.assign(tf.linalg.solve(products, tf.matmul(x, y, transpose_a=True)))


class Centers:
    """Of each class the place that its rows pull to, one after another."""

    def __init__(self):
        self.centers = tf.Variable(np.zeros([6, COLUMNS]))
        self.points = tf.Variable(np.zeros([6, COLUMNS]))

    def update(self, x):
        pulls = tf.gather(self.centers, classes(x)) - x
        self.centers.scatter_sub(tf.IndexedSlices(.1 * pulls, classes(x)))
        self.points.scatter_nd_add(classes(x)[:, tf.newaxis], x)


class Means:
    """What was right already: means over rows, numbers that have no rows."""

    def __init__(self):
        self.mean = tf.Variable(np.zeros(COLUMNS))
        self.steps = tf.Variable(0)

    def update(self, x):
        self.mean.assign(.9 * self.mean + .1 * tf.reduce_mean(x, 0))
        self.steps.assign_add(1)


class Places:
    """What is kept of one batch after another, each in a place of its own."""

    def __init__(self):
        self.turn = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        self.sums, self.means, self.roots, self.listed, self.rooted = (
            tf.Variable(np.zeros(4)) for _ in range(5))
        self.rows = tf.Variable(np.zeros(4, "int32"))
        self.table = tf.Variable(np.zeros([4, COLUMNS]))

    def update(self, x):
        turn = tf.convert_to_tensor(self.turn)
        root = tf.sqrt(tf.reduce_mean(tf.square(x)))
        self.sums[turn].assign(tf.reduce_sum(x))
        self.means.scatter_nd_update([[turn]], [tf.reduce_mean(x)])
        self.roots[turn].assign(root)
        self.rooted.scatter_nd_add([[turn]], [root])
        self.listed.scatter_nd_update([[turn]], [tf.reduce_sum(x)])
        self.rows[turn].assign(tf.shape(x)[0])
        self.table.scatter_update(tf.IndexedSlices(
            tf.reduce_sum(x, 0, keepdims=True), turn[tf.newaxis]))
        self.turn.assign_add(1)


class Rules:
    """Functions of sums, kept where the towers' mean, or the first tower's value, is asked for."""

    def __init__(self):
        self.mean, self.root, self.least = (
            tf.Variable(np.ones(()), aggregation=tf.VariableAggregation.MEAN) for _ in range(3))
        self.first, self.seen = (tf.Variable(
            np.zeros(()), aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA) for _ in range(2))

    def update(self, x):
        self.mean.assign_add(tf.reduce_sum(x))
        self.root.assign(tf.sqrt(tf.reduce_mean(tf.square(x))))
        self.least.assign(tf.minimum(self.least, tf.reduce_sum(x) / 100.))
        self.first.assign(.5 * self.first + tf.reduce_mean(x))
        self.seen.assign_add(tf.reduce_sum(x))


class Alone:
    """Sums over rows that are added up where the towers cannot meet."""

    def __init__(self):
        self.turn = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        self.total, self.mean, self.looped, self.called = (
            tf.Variable(np.zeros(())) for _ in range(4))
        self.rows, self.turns = tf.Variable(0), tf.Variable(0)

    @tf.function
    def add(self, x):
        self.called.assign_add(tf.reduce_sum(tf.abs(x)))

    def update(self, x):
        def write():
            self.total.assign_sub(tf.reduce_sum(x))
            self.mean.assign(.5 * self.mean + tf.reduce_mean(x))
            self.rows.assign_add(tf.shape(x)[0])
            self.turns.assign_add(1)
            return 0

        tf.cond(self.turn % 2 < 1, write, lambda: 0)
        for column in tf.range(2):
            self.looped.assign_add(tf.reduce_sum(x[:, column]))
        self.add(x)
        self.turn.assign_add(1)


class Chosen:
    """What is made in a branch that the batch's mean chooses."""

    def __init__(self):
        self.value = tf.Variable(np.ones(()))

    def update(self, x):
        mean = tf.reduce_mean(x)
        self.value.assign(tf.cond(mean > .2, lambda: 2. * mean, lambda: mean - 1.))


class Best:
    """Writes in a branch that the batch's mean chooses."""

    def __init__(self):
        self.value = tf.Variable(np.full((), 9.))

    def update(self, x):
        mean = tf.reduce_mean(x)
        tf.cond(mean < self.value, lambda: self.value.assign(mean), lambda: self.value.value())


class Root:
    def __init__(self):
        self.value = tf.Variable(np.ones(()))

    @tf.function
    def keep(self, x):
        self.value.assign(tf.sqrt(tf.reduce_sum(x * x)))

    def update(self, x):
        self.keep(x)


class Last:
    def __init__(self):
        self.value = tf.Variable(np.ones(()))

    def update(self, x):
        tf.cond(self.value < 1e9, lambda: self.value.assign(tf.reduce_sum(x)),
                lambda: self.value.value())


class Restarted:
    def __init__(self):
        self.value = tf.Variable(np.ones(()))

    def update(self, x):
        tf.cond(self.value > 3., lambda: self.value.assign(0.),
                lambda: self.value.assign_add(tf.reduce_sum(x)))


class Deviation:
    def __init__(self):
        self.value = tf.Variable(np.zeros(COLUMNS))

    def update(self, x):
        self.value.assign(tf.math.reduce_std(x, 0))


class Largest:
    def __init__(self):
        self.value = tf.Variable(np.zeros(COLUMNS))

    def update(self, x):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(x, 0)))


def kept(strategy, make):
    """What the variables of ``make`` hold after a few batches."""
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        state = make()

    @tf.function
    def step(x):
        state.update(x) if strategy is None else strategy.run(state.update, (x,))

    for batch in batches():
        step(*(batch if strategy is None else strategy.split(batch)))
    return {name: variable.numpy() for name, variable in vars(state).items()}


class ByRowsTest(parameterized.TestCase):

    @parameterized.parameters((Counts, 3), (Codebook, 3), (Codebook, 4), (LeastSquares, 3),
                              (Centers, 3), (Means, 3), (Places, 3), (Rules, 3),
                              (Alone, 3), (Chosen, 3))
    def test_as_on_one_device(self, make, towers):
        """Else counts and sums of rows come out R times too small, and nobody is told."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "towerstrategy")
            got = kept(towerstrategy.TowerStrategy(towers), make)
        for name, wanted in kept(None, make).items():
            np.testing.assert_allclose(got[name], wanted, rtol=1e-9, atol=1e-12, err_msg=name)

    @parameterized.parameters(Deviation, Largest)
    def test_what_is_made_of_each_towers_rows_is_told(self, make):
        """Else a variable holds the mean of the towers' values, and looks like one device's."""
        with self.assertWarnsRegex(UserWarning, "write to variable .* rows of the batch together"):
            kept(towerstrategy.TowerStrategy(3), make)

    @parameterized.parameters(Best, Root, Last, Restarted)
    def test_what_is_made_where_towers_cannot_meet_is_told(self, make):
        """Else a variable that a branch or a nested function writes is the towers' mean, untold."""
        with self.assertWarnsRegex(UserWarning, "where the towers cannot meet, and what is"):
            kept(towerstrategy.TowerStrategy(3), make)

    def test_a_part_that_is_no_sum_is_told(self):
        """Else a metric that keeps a deviation, or the largest error, is R times that."""
        strategy = towerstrategy.TowerStrategy(3)
        with strategy.scope():
            kept, largest, total, rows = (tf.Variable(
                0., trainable=False, aggregation=tf.VariableAggregation.SUM,
                synchronization=tf.VariableSynchronization.ON_READ) for _ in range(4))

        @tf.function
        def step(x):
            def replica(x):
                kept.assign_add(tf.math.reduce_std(x))
                largest.assign(tf.maximum(largest, tf.reduce_max(x)))
                total.assign_add(tf.reduce_sum(tf.sqrt(x)))
                rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))

            strategy.run(replica, (x,))

        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(strategy.split(tf.range(1., 8.)))
        self.assertLen([each for each in seen if "is no sum over them" in str(each.message)], 2)

    @parameterized.parameters(2, 11)  # of fewer rows than towers, each is traced by itself
    def test_a_small_batch_of_eager_code(self, rows):
        """Else a constant's sum over its rows is the mean of the towers', and nobody is told."""
        strategy = towerstrategy.TowerStrategy([f"CPU:{number}" for number in range(3)])
        strategy.extended.trace_once = False
        with strategy.scope():
            total = tf.Variable(tf.zeros([2]), trainable=False)
        batch = tf.reshape(tf.range(2. * rows), [rows, 2])
        parts = strategy.split(batch)
        tf.function(lambda: strategy.run(
            lambda x: total.assign(tf.reduce_sum(x, 0) * 2.), (parts,)))()
        np.testing.assert_allclose(total, 2. * tf.reduce_sum(batch, 0), rtol=1e-6)

    @parameterized.parameters(True, False)
    def test_what_a_tower_knows_of_itself(self, trace_once):
        """Else a tower's share is taken for a number that its rows add up to."""
        strategy = towerstrategy.TowerStrategy([f"CPU:{number}" for number in range(2)])
        strategy.extended.trace_once = trace_once
        with strategy.scope():
            kept = tf.Variable(0., trainable=False)

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def step(x):
            strategy.run(lambda _: kept.assign(tf.cast(
                tf.distribute.get_replica_context().share, tf.float32)), (strategy.split(x),))

        step(tf.ones([3, 2]))
        self.assertAlmostEqual(float(kept), (2. / 3.) ** 2 + (1. / 3.) ** 2, places=6)

    def test_a_rule_is_kept(self):
        """Else a variable that is to take the sum, or the largest, gets it of sums already made."""
        strategy = towerstrategy.TowerStrategy(2)
        with strategy.scope():
            total = tf.Variable(0., aggregation=tf.VariableAggregation.SUM)
            largest = tf.Variable(0.)
        strategy.merge_rule(largest, "max")

        @tf.function
        def step(x):
            def replica(x):
                total.assign_add(tf.reduce_sum(x))
                largest.assign(tf.reduce_sum(x))

            strategy.run(replica, (x,))

        step(strategy.split(tf.constant([1., 2., 3., 4.])))
        self.assertEqual((float(total), float(largest)), (10., 7.))

    @parameterized.product(version=[keras, tf_keras], is_part=[True, False])
    def test_a_learning_rate_of_the_batchs_loss(self, version, is_part):
        """Else each batch is learnt from at the rate that the first tower's rows ask for."""
        def learnt(strategy):
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                weight = tf.Variable(np.ones([COLUMNS, 1], "float32"))
                optimizer = version.optimizers.SGD(.1)
                optimizer.build([weight])

            def step(x):
                with tf.GradientTape() as tape:
                    losses = tf.square(tf.matmul(tf.cast(x, tf.float32), weight) - 1.)
                    mean = tf.reduce_mean(losses)
                    loss = mean if strategy is None else (
                        tf.nn.compute_average_loss(losses[:, 0]) if is_part
                        else strategy.scale_loss(mean))
                optimizer.learning_rate.assign(.1 / (1 + (loss if is_part else mean)))
                optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

            run = tf.function(step if strategy is None else lambda x: strategy.run(step, (x,)))
            for batch in batches():
                run(*(batch if strategy is None else strategy.split(batch)))
            return weight.numpy(), float(tf.convert_to_tensor(optimizer.learning_rate))

        for got, wanted in zip(learnt(towerstrategy.TowerStrategy(3)), learnt(None)):
            np.testing.assert_allclose(got, wanted, rtol=2e-6)

    def test_a_moving_average_whose_writes_are_added_up(self):
        """Else what it was counts once a tower, and it grows from step to step."""
        class Averages:
            def __init__(self):
                self.mean, self.total, self.parts = (
                    tf.Variable(np.ones(2), aggregation=tf.VariableAggregation.SUM)
                    for _ in range(3))

            def update(self, x):
                self.mean.assign(.9 * self.mean + .1 * tf.reduce_mean(x[:, :2], 0))
                self.total.assign(.9 * self.total + .1 * tf.reduce_sum(x[:, :2], 0))
                self.parts.assign_add(tf.reduce_sum(x[:, :2], 0))

        got, wanted = kept(towerstrategy.TowerStrategy(3), Averages), kept(None, Averages)
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-9, err_msg=name)


if __name__ == "__main__":
    absltest.main()
