"""devices: what a user may ask for, and what every complaint says."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
from towerstrategy.placement import devices as devices_lib


def short(placement):
    return [devices_lib.short_name(name) for name in placement.towers], devices_lib.short_name(
        placement.merge)


class PlaceTest(parameterized.TestCase):

    @parameterized.parameters(
        (None, None, ["CPU:0"], "CPU:0"), (1, None, ["CPU:0"], "CPU:0"),
        (3, None, ["CPU:0", "CPU:1", "CPU:2"], "CPU:0"),
        (np.int64(2), None, ["CPU:0", "CPU:1"], "CPU:0"),
        (2.0, None, ["CPU:0", "CPU:1"], "CPU:0"),
        (np.float64(2), None, ["CPU:0", "CPU:1"], "CPU:0"),
        ("CPU:3", None, ["CPU:3"], "CPU:3"),
        (["CPU:2", "CPU:1"], "cpu", ["CPU:2", "CPU:1"], "CPU:0"),
        (["/device:CPU:2", "/job:localhost/replica:0/task:0/device:CPU:1"], "CPU:5",
         ["CPU:2", "CPU:1"], "CPU:5"),
        (["cpu:1", "/cpu:2"], "/CPU:1", ["CPU:1", "CPU:2"], "CPU:1"),
        (("CPU:1", "CPU:2"), "BALANCED", ["CPU:1", "CPU:2"], "CPU:0"))
    def test_what_may_be_asked_for(self, asked, merge_device, towers, merge):
        """Else devices that MirroredStrategy or R users name are not understood."""
        self.assertEqual(short(devices_lib.place(asked, merge_device)), (towers, merge))

    def test_balanced(self):
        """Else one tower is balanced over nothing, or several are not."""
        self.assertTrue(devices_lib.place(2, "balanced").balanced)
        self.assertFalse(devices_lib.place(1, "balanced").balanced)
        self.assertFalse(devices_lib.place(2, "cpu").balanced)

    @parameterized.parameters(
        (True, TypeError, "devices must be a whole number, but got True"),
        (1.5, TypeError, "whole number, but got 1.5"),
        ([0.0, 1.0], ValueError, "GPU:0.*which is not there"),
        ({"CPU:1"}, TypeError, "devices must be None, a count, or a list.*set"),
        (0, ValueError, "devices=0 asks for 0 towers, but it must be from 1 to the 8 CPU"),
        (99, ValueError, "devices=99.*split_cpu"),
        ([], ValueError, "devices is empty"),
        (["CPU:1", "cpu:1"], ValueError, "names CPU:1 twice"),
        (["CPU:77"], ValueError, "'CPU:77'.*which is not there"),
        (["GPU:0"], ValueError, "GPU:0.*which is not there"),
        ([0], ValueError, "GPU:0.*which is not there"),
        (["nonsense"], ValueError, "'nonsense', which is no device string"),
        ("gpu", ValueError, "'gpu'.*split_cpu"),
        (["CPU:1", "CPU:77"], ValueError, "'CPU:77'.*split_cpu"),
        ([0, 1], ValueError, "names 0 .GPU:0.*split_cpu"),
        (["/job:worker/task:1/device:CPU:0"], ValueError, "which is on another machine"),
        ([None], TypeError, "A list holds GPU ids or device strings"))
    def test_wrong_devices(self, asked, error, message):
        """Else a wrong device ends in a message that does not say what is there."""
        with self.assertRaisesRegex(error, message) as caught:
            towerstrategy.TowerStrategy(asked)
        self.assertIn("The devices here: CPU:0, CPU:1", str(caught.exception))

    @parameterized.parameters(
        (7, TypeError, "merge_device must be None.*got 7 of type int"),
        ("CPU:77", ValueError, "merge_device names 'CPU:77'"),
        ("somewhere", ValueError, "merge_device has 'somewhere'"),
        ("balance", ValueError, """'balance'.*"cpu", "balanced" or a device string"""))
    def test_wrong_merge_device(self, asked, error, message):
        """Else a wrong merge device is noticed when the first variable is made."""
        with self.assertRaisesRegex(error, message) as caught:
            towerstrategy.TowerStrategy(2, asked)
        self.assertIn("The devices here: CPU:0, CPU:1", str(caught.exception))

    @parameterized.parameters((["CPU:0"], None, True), (["CPU:1"], None, False),
                              (["CPU:0"], "CPU:1", False), (["CPU:1"], "CPU:0", False),
                              (2, None, False))
    def test_compiles(self, asked, merge_device, wanted):
        """Else XLA is asked for a step that it cannot place, and dies in the middle of it."""
        self.assertEqual(devices_lib.place(asked, merge_device).compiles, wanted)


class SplitCpuTest(parameterized.TestCase):

    @parameterized.parameters(8, 8.0, np.int32(8))
    def test_same_count_again(self, count):
        """Else a script that is imported twice fails, or one in R, whose numbers are doubles."""
        self.assertEqual(towerstrategy.split_cpu(count), [f"CPU:{index}" for index in range(8)])
        self.assertLen(tf.config.list_logical_devices("CPU"), 8)

    @parameterized.parameters((0, ValueError, "at least 1, but got 0"),
                              ("2", TypeError, "whole number, but got '2' of type str"),
                              (2.5, TypeError, "whole number, but got 2.5"),
                              (3, RuntimeError, "TensorFlow had started with 8 CPU"))
    def test_wrong_counts(self, count, error, message):
        """Else a wrong or late split_cpu is ignored."""
        with self.assertRaisesRegex(error, message):
            towerstrategy.split_cpu(count)
