"""Loops: each tower runs its own, on its device, and reads variables once, before it."""

import collections

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy
from benchmarks import on_gpus
from towerstrategy import _tensorflow as _tf

DEVICES = towerstrategy.split_cpu(8)
TOWERS = 3
STEPS = 4
ROWS = (9, 2)  # of the second batch a tower has none


def weights(*shape):
    return tf.Variable(np.random.RandomState(len(shape)).normal(size=shape) / 2)


def made(strategy):
    """The loss of a recurrent layer whose steps read weights, one of them by index; its weights.

    The steps normalize a weight, as cells do.
    """
    with strategy.scope() if strategy else tf.device(None):
        kernel, bias, table = weights(3, 3), weights(3), weights(STEPS, 3)

    def normalized():  # each operation of its gradient is linear in the part of a tower
        scale = tf.nn.sigmoid(bias) / tf.norm(kernel, axis=0)
        return tf.where(kernel > -1, kernel * scale, 0) + tf.linalg.band_part(kernel, -1, 0)

    def loss_of(x):
        def step(at, state):
            inner = tf.while_loop(lambda count, _: count < 2, lambda count, state: (
                count + 1, tf.tanh(state @ normalized() + bias)), (0, state))[1]
            return at + 1, inner + tf.gather(table, at)

        return tf.reduce_sum(tf.while_loop(lambda at, _: at < STEPS, step, (0, x))[1] ** 2, 1)

    return loss_of, [kernel, bias, table]


def trained(strategy, in_run):
    """The weights after steps on some batches, and the graph of the last step."""
    loss_of, variables = made(strategy)

    def replica_step(x, count):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(x)) / count
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
        if in_run:
            gradients = tf.distribute.get_replica_context().all_reduce("sum", list(gradients))
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(gradient / 10)

    if in_run:
        step = tf.function(lambda x, count: strategy.run(replica_step, (x, count)))
    else:
        step = (strategy.function if strategy else tf.function)(replica_step)
    if strategy:
        strategy.extended.keep_graphs = True
    for rows in ROWS:
        x = tf.constant(np.random.RandomState(rows).normal(size=[rows, 3]))
        x = strategy.split(x) if strategy else x
        args = x, tf.constant(rows, tf.float64)
        step(*args)
    function = step.get_concrete_function(*args) if strategy else None
    return [variable.numpy() for variable in variables], function and function.graph


class LoopsTest(parameterized.TestCase):

    @parameterized.product(in_run=[False, True], merge=["balanced", "cpu"])
    def test_each_tower_runs_its_own(self, in_run, merge):
        """Else one GPU, or the CPU, runs the loops of all; or weights cross in every iteration."""
        wanted, _ = trained(None, False)
        strategy = towerstrategy.TowerStrategy(on_gpus.towers(TOWERS), merge)
        found, graph = trained(strategy, in_run)
        for one, other in zip(wanted, found):
            np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12)
        loops = [operation for operation in graph.get_operations() if "While" in operation.type]
        self.assertEqual(collections.Counter(on_gpus.name(each.device) for each in loops), {
            f"GPU:{tower}": 2 for tower in range(TOWERS)})
        for loop in loops:
            body = _tf.body_of(graph, loop.get_attr("body").name)
            self.assertNotIn("ReadVariableOp", {each.type for each in body.get_operations()})
            self.assertEqual({each.device for each in loop.inputs if each.dtype.is_floating},
                             {loop.device})  # TensorFlow keeps it there from turn to turn


if __name__ == "__main__":
    absltest.main()
