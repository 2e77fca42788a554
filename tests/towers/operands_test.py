"""operands: a product with a transposed weight, in the form that copies no weight."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from towerstrategy.towers import operands

WIDE, FEW = 1024, 256  # their product is operands.LEAST_WEIGHT


def dense_graph(rows, outputs=FEW, also=None):
    """A graph with a dense layer's product and the gradient of its input; feeds and fetches."""
    graph = tf.Graph()
    with graph.as_default(), tf.device("/device:CPU:0"):
        weight = tf.compat.v1.get_variable("w", [WIDE, outputs], use_resource=True,
                                           initializer=tf.compat.v1.ones_initializer())
        gradient = tf.compat.v1.placeholder(tf.float32, [rows, outputs])
        product = tf.matmul(gradient, weight.value(), transpose_b=True)
        used = tf.square(product)
        extra = also(product) if also else None
    return graph, gradient, product, used, extra


class SwapTest(parameterized.TestCase):

    def _swapped(self, graph, used):
        operands.swap(graph, graph.get_operations())
        return used.op.inputs[0].op.type == "Transpose"

    def test_result_is_the_same(self):
        """Else towers compute other gradients than one device."""
        graph, gradient, product, used, _ = dense_graph(None)
        self.assertTrue(self._swapped(graph, used))
        rows = np.random.RandomState(0).rand(20, FEW).astype("float32")
        with tf.compat.v1.Session(graph=graph) as session:
            with graph.as_default():
                session.run(tf.compat.v1.global_variables_initializer())
            found = session.run(used, {gradient: rows})
            other = session.run(product, {gradient: rows})  # the first form is still there
        np.testing.assert_allclose(found, other**2, rtol=1e-6)

    @parameterized.parameters((16, True), (256, True), (None, True), (8, False), (512, False))
    def test_rows_where_it_pays(self, rows, expected):
        """Else it is slower for a few rows and for many."""
        graph, _, _, used, _ = dense_graph(rows)
        self.assertEqual(self._swapped(graph, used), expected)

    def test_small_weights_stay(self):
        """Else small layers pay for a transpose that gains nothing."""
        graph, _, _, used, _ = dense_graph(16, outputs=FEW - 1)
        self.assertFalse(self._swapped(graph, used))

    def test_every_use_changes(self):
        """Else both forms are computed."""
        graph, _, product, used, extra = dense_graph(16, also=lambda value: (value, value + value))
        self.assertTrue(self._swapped(graph, used))
        self.assertEqual(product.consumers(), [])
        self.assertEqual({one.op.type for one in extra[1].op.inputs}, {"Transpose"})
