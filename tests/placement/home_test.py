"""merge_device="balanced": where variables live once a function has seen them."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
from towerstrategy.placement import homes


def model_in(strategy, kit, seen=False):
    """Layers built small ones first, so that homes chosen one by one are far from even."""
    with strategy.scope():
        model = kit.Sequential([kit.Input([3]), kit.layers.Dense(2, name="small"),
                                kit.layers.Dense(64, name="wide"),
                                kit.layers.Dense(256, name="large"), kit.layers.Dense(1)])
    function = tf.function(model)
    before = function(tf.ones([2, 3])) if seen else None
    with strategy.scope():
        model.compile(kit.optimizers.SGD(.01), "mse")
    return model, function, before


class HomesTest(parameterized.TestCase):

    @parameterized.named_parameters(("keras", keras), ("tf_keras", tf_keras))
    def test_functions_traced_before_compile_see_the_training(self, kit):
        """Else a function of the model made before ``compile`` predicts with untrained weights."""
        strategy = towerstrategy.TowerStrategy(4, "balanced")
        model, function, before = model_in(strategy, kit, seen=True)
        model.fit(np.ones([8, 3], "f"), np.ones([8, 1], "f"), verbose=0)
        after = function(tf.ones([2, 3])).numpy()
        np.testing.assert_allclose(after, model(tf.ones([2, 3])).numpy(), rtol=1e-6)
        self.assertFalse(np.allclose(after, before))

    @parameterized.named_parameters(("keras", keras), ("tf_keras", tf_keras))
    def test_compiled_models_are_balanced(self, kit):
        """Else the tower that got the first of many weights holds most bytes."""
        strategy = towerstrategy.TowerStrategy(2, "balanced")
        with strategy.scope():
            model = kit.Sequential([kit.Input([8]), *(kit.layers.Dense(units)
                                                      for units in (8, 24, 8, 40, 8, 24, 8, 40))])
            model.compile("sgd", "mse")
        sizes = {}
        for weight in model.weights:
            weight = getattr(weight, "value", weight) if kit is keras else weight
            home = homes.home_of(weight)
            sizes[home] = sizes.get(home, 0) + homes.size_of(weight)
        self.assertLess(max(sizes.values()), 1.02 * sum(sizes.values()) / 2)
