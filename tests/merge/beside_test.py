"""What an optimizer does besides its step is done where weights and gradients are."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

from benchmarks import traffic
from towerstrategy import TowerStrategy

PLACED = {"balanced": lambda: TowerStrategy(["CPU:1", "CPU:2"], "balanced"),
          "stages": lambda: TowerStrategy([["CPU:1", "CPU:2"]], micro_batches=2)}


def sent(kit, strategy, optimizer, constraint=None):
    """Bytes that cross devices in a training step, the batch's left out."""
    with strategy.scope():
        model = kit.Sequential([kit.Input([8]), *(kit.layers.Dense(
            64, "tanh", kernel_constraint=constraint) for _ in range(3)), kit.layers.Dense(1)])
        model.compile(optimizer(kit), "mse")
        model.optimizer.build(model.trainable_variables)
    strategy.extended.keep_graphs = True
    step = tf.function(lambda *parts: strategy.run(lambda *own: model.train_step(own), parts),
                       autograph=False)
    parts = strategy.split((np.ones([8, 8], "f"), np.ones([8, 1], "f")))
    return sum(traffic.count(step.get_concrete_function(*parts), 2).sent.values())


def clipping_by_hand(kit):
    class Clipping(kit.optimizers.SGD):
        """Clips before Keras does, and averages its weights."""

        def apply_gradients(self, grads_and_vars, **kwargs):
            gradients, variables = zip(*grads_and_vars)
            gradients, _ = tf.clip_by_global_norm(gradients, .1)
            return super().apply_gradients(zip(gradients, variables), **kwargs)

    return Clipping()


class BesideTest(parameterized.TestCase):

    @parameterized.product(placed=[*PLACED], case=[
        (keras, lambda kit: kit.optimizers.SGD(clipnorm=.1), "max_norm"),
        (keras, lambda kit: kit.optimizers.SGD(global_clipnorm=.1, gradient_accumulation_steps=2)),
        (keras, lambda kit: kit.optimizers.SGD(
            weight_decay=.1, use_ema=True, ema_overwrite_frequency=2)),
        (keras, lambda kit: kit.optimizers.LossScaleOptimizer(kit.optimizers.SGD(clipvalue=.1))),
        (tf_keras, lambda kit: kit.optimizers.SGD(clipnorm=.1, use_ema=True), "max_norm"),
        (tf_keras, clipping_by_hand)])
    def test_no_more_crosses_than_for_plain_steps(self, placed, case):
        """Else all weights and gradients go to one device and back in each step, over links."""
        kit, optimizer, *constraint = case
        plain = sent(kit, PLACED[placed](), lambda kit: kit.optimizers.SGD())
        self.assertLess(sent(kit, PLACED[placed](), optimizer, *constraint), plain + 2000)


if __name__ == "__main__":
    absltest.main()
