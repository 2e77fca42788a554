"""Numbers that functions make of rows: one device's, however their rows come together."""

import contextlib
import inspect
import warnings
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
from towerstrategy._keras import over_rows

KITS = {"keras": keras, "tf_keras": tf_keras}


def rows(count):
    random = np.random.RandomState(0)
    return random.randn(count, 6).astype("f"), random.randn(count, 4).astype("f")


@tf.function
def centered(t, p):
    return tf.reduce_sum(tf.square(p - tf.reduce_mean(p, 0) - t), -1)


@tf.function
def nested_ratio(t, p):
    return tf.reduce_sum(tf.square(p - t)) / tf.reduce_sum(tf.abs(t))


def count_of(rows):
    return tf.cast(tf.shape(rows)[0], rows.dtype)


# Of targets and outputs, one number each, to which rows do not add by themselves.
TOGETHER = {
    "a_function": lambda t, p: tf.reduce_mean(centered(t, p)),
    "a_branch": lambda t, p: tf.reduce_mean(tf.cond(
        tf.reduce_sum(t) > 0, lambda: p - tf.reduce_mean(p, 0), lambda: tf.cumsum(p, 0))),
    "a_loop": lambda t, p: tf.reduce_mean(tf.scan(lambda a, b: .5 * a + b, tf.square(p - t))),
    "gathered": lambda t, p: tf.reduce_mean(tf.square(p - tf.gather(p, 0))),
    "reversed": lambda t, p: tf.reduce_mean(tf.square(t - tf.gather(
        p, tf.shape(p)[0] - 1 - tf.range(tf.shape(p)[0])))),
    "elements": lambda t, p: tf.reduce_mean(tf.square(p - tf.gather_nd(p, [[0]]))),
    "sliced": lambda t, p: tf.reduce_mean(tf.slice(tf.pad(p, [[1, 0], [0, 0]]), [1, 0], [-1, 2])),
    "split": lambda t, p: tf.reduce_mean(tf.square(
        tf.split(p, [1, tf.shape(p)[0] - 1])[0] - t)),
    "a_row": lambda t, p: tf.reduce_mean(tf.square(p[:, :1] - tf.reshape(p[:, :1], [1, -1]))),
    "a_vector": lambda t, p: tf.reduce_mean(tf.square(t[:, :1] - tf.reduce_sum(p, -1))),
    "tiled": lambda t, p: tf.reduce_mean(tf.square(
        tf.tile(p, [tf.shape(p)[0], 1]) - tf.repeat(t, tf.shape(p)[0], axis=0))),
    "padded": lambda t, p: tf.reduce_mean(tf.concat([tf.square(p - t), tf.zeros([2, 4])], 0)),
    "a_norm": lambda t, p: tf.reduce_sum(tf.math.reduce_euclidean_norm(p - t, 0)),
    "cumulated": lambda t, p: tf.reduce_mean(tf.math.cumulative_logsumexp(p, 0)),
    "of_segments": lambda t, p: tf.reduce_mean(tf.math.unsorted_segment_max(
        tf.square(p), tf.range(tf.shape(p)[0]) % 2, 2)),
    "a_matrix": lambda t, p: tf.reduce_sum(tf.linalg.svd(p, compute_uv=False)),
    "over_columns": lambda t, p: tf.reduce_sum(tf.square(p - t)) / tf.cast(
        tf.shape(p)[1], p.dtype),
    "over_all": lambda t, p: tf.reduce_sum(tf.square(p - t)) / tf.cast(tf.size(p), p.dtype),
    "times_rows": lambda t, p: tf.reduce_mean(tf.square(p - t)) * count_of(p),
    "stacked": lambda t, p: tf.reduce_mean(tf.reduce_sum(tf.stack([p - t, t]), 0)),
}


def kept(t):
    return tf.cast(t > 0, tf.float32)


def sides(t):
    return tf.cast(t[:, 0] > 0, tf.int32)


def added_in_a_loop(t, p):
    return tf.while_loop(lambda turn, total: turn < 3, lambda turn, total: (
        turn + 1, total + tf.reduce_sum(tf.square(p - t)) / 3.), (0, 0.))[1]


def share_of_bins(t):
    bins = tf.math.bincount(sides(t), minlength=2, maxlength=2, dtype=tf.float32) / count_of(t)
    return -tf.reduce_sum(bins * tf.math.log(bins + 1e-6))


# In a step of one's own: made of sums, means and numbers of rows.
LOGGED = {
    "masked": lambda t, p: tf.reduce_mean(tf.boolean_mask(tf.square(p - t), t > 0)),
    "masked_rows": lambda t, p: tf.reduce_mean(tf.square(
        tf.gather(p, tf.where(t[:, 0] > 0)[:, 0]))),
    "size_of_masked": lambda t, p: tf.reduce_sum(tf.square(p - t) * kept(t)) / tf.cast(
        tf.size(tf.boolean_mask(p, t > 0)), tf.float32),
    "counted": lambda t, p: tf.reduce_sum(tf.square(p - t) * kept(t)) / tf.cast(
        tf.math.count_nonzero(t > 0), tf.float32),
    "of_outputs": lambda t, p: tf.reduce_sum(p * t) / tf.reduce_sum(p * p + t * t),
    "precision": lambda t, p: tf.reduce_sum(tf.cast((p > 0) & (t > 0), tf.int32)) / (
        tf.reduce_sum(tf.cast(p > 0, tf.int32)) + 1),
    "stopped": lambda t, p: tf.reduce_sum(tf.square(p - t) * kept(t)) / tf.stop_gradient(
        tf.reduce_sum(kept(t))),
    "over_columns": lambda t, p: tf.reduce_sum(tf.square(p - t)) / tf.cast(
        tf.shape(p)[1] * 10, tf.float32),
    "times_rows": lambda t, p: tf.reduce_mean(tf.square(p - t)) * count_of(p),
    "rows": lambda t, p: tf.shape(p)[0],
    "unbiased": lambda t, p: tf.reduce_sum(tf.square(p - t)) / (count_of(p) - 1.),
    "stacked": lambda t, p: tf.reduce_mean(tf.reduce_sum(tf.stack([p - t, t]), 0)),
    "listed": lambda t, p: tf.reduce_sum([tf.reduce_mean(tf.square(p)), tf.reduce_mean(p * t)]),
    "rows_behind": lambda t, p: tf.reduce_mean(tf.reduce_sum(tf.transpose(p - t), 0)),
    "rows_taken_behind": lambda t, p: tf.reduce_sum(tf.reduce_mean(tf.transpose(p), 1)),
    "a_branch": lambda t, p: tf.cond(tf.shape(t)[0] > 0, lambda: tf.reduce_sum(p), lambda: 0.),
    "einsum": lambda t, p: tf.einsum("ij,ij->", t, p) / count_of(p),
    "einsum_of_columns": lambda t, p: tf.reduce_sum(tf.abs(tf.einsum("bi,bj->ij", t, p[:, :3]))),
    "tensordot": lambda t, p: tf.tensordot(t, p, 2),
    "a_product": lambda t, p: tf.squeeze(tf.matmul(t[:, :1], p[:, :1], transpose_a=True)),
    "of_a_product": lambda t, p: tf.linalg.trace(tf.transpose(t) @ p) / count_of(p),
    "a_determinant": lambda t, p: tf.linalg.logdet(
        tf.matmul(p, p, transpose_a=True) / count_of(p) + tf.eye(4)),
    "segments": lambda t, p: tf.math.unsorted_segment_mean(p[:, 0], sides(t), 3)[1],
    "bins": lambda t, p: tf.math.bincount(sides(t), minlength=2, maxlength=2)[1],
    "of_bins": lambda t, p: share_of_bins(t),
    "histogram": lambda t, p: tf.histogram_fixed_width(p[:, 0], [-1., 1.], 5)[4],
    "confusion": lambda t, p: tf.linalg.trace(tf.cast(
        tf.math.confusion_matrix(sides(t), sides(p), 3), tf.float32)),
    "squares": lambda t, p: tf.sqrt(2. * tf.nn.l2_loss(p - t)),
    "a_loop": added_in_a_loop,
    "any": lambda t, p: tf.reduce_any(p > 1.5),
    "all": lambda t, p: tf.cast(tf.reduce_all(p > -1.5), tf.float32),
}


# Values, one a row, in which rows meet.
IN_ROWS = {
    "in_batch_negatives": lambda t, p: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.range(tf.shape(p)[0]), tf.matmul(p, t, transpose_b=True)),
    "centered": lambda t, p: tf.reduce_sum(tf.square(p - tf.reduce_mean(p, 0) - t), -1),
}


class SameTest(parameterized.TestCase):

    def results(self, kit, make, train):
        """What ``train`` returns of a model on one device, and on towers."""
        found = []
        for scope in (contextlib.nullcontext(), towerstrategy.TowerStrategy(3).scope()):
            kit.utils.set_random_seed(1)
            with scope:
                x = kit.Input([6])
                model = make(x, kit.layers.Dense(4)(kit.layers.Dense(5, "tanh")(x)))
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "towerstrategy")
                logs = train(model)
            found.append({**{name: float(np.ravel(value)[0]) for name, value in logs.items()},
                          "weights": model.get_weights()})
        return found

    def check(self, wanted, got):
        for one, other in zip(got.pop("weights"), wanted.pop("weights")):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        self.assertEqual(list(got), list(wanted))
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, 1e-4, 1e-5, err_msg=name)

    @parameterized.parameters(("keras", False), ("keras", True), ("tf_keras", False))
    def test_a_compiled_number_in_which_rows_meet(self, version, known):
        """Else a loss or metric is computed of each tower's rows, and nobody is told."""
        kit = KITS[version]
        made = TOGETHER if kit is keras and not known else {
            name: TOGETHER[name] for name in ("a_function", "gathered", "over_columns", "over_all",
                                              "times_rows", "stacked")}
        made = {**made, **IN_ROWS}

        def number(name):
            def function(t, p):
                return made[name](t, p)

            function.__name__ = name
            return function

        def make(inputs, outputs):
            model = kit.Model(inputs, outputs)
            model.compile(kit.optimizers.SGD(0.05), number("centered" if known else "a_function"),
                          metrics=[number(name) for name in made])
            return model

        def train(model):
            x, y = rows(9 if known else 17)
            if known:  # two sizes of sub-batches
                return model.train_on_batch(x, y, return_dict=True)
            return model.fit(x, y, batch_size=10, shuffle=False, verbose=0).history

        self.check(*self.results(kit, make, train))

    @parameterized.parameters(*KITS)
    def test_keras_own_losses_are_made_of_each_towers_rows(self, version):
        """Else all outputs of a batch cross to one device, for a loss that needs no other row."""
        losses = {name: loss for name, loss in vars(KITS[version].losses).items()
                  if inspect.isclass(loss) and name not in (
                      "Loss", "CTC", "Dice", "Tversky", "Circle", "Reduction")}
        strategy, failed = towerstrategy.TowerStrategy(2), []

        @tf.function
        def step(x):
            for name, loss in losses.items():
                for y in (x, tf.reshape(x, [-1, 3, 2])):
                    integers = name.startswith(("Sparse", "CategoricalGeneral"))
                    target = tf.cast(y[..., 0] > 0, tf.int32) if integers else tf.nn.softmax(y)
                    try:
                        loss(reduction="none")(target, tf.nn.softmax(y))
                    except AssertionError:
                        failed.append(name)

        with mock.patch.object(over_rows, "loss_of_all", side_effect=AssertionError):
            strategy.run(step, (strategy.split(rows(6)[0]),))
        self.assertGreater(len(losses), 10)
        self.assertEmpty(failed)

    @parameterized.parameters(("keras", False), ("keras", True), ("tf_keras", False))
    def test_numbers_of_a_step_of_ones_own(self, version, known):
        """Else a masked mean, or a count, counts by all of a tower's rows: a wrong loss and log."""
        kit = KITS[version]

        class Own(kit.Model):
            def train_step(self, data):
                x, y = data[:2]
                with tf.GradientTape() as tape:
                    outputs = self(x, training=True)
                    loss = LOGGED["masked"](y, outputs) + LOGGED["counted"](y, outputs)
                    strategy = tf.distribute.get_strategy()
                    if isinstance(strategy, towerstrategy.TowerStrategy):
                        loss = strategy.scale_loss(loss)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
                return {"loss": loss, **{name: made(y, outputs) for name, made in LOGGED.items()}}

        def make(inputs, outputs):
            model = Own(inputs, outputs)
            model.compile(kit.optimizers.SGD(0.05))
            return model

        def train(model):
            x, y = rows(6 if known else 17)
            if known:
                return model.train_on_batch(x, y, return_dict=True)
            return model.fit(x, y, batch_size=10, shuffle=False, verbose=0).history

        self.check(*self.results(kit, make, train))

    @parameterized.named_parameters(
        ("in_a_function", nested_ratio),
        ("in_a_branch", lambda t, p: tf.cond(
            tf.reduce_sum(t) > 0., lambda: nested_ratio.python_function(t, p), lambda: 0.)),
        ("of_the_worst", lambda t, p: tf.reduce_max(tf.square(p - t))),
        ("a_branch_by_a_mean", lambda t, p: tf.cond(
            tf.reduce_mean(t) > 0., lambda: tf.reduce_mean(tf.abs(p)), lambda: tf.reduce_mean(p))),
        ("prototypes", lambda t, p: tf.reduce_mean(tf.square(p - tf.gather(
            tf.math.unsorted_segment_mean(p, sides(t), 5), sides(t))))),
        ("by_their_covariance", lambda t, p: tf.reduce_mean(p * (p @ tf.linalg.inv(
            tf.matmul(p, p, transpose_a=True) + tf.eye(4))))),
        ("a_variance", lambda t, p: tf.math.reduce_variance(p - t)),
        ("rows_with_rows", lambda t, p: tf.reduce_mean(tf.matmul(p, p, transpose_b=True))),
        ("pairs", lambda t, p: tf.reduce_mean(tf.einsum("ij,kj->ik", t, p))),
        ("neighbours", lambda t, p: tf.reduce_mean(tf.abs(p[1:] - p[:-1]))),
        ("the_first", lambda t, p: p[0, 0]),
        ("softmax", lambda t, p: tf.reduce_sum(tf.nn.softmax(p[:, 0]) * t[:, 0])),
        ("folded", lambda t, p: tf.foldl(lambda a, row: a + tf.reduce_sum(row), p, 0.)),
        ("scanned", lambda t, p: tf.reduce_mean(tf.scan(
            lambda a, row: .5 * a + tf.reduce_sum(row), p, 0.))),
        ("segments", lambda t, p: tf.reduce_sum(tf.abs(tf.math.segment_sum(
            p, tf.sort(sides(t)))))),
        ("distinct", lambda t, p: tf.cast(tf.size(tf.unique(sides(p))[0]), tf.float32)),
        ("python", lambda t, p: tf.ensure_shape(
            tf.numpy_function(np.max, [p], tf.float32), [])))
    def test_what_cannot_be_made_of_all_rows_is_told(self, number):
        """Else it is the mean of the towers' numbers, and looks like one device's."""
        strategy = towerstrategy.TowerStrategy(3)

        @tf.function
        def step(t, p):
            return strategy.scale_loss(number(t, p))

        x, y = rows(7)
        with self.assertWarnsRegex(UserWarning, "puts rows of the batch together"):
            strategy.run(step, strategy.split((x[:, :4], y)))

    @parameterized.named_parameters(
        ("as_it_is", False),
        ("as_it_says", True))
    def test_losses_of_rows_among_rows(self, gathered):
        """Else a contrastive loss with a value a row trains on a tower's negatives, untold."""
        strategy = towerstrategy.TowerStrategy(3)
        x, y = rows(7)
        kernel = np.random.RandomState(1).randn(x.shape[1], y.shape[1]).astype("float32")
        with strategy.scope():
            weights = tf.Variable(kernel)

        def losses_of(x, y, weights):
            alike = tf.matmul(x @ weights, y, transpose_b=True)
            return tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.range(tf.shape(alike)[0]), alike - tf.reduce_max(alike, axis=1))

        def step(x, y):
            with tf.GradientTape() as tape:
                if gathered:
                    x, y = towerstrategy.whole_batch((x, y))
                loss = losses_of(x, y, weights)
                if gathered:
                    loss = strategy.scale_loss(tf.reduce_sum(loss))
            return tape.gradient(loss, weights)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parts = tf.function(lambda *args: strategy.run(step, args))(*strategy.split((x, y)))
        told = [each for each in caught if "puts other rows into each" in str(each.message)]
        self.assertLen(told, 1 - gathered)
        if gathered:
            with tf.GradientTape() as tape:
                loss = losses_of(x, y, weights)
            np.testing.assert_allclose(
                strategy.reduce("SUM", parts, None), tape.gradient(loss, weights), 1e-4, 1e-5)


# What a step reads of a metric's own variables.
READ = {
    "total": lambda metric: metric.total * 2.,
    "ratio": lambda metric: tf.sqrt(metric.total / metric.count),
    "whole": lambda metric: tf.cast(metric.count, tf.int32),
    "result in a branch": lambda metric: tf.cond(
        metric.total > 0., lambda: metric.result() ** 2, lambda: 0.),
}


def logs_of(kit, strategy, read):
    """What ``evaluate`` tells, after each of three batches, of rows that do not count alike."""
    class Model(kit.Model):
        def __init__(self):
            super().__init__()
            self.mean = kit.metrics.Mean("mean")

        def call(self, x):
            return tf.reduce_sum(x, -1)

        @property
        def metrics(self):
            return [self.mean]

        def test_step(self, data):
            x, y = data
            self.mean.update_state(self(x), y[:, 0] ** 2)
            return {"log": read(self.mean)}

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Model()
        model.compile()
    told = []

    class Note(kit.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            told.append(float(logs["log"]))

    model.evaluate(*rows(11), batch_size=5, verbose=0, callbacks=[Note()])
    return told


class StateTest(parameterized.TestCase):

    @parameterized.product(kit=tuple(KITS), read=tuple(READ))
    def test_a_metrics_own_variables(self, kit, read):
        """Else a log made of a metric's variables, not of its result, is a mean of the towers'."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            towers = logs_of(KITS[kit], towerstrategy.TowerStrategy(3), READ[read])
        np.testing.assert_allclose(towers, logs_of(KITS[kit], None, READ[read]), rtol=2e-6)
