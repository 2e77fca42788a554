"""Models of Keras whose rows meet, as written for one device: layers, steps, metrics.

Each is trained by ``fit`` in float64, in both Kerases, on one device and on towers, with a batch
that is smaller than the towers; a warning fails.
"""

import itertools
import warnings

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide

DEVICES = towerstrategy.split_cpu(8)
D = tf.float64
DRAW = np.random.RandomState(3)
X, Y = DRAW.randn(20, 5), DRAW.rand(20, 2)
BATCH = 9  # and a last one of 2 rows

# What a layer makes of activations [rows, 5].
FEATURES = {
    "mean": lambda h: h - tf.reduce_mean(h, 0),
    "max": lambda h: h / (1 + tf.reduce_max(tf.abs(h), 0)),
    "variance": lambda h: h / tf.sqrt(tf.math.reduce_variance(h, 0) + 0.1),
    "cumsum": lambda h: tf.cumsum(h, 0),
    "sort": lambda h: tf.sort(h, 0),
    "roll": lambda h: tf.roll(h, 1, 0),
    "reverse": lambda h: tf.reverse(h, [0]),
    "softmax over rows": lambda h: tf.nn.softmax(h, 0),
    "top_k": lambda h: h + tf.reduce_sum(tf.gather(h, tf.math.top_k(h[:, 0], 2).indices), 0),
    "unique": lambda h: h * tf.cast(tf.size(tf.unique(tf.cast(h[:, 0] * 3, tf.int32)).y), D),
    "shuffle": lambda h: tf.random.shuffle(h, seed=3),
    "attention": lambda h: tf.nn.softmax(h @ tf.transpose(h)) @ h,
    "kernel matrix": lambda h: tf.linalg.cholesky(
        tf.exp(-tf.reduce_sum((h[:, None] - h[None]) ** 2, -1)) + 0.1 * tf.eye(
            tf.shape(h)[0], dtype=D)) @ h,
    "chosen rows": lambda h: h + tf.reduce_sum(tf.boolean_mask(h, h[:, 0] > 0), 0),
    "graph": lambda h: tf.math.unsorted_segment_sum(
        tf.gather(h, tf.range(tf.shape(h)[0]) // 2), tf.range(tf.shape(h)[0]), tf.shape(h)[0]),
    "scan": lambda h: tf.scan(lambda state, row: state * 0.5 + row, h),
    "map": lambda h: tf.map_fn(lambda row: row - tf.reduce_mean(h, 0), h),
    "python": lambda h: tf.ensure_shape(
        tf.py_function(lambda a: a - tf.reduce_mean(a, 0), [h], D), [None, 5]),
    "until the error is small": lambda h: tf.while_loop(
        lambda error, _: tf.reduce_max(error) > 0.5,
        lambda error, h: (error * 0.5, h * 0.9), (tf.abs(h), h))[1],
    "branch": lambda h: tf.cond(tf.reduce_sum(h) > 0, lambda: h - tf.reduce_max(h), lambda: -h),
}


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


def root_of_a_sum(model, x, y):
    return gradients_of(model, lambda: tf.sqrt(tf.reduce_sum(squares(model, x, y))))


def normalized(model, x, y):
    loss, found = plain_mean(model, x, y)
    norm = tf.linalg.global_norm(found)
    return loss, [gradient / norm for gradient in found]


def gradient_penalty(model, x, y):
    def loss():
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = model(x, training=True)
        slopes = tf.sqrt(tf.reduce_sum(tape.gradient(out, x) ** 2, 1) + 1e-6)
        return tf.reduce_mean((out - y) ** 2) + tf.reduce_mean((slopes - 1) ** 2)

    return gradients_of(model, loss)


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


def real_and_fake(model, x, y):
    """Rows made in the step and rows of the data, in one batch of twice the rows."""
    both = tf.concat([x, x[::-1] * 0.5], 0)
    labels = tf.concat([y, tf.zeros_like(y)], 0)
    return gradients_of(model, lambda: tf.reduce_mean(squares(model, both, labels)))


STEPS = {step.__name__: step for step in (
    plain_mean, in_batch_negatives, chosen_rows, root_of_a_sum, normalized, gradient_penalty,
    two_passes, hessian_product, real_and_fake)}


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
    kit.backend.set_floatx("float64")
    try:
        with strategy.scope() if strategy else tf.device(None):
            model = make(kit)
            model.compile(kit.optimizers.SGD(0.05), "mse",
                          metrics=None if metrics is None else metrics(kit))
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        return [model.fit(data, epochs=2, verbose=0).history, model.get_weights()]
    finally:
        kit.backend.set_floatx("float32")
        kit.backend.clear_session()  # Keras 3 keeps the policy that was made meanwhile


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

    @wide.product(kit=[keras, tf_keras], group=[0, 1, 2, 3], towers=[3, 4])
    def test_layers(self, kit, group, towers):
        """Else a layer that looks at other rows trains something else on towers."""
        features = list(itertools.islice(FEATURES.values(), group, None, 4))
        self.assert_as_one_device(kit, lambda kit: layered(kit, features), towers)

    @wide.product(kit=[keras, tf_keras], step=list(STEPS), towers=[3, 4])
    def test_steps(self, kit, step, towers):
        """Else a train_step of one's own must be rewritten for towers."""
        self.assert_as_one_device(kit, lambda kit: stepping(kit, STEPS[step]), towers)

    @parameterized.product(kit=[keras, tf_keras])
    def test_metrics(self, kit):
        """Else a metric whose state is no sum, or that ranks rows, is logged wrong."""
        self.assert_as_one_device(
            kit, lambda kit: kit.Sequential([kit.layers.Dense(2)]), metrics=metrics_of, rtol=1e-6)


if __name__ == "__main__":
    absltest.main()
