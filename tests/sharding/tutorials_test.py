"""The loops of the tutorials, with ``strategy.function`` in place of ``tf.function``."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras
import tutorials
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from tests import dtypes

DEVICES = towerstrategy.split_cpu(8)
ROWS = (7, 7, 5)
KITS = ("keras", "tf_keras")
SMALL = ("dqn",)  # others take up to ten seconds


def outcome(kit, name, strategy=None, in_scope=True):
    """What each step returns, and the state that it leaves."""
    kit.utils.set_random_seed(3)
    scope = tf.distribute.get_strategy() if strategy is None or not in_scope else strategy
    with scope.scope():
        step, holders, batch = tutorials.TUTORIALS[name](kit)
    draw, given = np.random.default_rng(7), []
    given = [[tf.constant(part) for part in batch(draw, rows)] for rows in ROWS]
    signature = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in given[0]]
    if strategy is None:  # else it is traced, and drawn, anew for the last batch's rows
        run = tf.function(step, signature)
    else:
        run = strategy.function(step, signature if in_scope else None, reduce_retracing=True)
        given = [strategy.split(batch) for batch in given]
    given = [run(*batch) for batch in given]
    state = [variable for holder in holders
             for variable in getattr(holder, "variables", [holder])]
    return [np.asarray(leaf) for leaf in tf.nest.flatten([given, state])]


class TutorialsTest(parameterized.TestCase):

    @wide.parameters(*((name, KITS[at % 2]) for at, name in enumerate(SMALL)), wide=[
        (name, KITS[at % 2]) for at, name in enumerate(tutorials.TUTORIALS) if name not in SMALL])
    def test_one_word_changed(self, name, kit):
        """Else who follows a tutorial gets another model on several devices than on one."""
        kit = {"keras": keras, "tf_keras": tf_keras}[kit]
        self.enter_context(dtypes.policy(kit, "float64"))
        expected = outcome(kit, name)
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        given = outcome(kit, name, strategy, in_scope=len(name) % 2 == 0)
        self.assertEqual(len(given), len(expected))
        self.assertTrue(strategy.extended.crossings)
        for one, other in zip(expected, given):
            np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-9)


if __name__ == "__main__":
    absltest.main()
