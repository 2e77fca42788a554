"""derivatives: Jacobians, second derivatives and functions of gradients, in steps of one's own.

Each step is written as for one device; what cannot be made of the merged gradients says so.
"""

import contextlib
import warnings

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy

KITS = {"keras": keras, "tf_keras": tf_keras}
COLUMNS = 5


def batches():
    random = np.random.default_rng(4)
    for rows in (10, 2):
        yield random.normal(size=[rows, COLUMNS]), random.normal(size=[rows, 1])


def loss_of(scale, weight, x, y):
    return scale(tf.reduce_mean(tf.square(tf.tanh(x @ weight) - y)) + 0.1 * tf.reduce_sum(
        tf.square(weight)))


def gradient_of(scale, weight, x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(scale, weight, x, y)
    return tape.gradient(loss, weight)


def solved(matrix, vector):
    matrix = tf.reshape(matrix, [COLUMNS, COLUMNS]) + 0.5 * tf.eye(COLUMNS, dtype=vector.dtype)
    return tf.linalg.solve(matrix, vector)


def direction(weight):
    return tf.reshape(tf.linspace(tf.constant(-1., weight.dtype), 1., COLUMNS), [COLUMNS, 1])


def newton(scale, weight, x, y):
    with tf.GradientTape(persistent=True) as outer:
        gradient = gradient_of(scale, weight, x, y)
    return solved(outer.jacobian(gradient, weight), gradient)


def forward_over_reverse(scale, weight, x, y):
    along = direction(weight)
    with tf.autodiff.ForwardAccumulator(weight, along) as accumulator:
        gradient = gradient_of(scale, weight, x, y)
    curvature = tf.reduce_sum(along * accumulator.jvp(gradient))
    return gradient / (1. + tf.abs(curvature))


def along_the_gradient(scale, weight, x, y):
    gradient = gradient_of(scale, weight, x, y)
    with tf.autodiff.ForwardAccumulator(weight, gradient) as accumulator:
        again = gradient_of(scale, weight, x, y)
    curvature = tf.reduce_sum(gradient * accumulator.jvp(again))
    return gradient * tf.reduce_sum(gradient * gradient) / (0.1 + tf.abs(curvature))


def reverse_over_reverse(scale, weight, x, y):
    with tf.GradientTape() as outer:
        gradient = gradient_of(scale, weight, x, y)
        along = tf.reduce_sum(gradient * direction(weight))
    return gradient / (1. + tf.abs(outer.gradient(along, weight)))


def zeros_for_none(scale, weight, x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(scale, weight, x, y)
    return tf.clip_by_norm(tape.gradient(loss, weight, unconnected_gradients="zero"), 0.05)


def of_the_graph(scale, weight, x, y):
    gradient, = tf.gradients(loss_of(scale, weight, x, y), weight)
    return tf.clip_by_norm(gradient, 0.05)


def by_moved_weights(scale, weight, x, y):
    moved = weight + 0.1
    with tf.GradientTape() as tape:
        tape.watch(moved)
        loss = loss_of(scale, moved, x, y)
    return tf.clip_by_norm(tape.gradient(loss, moved), 0.05)


def of_a_loss_a_row(scale, weight, x, y):
    del scale
    with tf.GradientTape() as tape:
        losses = tf.square(tf.tanh(x @ weight) - y)[:, 0]
    return tf.clip_by_norm(tape.gradient(losses, weight), 0.05)


def gauss_newton(scale, weight, x, y):
    del scale
    with tf.GradientTape() as tape:
        outputs = tf.tanh(x @ weight)[:, 0]
    rows = tf.reshape(tape.jacobian(outputs, weight), [-1, COLUMNS])
    error = outputs[:, tf.newaxis] - y
    return solved(tf.matmul(rows, rows, transpose_a=True),
                  tf.matmul(rows, error, transpose_a=True))


def by_the_loss(scale, weight, x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(scale, weight, x, y)
    return tape.gradient(loss, weight) * tf.exp(-loss)


@tf.function
def taken_in_a_function(scale, weight, x, y):
    gradient = gradient_of(scale, weight, x, y)
    return gradient, -gradient / 2.


def of_a_function(scale, weight, x, y):
    gradient, half = taken_in_a_function(scale, weight, x, y)
    return tf.clip_by_norm(gradient - half, 0.05)


@tf.function
def clipped_in_a_function(scale, weight, x, y):
    return tf.clip_by_norm(gradient_of(scale, weight, x, y), 0.05)


STEPS = {step.__name__: step for step in (
    newton, forward_over_reverse, along_the_gradient, reverse_over_reverse, zeros_for_none,
    of_the_graph, by_moved_weights, of_a_loss_a_row, gauss_newton, by_the_loss, of_a_function)}


def penalized(scale, weight, x, y):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = loss_of(scale, weight, x, y)
        loss += tf.reduce_sum(tf.square(tape.gradient(loss, weight)))
    return outer.gradient(loss, weight)


def merged_penalty(scale, weight, x, y):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = loss_of(scale, weight, x, y)
        gradient = tape.gradient(loss, weight)
        if tf.distribute.has_strategy():
            gradient = tf.distribute.get_replica_context().all_reduce("SUM", gradient)
        loss += scale(tf.reduce_sum(tf.square(gradient)))
    return outer.gradient(loss, weight)


def adapted(scale, weight, x, y):
    with tf.GradientTape() as outer:
        gradient = gradient_of(scale, weight, x, y)
        loss = loss_of(scale, weight - 0.5 * gradient, 1.1 * x, y)
    return outer.gradient(loss, weight)


def by_hand(scale, weight, x, y):
    del scale
    return tf.matmul(x, x @ weight - y, transpose_a=True) / tf.cast(tf.shape(x)[0], x.dtype)


class DerivativesTest(parameterized.TestCase):

    def trained(self, strategy, kit, change, written=False):
        """The weight after a few batches; an optimizer changes it, or it is written."""
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            weight = tf.Variable(np.linspace(0.5, -0.5, COLUMNS)[:, np.newaxis])
            optimizer = kit.optimizers.SGD(0.5)

        def replica(x, y):
            scale = (lambda loss: loss) if strategy is None else strategy.scale_loss
            step = change(scale, weight, x, y)
            if written:
                weight.assign_sub(0.5 * step)
            else:
                optimizer.apply_gradients([(step, weight)])

        @tf.function
        def run(x, y):
            return replica(x, y) if strategy is None else strategy.run(replica, (x, y))

        for batch in batches():
            run(*(batch if strategy is None else strategy.split(batch)))
        return weight.numpy()

    @parameterized.parameters(
        *((name, False) for name in STEPS),
        *((name, True) for name in ("reverse_over_reverse", "of_a_loss_a_row", "gauss_newton")))
    def test_as_on_one_device(self, name, written):
        """Else a step of the second order is made of a tower's curvature, and nobody is told."""
        kit = KITS["tf_keras" if name == "newton" else "keras"]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "towerstrategy")
            got = self.trained(towerstrategy.TowerStrategy(3), kit, STEPS[name], written)
        wanted = self.trained(None, kit, STEPS[name], written)
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)

    @parameterized.named_parameters(
        ("a_penalty", penalized, "a function of gradients: .*all_reduce"),
        ("moved_weights", adapted, "a function of gradients: .*all_reduce"),
        ("changed_in_a_function", clipped_in_a_function, "a function of gradients: .*nested"),
        ("a_mean_by_hand", by_hand, "unscaled loss: "))
    def test_what_is_not_made_of_merged_gradients_is_told(self, change, message):
        """Else a penalty on the gradient's norm is one on those of the towers' parts."""
        with self.assertWarnsRegex(UserWarning, message):
            self.trained(towerstrategy.TowerStrategy(3), keras, change)

    def test_merged_first(self):
        """Else who follows the warning's advice gets something else than one device."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "towerstrategy")
            got = self.trained(towerstrategy.TowerStrategy(3), keras, merged_penalty)
        np.testing.assert_allclose(got, self.trained(None, keras, merged_penalty), rtol=1e-9)


if __name__ == "__main__":
    absltest.main()
