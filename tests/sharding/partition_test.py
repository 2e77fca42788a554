"""sharding/partition: what is read of a variable before a write does not see it."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy

DEVICES = towerstrategy.split_cpu(8)
CALLS = 4
X = np.ones([9, 5], np.float32)


class OrderTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        self.strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        with self.strategy.scope():
            self.counts = tf.Variable(tf.zeros([9]))
            self.slow = tf.Variable(tf.ones([300, 300]) / 300)

    def read(self, x):
        """A number of the counts, whose index takes a while to compute."""
        product = self.slow + tf.reduce_sum(x) * 0
        for _ in range(20):
            product = product @ self.slow
        return self.counts.sparse_read(tf.cast(product[0, 0] * 0, tf.int32))

    def add(self, x):
        self.counts.assign_add(tf.ones([9]) + tf.reduce_sum(x) * 0)

    def read_in_function(self, x):
        return tf.function(self.read)(x)

    def read_in_branch(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: self.read(x), lambda: -1.0)

    def read_in_loop(self, x):
        return tf.while_loop(lambda number, _: number < 1, lambda number, _: (
            number + 1, self.read(x)), (0, 0.0))[1]

    @parameterized.parameters("read", "read_in_function", "read_in_branch", "read_in_loop")
    def test_within_a_step(self, name):
        """Else a target network that is called as a function is updated before it is used."""
        def step(x):
            found = getattr(self, name)(x)
            self.add(x)
            return found

        function = self.strategy.function(step)
        self.assertEqual([function(self.strategy.split(X)).numpy() for _ in range(CALLS)],
                         [*range(CALLS)])

    @parameterized.product(in_run=[False, True], is_called=[False, True])
    def test_in_an_earlier_call(self, in_run, is_called):
        """Else two steps in a tf.function run at once, and the first one sees the second's."""
        self.strategy.extended.keep_graphs = not is_called

        def of(step):
            function = self.strategy.function(step)
            return lambda x: self.strategy.reduce(
                "SUM", self.strategy.run(step, (x,)), axis=None) if in_run else function(x)

        reads, adds = of(lambda x: self.read(x) / (3.0 if in_run else 1.0)), of(
            lambda x: self.add(x) or tf.reduce_sum(x))

        @tf.function
        def both(x):
            found = reads(x)
            adds(x)
            return found

        self.assertEqual([round(float(both(self.strategy.split(X)))) for _ in range(CALLS)],
                         [*range(CALLS)])

    @parameterized.parameters("constant", "cast", "group")
    def test_a_write_that_waits(self, waits_by):
        """Else a failed step is counted; so is the end of data, for tf_keras' legacy optimizers."""
        count = self.counts

        def step(x):
            total = tf.reduce_sum(tf.debugging.check_numerics(x, "a bad row"))
            with tf.control_dependencies([tf.group(total) if waits_by == "group" else total]):
                count.assign_add(tf.cast(np.ones(9), tf.float32) if waits_by == "cast"
                                 else np.ones(9, np.float32))
            return total

        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "a bad row"):
            self.strategy.function(step)(self.strategy.split(X * np.nan))
        np.testing.assert_array_equal(count, np.zeros(9))


if __name__ == "__main__":
    absltest.main()
