"""report: what describe() says is where things are."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

from towerstrategy import TowerStrategy, report

TOWERS = ["CPU:1", "CPU:2", "CPU:3"]


def rows(text: str) -> dict[str, tuple[str, int, int]]:
    """The table's lines: device -> role, variables, bytes."""
    found = {}
    for line in text.splitlines()[3:]:
        device, *role, variables, size = line.split()
        found[device] = (" ".join(role), int(variables), int(size.replace(",", "")))
    return found


class DescribeTest(parameterized.TestCase):

    def test_title_and_roles(self):
        """Else someone cannot see which device is a tower and where it all meets."""
        text = TowerStrategy(TOWERS).describe()
        self.assertStartsWith(text, "TowerStrategy: 3 towers, merge device CPU:0\n")
        self.assertEqual(rows(text), {"CPU:1": ("tower 0", 0, 0), "CPU:2": ("tower 1", 0, 0),
                                      "CPU:3": ("tower 2", 0, 0), "CPU:0": ("merge", 0, 0)})

    def test_a_tower_that_merges_has_one_line(self):
        """Else a device is listed twice, and its bytes with it."""
        found = rows(TowerStrategy(TOWERS, "CPU:2").describe())
        self.assertEqual(list(found), TOWERS)
        self.assertEqual(found["CPU:2"][0], "tower 1 and merge")

    def test_one_tower(self):
        """Else the plain case reads like a plural of nothing."""
        text = TowerStrategy(["CPU:1"]).describe()
        self.assertStartsWith(text, "TowerStrategy: 1 tower, merge device CPU:1\n")

    @parameterized.parameters(None, "CPU:2", "balanced")
    def test_counts_what_is_there(self, merge_device):
        """Else the bytes say nothing about the memory a device needs."""
        strategy = TowerStrategy(TOWERS, merge_device)
        with strategy.scope():
            kept = [tf.Variable(tf.zeros([size])) for size in (100, 50, 25, 25)]
            local = tf.Variable(0, synchronization=tf.VariableSynchronization.ON_READ,
                                aggregation=tf.VariableAggregation.SUM)
        found = rows(strategy.describe())
        self.assertEqual(sum(count for _, count, _ in found.values()), len(kept) + len(TOWERS))
        self.assertEqual(sum(size for _, _, size in found.values()), 800 + 4 * len(TOWERS))
        for device, (_, count, size) in found.items():
            here = [variable for variable in [*kept, *local.values]
                    if variable.device.endswith(device)]
            self.assertEqual((count, size), (len(here), sum(
                int(np.prod(variable.shape)) * variable.dtype.size for variable in here)))

    def test_balanced_spreads_bytes(self):
        """Else one tower holds everything and the others' memory is idle."""
        strategy = TowerStrategy(TOWERS, "balanced")
        with strategy.scope():
            kept = [tf.Variable(tf.zeros([size])) for size in (100, 50, 25, 25)]
        sizes = {device: size for device, (_, _, size) in rows(strategy.describe()).items()}
        self.assertLen(kept, 4)
        self.assertEqual(sizes, {"CPU:1": 400, "CPU:2": 200, "CPU:3": 200})

    def test_variables_that_are_gone_are_not_counted(self):
        """Else the table grows while the memory does not."""
        strategy = TowerStrategy(TOWERS)
        with strategy.scope():
            variable = tf.Variable(tf.zeros([10]))
        self.assertEqual(rows(strategy.describe())["CPU:0"][1:], (1, 40))
        del variable
        self.assertEqual(rows(strategy.describe())["CPU:0"][1:], (0, 0))

    # A tf_keras model has three counters of 8 bytes beside its weights.
    @parameterized.parameters((keras, 2, 32), (tf_keras, 5, 56))
    def test_adopted_variables_are_counted_where_they_are(self, kit, count, size):
        """Else a model that was adopted seems to need no memory."""
        strategy = TowerStrategy(TOWERS, "CPU:1")
        with tf.device("CPU:4"):
            model = kit.Sequential([kit.Input([3]), kit.layers.Dense(2)])
        strategy.adopt(model)
        self.assertEqual(rows(strategy.describe())["CPU:4"], ("variables only", count, size))


class TableTest(parameterized.TestCase):

    def test_numbers_align_right(self):
        """Else bytes cannot be compared at a glance."""
        text = report.table(("what", "bytes"), [("a", "1"), ("bcdef", "1,000")], numbers=(1,))
        self.assertEqual(text, "what   bytes\n-----  -----\na          1\nbcdef  1,000")


if __name__ == "__main__":
    absltest.main()
