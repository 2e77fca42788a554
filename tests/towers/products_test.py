"""products: a product with a large weight is made once for all towers' rows, and is the same."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide

KERAS = {"keras": keras, "tf_keras": tf_keras}
WIDE = 512  # WIDE x WIDE is products.LEAST_WEIGHT
DEVICES = ["CPU:1", "CPU:2", "CPU:3"]


def model_of(kit):
    kit.utils.set_random_seed(3)
    layers = kit.layers
    return kit.Sequential([
        kit.Input([WIDE]), layers.Dense(WIDE, activation="tanh"), layers.Dense(WIDE),
        layers.Dense(WIDE, use_bias=False), layers.Dense(3)])


def rows(count, width=WIDE):
    return np.random.default_rng(count).normal(size=[count, width]).astype("float32")


def of_all(value):
    """The sum of what all towers have for ``value``; on one device, ``value``."""
    context = tf.distribute.get_replica_context()
    return context.all_reduce("SUM", value) if tf.distribute.has_strategy() else value


def products_of(step, *args):
    """How many products the functions of ``step`` make that something is made of."""
    graph_def, count = step.get_concrete_function(*args).graph.as_graph_def(), 0
    for function in graph_def.library.function:
        used = {name.split(":")[0] for node in function.node_def for name in node.input}
        used |= {name.split(":")[0] for name in function.ret.values()}
        count += sum(node.op == "MatMul" and node.name in used for node in function.node_def)
    return count


class ProductsTest(parameterized.TestCase):

    @wide.product(kit=list(KERAS), merge_device=["CPU:0", "CPU:2"])
    def test_a_model_of_wide_layers(self, kit, merge_device):
        """Else towers mix up their rows, with batches that divide, do not, or leave some none."""
        kit, found = KERAS[kit], []
        x, y = rows(14), rows(14, 3)
        for strategy in (None, towerstrategy.TowerStrategy(DEVICES, merge_device)):
            model = model_of(kit)
            if strategy is not None:
                strategy.adopt(model)
            model.compile(kit.optimizers.SGD(1e-3, momentum=0.9), "mse")
            history = model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
            found.append([*model.get_weights(), history.history["loss"],
                          model.predict(x, batch_size=4, verbose=0),
                          model.evaluate(x, y, batch_size=5, verbose=0)])
            if strategy is not None:
                self.assertEmpty(strategy.extended.own_trace_reasons)
        for expected, got in zip(*found, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)

    def _traced(self, replica, count=None, **arguments):
        strategy = towerstrategy.TowerStrategy(DEVICES, "CPU:0", **arguments)
        with strategy.scope():
            weights = [tf.Variable(rows(WIDE) / WIDE) for _ in range(2)]

        @tf.function(autograph=False)
        def step(*parts):
            return strategy.run(lambda x: replica(x, *weights), parts)

        @tf.function(autograph=False)
        def whole(x):
            return replica(x, *weights)

        x = rows(7 if count is None else count)
        parts = strategy.split(tf.constant(x))
        got = np.concatenate([np.asarray(part) for part in
                              strategy.experimental_local_results(step(parts))])
        np.testing.assert_allclose(got, whole(x), rtol=1e-5, atol=1e-6)
        self.assertEmpty(strategy.extended.own_trace_reasons)
        return products_of(step, parts)

    @parameterized.parameters(6, 7)
    def test_one_product_for_all(self, count):
        """Else each tower sends the weights through the cores that all share once more."""
        products = self._traced(
            lambda x, one, two: tf.nn.relu(tf.matmul(tf.nn.relu(tf.matmul(x, one)), two)), count)
        self.assertEqual(products, 2)

    def test_a_product_of_a_product(self):
        """Else a tower's second product is given the rows of another tower, or the wrong ones."""
        products = self._traced(
            lambda x, one, two: tf.nn.relu(tf.matmul(tf.matmul(x, one), two, transpose_b=True)))
        self.assertEqual(products, 2)

    def test_a_product_that_is_handed_on(self):
        """Else what a replica function returns is tower 0's on all towers."""
        self._traced(lambda x, one, two: tf.matmul(x, one) + 0. * tf.matmul(x, two))
        self._traced(lambda x, one, two: tf.matmul(x, one))

    def test_behind_a_meeting(self):
        """Else a product on the other side of a meeting has lost its rows."""
        def replica(x, one, two):
            first = tf.matmul(x, one)
            return tf.matmul(first + of_all(tf.reduce_sum(first, 0)), two)

        self._traced(replica)

    def test_what_is_kept_in_order(self):
        """Else tower 1 waits for what tower 0 prints, and that, by a product, for tower 1."""
        seen = []

        def replica(x, one, two):
            def note(value):
                seen.append(len(value))
                return value

            def noted(value):
                told = tf.py_function(note, [value], tf.float32)
                told.set_shape(value.shape)
                return told

            return noted(tf.matmul(noted(x), one))

        products = self._traced(replica)
        self.assertEqual(products, 3)
        self.assertLen(seen, 2 * 4)

    def test_micro_batches_stay_apart(self):
        """Else all rows are in memory at once, which is what micro-batches are there to avoid."""
        products = self._traced(lambda x, one, two: tf.matmul(tf.nn.relu(tf.matmul(x, one)), two),
                                8, micro_batches=2)
        self.assertEqual(products, 2 * 6)

    def test_gradients_that_are_taken_behind_a_meeting(self):
        """Else the gradient of a shared product is that of another tower's rows."""
        def replica(x, one, two):
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = tf.matmul(tf.nn.relu(tf.matmul(x, one)), two)
                value += of_all(tf.reduce_sum(tf.stop_gradient(value), 0))
                loss = tf.reduce_sum(tf.square(value))
            return tape.gradient(loss, x)

        self._traced(replica)
