"""Batch norm that takes each tower's rows, as ``synchronize_batch_norm=False`` asks.

Beside one device with a layer that normalizes slices of the batch, each by itself.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import dtypes
import towerstrategy
import wide

DEVICES = towerstrategy.split_cpu(8)
KITS = {"keras": keras, "tf_keras": tf_keras}
IMAGE = (5, 5, 2)
X = np.random.RandomState(3).rand(18, *IMAGE)  # in batches of 8, 8 and 2
Y = np.random.RandomState(5).rand(18, 2)
IN_TURN = wide.turns(*((name, name) for name in KITS))
TOWERS = 3


def sliced(kit):
    """One device's layer that normalizes what each of three towers would have."""
    class Sliced(kit.layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            if not training:
                return super().call(inputs, training=False)
            rows, axes = tf.shape(inputs)[0], list(range(len(inputs.shape) - 1))
            gamma, beta, moving, spread = (tf.convert_to_tensor(variable) for variable in (
                self.gamma, self.beta, self.moving_mean, self.moving_variance))
            parts = tf.split(inputs, [(rows + TOWERS - 1 - tower) // TOWERS
                                      for tower in range(TOWERS)])
            outputs, means, variances = [], 0., 0.
            for part in parts:
                share = tf.cast(tf.shape(part)[0] / rows, inputs.dtype)
                count = tf.cast(tf.maximum(tf.size(part) // part.shape[-1], 1), inputs.dtype)
                mean = tf.reduce_sum(part, axes) / count
                variance = tf.reduce_sum((part - tf.stop_gradient(mean)) ** 2, axes) / count
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


def model_of(kit, first, second):
    """Two layers that normalize, of images and of features."""
    layers = kit.layers
    model = kit.Sequential([layers.Conv2D(4, 3), first(), layers.ReLU(), layers.Flatten(),
                            layers.Dense(5), second(), layers.Dense(2)])
    model.compile(kit.optimizers.SGD(.1), "mse", metrics=["mae"])
    return model


def trained(kit, make, strategy):
    kit.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = make()
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [history.history, model.get_weights(), model.predict(X, verbose=0)]


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

    def assert_alike(self, kit, norms_alone, norms):
        """One device with some layers is as towers that keep their statistics with others."""
        wanted = trained(kit, lambda: model_of(kit, *norms_alone), None)
        got = trained(kit, lambda: model_of(kit, *norms), towerstrategy.TowerStrategy(
            DEVICES[:TOWERS], synchronize_batch_norm=False))
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9),
                              got, wanted)

    @IN_TURN
    def test_each_tower_normalizes_by_its_rows(self, kit):
        """Else the way out of towers that wait for each other gives something of its own, or
        tf_keras' fused kernel, or a mean over places, is of all rows."""
        kit = KITS[kit]
        self.assert_alike(kit, [sliced(kit)] * 2, [kit.layers.BatchNormalization] * 2)

    @IN_TURN
    @pytest.mark.wide
    def test_a_layer_may_say_otherwise(self, kit):
        """Else `synchronized=True` of one layer is lost, or what a user's layer does besides is
        left out in training."""
        kit = KITS[kit]

        def doubled(base):
            class Doubled(base):
                def call(self, inputs, training=None):
                    return 2 * super().call(inputs, training=training)
            return Doubled

        whole = functools.partial(kit.layers.BatchNormalization, synchronized=True)
        self.assert_alike(kit, [whole, doubled(sliced(kit))],
                          [whole, doubled(kit.layers.BatchNormalization)])

    @parameterized.product(kit=list(KITS), rows=[5, 2])
    def test_in_a_replica_function(self, kit, rows):
        """Else a loop of one's own has a dozen operations a layer where there is a kernel, or the
        kernel's statistics are others than Keras', or those of a tower without rows count."""
        kit = KITS[kit]
        self.enter_context(dtypes.policy(kit, "float32"))
        x, factors = X[:rows].astype("f"), np.random.RandomState(7).rand(rows, *IMAGE).astype("f")
        strategy, found = towerstrategy.TowerStrategy(DEVICES[:TOWERS]), []
        strategy.extended.keep_graphs = True
        for make, scope in (sliced(kit), contextlib.nullcontext()), (
                kit.layers.BatchNormalization, strategy.scope()):
            with scope:
                layer = make()
                layer.build([None, *IMAGE])

            def step(x, factors, layer=layer):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = layer(x, training=True)
                    total = tf.reduce_sum(y * factors)
                return y, tape.gradient(total, x)

            given = [tf.constant(x), tf.constant(factors)]
            if found:
                run = tf.function(lambda *given: strategy.run(step, given))
                given = strategy.split(given)
                types = {operation.type for operation in run.get_concrete_function(
                    *given).graph.get_operations()}
                self.assertNotIn("SquaredDifference", types)
                made = [strategy.gather(value, axis=0) for value in run(*given)]
            else:
                made = tf.function(step)(*given)
            found.append([*made, *layer.non_trainable_variables])
        for got, wanted in zip(found[1], found[0]):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)

    @IN_TURN
    def test_no_tower_waits_for_another(self, kit):
        """Else it is right and not faster: sums of a layer would still cross."""
        kit, waits = KITS[kit], {}
        for asked in (True, False):
            strategy = towerstrategy.TowerStrategy(DEVICES[:TOWERS], synchronize_batch_norm=asked)
            with strategy.scope():
                model = model_of(kit, *[kit.layers.BatchNormalization] * 2)
                model.build([None, *IMAGE])

            @strategy.function
            def step(x, model=model):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(x, training=True))
                return tape.gradient(loss, model.trainable_variables)

            graph = step.get_concrete_function(strategy.split(X)).graph
            waits[asked] = waits_for_others(graph)
        self.assertTrue(waits[True])
        self.assertFalse(waits[False])

    @wide.parameters(wide=[
        *((kit, together, within) for kit in KITS for together in (True, False)
          for within in ("", "branch", "function"))])
    def test_gradients_of_gradients(self, kit, together, within):
        """Else a penalty on gradients, as of a GAN's critic, is another one's, by a percent; or
        fails, in a branch or a function, where statistics are a tower's own."""
        kit, found = KITS[kit], []
        self.enter_context(dtypes.policy(kit, "float32" if together else "float64"))
        x, factors = X[:9, 0, 0], tf.constant(Y[:9] * 9)  # of one row alone all gradients are NaN
        strategy = towerstrategy.TowerStrategy(DEVICES[:TOWERS], synchronize_batch_norm=together)
        one = kit.layers.BatchNormalization if together else sliced(kit)
        for make, scope, function, split in (
                (one, contextlib.nullcontext(), tf.function, lambda batch: batch),
                (kit.layers.BatchNormalization, strategy.scope(), strategy.function,
                 strategy.split)):
            with scope:
                layer = make()
                layer.build([None, 2])

            @function
            def step(x, factors, layer=layer):
                x, factors = tf.cast(x, layer.dtype), tf.cast(factors, layer.dtype)

                def slope(x, factors):
                    with tf.GradientTape() as tape:
                        tape.watch(x)
                        y = tf.cond(tf.reduce_sum(factors) > 0, lambda: layer(x, training=True),
                                    lambda: x) if within == "branch" else layer(x, training=True)
                        total = tf.reduce_sum(tf.sin(y * factors))
                    return tape.gradient(total, x)

                with tf.GradientTape() as outer:
                    outer.watch(x)
                    slopes = (tf.function(slope) if within == "function" else slope)(x, factors)
                    loss = tf.reduce_mean((tf.norm(slopes, axis=1) - 1) ** 2)
                return outer.gradient(loss, [tf.convert_to_tensor(x), *layer.trainable_variables])

            found.append(tf.nest.flatten(step(*split((x, factors)))))
        for got, wanted in zip(found[1], found[0]):
            np.testing.assert_allclose(got, wanted, rtol=2e-4 if together else 1e-9, atol=1e-6)

    def test_vectorized_gradients_are_refused(self):
        """Else a jacobian takes statistics of all rows where a tower's own are asked for."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:TOWERS], synchronize_batch_norm=False)
        with strategy.scope():
            layer = keras.layers.BatchNormalization()
            layer.build([None, 2])

        @strategy.function
        def step(x):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = tf.reduce_sum(layer(x, training=True) ** 3, 0)
            return tape.jacobian(y, x)

        with self.assertRaisesRegex(NotImplementedError, "experimental_use_pfor=False"):
            step(strategy.split(X[:, 0, 0]))

    @pytest.mark.wide
    def test_sums_that_cross_are_few(self):
        """Else towers of Keras 3 wait for each other more often than those of tf_keras do, or what
        the kernel gives, whose variance is another, is not what one device has."""
        crossings = {}
        for name, kit in KITS.items():
            self.enter_context(dtypes.policy(kit, "float32"))
            strategy, weights = towerstrategy.TowerStrategy(DEVICES[:TOWERS]), []
            for scope in contextlib.nullcontext(), strategy.scope():
                kit.utils.set_random_seed(1)
                with scope:
                    model = model_of(kit, *[kit.layers.BatchNormalization] * 2)
                model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
                weights.append(model.get_weights())
            tf.nest.map_structure(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *weights)
            crossings[name] = strategy.extended.crossings["reduce"]
        self.assertEqual(*crossings.values())

    def test_a_batch_without_rows(self):
        """Else the moving statistics are others than one device's, whose kernel gives NaN; with any
        strategy tf_keras keeps them."""
        strategy, rows = towerstrategy.TowerStrategy(DEVICES[:TOWERS]), tf.zeros([0, *IMAGE])

        def moved(scope, function, batch):
            with scope, dtypes.policy(keras, "float32"):
                layer = keras.layers.BatchNormalization()
                layer.build(rows.shape)
            function(lambda rows: layer(rows, training=True))(batch)
            return [np.array(weight) for weight in layer.weights]

        np.testing.assert_equal(
            moved(strategy.scope(), strategy.function, strategy.split(rows)),
            moved(contextlib.nullcontext(), tf.function, rows))


if __name__ == "__main__":
    absltest.main()
