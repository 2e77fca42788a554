"""Sparse gradients that name each row once, in eager code, where tensors do not tell it."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy

RANDOM = np.random.RandomState(0)
BATCHES = [(RANDOM.randint(0, 6, [rows, 3]), RANDOM.randn(rows, 1).astype("float32"))
           for rows in (7, 2, 8, 1)]


def looked_up_sparsely(table, x):
    ids = tf.SparseTensor(tf.where(x >= 0), tf.reshape(x, [-1]), tf.shape(x, out_type=tf.int64))
    return tf.nn.embedding_lookup_sparse(table, ids, None, combiner="sum")


def looked_up(table, x):
    return tf.reduce_sum(tf.gather(table, x), 1)


def trained(strategy, optimizer, lookup):
    """The table after four eager steps."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        table = tf.Variable(np.linspace(-1, 1, 24).reshape(6, 4).astype("float32"))
        optimizer.build([table])

    def step(x, y):
        with tf.GradientTape() as tape:
            found = tf.reduce_sum(lookup(table, x), 1, keepdims=True)
            loss = tf.reduce_mean(tf.square(found - y))
            loss = strategy.scale_loss(loss) if strategy else loss
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    for batch in BATCHES:
        batch = [tf.constant(part) for part in batch]
        if strategy:
            strategy.run(step, strategy.split(tuple(batch)))
        else:
            step(*batch)
    return table.numpy()


class RowsOnceTest(parameterized.TestCase):

    @parameterized.product(
        make=[lambda: keras.optimizers.Adam(0.1), lambda: tf_keras.optimizers.Adam(0.1, clipnorm=1),
              lambda: keras.optimizers.Adagrad(0.1)],
        lookup=[looked_up, looked_up_sparsely])
    def test_as_on_one_device(self, make, lookup):
        """Else rows that several towers look up are squared one by one, and steps too large."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"], "CPU:0")
        with strategy.scope():
            optimizer = make()
        np.testing.assert_allclose(trained(strategy, optimizer, lookup),
                                   trained(None, make(), lookup), rtol=1e-5, atol=1e-6)
