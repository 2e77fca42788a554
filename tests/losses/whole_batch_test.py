"""Losses over the whole batch: in loops and in ``compile``, saved as what they are."""

import contextlib
import json
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from towerstrategy.losses import WholeBatch

BOTH = (keras, tf_keras)


def strategy_of(count):
    return towerstrategy.TowerStrategy([f"CPU:{number}" for number in range(count)], "CPU:0")


def clip(one, other, scale):
    """In-batch negatives, both ways."""
    products = scale * tf.matmul(one, other, transpose_b=True)
    labels = tf.range(tf.shape(one)[0])
    return sum(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
               for logits in (products, tf.transpose(products))) / 2


def summed(one, other, scale):
    """A sum over all pairs, divided by a constant."""
    return scale * tf.reduce_sum(tf.square(one[:, tf.newaxis] - other)) / 7.


class LoopTest(parameterized.TestCase):

    def _losses_and_gradients(self, strategy, loss_of, eagerly, rows):
        random = np.random.RandomState(rows)
        x, y = random.randn(rows, 5), random.randn(rows, 5)
        kernel = random.randn(5, 4)
        with strategy.scope() if strategy else contextlib.nullcontext():
            weights = [tf.Variable(kernel), tf.Variable(1.5, dtype=tf.float64)]

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(x @ weights[0], y @ weights[0], tf.exp(weights[1]))
            return [loss, *tape.gradient(loss, weights)]

        if strategy is None:
            return step(tf.constant(x), tf.constant(y))
        run = (lambda *args: strategy.run(step, args)) if eagerly else tf.function(
            lambda *args: strategy.run(step, args))
        return [strategy.reduce("SUM", value, None) for value in run(*strategy.split((x, y)))]

    @wide.product(2,
        loss=[clip, summed], way=["gathered", "once"], eagerly=[False, True],
        batch=[(3, 13), (8, 2), (4, 8)])
    def test_as_on_one_device(self, loss, way, eagerly, batch):
        """Else contrastive training sees a tower's rows alone, or a gradient of the wrong size."""
        count, rows = batch
        strategy = strategy_of(count)

        def gathered(one, other, scale):
            one, other = towerstrategy.whole_batch((one, other))
            return strategy.scale_loss(loss(one, other, scale))

        found = self._losses_and_gradients(
            strategy, gathered if way == "gathered" else WholeBatch(loss), eagerly, rows)
        wanted = self._losses_and_gradients(None, loss, True, rows)
        for value, want in zip(found, wanted):
            np.testing.assert_allclose(value, want, 1e-12, 1e-12)

    @wide.product(2, version=BOTH, eagerly=[False, True], scaled=[False, True],
                  batch=[(3, 13), (3, 2)])
    def test_a_loss_object_that_sums(self, version, eagerly, scaled, batch):
        """Else it counts once a tower, whatever ``scale_loss`` says."""
        sums = version.losses.MeanSquaredError(reduction="sum")

        def loss_of(one, other, scale):
            loss = sums(*towerstrategy.whole_batch((one, other * scale)))
            if scaled and tf.distribute.has_strategy():
                loss = tf.distribute.get_strategy().scale_loss(loss)
            return loss + sums(one, other)  # and one of the tower's own rows

        count, rows = batch
        wanted = self._losses_and_gradients(None, loss_of, eagerly, rows)
        got = self._losses_and_gradients(strategy_of(count), loss_of, eagerly, rows)
        for one, other in zip(wanted, got):
            np.testing.assert_allclose(other, one, 1e-5)

    @parameterized.parameters(*BOTH)
    def test_an_eager_sum_that_is_one_number_is_refused(self, version):
        """Else it may be one of all rows or of the tower's, and nobody knows."""
        class OneNumber(version.losses.Loss):
            def call(self, y_true, y_pred):
                return tf.reduce_sum(tf.square(y_true - y_pred))

        def loss_of(one, other, scale):
            return OneNumber(reduction="sum")(*towerstrategy.whole_batch((one, other * scale)))

        with self.assertRaisesRegex(RuntimeError, "towerstrategy.losses.WholeBatch"):
            self._losses_and_gradients(strategy_of(3), loss_of, True, 7)
        wanted, got = (self._losses_and_gradients(strategy, loss_of, False, 7)
                       for strategy in (None, strategy_of(3)))
        for one, other in zip(wanted, got):
            np.testing.assert_allclose(other, one, 1e-5)

    def test_outside_of_towers(self):
        """Else code that runs with and without a strategy has to ask which it is."""
        x = tf.ones([3, 2])
        self.assertIs(towerstrategy.whole_batch(x), x)
        self.assertEqual(float(WholeBatch(tf.reduce_sum)(x)), 6.)
        one = strategy_of(1)
        self.assertEqual(float(one.run(lambda x: tf.reduce_sum(towerstrategy.whole_batch(x)),
                                       (one.split(x),))), 6.)

    def test_other_tensors(self):
        """Else words, ids or rows of different lengths cannot be put together."""
        strategy = strategy_of(3)
        ragged = tf.ragged.constant([[1, 2], [], [3], [4, 5, 6]])
        words = tf.constant(["a", "b", "c", "d"])

        @tf.function
        def replica(ragged, words):
            return towerstrategy.whole_batch({"ragged": ragged, "words": words})

        found = strategy.run(replica, strategy.split((ragged, words)))
        for part in strategy.experimental_local_results(found["ragged"]):
            self.assertEqual(part.to_list(), ragged.to_list())
        for part in strategy.experimental_local_results(found["words"]):
            self.assertEqual(part.numpy().tolist(), words.numpy().tolist())

    @parameterized.named_parameters(
        ("sparse", lambda x: towerstrategy.whole_batch(tf.sparse.from_dense(x)), TypeError, "rows"),
        ("a scalar", lambda x: towerstrategy.whole_batch(tf.reduce_sum(x)), ValueError, "a row an"),
        ("a branch", lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: towerstrategy.whole_batch(x),
                                       lambda: x), RuntimeError, "cannot meet"))
    def test_refused(self, function, error, text):
        """Else rows are lost, or the towers hang."""
        strategy = strategy_of(2)
        with self.assertRaisesRegex(error, text):
            tf.function(lambda x: strategy.run(function, (x,)))(strategy.split(np.ones([4, 2])))

    def test_refused_outside(self):
        """Else a per-replica value passes for the whole batch."""
        parts = strategy_of(2).split(np.ones([4, 2]))
        with self.assertRaisesRegex(RuntimeError, "strategy.gather"):
            towerstrategy.whole_batch(parts)
        with self.assertRaisesRegex(TypeError, "loss must be a loss object"):
            WholeBatch(3)


def spread(y_true, y_pred):
    """Each row by its distance to the others."""
    del y_true
    return tf.reduce_mean(tf.square(y_pred[:, tf.newaxis] - y_pred / 2), [1, 2])


class CompileTest(parameterized.TestCase):

    def _model(self, version):
        version.utils.set_random_seed(2)
        return version.Sequential([version.Input((5,)), version.layers.Dense(3, "sigmoid")])

    @parameterized.parameters((keras, "a name"), (tf_keras, "a function"))
    def test_a_file_holds_the_inner_loss(self, version, given):
        """Else a saved model cannot be loaded where this package is not installed."""
        with strategy_of(2).scope():
            model = self._model(version)
            inner = "mse" if given == "a name" else version.losses.mean_absolute_error
            model.compile("sgd", WholeBatch(inner), metrics=[WholeBatch(spread)])
        model.train_on_batch(np.ones([4, 5]), np.ones([4, 3]))
        self.assertNotIn("towerstrategy", json.dumps(model.get_compile_config()))
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = os.path.join(folder.name, "model.keras")
        model.save(path)
        loaded = version.models.load_model(path, custom_objects={"spread": spread})
        self.assertAlmostEqual(
            loaded.evaluate(np.ones([4, 5]), np.ones([4, 3]), verbose=0)[0],
            model.evaluate(np.ones([4, 5]), np.ones([4, 3]), verbose=0)[0], 5)

    @parameterized.product(version=BOTH)
    def test_without_a_strategy(self, version):
        """Else a script has to be changed to run on one device; sample weights are lost first."""
        x, weights = np.random.RandomState(1).rand(6, 5), np.arange(6.)
        seen = []
        for loss in (spread, WholeBatch(spread)):
            model = self._model(version)
            model.compile("sgd", loss)
            seen.append([model.train_on_batch(x, np.ones([6, 3]), sample_weight=weights),
                         *model.get_weights()])
        for one, other in zip(*seen):
            np.testing.assert_array_equal(one, other)

    @parameterized.parameters(keras.losses.Dice(), keras.losses.Tversky(axis=(0, 1)),
                              keras.losses.Circle(reduction="sum"))
    def test_coupled_losses_in_a_step(self, loss):
        """Else Keras' own losses of all rows are right in ``compile`` alone."""
        class Own(keras.Model):
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
                return loss(y, y_pred) + sum(self.losses)

        x = np.random.RandomState(1).rand(7, 5)
        y = np.arange(7) % 3 if isinstance(loss, keras.losses.Circle) else np.eye(3)[
            np.arange(7) % 3]
        seen = []
        for strategy in (None, strategy_of(3)):
            keras.utils.set_random_seed(2)
            with strategy.scope() if strategy else contextlib.nullcontext():
                inputs = keras.Input((5,))
                model = Own(inputs, keras.layers.Dense(
                    3, "sigmoid", kernel_regularizer="l2")(inputs))
                model.compile("sgd")
            model.train_on_batch(x, y)
            seen.append(model.get_weights())
        for one, other in zip(*seen):
            np.testing.assert_allclose(other, one, 1e-5, 1e-6)

    @parameterized.product(version=BOTH)
    def test_metrics_that_are_no_functions(self, version):
        """Else a metric's state is updated R times, or with a tower's rows."""
        metric = WholeBatch(version.metrics.AUC())  # before `compile` is looked up: it hooks that
        with self.assertRaisesRegex(TypeError, "WholeBatch makes a function a metric"):
            self._model(version).compile("sgd", "mse", metrics=[metric])


if __name__ == "__main__":
    absltest.main()
