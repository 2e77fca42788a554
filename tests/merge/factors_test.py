"""factors: a dense gradient of all towers' rows is the sum of the towers' gradients."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
from towerstrategy.merge import factors
from towerstrategy.merge import gradients as gradients_lib
from towerstrategy.merge import shares as shares_lib

TOWERS = 3


def gradients_of(rows, width=4):
    """A dense layer's gradients on each tower, and by one device: kernel, bias."""
    random = np.random.RandomState(0)
    kernel, bias = tf.constant(random.rand(5, width), tf.float32), tf.zeros([width])
    inputs = [tf.constant(random.rand(count, 5), tf.float32) for count in rows]

    def of(x):
        with tf.GradientTape() as tape:
            tape.watch([kernel, bias])
            loss = tf.reduce_sum(tf.square(tf.nn.bias_add(x @ kernel, bias)))
        return tape.gradient(loss, [kernel, bias])

    return [of(x) for x in inputs], of(tf.concat(inputs, 0))


def operations(graph_function, kind):
    return [operation for operation in graph_function.graph.get_operations()
            if operation.type == kind]


class TotalTest(parameterized.TestCase):

    @parameterized.parameters((2, 2, 2), (3, 1, 2), (2, 1, 0))
    def test_is_the_sum(self, *rows):
        """Else dense layers train with another gradient than one device's."""
        @tf.function
        def step():
            towers, whole = gradients_of(rows)
            made = factors.Factors()
            return [(made.total([gradients[index] for gradients in towers]), whole[index])
                    for index in (0, 1)]

        for found, expected in step():
            np.testing.assert_allclose(found, expected, rtol=1e-6)

    def test_rows_are_joined_once(self):
        """Else the rows of a layer are copied for the kernel and again for the bias."""
        @tf.function
        def step():
            towers, _ = gradients_of([1, 1, 1])
            made = factors.Factors()
            return [made.total([gradients[index] for gradients in towers]) for index in (0, 1)]

        # The layer's inputs and the gradient of its outputs.
        joined = [operation for operation in operations(step.get_concrete_function(), "ConcatV2")
                  if operation.outputs[0].shape.rank == 2 and "gradient" not in operation.name]
        self.assertLen([one for one in joined if len(one.inputs) == TOWERS + 1], 3)  # 1: whole

    def test_others_have_none(self):
        """Else a gradient that is no product over rows is taken for one."""
        with tf.Graph().as_default():
            x = tf.ones([2, 3])
            for others in ([x, x], [x @ tf.ones([3, 3])] * 2,
                           [tf.matmul(x, x, transpose_a=True), tf.ones([3, 3])]):
                self.assertIsNone(factors.Factors().total(others))
        self.assertIsNone(factors.Factors().total([tf.ones([2, 2])] * 2))  # eager

    def test_a_tower_left_out(self):
        """Else the NaN of a tower without rows reaches the weights."""
        @tf.function
        def step(filled):
            x, bad = tf.ones([2, 3]), tf.fill([2, 3], np.nan)
            per_tower = [tf.matmul(rows, rows, transpose_a=True) for rows in (x, bad)]
            shares = shares_lib.Shares([tf.constant(2, tf.int64), filled])
            return gradients_lib.gradients([per_tower], ["/device:CPU:0"], shares,
                                           from_factors=True)[0]

        np.testing.assert_array_equal(step(tf.constant(0, tf.int64)), np.full([3, 3], 2.))
        self.assertTrue(np.isnan(step(tf.constant(2, tf.int64)).numpy()).all())


class StepTest(parameterized.TestCase):

    @parameterized.product(keras_=[keras, tf_keras], balanced=[True, False])
    def test_a_step_makes_each_dense_gradient_once(self, keras_, balanced):
        """Else R towers make and sum R gradients of a kernel's size."""
        strategy = towerstrategy.TowerStrategy(
            ["CPU:1", "CPU:2", "CPU:3"], "balanced" if balanced else "cpu")
        with strategy.scope():
            model = keras_.Sequential([keras_.Input([5]), keras_.layers.Dense(7),
                                       keras_.layers.Dense(1)])
            model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensors((tf.ones([6, 5]), tf.ones([6, 1])))
        batch = next(iter(strategy.experimental_distribute_dataset(data)))
        step = tf.function(lambda one: strategy.run(model.train_step, (one,)), autograph=False)
        library = step.get_concrete_function(batch).graph.as_graph_def().library.function
        nodes = [node for function in library if "run_towers" in function.signature.name
                 for node in function.node_def]
        self.assertNotEmpty(nodes)
        products = [node for node in nodes if node.op == "MatMul" and node.attr["transpose_a"].b
                    and "merge" in node.name]
        self.assertLen(products, 2)
