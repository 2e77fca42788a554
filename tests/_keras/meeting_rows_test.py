"""Models of Keras whose rows meet, as written for one device: layers, steps, metrics.

Each is trained by ``fit`` in float64, in both Kerases, on one device and on towers, with a batch
that is smaller than the towers; a warning fails.
"""

import warnings

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from tests import dtypes
from tests.sharding import program_features

DEVICES = towerstrategy.split_cpu(8)
D = tf.float64
DRAW = np.random.RandomState(3)
X, Y = DRAW.randn(20, 5), DRAW.rand(20, 2)
BATCH = 9  # and a last one of 2 rows

# Of what programs of `strategy.function` make in layers; here it is a step of Keras.
FEATURES = [program_features.FEATURES[name] for name in (
    "batch_variance", "cumsum", "sort", "argsort", "unique", "shuffle", "attention_over_rows",
    "boolean_mask", "scan_over_rows", "map_fn_with_mean", "py_function")]


def gradients_of(model, loss_of):
    with tf.GradientTape() as tape:
        loss = loss_of()
    return loss, tape.gradient(loss, model.trainable_variables)


def squares(model, x, y):
    return tf.reduce_sum((model(x, training=True) - y) ** 2, -1)


def plain_mean(model, x, y):
    return gradients_of(model, lambda: tf.reduce_mean(squares(model, x, y)))


def in_batch_negatives(model, x, y):
    def loss():
        pairs = tf.matmul(model(x, training=True), y, transpose_b=True)
        return tf.reduce_mean(tf.reduce_logsumexp(pairs, 1) - tf.linalg.diag_part(pairs))

    return gradients_of(model, loss)


def chosen_rows(model, x, y):
    return gradients_of(model, lambda: tf.reduce_sum(
        tf.math.top_k(squares(model, x, y), tf.minimum(3, tf.shape(x)[0])).values))


def two_passes(model, x, y):
    """SAM: the gradient at the worst point nearby."""
    _, found = plain_mean(model, x, y)
    norm = tf.linalg.global_norm(found)
    steps = [0.05 * gradient / norm for gradient in found]
    for weight, step in zip(model.trainable_variables, steps):
        weight.assign_add(step)
    result = plain_mean(model, x, y)
    for weight, step in zip(model.trainable_variables, steps):
        weight.assign_sub(step)
    return result


def hessian_product(model, x, y):
    with tf.GradientTape() as outer:
        loss, found = plain_mean(model, x, y)
        along = tf.add_n([tf.reduce_sum(gradient * 0.1) for gradient in found])
    second = outer.gradient(along, model.trainable_variables)
    return loss, [one if two is None else one + two for one, two in zip(found, second)]


STEPS = (in_batch_negatives, chosen_rows, two_passes, hessian_product)


def layered(kit, features):
    class Meets(kit.layers.Layer):
        def call(self, h):
            return tf.add_n([feature(h) for feature in features]) / len(features)

        def compute_output_shape(self, shape):
            return shape

    return kit.Sequential([kit.layers.Dense(5, "tanh"), Meets(), kit.layers.Dense(2)])


def metrics_of(kit):
    class Last(kit.metrics.Metric):
        """A state that is no sum: the largest error so far."""

        def __init__(self):
            super().__init__(name="largest")
            self.largest = self.add_weight(name="largest", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            error = tf.reduce_max(tf.abs(y_true - y_pred))
            self.largest.assign(tf.maximum(self.largest, tf.cast(error, self.largest.dtype)))

        def result(self):
            return self.largest + 0.0

    def ranks(y_true, y_pred):
        """How far the order of the predictions is from that of the labels."""
        orders = [tf.argsort(tf.argsort(value[:, 0])) for value in (y_true, y_pred)]
        return tf.cast(tf.abs(orders[0] - orders[1]), tf.float32)

    return [Last(), ranks]


def stepping(kit, step):
    class Model(kit.Model):
        def __init__(self):
            super().__init__()
            self.inner = kit.Sequential([kit.layers.Dense(4, "tanh"), kit.layers.Dense(2)])
            self.queue = tf.Variable(tf.zeros([6, 5], D), trainable=False)

        def call(self, x, training=False):
            return self.inner(x, training=training)

        def train_step(self, data):
            x, y = data
            loss, found = step(self, x, y)
            self.optimizer.apply_gradients(zip(found, self.trainable_variables))
            self.queue.assign(tf.concat([x, self.queue], 0)[:6])  # the newest rows
            return {"loss": loss, "norm": tf.linalg.global_norm(found)}

    return Model()


def trained(kit, make, strategy, metrics=None):
    kit.backend.clear_session()
    kit.utils.set_random_seed(1)
    with dtypes.policy(kit, "float64"):
        with strategy.scope() if strategy else tf.device(None):
            model = make(kit)
            model.compile(kit.optimizers.SGD(0.05), "mse",
                          metrics=None if metrics is None else metrics(kit))
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        return [model.fit(data, epochs=2, verbose=0).history, model.get_weights()]


class MeetingRowsTest(parameterized.TestCase):

    def assert_as_one_device(self, kit, make, towers=3, metrics=None, rtol=1e-9):
        wanted = trained(kit, make, None, metrics)
        strategy = towerstrategy.TowerStrategy(DEVICES[:towers])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            got = trained(kit, make, strategy, metrics)
        self.assertEmpty([each for each in found
                          if issubclass(each.category, towerstrategy.TowerWarning)])
        for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(wanted)):
            np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-12)

    @wide.product(kit=[keras, tf_keras], towers=[3, 4])
    def test_layers(self, kit, towers):
        """Else a layer that looks at other rows trains something else on towers."""
        self.assert_as_one_device(kit, lambda kit: layered(kit, FEATURES), towers)

    @wide.product(kit=[keras, tf_keras], step=STEPS, towers=[3, 4])
    def test_steps(self, kit, step, towers):
        """Else a train_step of one's own must be rewritten for towers."""
        self.assert_as_one_device(kit, lambda kit: stepping(kit, step), towers)

    @wide.parameters(tf_keras, wide=[keras])
    def test_metrics(self, kit):
        """Else a metric whose state is no sum, or that ranks rows, is logged wrong."""
        self.assert_as_one_device(
            kit, lambda kit: kit.Sequential([kit.layers.Dense(2)]), metrics=metrics_of, rtol=1e-6)


if __name__ == "__main__":
    absltest.main()
