"""leavings: tensors that reach the caller by another way than the replica function's result."""

import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy

OF_THE_MODULE = []


class Box:
    """An object of the caller's."""


def leave_in_list(strategy, x):
    held = []
    strategy.run(lambda part: held.append(tf.reduce_sum(part)), (x,))
    return tf.add_n(held)


def leave_in_dict(strategy, x):
    held = {"total": 0.}

    def replica(part):
        held["total"] += tf.reduce_sum(part)

    strategy.run(replica, (x,))
    return held["total"]


def leave_in_attribute(strategy, x):
    box = Box()
    box.total = 0.

    class Step:
        def __call__(self, part):
            box.total = box.total + tf.reduce_sum(part)

    strategy.run(Step().__call__, (x,))
    return box.total


def leave_in_a_helper(strategy, x):
    held = []

    def put(value):
        held.append(value)

    def replica(part):
        put(tf.reduce_sum(part))

    strategy.run(replica, (x,))
    return tf.add_n(held)


def leave_in_the_module(strategy, x):
    OF_THE_MODULE.clear()

    def replica(part):
        OF_THE_MODULE.append(tf.reduce_sum(part))

    strategy.run(replica, (x,))
    return tf.add_n(OF_THE_MODULE)


class LeavingsTest(tf.test.TestCase, parameterized.TestCase):

    @parameterized.parameters(leave_in_list, leave_in_dict, leave_in_attribute, leave_in_a_helper,
                              leave_in_the_module)
    def test_every_towers(self, step):
        """Else what the caller finds there is an error, or one tower's alone."""
        strategy = towerstrategy.TowerStrategy(3)
        run = tf.function(lambda x: step(strategy, x), autograph=False)
        self.assertEqual(float(run(strategy.split(tf.range(6.)))), 15.)
        self.assertIn("leaves tensors behind", strategy.extended.own_trace_reasons[0])

    @parameterized.product(eagerly=[False, True], kept=["tensor", "list"])
    def test_each_tower_finds_its_own_behind_a_meeting(self, eagerly, kept):
        """Else an agent whose step keeps targets in an attribute trains tower 0 on the last
        tower's, which is an error only where they differ in their number of rows.
        """
        strategy = towerstrategy.TowerStrategy(3)

        class Agent:
            total = 0.

            def update(self, part):
                self.held = [] if kept == "list" else part * 2.
                self.total = self.total + tf.reduce_sum(part)
                tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(part))
                if kept == "list":
                    self.held.append(part * 2.)
                tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(part))
                self.total = self.total + tf.reduce_sum(part)
                return self.held[0] if kept == "list" else self.held

        agent = Agent()

        def step(x):
            return strategy.run(agent.update, (x,)), agent.total

        x = tf.range(7.)
        doubled, total = (step if eagerly else tf.function(step))(strategy.split(x))
        self.assertAllEqual(strategy.gather(doubled, axis=0), 2. * x)
        self.assertEqual(float(total), 42.)

    def test_layers_keep_what_they_like(self):
        """Else a layer that keeps its last scores makes start-up grow with the towers."""
        strategy = towerstrategy.TowerStrategy(3)

        class Keeping(tf.Module):
            def __call__(self, part):
                self.last = tf.reduce_sum(part)
                return self.last

        module = Keeping()
        run = tf.function(lambda x: strategy.run(module, (x,)))
        run(strategy.split(tf.range(6.)))
        self.assertEmpty(strategy.extended.own_trace_reasons)


if __name__ == "__main__":
    absltest.main()
