"""TensorFlow's own moving averages, written in towers: each counts by its share of the rows."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.training import moving_averages

import towerstrategy
import wide


def averaged(strategy, kind, eager):
    """A moving average of the batches' means after three batches."""
    with strategy.scope() if strategy else tf.init_scope():
        v = tf.Variable([0.5, -1.], trainable=False)
        mean = tf.Variable([0., 0.], trainable=False)
        average = tf.compat.v1.train.ExponentialMovingAverage(.9)

    def replica(x):
        if kind == "assign":
            moving_averages.assign_moving_average(v, tf.reduce_mean(x, 0), .9, zero_debias=False)
        elif kind == "internal":
            tf.__internal__.train.assign_moving_average(v, tf.reduce_mean(x, 0), .9,
                                                        zero_debias=False)
        else:
            mean.assign(tf.reduce_mean(x, 0))
            average.apply([mean])

    step = replica if eager else tf.function(replica)
    for rows in (7, 2, 4):
        x = tf.constant(np.arange(2. * rows, dtype="f").reshape([rows, 2]))
        if strategy is None:
            step(x)
        else:
            strategy.run(step, (strategy.split(x),))
    return (v if kind != "class" else average.average(mean)).numpy()


class MovingAverageTest(parameterized.TestCase):

    @wide.product(2, kind=["assign", "internal", "class"], towers=[1, 3, 4],
                  eager=[True, False])
    def test_as_one_device(self, kind, towers, eager):
        """Else towers with fewer rows count as much as others, and one without makes a NaN."""
        strategy = towerstrategy.TowerStrategy(towers)
        np.testing.assert_allclose(averaged(strategy, kind, eager), averaged(None, kind, eager),
                                   rtol=1e-6)

    def test_elsewhere_as_ever(self):
        """Else another strategy's averages, or those of none, are changed."""
        v = tf.Variable(1.)
        moving_averages.assign_moving_average(v, 3., .5, zero_debias=False)
        self.assertEqual(v.numpy(), 2.)
        other = tf.distribute.OneDeviceStrategy("CPU:1")
        with other.scope():
            w = tf.Variable(1.)
        other.run(lambda: moving_averages.assign_moving_average(w, 3., .5, zero_debias=False))
        self.assertEqual(w.numpy(), 2.)
