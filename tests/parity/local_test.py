"""What is local by nature, such as batch statistics that are not synchronized; random draws."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from towerstrategy.batch import rows as rows_lib

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


class BatchStatisticsTest(parameterized.TestCase):

    @wide.product(2, version=BOTH, rows=[12, 7, 2], count=[3, 4], eagerly=[False])
    def test_everything_moves_to_the_share_weighted_mean(self, version, rows, count, eagerly):
        """Else rows are lost from the moving statistics, or they depend on the Keras version.

        With plain SGD all weights, moving statistics included, go to the mean of where each tower
        would go alone, counted by its share of the rows.
        """
        version.utils.set_random_seed(3)
        with _strategy(count).scope():
            model = _model(version, eagerly)
        before = model.get_weights()
        x, y = _data(rows)
        model.train_on_batch(x, y)
        wanted = [np.zeros(weight.shape) for weight in before]
        alone = _model(version)
        for start, size in zip(*rows_lib.deal(rows, count)):
            if not size:
                continue
            alone.set_weights(before)
            alone.train_on_batch(x[start:start + size], y[start:start + size])
            wanted = [total + weight * size / rows
                      for total, weight in zip(wanted, alone.get_weights())]
        for got, want in zip(model.get_weights(), wanted):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    @parameterized.product(version=BOTH)
    def test_moving_statistics_by_hand(self, version):
        """Else the rule holds only because both sides of the other test are wrong alike."""
        with _strategy(4).scope():
            layer = version.layers.BatchNormalization(momentum=0.6)
            model = version.Sequential([version.Input((2,)), layer])
            model.compile("sgd", "mse")
        x = np.array([[0, 1], [2, 5], [3, 0], [9, 2], [4, 4], [8, 8]], "float32")
        model.fit(x, x, batch_size=6, epochs=1, verbose=0, shuffle=False)
        towers = [x[:2], x[2:4], x[4:5], x[5:]]
        mean = sum(part.mean(0) * len(part) / 6 for part in towers)
        variance = sum(part.var(0) * len(part) / 6 for part in towers)
        np.testing.assert_allclose(np.array(layer.moving_mean), 0.4 * mean, rtol=1e-6)
        np.testing.assert_allclose(np.array(layer.moving_variance), 0.6 + 0.4 * variance, rtol=1e-6)

    @parameterized.product(version=BOTH)
    def test_towers_without_rows_make_no_nan(self, version):
        """Else one small last batch destroys the model."""
        with _strategy(8).scope():
            model = _model(version)
        x, y = _data(9)
        model.fit(x, y, batch_size=8, epochs=1, verbose=0)
        self.assertTrue(all(np.isfinite(weight).all() for weight in model.get_weights()))


class AddedSumTest(parameterized.TestCase):

    @wide.product(version=BOTH, written=["rows", "an all-reduce", "eager rows"])
    def test_rows_summed_in_add_loss(self, version, written):
        """Else a sum in ``add_loss`` shrinks where it is said to be the whole batch's.

        Eager towers do not tell what a number is made of: there it counts as a mean, by the share.
        """
        class Summed(version.layers.Layer):

            def call(self, x):
                total = tf.reduce_sum(tf.square(x))
                replica = tf.distribute.get_replica_context()
                # There is none while the model is made.
                if written == "an all-reduce" and replica is not None:
                    total = replica.all_reduce("SUM", total)
                self.add_loss(total)
                return x

        x = np.random.RandomState(1).rand(7, 3).astype("float32")
        seen = []
        for scope in (contextlib.nullcontext(), _strategy(3).scope()):
            version.utils.set_random_seed(3)
            with scope:
                model = version.Sequential([version.Input([3]), version.layers.Dense(2), Summed()])
                model.compile(version.optimizers.SGD(0.1), run_eagerly="eager" in written)
            loss = model.train_on_batch(x)
            seen.append([loss, *model.get_weights()])
        if "eager" not in written:
            for one, other in zip(*seen):
                np.testing.assert_allclose(other, one, 1e-5, 1e-6)
            return
        version.utils.set_random_seed(3)
        layer = version.layers.Dense(2)
        out = np.asarray(layer(x))
        by_share = sum(size / 7 * np.sum(np.square(out[start:start + size]))
                       for start, size in zip(*rows_lib.deal(7, 3)))
        np.testing.assert_allclose(seen[1][0], by_share, 1e-5)


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

    @parameterized.product(version=BOTH)
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
