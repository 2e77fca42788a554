"""What one ``strategy.run`` returned, given to the next: the towers keep their rows.

Augment, then train: the reference is one device, which has no towers to forget rows of.
"""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
import wide
from peers import plain
from towerstrategy.batch import sub_batches

X = np.arange(40, dtype="f").reshape([20, 2])


def augment(x):
    return x * 2 + 1


def counted(strategy):
    """A variable, and a function of a batch that writes its mean there and returns its sum."""
    with strategy.scope():
        v = tf.Variable(tf.zeros([2]), trainable=False)

    def replica(x):
        v.assign(tf.reduce_mean(x, 0))
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(x))

    return v, lambda parts: strategy.run(replica, (parts,))


def chains(strategy):
    """name -> a variable, and a function that takes a batch through two runs."""
    unknown = [tf.TensorSpec([None, 2])]

    def first(x):
        return strategy.run(augment, (x,))

    def eagerly(train):
        return lambda x: train(first(strategy.split(x)))

    def in_one(train):
        return tf.function(eagerly(train))

    def rows_unknown(train):
        return tf.function(eagerly(train), input_signature=unknown)

    def in_two(train):
        one, other = tf.function(first), tf.function(train)
        return lambda x: other(one(strategy.split(x)))

    def in_two_rows_unknown(train):
        one = tf.function(lambda x: first(strategy.split(x)), input_signature=unknown)
        other = tf.function(train, reduce_retracing=True)
        return lambda x: other(one(x))

    def run_of_functions(train):
        one = tf.function(augment)
        return lambda x: train(strategy.run(one, (strategy.split(x),)))

    def function_then_eager(train):
        one = tf.function(first)
        return lambda x: train(one(strategy.split(x)))

    def nested_functions(train):
        one, other = tf.function(first), tf.function(train)
        return tf.function(lambda x: other(one(strategy.split(x))), input_signature=unknown)

    def thrice(train):
        def back(x):
            return strategy.run(lambda x: (x - 1) / 2, (x,))

        return lambda x: train(first(back(first(strategy.split(x)))))

    made = {}
    for chain in (eagerly, in_one, rows_unknown, in_two, in_two_rows_unknown, run_of_functions,
                  function_then_eager, nested_functions, thrice):
        v, train = counted(strategy)
        made[chain.__name__] = v, chain(train)
    return made


NAMES = list(chains(towerstrategy.TowerStrategy(2)))


class ChainedTest(parameterized.TestCase):

    @wide.product(name=NAMES, towers=[1, 3, 4])
    def test_rows_are_kept(self, name, towers):
        """Else after an augmenting run towers count the same, and an empty one makes a NaN."""
        strategy = towerstrategy.TowerStrategy(towers)
        v, chain = chains(strategy)[name]
        for rows in (7, 2, 8, 1, 7):
            x = tf.constant(X[:rows])
            total = chain(x)
            np.testing.assert_allclose(v.numpy(), augment(X[:rows]).mean(0), rtol=1e-6)
            np.testing.assert_allclose(
                float(tf.nest.flatten(strategy.experimental_local_results(total))[0]),
                augment(X[:rows]).sum(), rtol=1e-6)

    @parameterized.parameters(True, False)
    def test_other_results_are_no_rows(self, eager):
        """Else a vector or scalar of each tower counts by rows that it does not have."""
        strategy = towerstrategy.TowerStrategy(3)
        for result in (lambda x: tf.fill([5], tf.reduce_sum(x[:, 0])),
                       lambda x: tf.reduce_sum(x[:, 0]),
                       lambda x: tf.boolean_mask(x[:, 0], x[:, 0] > 5)):
            with strategy.scope():
                v = tf.Variable(0., trainable=False)

            def second(y, v=v):
                v.assign(tf.reduce_sum(y))

            def both(x, result=result, second=second):
                parts = strategy.run(result, (strategy.split(x),))
                strategy.run(second, (parts,))
                return [tf.reduce_sum(part) for part in strategy.experimental_local_results(parts)]

            if not eager:
                both = tf.function(both, input_signature=[tf.TensorSpec([None, 2])])
            sums = both(tf.constant(X[:7]))
            np.testing.assert_allclose(v.numpy(), np.mean(sums), rtol=1e-6)

    def test_batches_come_first(self):
        """Else a result beside a batch takes the place of the batch's own rows."""
        strategy = towerstrategy.TowerStrategy(3)
        with strategy.scope():
            v = tf.Variable(0., trainable=False)
        old = strategy.run(augment, (strategy.split(tf.constant(X[:8])),))
        batch = strategy.split(tf.constant(X[:7, 0]))
        strategy.run(lambda _, x: v.assign(tf.reduce_mean(x)), (old, batch))
        np.testing.assert_allclose(v.numpy(), X[:7, 0].mean(), rtol=1e-6)

    def test_loops_keep_running(self):
        """Else a total that a loop carries from tower to tower's next batch is refused."""
        strategy = towerstrategy.TowerStrategy(3)
        dataset = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(X).batch(7))

        @tf.function
        def total():
            so_far = strategy.run(lambda: tf.zeros([2]))
            for x in dataset:
                so_far = strategy.run(lambda so_far, x: so_far + tf.reduce_sum(x, 0), (so_far, x))
            return so_far

        np.testing.assert_allclose(strategy.reduce("SUM", total(), axis=None), X.sum(0))

    def test_results_of_equal_rows_are_plain(self):
        """Else what a function returns of equal rows gets a tensor more than before."""
        strategy = towerstrategy.TowerStrategy(2)
        result = tf.function(lambda x: strategy.run(augment, (x,)))(
            strategy.split(tf.constant(X[:8])))
        self.assertEqual(len(tf.nest.flatten(result, expand_composites=True)), 2)
        self.assertIsInstance(strategy.split(tf.constant(X[:8])), sub_batches.SubBatches)
        self.assertLen(plain(result)[1], 2)


class ValuesTest(parameterized.TestCase):
    """``experimental_distribute_values_from_function``."""

    @parameterized.product(rows=[(5, 1, 1, 1), (2, 1, 0, 0), (3,)], eager=[True, False],
                           kind=["tensor", "array", "dict"])
    def test_rows_count(self, rows, eager, kind):
        """Else a tower with one row counts as much as one with five, without a word."""
        strategy = towerstrategy.TowerStrategy(len(rows))
        starts = np.cumsum([0, *rows])

        def value(context):
            number = context.replica_id_in_sync_group
            part = X[starts[number]:starts[number + 1]]
            part = part if kind == "array" else tf.constant(part)
            return {"x": part, "scale": tf.constant(2.)} if kind == "dict" else part

        with strategy.scope():
            v = tf.Variable(tf.zeros([2]), trainable=False)

        def replica(x):
            x = x["x"] if kind == "dict" else x
            v.assign(tf.reduce_mean(x, 0))

        values = strategy.experimental_distribute_values_from_function(value)
        strategy.run(replica if eager else tf.function(replica), (values,))
        np.testing.assert_allclose(v.numpy(), X[:sum(rows)].mean(0), rtol=1e-6)

    def test_values_of_one_length_count_the_same(self):
        """Else a vector of each tower, or two that contradict each other, are taken for rows."""
        strategy = towerstrategy.TowerStrategy(2)
        make = strategy.experimental_distribute_values_from_function
        for value in (make(lambda _: tf.zeros([3])),
                      *make(lambda context: (tf.zeros([1 + context.replica_id_in_sync_group]),
                                             tf.zeros([5 - context.replica_id_in_sync_group]))),
                      make(lambda _: tf.zeros([]))):
            self.assertNotIsInstance(value, sub_batches.SubBatches)
