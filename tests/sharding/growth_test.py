"""What is made, and what Python does for it, grows with towers and operations no faster than these.
"""

import tensorflow as tf
from absl.testing import absltest

from towerstrategy import TowerStrategy


class GrowthTest(absltest.TestCase):

    def assert_linear(self, costs):
        """That ``costs`` of counts, each twice the one before, lie on a line, or below."""
        first, second, third = costs
        self.assertGreater(second, first)
        self.assertLessEqual(third - second, 2.1 * (second - first), costs)

    def test_checks(self):
        """Else each write of a model waits for each check in it, on each tower."""
        strategy = TowerStrategy(["CPU:1", "CPU:2", "CPU:3"], "CPU:0")
        strategy.extended.keep_graphs = True

        def made(count):
            with strategy.scope():
                weights = [tf.Variable(1.) for _ in range(count)]

            @strategy.function
            def step(x):
                for weight in weights:
                    tf.debugging.assert_less(x, 9.)
                    x *= weight
                for weight in weights:
                    weight.assign_add(tf.reduce_sum(x))

            graph = step.get_concrete_function(*strategy.split((tf.ones([6]),))).graph
            return sum(len(each.control_inputs) for each in graph.get_operations())

        self.assert_linear([made(count) for count in (4, 8, 16)])


if __name__ == "__main__":
    absltest.main()
