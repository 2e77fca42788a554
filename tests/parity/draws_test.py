"""Random draws, and overflows of float16."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide

BOTH = (keras, tf_keras)


def _strategy(count):
    return towerstrategy.TowerStrategy([f"CPU:{number}" for number in range(count)], "CPU:0")


def _data(rows):
    state = np.random.RandomState(rows)
    return state.randn(rows, 4, 4, 2).astype("float32"), state.randint(0, 3, rows)


def _model(version, eagerly=False):
    layers = version.layers
    model = version.Sequential([
        version.Input((4, 4, 2)), layers.Conv2D(3, 3), layers.BatchNormalization(momentum=0.6),
        layers.Activation("tanh"), layers.Flatten(), layers.Dense(4),
        layers.BatchNormalization(momentum=0.6), layers.Dense(3, activation="softmax")])
    model.compile(version.optimizers.SGD(0.5), "sparse_categorical_crossentropy",
                  run_eagerly=eagerly)
    return model


class RandomDrawsTest(parameterized.TestCase):

    def _random_layers(self, version):
        layers = version.layers
        return {"Dropout": layers.Dropout(0.5), "GaussianNoise": layers.GaussianNoise(1.0),
                "GaussianDropout": layers.GaussianDropout(0.5),
                "SpatialDropout1D": layers.SpatialDropout1D(0.5),
                "Dropout with a seed": layers.Dropout(0.5, seed=11)}

    @wide.product(version=BOTH, layer=["Dropout", "GaussianNoise", "GaussianDropout",
                                       "SpatialDropout1D", "Dropout with a seed"])
    def test_every_tower_and_every_step_draws_differently(self, version, layer):
        """Else R towers repeat one mask, and the noise is not that of the whole batch."""
        count, rows, features = 4, 3, 64

        class Always(version.layers.Layer):
            """Draws in ``predict`` too."""

            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def call(self, x):
                return self.inner(x, training=True)

        with _strategy(count).scope():
            drawing = Always(self._random_layers(version)[layer])
            model = version.Sequential([version.Input((1, features)), drawing])
            model.compile("sgd", "mse")
        ones = np.ones((2 * count * rows, 1, features), "float32")
        drawn = model.predict(ones, batch_size=count * rows, verbose=0)
        distinct = {row.tobytes() for row in drawn}
        self.assertEqual(len(distinct), len(ones))

    @wide.product(version=BOTH, eagerly=[False, True])
    def test_training_draws_differently_on_every_tower(self, version, eagerly):
        """Else dropout in training is weaker than on one device."""
        count, features = 4, 64
        with _strategy(count).scope():
            dropped = version.layers.Dropout(0.5)
            model = version.Sequential([version.Input((features,)), dropped,
                                        version.layers.Dense(count, use_bias=False)])
            model.compile(version.optimizers.SGD(1.0), version.losses.MeanSquaredError(
                reduction="sum"), run_eagerly=eagerly)
        model.set_weights([np.zeros((features, count))])
        # Row r wants output r alone, so the weights to output r become row r's dropout mask.
        model.fit(np.ones((count, features)), np.eye(count), batch_size=count, epochs=1, verbose=0)
        masks = np.array(model.get_weights()[0]).T
        self.assertEqual(len({(mask != 0).tobytes() for mask in masks}), count)
        self.assertBetween(np.mean(masks != 0), 0.3, 0.7)

    @wide.product(version=BOTH, count=[1, 3])
    @pytest.mark.wide
    def test_a_seed_makes_a_run_repeatable(self, version, count):
        """Else an experiment on towers cannot be repeated."""

        def weights():
            version.backend.clear_session()
            version.utils.set_random_seed(5)
            with _strategy(count).scope():
                layers = version.layers
                model = version.Sequential([
                    version.Input((4, 4, 2)), layers.GaussianNoise(0.1), layers.Conv2D(3, 3),
                    layers.BatchNormalization(), layers.Flatten(), layers.Dropout(0.3),
                    layers.Dense(3, activation="softmax")])
                model.compile("adam", "sparse_categorical_crossentropy")
            model.fit(*_data(19), batch_size=8, epochs=2, verbose=0)
            return model.get_weights()

        for first, second in zip(weights(), weights()):
            np.testing.assert_array_equal(first, second)

    @wide.parameters(keras, wide=[tf_keras])
    def test_one_tower_draws_what_one_device_draws(self, version):
        """Else R = 1 is not the run without a strategy."""

        def weights(strategy):
            version.backend.clear_session()
            version.utils.set_random_seed(5)
            with strategy.scope() if strategy else contextlib.nullcontext():
                layers = version.layers
                model = version.Sequential([version.Input((4, 4, 2)), layers.Flatten(),
                                            layers.Dropout(0.3),
                                            layers.Dense(3, activation="softmax")])
                model.compile("sgd", "sparse_categorical_crossentropy")
            model.fit(*_data(19), batch_size=8, epochs=2, verbose=0)
            return model.get_weights()

        for alone, tower in zip(weights(None), weights(_strategy(1))):
            np.testing.assert_allclose(tower, alone, rtol=1e-6)


class OverflowTest(parameterized.TestCase):

    @wide.product(version=BOTH, count=[1, 4])
    def test_an_overflow_on_one_tower_skips_one_step(self, version, count):
        """Else towers that do not overflow update alone, or the scale falls once a tower."""
        optimizers = version.optimizers if version is keras else version.mixed_precision
        with _strategy(count).scope():
            model = version.Sequential([version.Input((2,)), version.layers.Dense(1)])
            optimizer = optimizers.LossScaleOptimizer(version.optimizers.SGD(0.1),
                                                      initial_scale=2.0**75)
            model.compile(optimizer, "mse")
        x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
        y[3] = 1e17
        model.train_on_batch(x, np.ones_like(y))
        before = model.get_weights()
        model.train_on_batch(x, y)
        for weight, unchanged in zip(model.get_weights(), before):
            np.testing.assert_array_equal(weight, unchanged)
        scale = optimizer.dynamic_scale if version is keras else optimizer.loss_scale
        self.assertEqual(float(tf.convert_to_tensor(scale)), 2.0**74)

    @wide.product(version=BOTH, size=[8, 7])
    def test_towers_that_are_finite_where_the_batch_is_not(self, version, size):
        """Else a step is taken, and the scale kept, where one device skips it.

        The gradient of all rows is 2 ** 16 in float16, which is infinite; that of three is not.
        """
        optimizers = version.optimizers if version is keras else version.mixed_precision
        seen = []
        for scope in (contextlib.nullcontext(), _strategy(3).scope()):
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
