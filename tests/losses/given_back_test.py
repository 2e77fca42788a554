"""Statistics over the batch's rows that go back into each row: told, and nothing else is."""

import contextlib
import warnings

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy

BOTH = (keras, tf_keras)
RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=[11, 6]).astype("float32")
Y = RANDOM.normal(size=[11, 1]).astype("float32")
TABLE = RANDOM.normal(size=[11, 6]).astype("float32")
WORDS = RANDOM.integers(0, 5, size=[11, 6])


def standardized(x):
    return (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 1e-3)


def below_the_largest(x):
    return x / tf.reduce_max(tf.abs(x))


def by_moments(x):
    mean, variance = tf.nn.moments(x, [0], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def by_their_length(x):
    return tf.math.l2_normalize(x, axis=0)


def beside_the_deviation(x):
    """Minibatch standard deviation, as in discriminators: one more feature, of all rows."""
    deviation = tf.reduce_mean(tf.sqrt(tf.math.reduce_variance(x, 0, keepdims=True) + 1e-8))
    return tf.concat([x, tf.fill([tf.shape(x)[0], 1], deviation)], 1)[:, 1:]


def of_groups(x):
    groups = tf.reshape(x, [1, -1, 1, 6])
    mean = tf.tile(tf.reduce_mean(groups, [0, 1]), [tf.shape(x)[0], 1])
    return x + mean


def as_weights(x):
    return x * tf.nn.softmax(tf.reduce_sum(x, 1), 0)[:, None]


def in_a_function(x):
    return tf.function(standardized)(x)


def behind_time(x):
    """Rows are in the second dimension."""
    steps = tf.transpose(tf.reshape(x, [-1, 3, 2]), [1, 0, 2])
    return tf.reshape(tf.transpose(steps - tf.reduce_mean(steps, 1, keepdims=True), [1, 0, 2]),
                      [-1, 6])


def of_a_row(x):
    steps = tf.transpose(tf.reshape(x, [-1, 3, 2]), [1, 0, 2])
    steps -= tf.reduce_mean(steps, 0)
    mean, variance = tf.nn.moments(steps, [0, 2], keepdims=True)
    return tf.reshape(tf.transpose((steps - mean) / tf.sqrt(variance + 1.), [1, 0, 2]), [-1, 6])


def taken_off_before_exponentials(x):
    lifted = tf.exp(x - tf.stop_gradient(tf.reduce_max(x)))
    return lifted / tf.reduce_sum(lifted, 1, keepdims=True)


def of_all_rows(x):
    rows = towerstrategy.whole_batch(x)
    return (x - tf.reduce_mean(rows, 0)) / (tf.math.reduce_std(rows, 0) + 1e-3)


def masked(x):
    lengths = tf.cast(tf.abs(3 * x[:, 0]), tf.int32)
    kept = tf.sequence_mask(lengths, tf.reduce_max(lengths) + 6, dtype=tf.float32)[:, :6]
    return x * kept


def by_weights(x):
    return x - tf.reduce_mean(tf.constant(TABLE), 0)


TOLD = (standardized, below_the_largest, by_moments, by_their_length, beside_the_deviation,
        of_groups, as_weights, in_a_function, behind_time)
SILENT = (of_a_row, taken_off_before_exponentials, masked, by_weights)


def fitted(version, strategy, function, rows=X, **kwargs):
    """The weights after a step of a model with a layer that calls ``function``."""
    class Given(version.layers.Layer):
        def call(self, x):
            return function(x)

    with contextlib.nullcontext() if strategy is None else strategy.scope():
        version.utils.set_random_seed(1)
        inputs = version.Input([6])
        hidden = Given()(version.layers.Dense(6, activation="tanh")(inputs))
        model = version.Model(inputs, version.layers.Dense(1)(hidden))
        model.compile(version.optimizers.SGD(.1), "mse", **kwargs)
    model.fit(rows, Y[:len(rows)], batch_size=11, epochs=1, shuffle=False, verbose=0)
    return model.get_weights()


def stepped(strategy, function):
    """The weights after a step of a loop, which calls ``function`` before the model."""
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        weight = tf.Variable(np.ones([6, 1], "float32"))
        optimizer = tf_keras.optimizers.SGD(.1)

    def step(x, y):
        x = function(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) - y))
            scaled = loss if strategy is None else strategy.scale_loss(loss)
        optimizer.apply_gradients([(tape.gradient(scaled, weight), weight)])

    if strategy is None:
        tf.function(step)(X, Y)
    else:
        tf.function(lambda parts: strategy.run(step, parts))(strategy.split((X, Y)))
    return [weight.numpy()]


@contextlib.contextmanager
def silence():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "towerstrategy")
        yield


def told(step):
    """The warnings of ``step``, ours alone."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step()
    return [str(each.message) for each in found if "towerstrategy" in str(each.message)]


def assert_same(got, wanted):
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class GivenBackTest(parameterized.TestCase):

    @parameterized.product(version=BOTH, function=TOLD)
    def test_of_a_layer_is_told(self, version, function):
        """Else a tower normalizes by its own rows, and weights are others, and nobody knows."""
        strategy = towerstrategy.TowerStrategy(4)
        found = told(lambda: fitted(version, strategy, function))
        self.assertLen(found, 1)
        self.assertIn("goes back into each", found[0])

    @parameterized.product(version=BOTH, function=(*SILENT, of_all_rows))
    def test_of_a_layer_as_on_one_device_in_silence(self, version, function):
        """Else models that are right are warned of."""
        with silence():
            got = fitted(version, towerstrategy.TowerStrategy(4), function)
        assert_same(got, fitted(version, None, function))

    @parameterized.product(function=TOLD, once=[True, False])
    def test_of_a_step_is_told(self, function, once):
        """Else rows that a step normalizes are normalized tower by tower."""
        strategy = towerstrategy.TowerStrategy(4)
        strategy.extended.trace_once = once
        found = told(lambda: stepped(strategy, function))
        self.assertLen(found, 1)

    @parameterized.product(function=(*SILENT, of_all_rows), once=[True, False])
    def test_of_a_step_as_on_one_device_in_silence(self, function, once):
        """Else steps that are right are warned of."""
        strategy = towerstrategy.TowerStrategy(4)
        strategy.extended.trace_once = once
        with silence():
            got = stepped(strategy, function)
        assert_same(got, stepped(None, function))

    @parameterized.product(version=BOTH, rows=[1, 5])
    def test_batches_of_few_rows(self, version, rows):
        """Else the number of rows, or that of features, is taken for something else."""
        def step(function):
            strategy = towerstrategy.TowerStrategy(3)
            return lambda: fitted(version, strategy, function, X[:rows])

        self.assertLen(told(step(standardized)), 1)
        self.assertEmpty(told(step(of_a_row)))


class LayersTest(parameterized.TestCase):

    @parameterized.product(version=BOTH, fused=[True, False], masks=[True, False])
    def test_batch_norm_is_not_told(self, version, fused, masks):
        """Else who trains any convolutional model is warned of what everybody does."""
        options = {"fused": fused} if version is tf_keras and not masks else {}
        strategy = towerstrategy.TowerStrategy(4)
        with strategy.scope():
            if masks:
                model = version.Sequential([
                    version.layers.Embedding(5, 4, mask_zero=True),
                    version.layers.BatchNormalization(),
                    version.layers.LSTM(3), version.layers.Dense(1)])
            else:
                model = version.Sequential([
                    version.layers.Reshape([3, 2, 1]), version.layers.Conv2D(2, 2),
                    version.layers.BatchNormalization(**options),
                    version.layers.Flatten(), version.layers.Dense(1)])
            model.compile("sgd", "mse")
        with silence():
            model.fit(WORDS if masks else X, Y, batch_size=11, verbose=0)

    @parameterized.product(version=BOTH)
    def test_batch_norm_in_a_function_is_not_told(self, version):
        """Else a decorated ``call`` that was traced outside of the towers is warned of."""
        class Own(version.Model):
            def __init__(self):
                super().__init__()
                self.norm, self.dense = version.layers.BatchNormalization(), version.layers.Dense(1)

            @tf.function
            def call(self, x, training=None):
                return self.dense(self.norm(x, training=training))

        strategy = towerstrategy.TowerStrategy(2)
        with strategy.scope():
            model = Own()
            model.compile("sgd", "mse")
            model(X[:2], training=True)
        with silence():
            model.fit(X[:4], Y[:4], batch_size=4, verbose=0)

    @parameterized.product(version=BOTH)
    def test_what_is_recomputed_is_not_told(self, version):
        """Else TensorFlow's own order is warned of: an extreme of the gradients, times 0."""
        class Again(version.layers.Layer):
            def build(self, shape):
                self.kernel = self.add_weight(shape=[6, 6], name="kernel")

            def call(self, x):
                return tf.recompute_grad(lambda x: tf.tanh(tf.matmul(x, self.kernel)))(x)

        strategy = towerstrategy.TowerStrategy(4)
        with strategy.scope():
            inputs = version.Input([6])
            model = version.Model(inputs, version.layers.Dense(1)(Again()(Again()(inputs))))
            model.compile("sgd", "mse")
        with silence():
            model.fit(X, Y, batch_size=11, verbose=0)

    @parameterized.product(version=BOTH)
    def test_masks_and_weights_are_not_told(self, version):
        """Else Keras' own mean over unmasked steps is taken for a statistic of rows."""
        strategy = towerstrategy.TowerStrategy(4)
        with strategy.scope():
            model = version.Sequential([
                version.layers.Embedding(5, 4, mask_zero=True),
                version.layers.LSTM(3, return_sequences=True), version.layers.Dense(1)])
            model.compile("sgd", "mse")
        with silence():
            model.fit(WORDS, np.repeat(Y[:, None], 6, 1), sample_weight=np.abs(X),
                      batch_size=11, verbose=0)

    @parameterized.product(version=BOTH)
    def test_weights_that_a_step_normalizes_are_told(self, version):
        """Else a tower's rows count by those of the tower alone."""
        class Weighted(version.Model):
            def train_step(self, data):
                x, y = data
                weight = tf.abs(x[:, 0])
                return super().train_step((x, y, weight / tf.reduce_sum(weight)))

        strategy = towerstrategy.TowerStrategy(4)
        with strategy.scope():
            inputs = version.Input([6])
            model = Weighted(inputs, version.layers.Dense(1)(inputs))
            model.compile("sgd", "mse")
        self.assertLen(told(lambda: model.fit(X, Y, batch_size=11, verbose=0)), 1)

    def test_what_is_told_of_a_loss_is_told_once(self):
        """Else a variance in a step's loss is warned of for each of its operations."""
        strategy = towerstrategy.TowerStrategy(4)
        with strategy.scope():
            weight = tf.Variable(np.ones([6, 1], "float32"))
            optimizer = tf_keras.optimizers.SGD(.1)

        def step(x):
            with tf.GradientTape() as tape:
                loss = strategy.scale_loss(tf.math.reduce_variance(tf.matmul(x, weight)))
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

        found = told(lambda: tf.function(lambda x: strategy.run(step, (x,)))(strategy.split(X)))
        self.assertLen(found, 1)
        self.assertIn("puts rows of the batch together", found[0])


if __name__ == "__main__":
    absltest.main()
