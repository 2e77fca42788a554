"""The hooks into keras: every name is still where we hook it, and others are left alone."""

import inspect

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
from towerstrategy._keras import common
from towerstrategy._keras import keras3 as hooks


class HooksTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        towerstrategy.TowerStrategy(1)

    @parameterized.named_parameters(
        (f"{owner.__name__}_{name}".replace(".", "_"), owner, name, why)
        for (owner, name), why in hooks.HOOKS.items())
    def test_stands_where_we_hook_it(self, owner, name, why):
        """Else a new release trains wrongly, because a hook of ours is never called."""
        hooked = owner.__dict__[name]
        original = getattr(hooked, common._MARK)
        self.assertEqual(original.__module__.split(".")[0], "keras")
        self.assertTrue(callable(original))
        self.assertNotEmpty(why)
        self.assertIsNot(inspect.unwrap(hooked), hooked)

    def test_a_moved_name_is_reported(self):
        """Else a release that moved a name fails in the middle of somebody's training."""
        with self.assertRaisesRegex(RuntimeError, "hooks .*moved_away"):
            common.wrap(type("Owner", (), {}), "moved_away", lambda original: original)

    def test_without_a_strategy_nothing_changes(self):
        """Else importing towerstrategy changes training for people who do not use it."""
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.5), "mse")
        model.set_weights([np.zeros([2, 1])])
        model.fit(np.ones([4, 2]), np.ones([4, 1]), batch_size=4, verbose=0)
        np.testing.assert_allclose(model.get_weights()[0], np.ones([2, 1]))
        self.assertNotIsInstance(tf.nest.flatten(model.weights)[0],
                                 towerstrategy.variables.TowerVariable)
