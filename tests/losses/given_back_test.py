"""Statistics over the batch's rows that go back into each row.

In a step of Keras they are one device's; in a loop of one's own they are told, and nothing else is.
"""

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


def trained(version, strategy, *functions):
    """The weights after steps of a model with a layer for each of some functions."""
    class Given(version.layers.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, x):
            return self.function(x)

    class Model(version.Model):
        """Normalizes within a function, and the rows' weights in its step."""

        def __init__(self):
            super().__init__()
            self.dense = version.layers.Dense(6, activation="tanh")
            self.norm, self.head = version.layers.BatchNormalization(), version.layers.Dense(1)
            self.given = [Given(function) for function in functions]

        @tf.function
        def call(self, x, training=None):
            hidden = self.norm(self.dense(x), training=training)
            return self.head(tf.concat([given(hidden) for given in self.given], 1))

        def train_step(self, data):
            x, y = data
            weight = tf.abs(x[:, 0])
            return super().train_step((x, y, weight / tf.reduce_sum(weight)))

    with contextlib.nullcontext() if strategy is None else strategy.scope():
        version.utils.set_random_seed(1)
        model = Model()
        model.compile(version.optimizers.SGD(.1), "mse")
        model(X[:2], training=True)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)  # of 8 and of 3 rows
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

    @parameterized.parameters(*BOTH)
    def test_in_a_step_of_keras(self, version):
        """Else a tower normalizes by its own rows, and weights are others."""
        functions = (*TOLD, *SILENT, of_all_rows)
        with silence():
            got = trained(version, towerstrategy.TowerStrategy(4), *functions)
        assert_same(got, trained(version, None, *functions))

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
