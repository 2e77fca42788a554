"""Optimizers that are called in a branch, as published code accumulates gradients by hand.

Each step is written as for one device, and compared with it.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy

KERAS = {"keras": keras, "tf_keras": tf_keras}
ROWS, SIZE, WORDS = 37, 8, 5  # the last batch has five rows
RANDOM = np.random.RandomState(4)
X = RANDOM.randint(0, WORDS, [ROWS, 3]).astype("int32")
Y = RANDOM.normal(size=[ROWS, 1]).astype("float32")


def model_of(kit, model_class=None):
    kit.utils.set_random_seed(5)
    inputs = kit.layers.Input([3], dtype="int32")
    values = kit.layers.Flatten()(kit.layers.Embedding(WORDS, 4)(inputs))
    values = kit.layers.Dense(3, activation="tanh")(values)
    return (model_class or kit.Model)(inputs, kit.layers.Dense(1)(values))


def published(kit):
    """A model whose train_step adds gradients up, as in answers on Stack Overflow."""

    class Accumulating(kit.Model):

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.every = tf.constant(2)
            self.number = tf.Variable(0, trainable=False)
            self.sums = [tf.Variable(tf.zeros(variable.shape), trainable=False)
                         for variable in self.trainable_variables]

        def train_step(self, data):
            self.number.assign_add(1)
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            for held, gradient in zip(self.sums, gradients):
                held.assign_add(tf.convert_to_tensor(gradient))
            tf.cond(tf.equal(self.number, self.every), self.apply_sums, lambda: None)
            return {"loss": loss}

        def apply_sums(self):
            self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables))
            self.number.assign(0)
            for held in self.sums:
                held.assign(tf.zeros_like(held))

    return Accumulating


def fitted(strategy, kit, adam):
    """The weights, the optimizer's number of updates and the losses of ``fit``."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_of(kit, published(kit))
        model.compile(kit.optimizers.Adam(0.05) if adam else kit.optimizers.SGD(0.1), "mse")
    history = model.fit(X, Y, batch_size=SIZE, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), np.array(model.optimizer.iterations), history.history["loss"]]


def by_if(own, gradients):
    """Autograph's ``if``; what the last batch adds goes into the update as it is."""
    if tf.cast(own.optimizer.iterations, tf.int32) + own.waiting >= 0 and own.waiting == 1:
        own.apply([held + gradient for held, gradient in zip(own.sums, gradients)])
    else:
        own.add(gradients)


def by_cond(own, gradients):
    """The two branches of ``tf.cond``; the gradients are clipped in front of it."""
    clipped, _ = tf.clip_by_global_norm(gradients, 0.5)
    tf.cond(tf.equal(own.waiting % 2, 1),
            lambda: own.apply([held + gradient for held, gradient in zip(own.sums, clipped)]),
            lambda: own.add(clipped))


def nested(own, gradients):
    """A branch in a branch, and one gradient that is not added up."""
    tf.cond(own.waiting >= 1, lambda: tf.cond(
        tf.equal(own.waiting, 1), lambda: own.apply(gradients), lambda: None), lambda: None)
    own.waiting.assign((own.waiting + 1) % 3)


def when_finite(own, gradients):
    """A step that is left out where a gradient of any tower is not finite."""
    bad = sum(tf.reduce_sum(tf.cast(~tf.math.is_finite(gradient), tf.float32))
              for gradient in gradients)
    if own.strategy is not None:
        bad = tf.distribute.get_replica_context().all_reduce("SUM", bad)
    tf.cond(bad > 0, lambda: None, lambda: own.apply(gradients))


def sparse(own, gradients):
    """Gradients as tapes give them, of a table among them."""
    tf.cond(tf.equal(own.waiting, 1), lambda: own.apply(gradients), lambda: None)
    own.waiting.assign(1 - own.waiting)


LOOPS = {each.__name__: each for each in (by_if, by_cond, nested, when_finite, sparse)}


class Own:
    """What steps of one's own need."""

    def __init__(self, strategy, kit):
        self.strategy = strategy
        self.model = model_of(kit)
        self.optimizer = kit.optimizers.SGD(0.1, momentum=0.5)
        self.optimizer.build(self.model.trainable_variables)
        self.waiting = tf.Variable(0, trainable=False)
        self.sums = [tf.Variable(tf.zeros(variable.shape), trainable=False)
                     for variable in self.model.trainable_variables]

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self.model(x, training=True)))
            loss = loss if self.strategy is None else self.strategy.scale_loss(loss)
        return tape.gradient(loss, self.model.trainable_variables)

    def add(self, gradients):
        for held, gradient in zip(self.sums, gradients):
            held.assign_add(gradient)
        self.waiting.assign_add(1)

    def apply(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        for held in self.sums:
            held.assign(tf.zeros_like(held))
        self.waiting.assign(0)


def looped(strategy, kit, way, once=True):
    """The weights after a loop of one's own."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        own = Own(strategy, kit)
    if strategy is not None:
        strategy.extended.trace_once = once

    def step(x, y):
        gradients = own.gradients(x, y)
        if way is not sparse:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        way(own, gradients)

    @tf.function
    def run(*batch):
        if strategy is None:
            step(*batch)
        else:
            strategy.run(step, batch)

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE)
    for batch in dataset if strategy is None else strategy.experimental_distribute_dataset(dataset):
        run(*batch)
    return [*own.model.get_weights(), np.array(own.optimizer.iterations), own.waiting.numpy()]


class SameTest(parameterized.TestCase):

    def assert_same(self, wanted, found):
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)

    @parameterized.parameters(("keras", 3, True), ("keras", 1, False), ("tf_keras", 4, True),
                              ("tf_keras", 3, False))
    def test_published_train_step(self, kit, towers, adam):
        """Else what people copy to accumulate gradients fails, or trains on other sums."""
        strategy = towerstrategy.TowerStrategy([f"CPU:{each}" for each in range(towers)])
        self.assert_same(fitted(None, KERAS[kit], adam), fitted(strategy, KERAS[kit], adam))

    @parameterized.parameters(
        ("keras", "by_if", 3, True), ("tf_keras", "by_if", 3, False),
        ("tf_keras", "by_cond", 4, True), ("keras", "by_cond", 3, False),
        ("keras", "nested", 3, True), ("tf_keras", "when_finite", 3, True),
        ("keras", "when_finite", 3, False), ("keras", "sparse", 3, True))
    def test_loop(self, kit, way, towers, once):
        """Else an update that only some steps make is not that of one device."""
        strategy = towerstrategy.TowerStrategy([f"CPU:{each}" for each in range(towers)])
        self.assert_same(looped(None, KERAS[kit], LOOPS[way]),
                         looped(strategy, KERAS[kit], LOOPS[way], once))
        if once:
            self.assertEmpty(strategy.extended.own_trace_reasons)


class RefusedTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        self.strategy = towerstrategy.TowerStrategy(["CPU:0", "CPU:1", "CPU:2"])
        with self.strategy.scope():
            self.weight = tf.Variable(2.)
            self.count = tf.Variable(0., aggregation=tf.VariableAggregation.SUM)
            self.metric = keras.metrics.Mean()
            self.optimizer = keras.optimizers.SGD(0.1)
            self.optimizer.build([self.weight])

    def run_step(self, step):
        parts = self.strategy.split(tf.range(7.))
        tf.function(lambda x: self.strategy.run(step, (x,)))(parts)

    def apply(self, gradient=1.):
        self.optimizer.apply_gradients([(tf.convert_to_tensor(gradient), self.weight)])

    @parameterized.parameters(True, False)
    def test_predicates_that_may_differ(self, once):
        """Else towers take different branches, and one of them decides for all."""
        self.strategy.extended.trace_once = once
        with self.assertRaisesRegex(RuntimeError, "its predicate may differ.*all_reduce"):
            self.run_step(lambda x: tf.cond(tf.reduce_sum(x) > 3., self.apply, lambda: None))
        with self.assertRaisesRegex(RuntimeError, "its predicate may differ"):
            self.run_step(lambda x: [self.metric.update_state(x), tf.cond(
                self.metric.total > 3., self.apply, lambda: None)])

    def test_what_a_branch_uses(self):
        """Else one tower's rows count for the whole batch."""
        with self.assertRaisesRegex(RuntimeError, "which it uses, may differ.*all_reduce"):
            self.run_step(lambda x: tf.cond(
                self.weight > 0., lambda: self.apply(tf.reduce_sum(x)), lambda: None))

        def measured():
            self.apply()
            self.metric.update_state([1.])

        with self.assertRaisesRegex(RuntimeError, "which it uses, may differ"):
            self.run_step(lambda x: tf.cond(self.weight > 0., measured, lambda: None))

    def test_sparse_gradients_of_known_size(self):
        """Else a branch that was traced for one tower's rows gets those of all."""
        with self.strategy.scope():
            table = tf.Variable(tf.ones([7, 2]))
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([table])

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, tf.cast(x, tf.int32))) / 9
            gradient = tape.gradient(loss, table)
            tf.cond(self.weight > 0.,
                    lambda: [optimizer.apply_gradients([(gradient, table)]), None][1:],
                    lambda: [None])

        parts = self.strategy.split(tf.range(6.))
        with self.assertRaisesRegex(RuntimeError, "Make it dense before the branch"):
            tf.function(lambda x: self.strategy.run(step, (x,)))(parts)

    def test_sums(self):
        """Else a count of towers is one, in silence."""

        def counted():
            self.apply()
            self.count.assign_add(1.)

        with self.assertRaisesRegex(RuntimeError, "aggregation=SUM and is written in a branch"):
            self.run_step(lambda x: tf.cond(self.weight > 0., counted, lambda: None))

    def test_elsewhere(self):
        """Else a loop with an optimizer in it ends without a word of what to do."""

        def step(x):
            tf.while_loop(lambda number: number < 3, lambda number: [self.apply(), number + 1][1:],
                          [tf.constant(0)])

        with self.assertRaisesRegex(RuntimeError, "The towers cannot meet there. Move"):
            self.run_step(step)
