"""Training loops of one's own, as the documents show them: the weights are those of one device."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import wide
from towerstrategy import TowerStrategy

TOWERS = ["CPU:1", "CPU:2", "CPU:3"]
BATCH = 9


def mean_of(kit):
    """A loss object's mean over the batch; tf_keras refuses one under any strategy."""
    return kit.losses.MeanSquaredError()


def sum_over_batch_size(kit):
    """The mean by hand, over a batch size that is known."""
    del kit
    return lambda y, predicted: tf.reduce_sum(tf.square(y - predicted)) / BATCH


def train(strategy, kit, loss_of, rows, optimizer):
    """Trains for one pass over ``rows`` rows; the losses and the weights."""
    random = np.random.RandomState(0)
    x = random.rand(rows, 4).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, np.sin(x.sum(1, keepdims=True))))
    kit.utils.set_random_seed(1)
    with strategy.scope():
        model = kit.Sequential([kit.Input([4]), kit.layers.Dense(5, activation="tanh"),
                                kit.layers.Dense(1)])
        optimizer = getattr(kit.optimizers, optimizer)(0.1, clipnorm=0.1)

    def tower_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    @tf.function
    def train_step(batch):
        return strategy.reduce("SUM", strategy.run(tower_step, args=batch), axis=None)

    losses = [float(train_step(batch))
              for batch in strategy.experimental_distribute_dataset(dataset.batch(BATCH))]
    return losses, model.get_weights()


class LoopTest(parameterized.TestCase):

    @wide.product(
        0, 2,
        kit_and_loss=[(keras, mean_of), (keras, sum_over_batch_size),
                      (tf_keras, sum_over_batch_size)],
        rows=[27, 24, 19], optimizer=["SGD", "Adam"])
    def test_trains_as_one_device(self, kit_and_loss, rows, optimizer):
        """Else a loop that is right on one device trains something else on towers.

        Full batches divide evenly over the towers; the last of 19 rows is a single row, and two of
        the towers have none.
        """
        kit, loss = kit_and_loss
        wanted = train(tf.distribute.get_strategy(), kit, loss(kit), rows, optimizer)
        got = train(TowerStrategy(TOWERS), kit, loss(kit), rows, optimizer)
        np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)
        for one, other in zip(got[1], wanted[1]):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    absltest.main()
