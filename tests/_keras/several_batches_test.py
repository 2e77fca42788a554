"""Steps that get several batches of different sizes, as of labelled and unlabelled examples.

Beside one device, in Keras 3 and in tf_keras: data as semi-supervised training zips it.
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
DRAW = np.random.RandomState(3)
IN_TURN = wide.turns(*((name, name) for name in KITS))
UNLABELLED, X, Y = DRAW.rand(37, 4), DRAW.rand(8, 4), DRAW.rand(8, 2)


def data(drop=False, change=False):
    """Batches of 10 and of 2 rows; the last has 7 of the former."""
    of = tf.data.Dataset.from_tensor_slices
    zipped = tf.data.Dataset.zip((of(UNLABELLED).batch(10, drop_remainder=drop),
                                  of((X, Y)).batch(2, drop_remainder=drop)))
    return zipped.map(lambda u, known: {"u": u * 2, "x": known[0], "y": known[1]}) if change \
        else zipped.map(lambda u, known: {"u": u, "x": known[0], "y": known[1]})


def model_of(kit):
    class SemiSupervised(kit.Model):
        def __init__(self):
            super().__init__()
            self.encoder = kit.layers.Dense(5, "tanh")
            self.head = kit.layers.Dense(2)

        def call(self, inputs):
            return self.head(self.encoder(inputs))

        def train_step(self, batch):
            with tf.GradientTape() as tape:
                u, x = self.encoder(batch["u"]), self.encoder(batch["x"])
                codes = tf.concat([u, x, u ** 2], 0)
                alike = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels=tf.range(tf.shape(codes)[0]),
                    logits=tf.matmul(codes, codes, transpose_b=True)))
                first, _, last = tf.split(codes, [tf.shape(of)[0] for of in (u, x, u)], 0)
                alike += tf.reduce_mean(first * last) - tf.reduce_mean(
                    codes[tf.shape(u)[0]:tf.shape(u)[0] + tf.shape(x)[0]] ** 3)
                apart = tf.reduce_mean(tf.abs(self(batch["u"]))) - tf.reduce_mean(self(batch["x"]))
                loss = alike + apart + tf.reduce_mean((self(batch["x"]) - batch["y"]) ** 2)
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return {"mean": loss}

    model = SemiSupervised()
    model.compile(kit.optimizers.Adam(.01))
    return model


def trained(kit, strategy, **options):
    KITS[kit].utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = model_of(KITS[kit])
    history = model.fit(data(**options), epochs=2, verbose=0)
    return [history.history, model.get_weights()]


@functools.cache
def on_one_device(kit, **options):
    return trained(kit, None, **options)


class SeveralBatchesTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        for kit in KITS.values():
            self.enter_context(dtypes.policy(kit, "float64"))

    def assert_as_one_device(self, kit, strategy, **options):
        got, wanted = trained(kit, strategy, **options), on_one_device(kit, **options)
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
                              got, wanted)

    @IN_TURN
    def test_fit(self, kit):
        """Else semi-supervised training as published stops at its first batch."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        self.assert_as_one_device(kit, strategy)
        self.assertEmpty(strategy.extended.done_with_all_rows)

    @IN_TURN
    @pytest.mark.wide
    def test_of_known_sizes_and_unequal_shares(self, kit):
        """Else the sizes of `drop_remainder` are taken for those of single examples."""
        self.assert_as_one_device(kit, towerstrategy.TowerStrategy(DEVICES[:2], shares=[3, 1]),
                                  drop=True, change=True)

    @pytest.mark.wide
    def test_one_tower(self):
        """Else what trains on a machine with four GPUs fails on one with one."""
        self.assert_as_one_device("keras", towerstrategy.TowerStrategy(DEVICES[:1]))

    @pytest.mark.wide
    def test_a_loop_of_ones_own(self):
        """Else the second batch is of another size on each tower, or done once."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        weight = tf.Variable(np.ones(4))

        @strategy.function
        def step(batch):
            with tf.GradientTape() as tape:
                both = tf.concat([batch["u"], batch["x"], batch["x"]], 0)
                for _ in tf.range(2):
                    both = both / tf.cast(tf.shape(both)[0], both.dtype)
                for i in tf.range(2):
                    both += tf.random.stateless_uniform(tf.shape(both), [1, i], dtype=both.dtype)
                both = tf.concat([both, both], 0)
                loss = tf.reduce_mean(tf.linalg.matvec(batch["u"], weight) ** 2) - tf.reduce_mean(
                    tf.linalg.matvec(batch["x"], weight) ** 3) + tf.reduce_mean(
                        tf.linalg.matvec(both[:tf.shape(both)[0] // 2], weight) ** 2)
                chosen = tf.boolean_mask(batch["x"], batch["x"][:, 0] > .5)
                loss += tf.reduce_sum(tf.linalg.matvec(chosen, weight))
                count = tf.shape(batch["x"])[0]
                loss += tf.reduce_sum(weight[0] * tf.gather_nd(
                    batch["x"], tf.stack([tf.range(count), tf.zeros([count], tf.int32)], 1)))
            weight.assign_sub(.01 * tape.gradient(loss, weight))
            return loss

        one_device = tf.function(step.python_function)
        alone = [float(one_device(batch)) for batch in data()]
        weight.assign(np.ones(4))
        together = [float(step(batch)) for batch in
                    strategy.experimental_distribute_dataset(data())]
        np.testing.assert_allclose(together, alone, rtol=1e-12)
        self.assertEmpty(strategy.extended.done_with_all_rows)

    def test_towers_get_their_rows_of_each(self):
        """Else a function given to strategy.run has all rows of the second batch on each tower."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:2])
        batch = next(iter(strategy.experimental_distribute_dataset(data())))
        rows = strategy.experimental_local_results(strategy.run(
            lambda batch: tf.stack([tf.shape(batch["u"])[0], tf.shape(batch["x"])[0]]), (batch,)))
        self.assertEqual([part.numpy().tolist() for part in rows], [[5, 1], [5, 1]])

    def test_rows_of_one_batch_still_have_to_be_as_many(self):
        """Else a label too few is found deep in the step, or never."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:2])
        with self.assertRaisesRegex(ValueError, "same number of rows"):
            strategy.split((X, Y[:7]))


if __name__ == "__main__":
    absltest.main()
