"""Gradients that the replica function merged itself, handed over with "do not merge them again".

The documented way to clip after reducing in tf_keras: ``all_reduce``, clip, then
``apply_gradients(..., experimental_aggregate_gradients=False)`` (legacy optimizers, and those that
scale the loss) or ``skip_gradients_aggregation=True``.  And gradients that it keeps, or has not.
"""

from contextlib import nullcontext as nothing

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide

OPTIMIZERS = {
    "legacy": (lambda: tf_keras.optimizers.legacy.SGD(0.5, momentum=0.9),
               {"experimental_aggregate_gradients": False}),
    "new": (lambda: tf_keras.optimizers.SGD(0.5, momentum=0.9),
            {"skip_gradients_aggregation": True}),
    "new_called_as_legacy": (lambda: tf_keras.optimizers.SGD(0.5, momentum=0.9),
                             {"experimental_aggregate_gradients": False}),
    "scaled_legacy": (
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.legacy.SGD(0.5), dynamic=False, initial_scale=1),
        {"experimental_aggregate_gradients": False}),
    "scaled_new": (
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(0.5), dynamic=False, initial_scale=1),
        {"skip_gradients_aggregation": True}),
}
ROWS = (7, 2, 1)


def trained(strategy, make_optimizer, options, eager=False):
    """The weights after a step a batch: dense ones and an embedding table."""
    with strategy.scope() if strategy else tf.init_scope():
        kernel = tf.Variable([[0.5], [-1.], [2.]])
        table = tf.Variable(tf.reshape(tf.range(12, dtype=tf.float32), [4, 3]) / 7)
        optimizer = make_optimizer()

    def step(ids, y, rows):
        with tf.GradientTape() as tape:
            error = tf.gather(table, ids) @ kernel - y
            loss = tf.reduce_sum(error ** 2) / rows
        gradients = tape.gradient(loss, [kernel, table])
        replica = tf.distribute.get_replica_context()
        if strategy:
            gradients = replica.all_reduce("SUM", gradients)
        clipped, _ = tf.clip_by_global_norm(gradients, 0.3)
        optimizer.apply_gradients(zip(clipped, [kernel, table]), **options)

    def train(ids, y, rows):
        if strategy is None:
            return step(ids, y, rows)
        return strategy.run(step, (*strategy.split((ids, y)), rows))

    train = train if eager else tf.function(train)
    for rows in ROWS:
        ids = np.arange(rows, dtype=np.int32) * 3 % 4
        train(tf.constant(ids), tf.constant(np.sin(ids + 1.).astype("f")[:, None]),
              tf.constant(float(rows)))
    return kernel.numpy(), table.numpy()


class MergedGradientsTest(parameterized.TestCase):

    @wide.product(optimizer=list(OPTIMIZERS), towers=[1, 3, 4])
    def test_as_one_device(self, optimizer, towers):
        """Else a loop that clips after reducing takes steps R times too long, without a word."""
        make_optimizer, options = OPTIMIZERS[optimizer]
        alone = trained(None, make_optimizer, {})
        for eager in (False, True) if optimizer in ("legacy", "new") else (False,):
            strategy = towerstrategy.TowerStrategy(towers)
            together = trained(strategy, make_optimizer, options, eager)
            for one, other in zip(alone, together):
                np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)

    @parameterized.product(optimizer=["legacy", "new"], eager=[True, False])
    def test_equal_gradients_are_applied_as_they_are(self, optimizer, eager):
        """Else what all towers agree on is rounded, and whole numbers are whole no more."""
        make_optimizer, options = OPTIMIZERS[optimizer]
        strategy = towerstrategy.TowerStrategy(3)
        with strategy.scope():
            v, applied = tf.Variable(0.), make_optimizer()
        gradient = 0.1

        def step(x):
            zero = tf.reduce_sum(x) * 0
            applied.apply_gradients([(gradient + zero, v)], **options)

        parts = strategy.split(tf.ones([7]))
        strategy.run(step if eager else tf.function(step), (parts,))
        self.assertEqual(v.numpy(), np.float32(-0.5) * np.float32(gradient))

    @parameterized.product(
        optimizer=["legacy", "new"],
        case=[(5, -0.5 * np.mean([0.5, 0.5, 2, 3, 4])), (2, -0.25)])
    def test_gradients_that_differ_count_by_rows(self, optimizer, case):
        """Else one copy moves by R steps, or by the last tower's alone; a NaN of no rows counts."""
        rows, want = case
        make_optimizer, options = OPTIMIZERS[optimizer]
        strategy = towerstrategy.TowerStrategy(4)
        with strategy.scope():
            v, applied = tf.Variable(0.), make_optimizer()

        def step(x):
            applied.apply_gradients([(tf.reduce_mean(x), v)], **options)

        parts = strategy.split(tf.range(rows, dtype=tf.float32))
        strategy.run(tf.function(step), (parts,))
        np.testing.assert_allclose(v.numpy(), want, rtol=1e-6)


class KeptGradientsTest(parameterized.TestCase):

    @parameterized.product(kit=[keras, tf_keras], aggregation=["NONE", "SUM"], eager=[True, False])
    def test_in_tower_local_variables(self, kit, aggregation, eager):
        """Else learners that keep gradients for a later call fail, or count them R times."""
        strategy = towerstrategy.TowerStrategy(3)
        with strategy.scope():
            weight, optimizer = tf.Variable([1., 2.]), kit.optimizers.SGD(0.1)
            kept = tf.Variable(tf.zeros([2]), trainable=False, aggregation=getattr(
                tf.VariableAggregation, aggregation),
                synchronization=tf.VariableSynchronization.ON_READ)

        def compute(x):
            kept.assign(tf.reduce_sum(x, 0) * weight)

        def step(parts):
            strategy.run(compute, (parts,))
            strategy.run(lambda: optimizer.apply_gradients([(kept, weight)]))

        (step if eager else tf.function(step))(strategy.split(tf.ones([5, 2])))
        np.testing.assert_allclose(weight.numpy(), [0.5, 1.], rtol=1e-6)


class MissingGradientsTest(parameterized.TestCase):

    @parameterized.product(kit=[keras, tf_keras], rows=[1, 5])
    def test_towers_that_do_not_come_to_a_variable(self, kit, rows):
        """Else a loop over rows fails in eager code on a tower that has none, or none of a kind."""
        strategy = towerstrategy.TowerStrategy(3)
        x = np.arange(1., rows + 1, dtype=np.float32)

        def trained(strategy):
            with nothing() if strategy is None else strategy.scope():
                weights, table = tf.Variable(1.), tf.Variable(tf.ones([2, 1]))
                optimizer = kit.optimizers.SGD(.5)
                optimizer.build([weights, table])

            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.constant(0.)
                    for row in x:
                        loss += row * weights if row > 4 else row * tf.reduce_sum(
                            tf.nn.embedding_lookup(table, [0]))
                gradients = tape.gradient(loss, [weights, table])
                optimizer.apply_gradients(zip(gradients, [weights, table]))

            if strategy is None:
                step(x)
            else:
                strategy.run(step, (strategy.split(x),))
            return [weights.numpy(), *table.numpy()]

        self.assertEqual(trained(strategy), trained(None))


class OnReadTest(parameterized.TestCase):

    @parameterized.product(kit=[keras, tf_keras], sparse=[False, True], rows=[6, 2])
    def test_as_one_device(self, kit, sparse, rows):
        """Else a tower without rows counts in a table that is the mean of the towers' own."""
        def trained(strategy):
            with nothing() if strategy is None else strategy.scope():
                table = tf.Variable(tf.ones([3, 1]),
                                    synchronization=tf.VariableSynchronization.ON_READ,
                                    aggregation=tf.VariableAggregation.MEAN, trainable=True)
                optimizer = kit.optimizers.SGD(.5)
                optimizer.build([table])

            def step(ids):
                with tf.GradientTape() as tape:
                    read = tf.nn.embedding_lookup(table, ids) if sparse else tf.matmul(
                        tf.one_hot(ids, 3), table)
                    loss = tf.nn.compute_average_loss(read[:, 0] ** 2, global_batch_size=rows)
                optimizer.apply_gradients([(tape.gradient(loss, table), table)])

            ids = tf.constant([0, 1, 2, 0, 1, 0][:rows])
            if strategy is None:
                step(ids)
            else:
                tf.function(lambda ids: strategy.run(step, (ids,)))(strategy.split(ids))
            return table.numpy()

        np.testing.assert_allclose(trained(towerstrategy.TowerStrategy(3)), trained(None),
                                   rtol=1e-6)
