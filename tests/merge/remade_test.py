"""remade: what replica functions make of their gradients before they are merged.

Each step is written as for one device: gradients that are clipped, decayed, added up over several
batches or turned into an optimizer's step by hand.
"""

import contextlib
import warnings

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy

KERAS = {"keras": keras, "tf_keras": tf_keras}
ROWS = (7, 2, 8, 1)
WORDS = 6


def batches():
    random = np.random.default_rng(3)
    for rows in ROWS:
        yield (random.integers(0, WORDS, [rows, 3]), random.normal(size=[rows, 1]))


def model_of(kit):
    kit.utils.set_random_seed(5)
    return kit.Sequential([kit.layers.Input([3], dtype="int32"),
                           kit.layers.Embedding(WORDS, 4), kit.layers.Flatten(),
                           kit.layers.Dense(3, activation="tanh"), kit.layers.Dense(1)])


def loss_of(strategy, model, x, y):
    squares = tf.square(tf.cast(y, tf.float32) - model(x, training=True))
    loss = tf.reduce_mean(squares)
    return loss if strategy is None else strategy.scale_loss(loss)


def gradients_of(strategy, model, x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(strategy, model, x, y)
    return tape.gradient(loss, model.trainable_variables)


def dense(gradient):
    return tf.convert_to_tensor(gradient)


@tf.function
def clipped_in_a_function(gradients):
    return tf.clip_by_global_norm(gradients, 0.05)[0]


def by_norm(gradients, model):
    return [tf.clip_by_norm(gradient, 0.02) for gradient in gradients]


def by_global_norm(gradients, model):
    return tf.clip_by_global_norm(gradients, 0.05)[0]


def by_value(gradients, model):
    return [tf.clip_by_value(gradient, -0.01, 0.01) for gradient in gradients]


def nested(gradients, model):
    return clipped_in_a_function([dense(gradient) for gradient in gradients])


def decayed(gradients, model):
    return [dense(gradient) + 0.1 * variable
            for gradient, variable in zip(gradients, model.trainable_variables)]


def some(gradients, model):
    return [*gradients[:-1], tf.clip_by_norm(gradients[-1], 0.02)]


CHANGES = {change.__name__: change
           for change in (by_norm, by_global_norm, by_value, nested, decayed, some)}


def train(strategy, kit, step_of, once=True, finish=None):
    """The weights after a few batches; ``step_of`` makes the step of a model."""
    model = model_of(kit)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        if strategy is not None:
            strategy.adopt(model)
        step = step_of(model)

    @tf.function
    def run(x, y):
        return step(x, y) if strategy is None else strategy.run(step, (x, y))

    if strategy is not None:
        strategy.extended.trace_once = once
    for x, y in batches():
        run(*((x, y) if strategy is None else strategy.split((x, y))))
    return model.get_weights()


class Accumulating:
    """Adds gradients up in plain variables; every second batch they are applied."""

    def __init__(self, strategy, model, optimizer, sparse=False):
        self.strategy, self.model, self.optimizer = strategy, model, optimizer
        self.sums = [tf.Variable(tf.zeros(variable.shape)) for variable in
                     model.trainable_variables]
        self.sparse = sparse

    def add(self, x, y):
        for held, gradient in zip(self.sums, gradients_of(self.strategy, self.model, x, y)):
            if self.sparse and isinstance(gradient, tf.IndexedSlices):
                held.scatter_add(gradient)
            else:
                held.assign_add(gradient / 2 if gradient.shape.rank == 1 else dense(gradient))

    def apply(self):
        held = [tf.identity(each) for each in self.sums]
        if self.sparse:
            held, _ = tf.clip_by_global_norm(held, 0.05)
        self.optimizer.apply_gradients(zip(held, self.model.trainable_variables))

    def reset(self):
        for held in self.sums:
            held.assign(tf.zeros_like(held))


def accumulate(strategy, kit, where, sparse=False):
    """The weights, and the sums before each update."""
    model = model_of(kit)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        if strategy is not None:
            strategy.adopt(model)
        own = Accumulating(strategy, model, kit.optimizers.SGD(0.1), sparse)

    def in_towers(function, *args):
        return function(*args) if strategy is None else strategy.run(function, args)

    add = tf.function(lambda *args: in_towers(own.add, *args))
    apply = {"towers": tf.function(lambda: in_towers(own.apply)),
             "eager towers": lambda: in_towers(own.apply), "outside": own.apply}[where]
    sums = []
    for number, (x, y) in enumerate(batches()):
        add(*((x, y) if strategy is None else strategy.split((x, y))))
        if number % 2:
            sums += [held.numpy() for held in own.sums]
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                apply()
                own.reset()
    return model.get_weights() + sums


class RemadeTest(parameterized.TestCase):

    def assert_same(self, one, other):
        for expected, got in zip(one, other, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(
        ("keras", "by_norm", 3), ("keras", "by_global_norm", 4), ("keras", "nested", 3, False),
        ("keras", "decayed", 1), ("keras", "some", 3), ("tf_keras", "by_global_norm", 3),
        ("tf_keras", "by_value", 3, False), ("tf_keras", "decayed", 3), ("tf_keras", "nested", 4))
    def test_changed_before_they_are_applied(self, kit, change, towers, once=True):
        """Else who clips by hand clips each tower's part, and trains with a larger step."""
        kit = KERAS[kit]

        def trained(strategy):
            def step_of(model):
                optimizer = kit.optimizers.SGD(0.5)

                def step(x, y):
                    gradients = gradients_of(strategy, model, x, y)
                    gradients = CHANGES[change](gradients, model)
                    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

                return step

            return train(strategy, kit, step_of, once)

        self.assert_same(trained(None), trained(towerstrategy.TowerStrategy(towers)))

    @parameterized.parameters(("keras", True, 3), ("keras", False, 4), ("tf_keras", True, 1))
    def test_an_optimizer_by_hand(self, kit, scaled, towers):
        """Else a rule of one's own moves the weights by another step than on one device."""

        def trained(strategy):
            def step_of(model):
                weights = [variable.value if hasattr(variable.value, "assign") else variable
                           for variable in model.trainable_variables]
                slots = [[tf.Variable(tf.zeros(weight.shape)) for _ in range(2)]
                         for weight in weights]

                def step(x, y):
                    gradients = gradients_of(strategy if scaled else None, model, x, y)
                    for weight, (first, second), gradient in zip(weights, slots, gradients):
                        gradient = dense(gradient)
                        first.assign(0.9 * first + 0.1 * gradient)
                        second.assign(0.99 * second + 0.01 * tf.square(gradient))
                        weight.assign_sub(0.1 * first / (tf.sqrt(second) + 0.01))

                return step

            return train(strategy, KERAS[kit], step_of)

        self.assert_same(trained(None), trained(towerstrategy.TowerStrategy(towers)))

    @parameterized.parameters(
        ("keras", "towers", 3, False), ("keras", "eager towers", 4, False),
        ("keras", "outside", 3, True), ("tf_keras", "towers", 4, True),
        ("tf_keras", "eager towers", 3, True), ("tf_keras", "outside", 1, False))
    def test_added_up_by_hand(self, kit, where, towers, sparse):
        """Else batches whose rows do not divide count for another sum than on one device."""
        kit = KERAS[kit]
        self.assert_same(accumulate(None, kit, where, sparse),
                         accumulate(towerstrategy.TowerStrategy(towers), kit, where, sparse))

    def test_a_product_with_a_large_weight(self):
        """Else a gradient that is projected by a large weight is tower 0's alone, on CPU towers."""
        x = np.random.default_rng(1).normal(size=[6, 256]).astype("float32")

        def trained(strategy):
            with strategy.scope() if strategy else contextlib.nullcontext():
                weight = tf.Variable(tf.random.stateless_normal([256, 1024], [1, 2]) / 16)

            def replica(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(tf.matmul(x, weight)))
                    loss = strategy.scale_loss(loss) if strategy else loss
                gradient = tape.gradient(loss, weight)
                along = tf.matmul(tf.matmul(gradient, weight, transpose_b=True), weight)
                weight.assign_sub(10. * gradient - 0.1 * along)

            @tf.function
            def step(x):
                return strategy.run(replica, (strategy.split(x),)) if strategy else replica(x)

            step(x)
            return weight.numpy()

        self.assert_same([trained(None)], [trained(towerstrategy.TowerStrategy(3))])

    @parameterized.parameters("by hand", "merged first", "in a function")
    def test_eager_step_by_hand(self, how):
        """Else an eager step that is right on one device is R times too small without a word."""
        x, y = np.arange(14, dtype="float32").reshape([7, 2]) / 14, np.ones([7, 1], "float32")

        def trained(strategy):
            with strategy.scope() if strategy else contextlib.nullcontext():
                weight = tf.Variable([[1.], [2.]])

            def replica(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) - y))
                    loss = strategy.scale_loss(loss) if strategy else loss
                gradient = tape.gradient(loss, weight)
                if strategy and how == "merged first":
                    gradient = tf.distribute.get_replica_context().all_reduce("SUM", gradient)
                weight.assign_sub(0.1 * gradient)

            def step(*batch):
                if strategy:
                    strategy.run(replica, strategy.split(batch))
                else:
                    replica(*batch)

            (tf.function(step) if how == "in a function" else step)(x, y)
            return weight.numpy()

        strategy = towerstrategy.TowerStrategy(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = trained(strategy)
        words = [str(each.message) for each in caught if "eager towers write" in str(each.message)]
        self.assertLen(words, int(how == "by hand"))
        if how != "by hand":
            np.testing.assert_allclose(found, trained(None), rtol=1e-5)

    @parameterized.product(kit=list(KERAS), scaled=[True, False])
    def test_added_up_in_a_loop(self, kit, scaled):
        """Else each tower's own sum is clipped, by the norm of that, and nobody is told."""
        def trained(strategy):
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                model = model_of(KERAS[kit])
                optimizer = KERAS[kit].optimizers.SGD(1.)

            def step(x, y):
                weights = model.trainable_variables
                sums = [tf.zeros(weight.shape) for weight in weights]
                for turn in tf.range(3):
                    found = gradients_of(strategy, model, x, tf.cast(y, tf.float32)
                                         * tf.cast(turn, tf.float32))
                    if scaled:
                        sums = [.5 * each + dense(new) / 3. for each, new in zip(sums, found)]
                    else:
                        sums = [each + dense(new) for each, new in zip(sums, found)]
                clipped, _ = tf.clip_by_global_norm(sums, 0.05)
                optimizer.apply_gradients(zip(clipped, weights))

            run = tf.function(step if strategy is None else (
                lambda x, y: strategy.run(step, (x, y))))
            for batch in batches():
                run(*(batch if strategy is None else strategy.split(batch)))
            return [weight.numpy() for weight in model.weights]

        for got, wanted in zip(trained(towerstrategy.TowerStrategy(3)), trained(None)):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)

    def test_what_is_the_towers_own_stays(self):
        """Else a gradient that is weighted by a number of each tower's counts as another's."""
        strategy = towerstrategy.TowerStrategy(2)
        with strategy.scope():
            weight = tf.Variable(1.)
            optimizer = keras.optimizers.SGD(1.)

        @tf.function
        def step(x):
            def replica(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(x) * weight
                gradient = tape.gradient(loss, weight) * tf.reduce_max(x)
                optimizer.apply_gradients([(gradient, weight)])

            strategy.run(replica, (x,))

        step(strategy.split(tf.constant([1., 2., 3., 4.])))
        self.assertAlmostEqual(float(weight), 1. - 3 * 2 - 7 * 4, places=5)


if __name__ == "__main__":
    absltest.main()
