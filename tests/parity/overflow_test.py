"""Overflows of float16 in a batch whose towers have none."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide


class OverflowTest(parameterized.TestCase):

    @wide.product(version=[keras, tf_keras], size=[8, 7])
    def test_towers_that_are_finite_where_the_batch_is_not(self, version, size):
        """Else a step is taken, and the scale kept, where one device skips it.

        The gradient of all rows is 2 ** 16 in float16, which is infinite; that of three is not.
        """
        optimizers = version.optimizers if version is keras else version.mixed_precision
        seen = []
        for scope in (contextlib.nullcontext(), towerstrategy.TowerStrategy(3, "CPU:0").scope()):
            with scope:
                model = version.Sequential([version.Input((1,)), version.layers.Dense(
                    1, kernel_initializer="zeros", use_bias=False, dtype="mixed_float16")])
                optimizer = optimizers.LossScaleOptimizer(version.optimizers.SGD(0.1),
                                                          initial_scale=2.0**15)
                model.compile(optimizer, "mse")
            x = np.ones((size, 1), "float32")
            for y in (x, x / 64):
                model.train_on_batch(x, y)
                scale = optimizer.dynamic_scale if version is keras else optimizer.loss_scale
                seen.append([float(tf.convert_to_tensor(scale)), *model.get_weights()])
        self.assertEqual(seen[0][1], 0.0)
        self.assertNotEqual(seen[1][1], 0.0)
        for one, other in zip(seen[:2], seen[2:]):
            for wanted, got in zip(one, other):
                np.testing.assert_allclose(got, wanted, 1e-3)


if __name__ == "__main__":
    absltest.main()
