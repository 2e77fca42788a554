"""Whether a number's rows are looked through right: which functions put several rows together."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

from towerstrategy.losses import by_row, provenance

WEIGHTS = np.array([[1.0, 2.0, 0.5], [0.5, 1.0, 1.0], [2.0, 0.5, 1.0]], "float32")


@tf.function
def _squares(y, p):
    return tf.square(y - p)


@tf.function
def _of_pairs(y, p):
    return tf.reshape(y - p, [-1, 1]) * tf.reshape(y - p, [1, -1])


def _order(p):
    return tf.shape(p)[0] - 1 - tf.range(tf.shape(p)[0])


# Of y and p, with 3 values a row: a value or more for each row, of that row alone.
BY_ROW = {
    "flat": lambda y, p: tf.reshape(tf.square(y - p), [-1]),
    "images": lambda y, p: tf.image.sobel_edges(tf.reshape(y * p, [-1, 1, 3, 1])),
    "convolution": lambda y, p: tf.nn.conv1d(p[:, :, None], tf.ones([2, 1, 1]), 1, "SAME"),
    "a table": lambda y, p: tf.gather(WEIGHTS, tf.argmax(y, -1)) * tf.matmul(p, WEIGHTS),
    "from each row": lambda y, p: tf.gather(p, tf.argmax(y, -1), axis=1, batch_dims=1),
    "columns": lambda y, p: tf.gather(p, [2, 0], axis=-1) + y[..., :2] + p[:, 1:],
    "of a row": lambda y, p: tf.sort(p) + tf.cumsum(y, 1) + tf.nn.softmax(p),
    "stacked": lambda y, p: tf.stack([y, p], -1) + tf.concat([y, p], 1)[:, :3, None],
    "split": lambda y, p: tf.split(p, 3, axis=1)[0] + tf.unstack(y, axis=1)[0][:, None],
    "padded": lambda y, p: tf.pad(p, [[0, 0], [1, 0]]) + tf.tile(y, [1, 2])[:, :4],
    "outer products": lambda y, p: tf.matmul(y[:, :, None], p[:, None]) + tf.linalg.diag(p),
    "weighted": lambda y, p: tf.where(y > 0, WEIGHTS[0] * p, tf.nn.leaky_relu(p)),
    "a spectrum": lambda y, p: tf.abs(tf.signal.rfft(p)),
    "a function": lambda y, p: _squares(y, p),
    "a gradient of its own": lambda y, p: tf.nn.swish(p) + tf.clip_by_value(y, 0.0, 1.0),
    "by the number of features": lambda y, p: p / tf.cast(tf.shape(p)[1], tf.float32),
    "beside zeros": lambda y, p: tf.concat([p, tf.zeros([tf.shape(p)[0], 1])], 1),
    "as many as": lambda y, p: tf.reshape(y, tf.shape(p)) - tf.ones_like(y),
    "ones": lambda y, p: tf.ones([tf.shape(p)[0]]),
    "softmax cross entropy": lambda y, p: tf.nn.softmax_cross_entropy_with_logits(y, p),
}

TOGETHER = {
    "pairs, reshaped": lambda y, p: tf.reshape(y, [-1, 1]) - tf.reshape(p, [1, -1]),
    "neighbours, reshaped": lambda y, p: tf.reshape(p[:, 0], [-1, 2]),
    "pairs, by ranks": lambda y, p: y[:, 0] - p[:, :1],
    "pairs, tiled": lambda y, p: tf.repeat(p, tf.shape(p)[0], 0) - tf.tile(y, [tf.shape(p)[0], 1]),
    "pairs, broadcast": lambda y, p: tf.broadcast_to(p[:, 0], [tf.shape(p)[0]] * 2),
    "pairs, a mesh": lambda y, p: tf.meshgrid(p[:, 0], y[:, 0])[0],
    "by the number of rows": lambda y, p: p / tf.cast(tf.shape(p)[0], tf.float32),
    "by their places": lambda y, p: p * tf.cast(tf.range(tf.shape(p)[0]), tf.float32)[:, None],
    "places": lambda y, p: tf.cast(tf.range(tf.shape(p)[0]), tf.float32),
    "products": lambda y, p: tf.matmul(y, p, transpose_b=True),
    "a covariance": lambda y, p: tf.matmul(y, p, transpose_a=True),
    "a softmax of all rows": lambda y, p: tf.nn.softmax(tf.reshape(p, [-1])),
    "cumulated": lambda y, p: tf.math.cumulative_logsumexp(p),
    "some rows": lambda y, p: tf.gather(p, tf.range(tf.shape(p)[0] // 2)),
    "other rows": lambda y, p: y - tf.gather(p, _order(p)),
    "other rows, of a vector": lambda y, p: tf.gather(p[:, 0], _order(p), axis=-1),
    "other rows, by index": lambda y, p: tf.gather_nd(p, _order(p)[:, None]),
    "other rows, stitched": lambda y, p: tf.dynamic_stitch([_order(p)], [p]),
    "first rows": lambda y, p: tf.slice(p, [0, 0], [2, 3]),
    "halves": lambda y, p: tf.split(p, [2, tf.shape(p)[0] - 2])[0],
    "joined": lambda y, p: tf.concat([y, WEIGHTS], 0),
    "each row in turn": lambda y, p: tf.scan(lambda a, b: 0.5 * a + b, p),
    "largest of a kind": lambda y, p: tf.gather(
        tf.math.unsorted_segment_max(p, tf.argmax(y, -1), 3), tf.argmax(y, -1)),
    "counted": lambda y, p: p / tf.gather(tf.cast(tf.math.bincount(
        tf.cast(tf.argmax(y, -1), tf.int32), minlength=3), tf.float32), tf.argmax(y, -1))[:, None],
    "scattered": lambda y, p: tf.scatter_nd(tf.argmax(y, -1)[:, None], p, [3, 3]),
    "normalized": lambda y, p: tf.compat.v1.nn.fused_batch_norm(
        p[:, None, None], tf.ones([3]), tf.ones([3]))[0],
    "along the rows": lambda y, p: tf.nn.conv1d(p[None], tf.ones([2, 3, 1]), 1, "SAME"),
    "a function": lambda y, p: _of_pairs(y, p),
    "a function, called twice": lambda y, p: _squares(y, p) + _squares(p, y),
}


def _is_by_row(function, static):
    found = []

    @tf.function(autograph=False)
    def traced(y, p):
        walk = provenance.Walk(rows=4 if static else 0)
        found.append(by_row.is_by_row(walk, function(y, p), by_row.Given({id(y), id(p)})))

    spec = tf.TensorSpec([4 if static else None, 3])
    traced.get_concrete_function(spec, spec)
    return found[0]


class ByRowTest(parameterized.TestCase):

    @parameterized.product(name=list(BY_ROW), static=[True, False])
    def test_of_one_row(self, name, static):
        """Else an ordinary mean over rows is computed a second time, of all rows."""
        self.assertTrue(_is_by_row(BY_ROW[name], static))

    @parameterized.product(name=list(TOGETHER), static=[True, False])
    def test_of_several_rows(self, name, static):
        """Else a loss that puts rows together is that of each tower's rows, without a word."""
        self.assertFalse(_is_by_row(TOGETHER[name], static))

    @parameterized.product(kit=[keras, tf_keras], name=[
        "mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error",
        "mean_squared_logarithmic_error", "huber", "log_cosh", "kl_divergence", "poisson",
        "cosine_similarity", "categorical_hinge", "binary_crossentropy",
        "categorical_crossentropy", "binary_focal_crossentropy", "categorical_focal_crossentropy"])
    def test_keras_losses(self, kit, name):
        """Else the mean of one of them is computed a second time, of all rows."""
        self.assertTrue(_is_by_row(getattr(kit.losses, name), False))
