"""variables.rules: state that is an extreme is the towers' extreme."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide

X = np.float32([[3.], [-7.], [5.], [1.], [9.], [2.], [4.]])


def peak_metric(kit):
    """A metric whose state is the largest label seen."""
    class Peak(kit.metrics.Metric):
        def __init__(self):
            super().__init__(name="peak")
            self.peak = self.add_weight(name="peak", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.peak.assign(tf.maximum(tf.convert_to_tensor(self.peak), tf.reduce_max(y_true)))

        def result(self):
            return tf.convert_to_tensor(self.peak) + 0.

        def reset_state(self):
            self.peak.assign(0.)

    return Peak()


class RulesTest(parameterized.TestCase):

    @wide.product(2, rule=["max", "min"], towers=[1, 3, 4], in_branch=[False, True],
                  in_function=[False, True])
    def test_one_copy(self, rule, towers, in_branch, in_function):
        """Else a layer that keeps the largest number seen keeps a mean of the towers' largest."""
        strategy = towerstrategy.TowerStrategy([f"CPU:{n}" for n in range(1, towers + 1)], "cpu")
        pick, reduced = ((tf.maximum, tf.reduce_max) if rule == "max"
                         else (tf.minimum, tf.reduce_min))
        with strategy.scope():
            v = tf.Variable(0.)
        strategy.merge_rule(v, rule)

        def write(x):
            v.assign(pick(v, reduced(x)))
            return 0

        def tower(x):
            if in_branch:
                return tf.cond(tf.shape(x)[0] >= 0, lambda: write(x), lambda: 0)
            return write(x)

        step = lambda parts: strategy.run(tower, (parts,))  # noqa: E731
        step = tf.function(step) if in_function else step
        for rows in (4, 7, 2):
            step(strategy.split(X[:rows]))
        self.assertEqual(float(v), 9. if rule == "max" else -7.)

    def test_slices_that_differ(self):
        """Else of a slice that is written by several towers the mean counts, not the largest."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "cpu")
        with strategy.scope():
            v = tf.Variable(tf.zeros([3]))
        strategy.merge_rule(v, "max")

        @tf.function
        def tower(x):
            first = tf.shape(x)[0] - 1
            v[first:first + 2].assign([tf.reduce_max(x), tf.reduce_min(x)])

        strategy.run(tower, (strategy.split(tf.constant([1., 5., 3.])),))
        self.assertEqual(v.numpy().tolist(), [3., 5., 1.])

    @wide.some(2, keras, tf_keras)
    def test_a_metric(self, kit):
        """Else a metric of the largest value seen logs the sum of the towers' largest."""
        def logged(strategy):
            with strategy.scope():
                model = kit.Sequential([kit.Input([1]), kit.layers.Dense(1)])
                metric = peak_metric(kit)
                if isinstance(strategy, towerstrategy.TowerStrategy):
                    strategy.merge_rule(metric.peak, "max")
                model.compile("sgd", "mse", metrics=[metric])
            history = model.fit(X, X, batch_size=3, epochs=2, shuffle=False, verbose=0).history
            return [history["peak"], model.evaluate(X[:2], X[:2], verbose=0)[1]]

        got = logged(towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"], "cpu"))
        self.assertEqual(got, logged(tf.distribute.OneDeviceStrategy("CPU:0")))
        self.assertEqual(got, [[9., 9.], 3.])

    def test_towers_parts(self):
        """Else a checkpoint, value() or a step of all rows has the first tower's largest."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "cpu")
        with strategy.scope():
            v = tf.Variable(0., synchronization=tf.VariableSynchronization.ON_READ)
        strategy.merge_rule(v, "max")
        strategy.run(lambda x: v.assign(tf.reduce_max(x)), (strategy.split(tf.range(4.)),))
        self.assertEqual(v.value(), 3.)
        one_device = tf.Variable(0.)
        path = tf.train.Checkpoint(v=v).save(os.path.join(tempfile.mkdtemp(), "v"))
        tf.train.Checkpoint(v=one_device).restore(path)
        self.assertEqual(one_device, 3.)
        self.assertEqual(strategy.function(lambda: v + 0.)(), 3.)

    def test_refused(self):
        """Else a wrong rule, or a variable of nobody's, is taken and nothing comes of it."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"])
        other = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"])
        with other.scope():
            v = tf.Variable(1.)
        with self.assertRaisesRegex(ValueError, "one of .*max.*min.*'largest'"):
            other.merge_rule(v, "largest")
        with self.assertRaisesRegex(ValueError, "another strategy"):
            strategy.merge_rule(v, "max")
        with self.assertRaisesRegex(TypeError, "made in the scope"):
            strategy.merge_rule(tf.Variable(1.), "max")
        for value, dtype in (("a", "string"), (True, "bool"), (1j, "complex128")):
            with strategy.scope():
                v = tf.Variable(value)
            with self.assertRaisesRegex(TypeError, f"real numbers to have a largest.*{dtype}"):
                strategy.merge_rule(v, "max")
