"""The hooks into Keras: every name is still where we hook it, and others are left alone."""

import inspect

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
from towerstrategy._keras import common, keras3
from towerstrategy._keras import tf_keras as legacy


def hooked_names():
    for package, hooks in (("keras", keras3.HOOKS), ("tf_keras", legacy.HOOKS)):
        for (owner, name), why in hooks.items():
            label = f"{package}_{owner.__name__}_{name}".replace(".", "_")
            yield label, package, owner, name, why


class HooksTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        towerstrategy.TowerStrategy(1)

    @parameterized.named_parameters(*hooked_names())
    def test_stands_where_we_hook_it(self, package, owner, name, why):
        """Else a new release trains wrongly, because a hook of ours is never called."""
        hooked = owner.__dict__[name]
        original = getattr(hooked, common._MARK)
        self.assertEqual(original.__module__.split(".")[0], package)
        self.assertNotEmpty(why)
        self.assertIsNot(inspect.unwrap(hooked), hooked)

    def test_a_moved_name_is_reported(self):
        """Else a release that moved a name fails in the middle of somebody's training."""
        with self.assertRaisesRegex(RuntimeError, "hooks .*moved_away"):
            common.wrap(type("Owner", (), {}), "moved_away", lambda original: original)

    @parameterized.parameters(keras, tf_keras)
    def test_without_a_strategy_nothing_changes(self, kit):
        """Else importing towerstrategy changes training for people who do not use it."""
        model = kit.Sequential([kit.Input([2]), kit.layers.Dense(1, use_bias=False)])
        model.compile(kit.optimizers.SGD(0.5), "mse")
        model.set_weights([np.zeros([2, 1])])
        model.fit(np.ones([4, 2]), np.ones([4, 1]), batch_size=4, verbose=0)
        np.testing.assert_allclose(model.get_weights()[0], np.ones([2, 1]))
        self.assertNotIsInstance(tf.nest.flatten(model.weights)[0],
                                 towerstrategy.variables.TowerVariable)
