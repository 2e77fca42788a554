"""The end of the towers' function waits for all that they do."""

import collections

import tensorflow as tf
from absl.testing import parameterized

import towerstrategy

TOWERS = 3


def counting(strategy):
    """Two variables with a part on each tower, and a step that writes both."""
    with strategy.scope():
        seen, squares = (tf.Variable(0., synchronization=tf.VariableSynchronization.ON_READ,
                                     aggregation=tf.VariableAggregation.SUM) for _ in range(2))

    def step(x):
        seen.assign_add(tf.reduce_sum(x))
        squares.assign(squares + tf.reduce_sum(x) ** 2 + 0 * seen)

    return seen, squares, step


class EndTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        self.strategy = towerstrategy.TowerStrategy([f"CPU:{index}" for index in range(TOWERS)])

    @parameterized.parameters(6, 7)  # traced once, and on each tower
    def test_all_is_done(self, rows):
        """Else a write is lost where nothing needs its result, or a later one overtakes a read."""
        seen, squares, step = counting(self.strategy)
        found = collections.deque()

        @tf.function
        def train(x):
            for _ in tf.range(3):
                self.strategy.run(step, self.strategy.split((x,)))
                seen.assign(seen + 1)
            return seen + 0, squares + 0

        for _ in range(20):
            seen.assign(0)
            squares.assign(0)
            found.append([float(value) for value in train(tf.ones([rows]))])
        parts = [2, 2, 2] if rows == 6 else [3, 2, 2]
        wanted = [3. * (rows + 1), 3. * sum(part ** 2 for part in parts)]
        self.assertEqual(list(found), [wanted] * 20)
