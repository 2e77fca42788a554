"""Stages balanced by the time that each layer takes when it is tried."""

import time

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

from towerstrategy import TowerStrategy

ROW = ["CPU:1", "CPU:2"]


def uneven(kit):
    """A model whose first layer takes the time, and whose last layers hold the bytes."""

    class Slow(kit.layers.Layer):
        def call(self, x):
            x.set_shape([None, 8])

            def wait(value):
                time.sleep(0.05)
                return value

            return x + tf.stop_gradient(tf.ensure_shape(
                tf.numpy_function(wait, [x * 0], tf.float32), [None, 8]))

    kit.utils.set_random_seed(3)
    return kit.Sequential([
        kit.Input([8]), Slow(name="slow"), kit.layers.BatchNormalization(name="norm"),
        kit.layers.Dropout(0.5, seed=3), kit.layers.Dense(300, name="large"),
        kit.layers.Dense(300, name="larger"), kit.layers.Dense(1, name="last")])


class TrialsTest(parameterized.TestCase):

    @parameterized.product(kit=[keras, tf_keras], balance=["bytes", "time"])
    def test_the_slow_layer_is_alone(self, kit, balance):
        """Else "time" cuts by bytes, and one device waits for the other."""
        strategy = TowerStrategy([ROW], balance=balance)
        with strategy.scope():
            model = uneven(kit)
            model.compile("sgd", "mse")
        large, = [weight for weight in model.weights
                  if "large/" in getattr(weight, "path", weight.name) and weight.shape.rank == 2]
        home = getattr(large, "value", large).device if kit is keras else large.device
        self.assertEqual(home[-5:], "CPU:1" if balance == "bytes" else "CPU:2",
                         strategy.describe(model))

    @parameterized.parameters(keras, tf_keras)
    def test_a_trial_leaves_nothing_behind(self, kit):
        """Else a model has learned statistics, or drawn numbers, before it is trained."""
        def trained(strategy):
            with strategy.scope():
                model = uneven(kit)
                model.compile("sgd", "mse")
            before = [np.copy(weight) for weight in model.get_weights()]
            x = np.random.default_rng(0).normal(size=[10, 8]).astype("f")
            model.fit(x, x[:, :1], batch_size=10, verbose=0)
            return before, model.get_weights()

        of_bytes = trained(TowerStrategy([ROW]))
        of_time = trained(TowerStrategy([ROW], balance="time"))
        for one, other in zip(of_bytes, of_time):
            for value, same in zip(one, other):
                np.testing.assert_allclose(value, same, rtol=1e-5, atol=1e-7)

    @parameterized.parameters(keras, tf_keras)
    def test_a_layer_that_cannot_be_tried(self, kit):
        """Else a user reads of shapes in a layer of theirs, and nothing of balance."""
        class Picky(kit.layers.Layer):
            def call(self, x):
                if not hasattr(x, "_keras_history") and tf.executing_eagerly() is False \
                        and getattr(self, "tried", False):
                    raise RuntimeError("not like this")
                return x

        strategy = TowerStrategy([ROW], balance="time")
        with strategy.scope():
            picky = Picky(name="picky")
            model = kit.Sequential([kit.Input([8]), kit.layers.Dense(3), picky])
            picky.tried = True
            with self.assertRaisesRegex(ValueError, '(?s)balance="time".*\'picky\'.*not like this'
                                                    '.*balance="bytes"'):
                model.compile("sgd", "mse")

    @parameterized.parameters(
        (3, [ROW], TypeError, "balance must be 'bytes' or 'time', but got 3 of type int"),
        ("rows", [ROW], ValueError, "balance must be 'bytes' or 'time', but got 'rows'"),
        ("time", ROW, ValueError, "balance='time' .* each tower one device"))
    def test_bad_input(self, balance, devices, error, message):
        """Else a strategy is balanced in a way that nobody asked for."""
        with self.assertRaisesRegex(error, message):
            TowerStrategy(devices, balance=balance)


if __name__ == "__main__":
    absltest.main()
