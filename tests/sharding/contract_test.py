"""What ``strategy.run`` warns of: programs whose gradients are not one device's, and no others."""

import warnings

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from towerstrategy import warned

DEVICES = towerstrategy.split_cpu(8)
DRAW = np.random.RandomState(0)
X, Y = DRAW.rand(8, 3), DRAW.rand(8, 2)
WEIGHTS = [DRAW.rand(3, 4), DRAW.rand(4, 2)]


def squares(w, x, y):
    return tf.reduce_sum((tf.nn.relu(x @ w[0]) @ w[1] - y) ** 2, -1)


def penalty(w):
    return .1 * tf.reduce_sum(w[0] ** 2)


def mean_squared(w, x, y):
    return keras.losses.MeanSquaredError(dtype="float64")(y, tf.nn.relu(x @ w[0]) @ w[1])


def products(x, rows):
    return tf.reduce_mean(tf.matmul(x, rows, transpose_b=True))


@tf.function
def nested(w, x, y):
    return tf.reduce_mean(squares(w, x, y))


def recurrent(w, x, y):
    state = tf.zeros([tf.shape(x)[0], 4], x.dtype)
    for step in tf.range(3):
        state = tf.tanh(x @ w[0] * tf.cast(step, x.dtype) + state)
    return tf.reduce_sum((state @ w[1] - y) ** 2, -1)


def attended(w, x):
    """A softmax over an axis that is not the last one, in a loop."""
    rows = tf.reshape(x @ w[0], [-1, 2, 2])
    return tf.while_loop(lambda turn, _: turn < 2, lambda turn, rows: (
        turn + 1, rows * tf.nn.softmax(rows, 1)), (0, rows))[1]


def summed(w, x):
    """A sum over rows, in a loop that adds it to what is zero, as gradients of filters do."""
    zero = tf.zeros([3, 4], x.dtype)
    _, all_turns, _, none = tf.while_loop(lambda turn, *_: turn < 3, lambda turn, _, total, none: (
        turn + 1, total + (none + none), tf.matmul(x, x @ w[0], transpose_a=True), none * 2),
        (0, zero, zero, zero))
    return tf.stop_gradient(all_turns + none)


def gradients_of_products(w, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        rows = tf.reshape(x @ w[0], [-1, 2, 2])
        total = tf.reduce_sum(tf.tanh(tf.matmul(rows, rows, transpose_b=True) @ w[1][:2]))
    return tape.gradient(total, x)


def in_branch(w, loss_of):
    return tf.cond(tf.reduce_sum(w[0]) > 0, loss_of, lambda: tf.zeros([], tf.float64))


# Each takes the strategy, the weights, rows and labels.
RIGHT = {
    "loss_object": lambda s, w, x, y: mean_squared(w, x, y),
    "scaled_mean": lambda s, w, x, y: s.scale_loss(tf.reduce_mean(squares(w, x, y))),
    "scaled_twice": lambda s, w, x, y: s.scale_loss(mean_squared(w, x, y)),
    "scaled_nested": lambda s, w, x, y: s.scale_loss(nested(w, x, y)),
    "average": lambda s, w, x, y: tf.nn.compute_average_loss(squares(w, x, y)),
    "average_of": lambda s, w, x, y: tf.nn.compute_average_loss(squares(w, x, y),
                                                                global_batch_size=8),
    "sum": lambda s, w, x, y: tf.reduce_sum(squares(w, x, y)),
    "every_second": lambda s, w, x, y: (tf.reduce_sum(squares(w, x[::2], y[::2]))
                                        + tf.reduce_sum(squares(w, x[1::2], y[1::2]))) / 8,
    "same_rows_gathered": lambda s, w, x, y: mean_squared(
        [w[0], tf.gather(w[1], tf.range(4))], x, y),  # as of position embeddings
    "noise_of_a_fixed_size": lambda s, w, x, y: mean_squared(w, x, y) + 0. * tf.reduce_sum(
        tf.random.normal([2, 3], dtype=x.dtype) @ w[0]),
    "ragged_lengths": lambda s, w, x, y: tf.reduce_sum(tf.RaggedTensor.from_tensor(
        tf.nn.relu(x @ w[0]) @ w[1], lengths=tf.cast(y[:, 0] * 2, tf.int64)) ** 2) / 8,
    "sum_over_constant": lambda s, w, x, y: tf.reduce_sum(squares(w, x, y)) / 8,
    "penalty": lambda s, w, x, y: mean_squared(w, x, y) + tf.nn.scale_regularization_loss(
        penalty(w)),
    "penalty_by_replicas": lambda s, w, x, y: tf.reduce_sum(squares(w, x, y)) / 8 + penalty(
        w) / s.num_replicas_in_sync,
    "penalty_on_all_by_replicas": lambda s, w, x, y: (tf.reduce_sum(squares(w, x, y)) / 8
        * s.num_replicas_in_sync + penalty(w)) / s.num_replicas_in_sync,
    "two_parts": lambda s, w, x, y: tf.reduce_sum(squares(w, x, y)) / 8 + s.scale_loss(
        tf.reduce_mean(squares(w, x + 1, y))),
    "times_zero": lambda s, w, x, y: mean_squared(w, x, y) + 0. * (
        penalty(w) + tf.reduce_mean(squares(w, x + 1, y))),
    "scaled_penalty": lambda s, w, x, y: mean_squared(w, x, y) + s.scale_loss(penalty(w)),
    "gathered": lambda s, w, x, y: s.scale_loss(products(
        x @ w[0], towerstrategy.whole_batch(x @ w[0]))) + mean_squared(w, x, y),
    "dropout": lambda s, w, x, y: s.scale_loss(tf.reduce_mean(squares(w, tf.nn.dropout(
        x, 1e-9), y))),
    "drawn": lambda s, w, x, y: mean_squared(w, x + 0. * tf.cast(tf.random.categorical(
        tf.matmul(x, w[0]), 3, seed=1), x.dtype), y),
    "one_of_two_views": lambda s, w, x, y: mean_squared(
        w, tf.split(tf.concat([x * w[0][:, 0], x * w[0][:, 1]], 0), 2)[1], y),
    "in_python": lambda s, w, x, y: mean_squared(w, x + tf.ensure_shape(tf.numpy_function(
        lambda rows: 0. * rows, [tf.stop_gradient(x @ w[0][:, :3])], x.dtype), [None, 3]), y),
    "one_after_another": lambda s, w, x, y: mean_squared(w, tf.map_fn(
        lambda row: row * w[0][:, 0], x), y),
    "mean_of_all": lambda s, w, x, y: mean_squared(w, x - tf.distribute.get_replica_context(
        ).all_reduce("SUM", tf.reduce_sum(x, 0)) / 8, y),
    "chosen": lambda s, w, x, y: mean_squared(
        [tf.where(w[0] > .5, w[0], tf.zeros_like(w[0])), w[1]], x, y),
    "lookup": lambda s, w, x, y: s.scale_loss(tf.reduce_mean(
        tf.gather(w[0], tf.cast(x[:, 0] * 3, tf.int32)) @ w[1])),
    "last_in_rows": lambda s, w, x, y: s.scale_loss(tf.reduce_mean(tf.gather(
        tf.reshape(tf.nn.relu(x[:, :, None] * w[0] @ w[1]), [-1, 2]), tf.range(tf.shape(x)[0]) * 3
        + tf.cast(y[:, 0] * 2, tf.int32)) ** 2)),
    "chosen_in_rows": lambda s, w, x, y: s.scale_loss(tf.reduce_mean(tf.gather(
        tf.nn.relu(x @ w[0]) @ w[1], tf.cast(y[:, 0] * 2, tf.int32), batch_dims=1) ** 2)),
    "chosen_by_batch_dims": lambda s, w, x, y: s.scale_loss(tf.reduce_mean(tf.gather_nd(
        tf.nn.relu(x @ w[0]) @ w[1], tf.cast(y[:, :1] * 2, tf.int32), batch_dims=1) ** 2)),
    "chosen_in_a_grid": lambda s, w, x, y: s.scale_loss(tf.reduce_mean(tf.gather_nd(
        tf.nn.relu(x @ w[0]) @ w[1], tf.stack(tf.meshgrid(
            tf.range(tf.shape(x)[0]), [0, 1], indexing="ij"), -1)) ** 2)),
    "chosen_twice": lambda s, w, x, y: tf.reduce_sum((tf.boolean_mask(
        x @ w[0] @ w[1], y[:, 0] > .4) - tf.boolean_mask(y, y[:, 0] > .4)) ** 2) / 8,
    "spectrum_of_weights": lambda s, w, x, y: tf.reduce_sum(squares(
        [tf.math.real(tf.signal.fft(tf.cast(w[0], tf.complex128))), w[1]], x, y)) / 8,
    "triangular_weights": lambda s, w, x, y: tf.reduce_sum(squares([tf.linalg.set_diag(
        tf.linalg.band_part(w[0], -1, 0), tf.exp(tf.linalg.diag_part(w[0]))), w[1]], x, y)) / 8,
    "signals_on_a_graph": lambda s, w, x, y: mean_squared(
        [tf.eye(3, 4, dtype=x.dtype), w[1]], tf.transpose(tf.sparse.sparse_dense_matmul(
            tf.sparse.from_dense(np.eye(3, 4) * 2.), tf.transpose(x @ w[0]))), y),
    "sparse_rows": lambda s, w, x, y: tf.reduce_sum((tf.sparse.sparse_dense_matmul(
        tf.sparse.from_dense(tf.nn.relu(x)), w[0]) @ w[1] - y) ** 2) / 8,
    "determinant_beside_rows": lambda s, w, x, y: tf.reduce_sum(squares(w, x, y) + tf.reduce_sum(
        tf.math.log(tf.linalg.diag_part(tf.linalg.cholesky(tf.matmul(
            w[0], w[0], transpose_b=True) + tf.eye(3, dtype=x.dtype)))))) / 8,
    "entry_of_weights_set": lambda s, w, x, y: tf.reduce_sum(squares([
        tf.tensor_scatter_nd_update(w[0], [[1]], w[0][:1] * 2), w[1]], x, y)) / 8,
    "penalty_on_gradients": lambda s, w, x, y: tf.reduce_sum(gradients_of_products(w, x) ** 2) / 8,
    "softmax_in_loop": lambda s, w, x, y: tf.reduce_sum(attended(w, x) ** 2) / 8,
    "sum_beside_zeros": lambda s, w, x, y: tf.reduce_sum(squares(w, x, y)) / 8 + tf.reduce_sum(
        w[0] * summed(w, x)) / 8,
    "sum_behind_loop": lambda s, w, x, y: tf.reduce_sum(recurrent(w, x, y)) / 8,
    "sum_in_branch": lambda s, w, x, y: in_branch(
        w, lambda: tf.reduce_sum(squares(w, x, y)) / 8),
    "counts_as_wide_as_the_largest": lambda s, w, x, y: tf.reduce_sum((tf.cast(tf.math.bincount(
        tf.cast(x * 4, tf.int32), axis=-1, minlength=4, maxlength=4), x.dtype)[:, :3]
        @ w[0]) ** 2) / 8,
    "flat_rows": lambda s, w, x, y: s.scale_loss(tf.reduce_mean(tf.reduce_mean(tf.reshape(
        (x[:, tf.newaxis, :, tf.newaxis] * w[0] @ w[1]) ** 2, [tf.shape(x)[0], -1]), 1))),
    "ellipsis": lambda s, w, x, y: tf.reduce_sum(tf.tanh(tf.einsum(
        "...i,ij->...j", x[:, tf.newaxis], w[0])) @ w[1]) / 8,
    "sliced": lambda s, w, x, y: tf.reduce_sum(tf.slice(x @ w[0], [0, 1], [-1, -1]) ** 2) / 8,
    "recomputed": lambda s, w, x, y: mean_squared(
        [tf.eye(4, dtype=x.dtype), w[1]], tf.recompute_grad(lambda x: tf.nn.relu(x @ w[0]))(x), y),
}
WRONG = {
    "mean": lambda s, w, x, y: tf.reduce_mean(squares(w, x, y)),
    "a_part_and_a_mean": lambda s, w, x, y: tf.reduce_sum(squares(w, x, y)) / 8 + tf.reduce_mean(
        squares(w, x + 1, y)),
    "scaled_twice_in_part": lambda s, w, x, y: mean_squared(w, x, y) + s.scale_loss(
        mean_squared(w, x + 1, y) + tf.reduce_sum(squares(w, x, y)) / 8),
    "nested_mean": lambda s, w, x, y: nested(w, x, y),
    "mean_by_hand": lambda s, w, x, y: tf.reduce_sum(squares(w, x, y)) / tf.cast(
        tf.shape(x)[0], x.dtype),
    "penalty": lambda s, w, x, y: mean_squared(w, x, y) + penalty(w),
    "in_batch": lambda s, w, x, y: s.scale_loss(products(x @ w[0], x @ w[0])
                                                + tf.reduce_mean(squares(w, x, y))),
    "statistics": lambda s, w, x, y: mean_squared(w, x - tf.reduce_mean(x, 0), y),
    "root_of_sum": lambda s, w, x, y: tf.sqrt(tf.reduce_sum(squares(w, x, y))),
    "square_of_sum_by_replicas": lambda s, w, x, y: (
        1. + tf.reduce_sum(squares(w, x, y)) / 8) ** 2 / s.num_replicas_in_sync,
    "ratio_by_replicas": lambda s, w, x, y: (1. - (2. * tf.reduce_sum(x @ w[0] @ w[1] * y) + 1.) / (
        tf.reduce_sum(x @ w[0] @ w[1] + y) + 1.)) / s.num_replicas_in_sync,
    "order": lambda s, w, x, y: mean_squared(w, tf.sort(x, 0), y),
    "mean_behind_loop": lambda s, w, x, y: tf.reduce_mean(recurrent(w, x, y)),
    "mean_in_branch": lambda s, w, x, y: in_branch(w, lambda: tf.reduce_mean(squares(w, x, y))),
    "mean_along_rows": lambda s, w, x, y: tf.reduce_mean(squares(w, x, y), 0),
    "mean_of_resized": lambda s, w, x, y: tf.reduce_mean(tf.image.resize(
        (x @ w[0] @ w[1])[:, :, tf.newaxis, tf.newaxis], [4, 4]) ** 2),
    "mean_of_spectra": lambda s, w, x, y: tf.reduce_mean(tf.abs(tf.signal.rfft(x @ w[0])) ** 2),
    "size_of_sum": lambda s, w, x, y: mean_squared(w, x, y) + tf.reduce_sum(
        tf.linalg.matvec(w[0], tf.abs(tf.reduce_sum(x - .5, 0)), transpose_a=True)) / 8,
}


def trained(strategy, loss_of, whole=False, persistent=False):
    """The weights after a step, and what was warned of."""
    with strategy.scope():
        weights = [tf.Variable(value) for value in WEIGHTS]
        optimizer = keras.optimizers.SGD(.1)

    def step(x, y):
        with tf.GradientTape(persistent=persistent) as tape:
            loss = loss_of(strategy, weights, x, y)
        optimizer.apply(tape.gradient(loss, weights), weights)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if whole:
            strategy.function(step)(*strategy.split((X, Y)))
        else:
            tf.function(lambda *batch: strategy.run(step, batch))(*strategy.split((X, Y)))
    return [weight.numpy() for weight in weights], [
        warning for warning in found if issubclass(warning.category, warned.TowerWarning)]


def one_device(loss_of):
    return trained(towerstrategy.TowerStrategy(DEVICES[:1]), loss_of)[0]


def one_in_three(name):
    """The marks of a program: the default run has one in three."""
    names = [*RIGHT, *WRONG]
    return wide.WIDE if names.index(name) % 3 else wide.DEFAULT


class ContractTest(parameterized.TestCase):

    @wide.named_parameters(*((name, name) for name in RIGHT), marks=one_in_three)
    def test_nothing_is_said_of_what_is_right(self, name):
        """Else people learn to ignore the warning."""
        got, said = trained(towerstrategy.TowerStrategy(DEVICES[:3]), RIGHT[name])
        self.assertEmpty(said)
        for one, other in zip(got, one_device(RIGHT[name])):
            np.testing.assert_allclose(one, other, rtol=1e-6)

    @wide.named_parameters(*((name, name) for name in WRONG), marks=one_in_three)
    def test_what_is_not_one_devices_is_said(self, name):
        """Else a step written for one device trains something else in silence."""
        got, said = trained(towerstrategy.TowerStrategy(DEVICES[:3]), WRONG[name])
        self.assertLen(said, 1)
        self.assertIn("strategy.function", str(said[0].message))
        self.assertEqual(said[0].filename, __file__)
        wanted = one_device(WRONG[name])
        self.assertTrue(any(abs(one - other).max() > 1e-4 for one, other in zip(got, wanted)))
        got, said = trained(towerstrategy.TowerStrategy(DEVICES[:3]), WRONG[name], whole=True)
        self.assertEmpty(said)
        for one, other in zip(got, wanted):
            np.testing.assert_allclose(one, other, rtol=1e-6)

    def test_a_branch_under_a_persistent_tape(self):
        """Else its right gradients are warned of: zeros are added to what it kept for them."""
        self.assertEmpty(trained(towerstrategy.TowerStrategy(DEVICES[:3]), RIGHT["sum_in_branch"],
                                 persistent=True)[1])

    def test_a_warning_that_is_an_error_ends_the_step(self):
        """Else who asks for an error trains on, and is not even warned, as AutoGraph changes it."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        with strategy.scope():
            weights = [tf.Variable(value) for value in WEIGHTS]
            optimizer = keras.optimizers.SGD(.1)

        @tf.function
        def train_step(batch):
            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(squares(weights, x, y))
                optimizer.apply(tape.gradient(loss, weights), weights)

            strategy.run(step, batch)

        with warnings.catch_warnings():
            warnings.simplefilter("error", warned.TowerWarning)
            for _ in range(2):  # nor does the second try train on
                with self.assertRaisesRegex(Exception, "mean over the tower's rows"):
                    train_step(strategy.split((X, Y)))
        np.testing.assert_array_equal(weights[0], WEIGHTS[0])

    def test_a_legacy_optimizer_that_scales_the_loss(self):
        """Else nothing is said of a mean in half precision with tf_keras' old optimizers."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        with strategy.scope():
            weights = [tf.Variable(value) for value in WEIGHTS]
            optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
                tf_keras.optimizers.legacy.SGD(.1))

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = optimizer.get_scaled_loss(tf.reduce_mean(squares(weights, x, y)))
            gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, weights))
            optimizer.apply_gradients(zip(gradients, weights))

        with self.assertWarnsRegex(warned.TowerWarning, "mean over the tower's rows"):
            tf.function(lambda *batch: strategy.run(step, batch))(*strategy.split((X, Y)))

    @parameterized.parameters(False, True)
    def test_draws_of_layers(self, scaled):
        """Else nothing is said of any model with dropout."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        with strategy.scope():
            dropout = keras.layers.Dropout(.5, dtype="float64")
        said = trained(strategy, lambda s, w, x, y: (s.scale_loss if scaled else tf.identity)(
            tf.reduce_mean(squares(w, dropout(x, training=True), y))))[1]
        self.assertLen(said, 0 if scaled else 1)

    @parameterized.parameters(False, True)
    def test_gradients_that_are_merged_already(self, divided):
        """Else who adds gradients up by hand has them R times in silence, or is told if right."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        with strategy.scope():
            weights = [tf.Variable(value) for value in WEIGHTS]
            optimizer = keras.optimizers.SGD(.1)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = mean_squared(weights, x, y)
            context = tf.distribute.get_replica_context()
            merged = context.all_reduce("SUM", tape.gradient(loss, weights))
            replicas = context.num_replicas_in_sync if divided else 1
            optimizer.apply([gradient / replicas for gradient in merged], weights)

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            tf.function(lambda *batch: strategy.run(step, batch))(*strategy.split((X, Y)))
        if not divided:
            self.assertIn("or one that is summed already", str(said[0].message))
        else:
            self.assertEmpty(said)
            for one, other in zip(weights, one_device(RIGHT["loss_object"])):
                np.testing.assert_allclose(one, other, rtol=1e-6)

    @parameterized.parameters(
        lambda tape, loss, w: tape.gradient(loss, w, unconnected_gradients="zero"),
        lambda tape, loss, w: [tf.zeros_like(each) if gradient is None else gradient
                               for each, gradient in zip(w, tape.gradient(loss, w))])
    def test_gradients_of_what_is_not_used(self, gradients):
        """Else frozen branches, and losses of one of two heads, are warned of."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        with strategy.scope():
            weights = [*map(tf.Variable, WEIGHTS), tf.Variable([1.0, 2.0])]
            optimizer = keras.optimizers.SGD(.1)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = mean_squared(weights, x, y)
            optimizer.apply(gradients(tape, loss, weights), weights)

        with warnings.catch_warnings():
            warnings.simplefilter("error", warned.TowerWarning)
            tf.function(lambda *batch: strategy.run(step, batch))(*strategy.split((X, Y)))

    def test_gradients_kept_by_each_tower(self):
        """Else accumulation by hand, in variables of each tower's own, is warned of."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        with strategy.scope():
            weights = [tf.Variable(value) for value in WEIGHTS]
            kept = [tf.Variable(tf.zeros_like(weight), trainable=False,
                                synchronization=tf.VariableSynchronization.ON_READ,
                                aggregation=tf.VariableAggregation.SUM) for weight in weights]
            optimizer = keras.optimizers.SGD(.1)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = mean_squared(weights, x, y)
            for store, gradient in zip(kept, tape.gradient(loss, weights)):
                store.assign_add(gradient)
            optimizer.apply([store.read_value() for store in kept], weights)

        with warnings.catch_warnings():
            warnings.simplefilter("error", warned.TowerWarning)
            tf.function(lambda *batch: strategy.run(step, batch))(*strategy.split((X, Y)))
        for one, other in zip(weights, one_device(RIGHT["loss_object"])):
            np.testing.assert_allclose(one, other, rtol=1e-6)

    def test_each_model_is_told_of_once(self):
        """Else a second model with the same mistake trains in silence, or each retrace nags."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        for _ in range(2):
            self.assertLen(trained(strategy, WRONG["mean"])[1], 1)
        with strategy.scope():
            weights = [tf.Variable(value) for value in WEIGHTS]
            optimizer = keras.optimizers.SGD(.1)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(squares(weights, x, y))
            optimizer.apply(tape.gradient(loss, weights), weights)

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for rows in (8, 5):
                tf.function(lambda *batch: strategy.run(step, batch))(
                    *strategy.split((X[:rows], Y[:rows])))
        self.assertLen(said, 1)

    def test_gradients_that_are_averaged_before(self):
        """Else `all_reduce("MEAN", gradients)` is warned of: R of these means are the sum."""
        def averaged(strategy, w, x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(squares(w, x, y)) / 8
            means = tf.distribute.get_replica_context().all_reduce("MEAN", tape.gradient(loss, w))
            return tf.add_n([tf.reduce_sum(tf.stop_gradient(mean) * each)
                             for mean, each in zip(means, w)])

        self.assertEmpty(trained(towerstrategy.TowerStrategy(DEVICES[:4]), averaged)[1])

    def test_a_gradient_that_no_optimizer_gets(self):
        """Else a norm that is only looked at is warned of."""
        def looked_at(strategy, w, x, y):
            with tf.GradientTape() as tape:
                mean = tf.reduce_mean(squares(w, x, y))
            norm = tf.linalg.global_norm(tape.gradient(mean, w))
            return mean_squared(w, x, y) + 0. * tf.stop_gradient(norm)

        self.assertEmpty(trained(towerstrategy.TowerStrategy(DEVICES[:3]), looked_at)[1])

    @parameterized.parameters("nothing", "a part", "a penalty")
    def test_a_mean_over_the_number_of_replicas(self, beside):
        """Else TensorFlow's own tutorials are warned of on towers with equally many rows."""
        def by_replicas(strategy, w, x, y):
            replicas = strategy.num_replicas_in_sync
            terms = {"nothing": 0, "a part": tf.reduce_sum(squares(w, x + 1, y)) / 8,
                     "a penalty": penalty(w) / replicas}
            return tf.reduce_mean(squares(w, x, y)) / replicas + terms[beside]

        got, said = trained(towerstrategy.TowerStrategy(DEVICES[:4]), by_replicas)
        self.assertEmpty(said)
        for one, other in zip(got, one_device(by_replicas)):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        self.assertLen(trained(towerstrategy.TowerStrategy(DEVICES[:3]), by_replicas)[1], 1)


if __name__ == "__main__":
    absltest.main()
