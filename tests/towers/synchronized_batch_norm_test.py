"""Batch norm over the whole batch: exact with large means, one meeting a pass, files as ever."""

import contextlib
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
from towerstrategy.towers import contexts, statistics

BOTH = (keras, tf_keras)


def strategy_of(count, **options):
    return towerstrategy.TowerStrategy([f"CPU:{number}" for number in range(count)], "CPU:0",
                                       **{"synchronize_batch_norm": True, **options})


class MomentsTest(parameterized.TestCase):

    @parameterized.product(eagerly=[False, True], rows=[13, 2], masked=[False, True])
    def test_value_and_gradient(self, eagerly, rows, masked):
        """Else layers normalize with wrong numbers, or train on a wrong gradient."""
        random = np.random.RandomState(rows)
        x, seen = random.randn(rows, 4, 3), random.randn(2, 3)
        kept = random.rand(rows, 4, 3) < .6 if masked else np.ones([rows, 4, 3], bool)

        def gradient_of(moments, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                mean, variance = moments(x)
                loss = tf.reduce_sum(mean * seen[0] + variance * seen[1])
            return mean, variance, tape.gradient(loss, x)

        def replica(x, kept):
            tower = contexts.current_tower()

            def moments(x):
                parts = statistics.whole_batch_moments(tower, x, (0, 1), kept if masked else None)
                # Each tower's loss is its share of the whole.
                return [tf.squeeze(part) for part in parts[1:]]

            mean, variance, gradient = gradient_of(moments, x)
            return mean, variance, gradient / tf.cast(tower.count, gradient.dtype)

        strategy = strategy_of(3)
        run = (lambda *args: strategy.run(replica, args)) if eagerly else tf.function(
            lambda *args: strategy.run(replica, args))
        mean, variance, gradient = run(*strategy.split((x, kept)))
        weights = tf.cast(kept, tf.float64)
        wanted = gradient_of(
            lambda x: tf.nn.weighted_moments(x, [0, 1], weights), tf.constant(x))
        for value, want in zip((mean, variance), wanted):
            for part in strategy.experimental_local_results(value):
                np.testing.assert_allclose(part, want, 1e-12)
        np.testing.assert_allclose(strategy.gather(gradient, 0), wanted[2], 1e-9, 1e-12)

    def test_large_means(self):
        """Else the variance of features far from zero is noise, as E[x^2] - E[x]^2 is."""
        x = (1000 + np.random.RandomState(1).randn(4000, 2)).astype("float32")
        strategy = strategy_of(4)

        @tf.function
        def replica(x):
            return statistics.whole_batch_moments(contexts.current_tower(), x, (0,))[2]

        found = strategy.experimental_local_results(strategy.run(replica, (strategy.split(x),)))[0]
        np.testing.assert_allclose(found[0], x.astype("float64").var(0), 1e-4)
        squares = np.mean(np.square(x), 0) - np.square(np.mean(x, 0))
        self.assertGreater(np.max(np.abs(squares - x.astype("float64").var(0))), 1e-2)


class LayerTest(parameterized.TestCase):

    def _model(self, version):
        version.utils.set_random_seed(3)
        layers = version.layers
        return version.Sequential([
            version.Input((4, 4, 2)), layers.Conv2D(3, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.6), layers.Activation("elu"), layers.Flatten(),
            layers.Dense(3, activation="softmax")])

    def _data(self, rows):
        random = np.random.RandomState(rows)
        return random.randn(rows, 4, 4, 2).astype("float32"), random.randint(0, 3, rows)

    @parameterized.parameters((keras, True), (tf_keras, False))
    def test_an_adopted_model_trains_as_on_one_device(self, version, eagerly):
        """Else a model that was built elsewhere keeps normalizing with its towers' rows."""
        x, y = self._data(11)
        seen = []
        for strategy in (None, strategy_of(4)):
            model = self._model(version)
            if strategy is not None:
                strategy.adopt(model)
            model.compile(version.optimizers.SGD(0.1), "sparse_categorical_crossentropy",
                          run_eagerly=eagerly)
            history = model.fit(x, y, batch_size=7, epochs=1, shuffle=False, verbose=0)
            seen.append([*model.get_weights(), np.array(history.history["loss"])])
        for one, other in zip(*seen):
            np.testing.assert_allclose(other, one, 1e-5, 1e-6)

    def _gradients(self, version, strategy, model, x, y):
        def step(x, y):
            with tf.GradientTape() as tape:
                rows = tf.keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
                loss = tf.reduce_sum(rows) / 10.
            return tape.gradient(loss, [weight.value if version is keras else weight
                                        for weight in model.trainable_weights])

        if strategy is None:
            return step(x, y)
        run = tf.function(lambda x, y: strategy.run(step, (x, y)))
        return [strategy.reduce("SUM", gradient, None)
                for gradient in run(*strategy.split((x, y)))]

    @parameterized.product(version=BOTH)
    def test_a_loop(self, version):
        """Else who writes his own step gets his towers' statistics."""
        x, y = self._data(10)
        seen = []
        for strategy in (None, strategy_of(3)):
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = self._model(version)
            gradients = self._gradients(version, strategy, model, x, y)
            seen.append([*gradients, *model.get_weights()])
        for one, other in zip(*seen):
            np.testing.assert_allclose(other, one, 1e-5, 1e-6)

    @parameterized.product(version=BOTH, said=[False, True])
    def test_the_layer_says_what_it_said(self, version, said):
        """Else a saved model is another one than its user made."""
        with strategy_of(2).scope():
            layer = version.layers.BatchNormalization(synchronized=said)
            model = version.Sequential([version.Input((2,)), layer])
            model.compile("sgd", "mse")
        config = layer.get_config()
        model.train_on_batch(np.ones([4, 2]), np.ones([4, 2]))
        self.assertEqual(layer.synchronized, said)
        self.assertEqual(layer.get_config(), config)

    @parameterized.product(version=BOTH)
    def test_one_meeting_a_pass(self, version):
        """Else each statistic of each layer stops all towers by itself."""
        meetings = []
        meet = contexts.TowerContext.meet

        def counting(self, *args):
            meetings.append(self)
            return meet(self, *args)

        x, _ = self._data(8)
        strategy = strategy_of(2)
        with strategy.scope():
            layer = version.layers.BatchNormalization()
            layer.build(x.shape)

        @tf.function
        def run(x):
            return strategy.run(lambda x: layer(x, training=True), (x,))

        with mock.patch.object(contexts.TowerContext, "meet", counting):
            run(strategy.split(x))
        self.assertLen(meetings, 1)

    def test_wrong_argument(self):
        """Else a number or a name is taken for True."""
        with self.assertRaisesRegex(TypeError, "synchronize_batch_norm must be True or False"):
            strategy_of(2, synchronize_batch_norm="yes")


if __name__ == "__main__":
    absltest.main()
