"""Steps that are written for one device, in which rows meet: towers do what one device does.

Each program is made anew for one device and for some towers, and runs three batches of 9, 9 and 5
rows.  All that it returns and all of its variables are compared.
"""

import contextlib
import functools
import itertools
import warnings

import keras
import numpy as np
import program_features
import programs
import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy
import wide

DEVICES = towerstrategy.split_cpu(8)
TOWERS = (3, 4, 8, 3, 1)  # these take turns
NAMES = [name for name in programs.PROGRAMS if name not in program_features.FEATURES]
TURNS = list(zip(NAMES, itertools.cycle(TOWERS)))
CASES = [case for case in TURNS if case[0] not in programs.GROUPS or case[0] == "features_0"][::5]
OTHERS = list(zip(NAMES, itertools.cycle(TOWERS[1:-1])))
IN_WIDE = TURNS + [other for turn, other in zip(TURNS, OTHERS) if turn[1] == 1]


def outcome(name, strategy=None, in_scope=True, **options):
    """All that a program returns, then its variables."""
    keras.utils.set_random_seed(3)
    if strategy is None:
        step, state = programs.PROGRAMS[name]()
        run = tf.function(step, programs.SIGNATURE)
    else:
        with strategy.scope() if in_scope else contextlib.nullcontext():
            step, state = programs.PROGRAMS[name]()
        alone = len(strategy.extended.worker_devices) == 1  # as tf.function: traced for each shape
        function = strategy.function(step, programs.SIGNATURE if alone else None, **options)
        run = lambda x, y: function(*strategy.split((x, y)))  # noqa: E731
    given = [run(tf.constant(x), tf.constant(y)) for x, y in programs.batches(name)]
    state = state() if callable(state) else state
    return [np.asarray(leaf) for leaf in tf.nest.flatten([given, list(state)])]


of_one_device = functools.cache(outcome)


class ProgramsTest(parameterized.TestCase):

    def check(self, name, strategy, in_scope=True, **options):
        expected = of_one_device(name)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            given = outcome(name, strategy, in_scope, **options)
        self.assertEqual(len(given), len(expected))
        for one, other in zip(expected, given):
            self.assertEqual((one.shape, one.dtype), (other.shape, other.dtype))
            bound = 1e-12 if one.dtype == np.float64 else 1e-5
            np.testing.assert_allclose(other, one, rtol=bound, atol=bound * max(
                1.0, np.abs(one).max(initial=0.0)))

    @wide.named_parameters(
        *((f"_{name}_{towers}", name, towers) for name, towers in dict.fromkeys([*TURNS, *OTHERS])),
        marks=lambda *case: () if case in CASES else wide.WIDE if case in IN_WIDE else wide.REST)
    def test_towers_do_what_one_device_does(self, name, towers):
        """Else a program that is right on one device is wrong on several, or warned of."""
        self.check(name, towerstrategy.TowerStrategy(DEVICES[:towers]), in_scope=towers != 4)

    @wide.parameters(("in_batch_negatives", {"micro_batches": 2}),
                     wide=list(itertools.product(
                         ["in_batch_negatives", "moco_queue", "gan", "lstm", "drawn_noise"],
                         [{"micro_batches": 2}, {"shares": [3, 1]}, {"merge_device": "balanced"},
                          {"merge_device": DEVICES[4]}]))[1:])
    def test_however_the_towers_are_made(self, name, options):
        """Else a program is right until rows are dealt otherwise, or variables live elsewhere."""
        self.check(name, towerstrategy.TowerStrategy(DEVICES[:2], **options))

    @wide.parameters(wide=["in_batch_negatives", "first_set_in_a_loop", "triplet_hard"])
    def test_compiled(self, name):
        """Else a slice of all rows fails with XLA on several CPU towers."""
        self.check(name, towerstrategy.TowerStrategy(DEVICES[:2]), jit_compile=True)


if __name__ == "__main__":
    absltest.main()
