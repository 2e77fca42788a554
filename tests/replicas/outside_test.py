"""Training in a strategy's scope, outside of its towers: on the one copy, as on one device."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide

ROWS = np.random.RandomState(0).randn(7, 3).astype("float32")


def strategy_of(count):
    return towerstrategy.TowerStrategy([f"CPU:{number}" for number in range(1, count + 1)], "cpu")


def optimizers(kit):
    made = [kit.optimizers.SGD(0.1, momentum=0.9), kit.optimizers.Adam(clipnorm=0.1)]
    if kit is tf_keras:
        return [*made, kit.optimizers.legacy.Adam(0.1),
                kit.mixed_precision.LossScaleOptimizer(kit.optimizers.SGD(0.1)),
                kit.mixed_precision.LossScaleOptimizer(kit.optimizers.legacy.SGD(0.1))]
    return [*made, kit.optimizers.Adam(gradient_accumulation_steps=2),
            kit.optimizers.LossScaleOptimizer(kit.optimizers.SGD(0.1))]


def trained(kit, number, strategy, in_function):
    """The weights after a tape around the forward pass and ``apply_gradients``, both in scope."""
    kit.utils.set_random_seed(1)
    scope = strategy.scope if strategy else contextlib.nullcontext
    with scope():
        model = kit.Sequential([kit.Input([2]), kit.layers.Dense(4, "tanh"), kit.layers.Dense(1)])
        optimizer = optimizers(kit)[number]
        if hasattr(optimizer, "build"):
            optimizer.build(model.trainable_variables)
    loss_of = kit.losses.MeanSquaredError(
        reduction="sum_over_batch_size" if kit is keras else "sum")

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x[:, 2:], model(x[:, :2], training=True))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    step = tf.function(step) if in_function else step
    with scope():
        losses = [float(step(tf.constant(ROWS))) for _ in range(4)]
    return [*model.get_weights(), losses]


class OutsideTest(parameterized.TestCase):

    @wide.product(2, kit=[keras, tf_keras], number=[0, 1, 2], towers=[1, 3],
                  in_function=[False, True])
    def test_as_on_one_device(self, kit, number, towers, in_function):
        """Else code with a tape around the forward pass fails, or trains with 1/R of the loss."""
        got = trained(kit, number, strategy_of(towers), in_function)
        wanted = trained(kit, number, None, in_function)
        for one, other in zip(got, wanted):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)

    @wide.product(2, kit=[keras, tf_keras], towers=[1, 3], in_scope=[False, True],
                  where=["towers", "outside"], in_function=[True, False])
    def test_optimizers_that_nobody_has_built(self, kit, towers, in_scope, where, in_function):
        """Else an optimizer that one device builds when it is called is one of no strategy."""
        def last(strategy):
            with strategy.scope() if strategy else contextlib.nullcontext():
                weight = kit.Variable([1., 2.]) if kit is keras else tf.Variable([1., 2.])
                optimizer = kit.optimizers.Adam(0.1) if in_scope else None
            optimizer = optimizer or kit.optimizers.Adam(0.1)

            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(x) * tf.reduce_sum(tf.square(weight)) / 7
                plain = weight.value if kit is keras else weight
                optimizer.apply_gradients([(tape.gradient(loss, plain), weight)])

            alone = strategy is None or where == "outside"
            run = step if alone else lambda x: strategy.run(step, (x,))
            run = tf.function(run) if in_function else run
            for _ in range(2):
                run(tf.range(7.) if alone else strategy.split(tf.range(7.)))
            return np.asarray(weight)

        np.testing.assert_allclose(last(strategy_of(towers)), last(None), rtol=1e-6)

    def test_loss_scaling(self):
        """Else a loss scaled for mixed precision is unscaled by another number."""
        for kit, number in (keras, 2), (keras, 3), (tf_keras, 3), (tf_keras, 4):
            got = trained(kit, number, strategy_of(3), True)
            for one, other in zip(got, trained(kit, number, None, True)):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)

    @parameterized.parameters(False, True)
    def test_metrics_that_are_called(self, in_function):
        """Else what is counted outside of towers, or by an eager model, counts R times."""
        strategy = strategy_of(3)
        with strategy.scope():
            total, parts = tf_keras.metrics.Sum(), tf_keras.metrics.Sum()
            call = tf.function(total) if in_function else total
            self.assertEqual(float(call(tf.constant([100., 1.]))), 101.)
            self.assertEqual(float(call(tf.constant([2.]), sample_weight=tf.constant([3.]))), 107.)
            parts(strategy.split(tf.constant([1., 2., 3., 4.])))
        self.assertEqual([float(total.result()), float(parts.result())], [107., 10.])

    @parameterized.parameters(keras, tf_keras)
    def test_gradients_of_towers_are_refused(self, kit):
        """Else what towers have computed apart is applied as if it were one gradient."""
        strategy = strategy_of(3)
        with strategy.scope():
            v = tf.Variable(1.)
            optimizer = kit.optimizers.SGD(0.1)
            gradients = strategy.run(lambda x: tf.reduce_sum(x), (strategy.split(tf.ones([7])),))
            with self.assertRaisesRegex(ValueError, "inside of the function given to strategy.run"):
                optimizer.apply_gradients([(gradients, v)])

    @wide.parameters(False, wide=[True])
    def test_losses_that_are_logged(self, in_towers):
        """Else a model's log of its loss is R times it, or counts a tower's by its rows twice."""
        def logged(strategy):
            keras.utils.set_random_seed(1)
            with strategy.scope() if strategy else contextlib.nullcontext():
                given = keras.Input([2])
                model = keras.Model(given, [keras.layers.Dense(1)(given) for _ in range(2)])
                model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"])
                x, y = tf.constant(ROWS[:, :2]), [tf.constant(ROWS[:, 2:])] * 2
                if strategy and in_towers:
                    tf.function(lambda batch: strategy.run(model.train_step, (batch,)))(
                        strategy.split((x, y)))
                elif in_towers:
                    model.train_step((x, y))
                else:
                    model.compute_loss(x, y, model(x))
                # In towers, of which Keras counts each as one there, not those of single outputs.
                return [float(metric.result()) for metric in model.metrics[:1 if in_towers else 3]]

        np.testing.assert_allclose(logged(strategy_of(3)), logged(None), rtol=1e-5)
