"""Batch norm that takes each tower's rows, as ``synchronize_batch_norm=False`` asks.

Beside one device with a layer that normalizes slices of the batch, each by itself.
"""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import dtypes
import towerstrategy
import wide

DEVICES = towerstrategy.split_cpu(8)
KITS = {"keras": keras, "tf_keras": tf_keras}
DRAW = np.random.RandomState(3)
IN_TURN = wide.turns(*((name, name) for name in KITS))
TOWERS = 3


def sliced(kit):
    """One device's layer that normalizes what each of three towers would have."""
    class Sliced(kit.layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            if not training:
                return super().call(inputs, training=False)
            rows = tf.shape(inputs)[0]
            axes = list(range(len(inputs.shape) - 1))
            gamma, beta, moving, spread = (tf.convert_to_tensor(variable) for variable in (
                self.gamma, self.beta, self.moving_mean, self.moving_variance))
            parts = tf.split(inputs, [(rows + TOWERS - 1 - tower) // TOWERS
                                      for tower in range(TOWERS)])
            outputs, means, variances = [], 0., 0.
            for part in parts:
                size = tf.shape(part)[0]
                share = tf.cast(size / rows, inputs.dtype)
                mean, variance = tf.nn.moments(tf.cond(
                    size > 0, lambda part=part: part, lambda part=part: tf.zeros_like(inputs)[:1]),
                    axes)
                outputs.append(tf.nn.batch_normalization(part, mean, variance, beta, gamma,
                                                         self.epsilon))
                means, variances = means + share * mean, variances + share * variance
            keep = self.momentum
            self.moving_mean.assign(moving * keep + means * (1 - keep))
            self.moving_variance.assign(spread * keep + variances * (1 - keep))
            output = tf.concat(outputs, 0)
            output.set_shape(inputs.shape)
            return output
    return Sliced


def model_of(kit, norm, image=False):
    layers = kit.layers
    ahead = [layers.Dense(6, "tanh"), norm(name="first")]
    if image:
        ahead = [layers.Conv2D(4, 3), norm(name="first"), layers.ReLU(), layers.Flatten()]
    model = kit.Sequential([*ahead, layers.Dense(5), norm(name="second"), layers.Dense(2)])
    model.compile(kit.optimizers.Adam(.01), "mse", metrics=["mae"])
    return model


def trained(kit, make, strategy, x):
    kit.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = make()
    y = np.random.RandomState(5).rand(len(x), 2)
    history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return [history.history, model.get_weights(), model.predict(x, verbose=0)]


def waits_for_others(graph):
    """Whether what tower 1 does needs what tower 0 has done, numbers of rows left out."""
    own = [operation for operation in graph.get_operations() if "tower_1" in operation.name]
    seen, left = set(), list(own)
    while left:
        operation = left.pop()
        if operation not in seen:
            seen.add(operation)
            left += [tensor.op for tensor in operation.inputs
                     if tensor.dtype.is_floating and tensor.shape.rank != 0]
    return any("tower_0" in operation.name for operation in seen)


class BatchNormTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        for kit in KITS.values():
            self.enter_context(dtypes.policy(kit, "float64"))

    def assert_of_slices(self, kit, x, strategy, **options):
        kit = KITS[kit]
        wanted = trained(kit, lambda: model_of(kit, sliced(kit), **options), None, x)
        got = trained(kit, lambda: model_of(kit, kit.layers.BatchNormalization, **options),
                      strategy, x)
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9),
                              got, wanted)

    @IN_TURN
    def test_each_tower_normalizes_by_its_rows(self, kit):
        """Else the way out of towers that wait for each other gives something of its own."""
        self.assert_of_slices(kit, DRAW.rand(18, 4), towerstrategy.TowerStrategy(
            DEVICES[:TOWERS], synchronize_batch_norm=False))

    @IN_TURN
    def test_of_images(self, kit):
        """Else tf_keras' fused kernel, or a mean over places, is of all rows."""
        self.assert_of_slices(kit, DRAW.rand(18, 5, 5, 2), towerstrategy.TowerStrategy(
            DEVICES[:TOWERS], synchronize_batch_norm=False), image=True)

    @IN_TURN
    def test_no_tower_waits_for_another(self, kit):
        """Else it is right and not faster: sums of a layer would still cross."""
        kit, waits = KITS[kit], {}
        for asked in (True, False):
            strategy = towerstrategy.TowerStrategy(DEVICES[:TOWERS], synchronize_batch_norm=asked)
            with strategy.scope():
                model = model_of(kit, kit.layers.BatchNormalization)
                model.build([None, 4])

            @strategy.function
            def step(x, model=model):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(x, training=True))
                return tape.gradient(loss, model.trainable_variables)

            graph = step.get_concrete_function(strategy.split(DRAW.rand(6, 4))).graph
            waits[asked] = waits_for_others(graph)
        self.assertTrue(waits[True])
        self.assertFalse(waits[False])

    @IN_TURN
    def test_a_layer_may_say_otherwise(self, kit):
        """Else `synchronized=True` of one layer is lost."""
        kit, x = KITS[kit], DRAW.rand(18, 4)
        norm = functools.partial(kit.layers.BatchNormalization, synchronized=True)
        wanted, got = (trained(kit, lambda: model_of(kit, norm), strategy, x) for strategy in (
            None, towerstrategy.TowerStrategy(DEVICES[:TOWERS], synchronize_batch_norm=False)))
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8),
                              got, wanted)

    @IN_TURN
    def test_a_call_of_its_own(self, kit):
        """Else what a user's layer does besides is left out in training."""
        kit, x = KITS[kit], DRAW.rand(18, 4)

        class Doubled(kit.layers.BatchNormalization):
            def call(self, inputs, training=None):
                return 2 * super().call(inputs, training=training)

        wanted, got = (trained(kit, lambda: model_of(kit, Doubled), strategy, x) for strategy in (
            None, towerstrategy.TowerStrategy(DEVICES[:TOWERS], synchronize_batch_norm=False)))
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8),
                              got, wanted)


if __name__ == "__main__":
    absltest.main()
