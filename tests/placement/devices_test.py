"""devices: what a user may ask for; what is refused is in ``bad_input_test.py``."""

import os
import warnings
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
from towerstrategy.placement import devices as devices_lib, names


def short(placement):
    return [names.short_name(name) for name in placement.towers], names.short_name(
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

    def test_logical_devices(self):
        """Else what tf.config lists has to be spelled again for this strategy."""
        logical = tf.config.list_logical_devices("CPU")
        self.assertEqual(short(devices_lib.place(logical[1:3], logical[4])),
                         (["CPU:1", "CPU:2"], "CPU:4"))
        self.assertEqual(short(devices_lib.place(logical[5], None)), (["CPU:5"], "CPU:5"))

    @parameterized.parameters((None, None, "balanced"), (1, None, "GPU:0"),
                              (["GPU:1", "CPU:0"], [2, 1], "CPU:0"),
                              ([["GPU:0", "GPU:1"]], None, "GPU:0"))
    def test_gpus_by_default(self, asked, shares, merge):
        """Else many GPUs wait for one link to the host, and for its memory."""
        logical = [tf.config.LogicalDevice(f"/device:{kind}:{index}", kind)
                   for kind, index in (("GPU", 0), ("GPU", 1), ("GPU", 2), ("CPU", 0))]
        with mock.patch.object(tf.config, "list_logical_devices", lambda kind=None: [
                device for device in logical if kind in (None, device.device_type)]):
            placement = devices_lib.place(asked, None, shares)
        self.assertEqual("balanced" if placement.balanced else short(placement)[1], merge)

    @parameterized.product(traces=[[], ["there is /dev/nvidia0"]],
                           hidden=["-1", "", "0"], asked=[None, ["CPU:0"]])
    def test_one_cpu_tower_where_a_gpu_is_meant(self, traces, hidden, asked):
        """Else a training on a machine with GPUs runs on a CPU for a night, without a word."""
        with mock.patch.object(devices_lib, "_signs_of_gpus", lambda: iter(traces)), \
                mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=hidden), \
                warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy = towerstrategy.TowerStrategy(asked)
        self.assertEqual(strategy.devices, ["CPU:0"])
        said = [str(each.message) for each in caught
                if each.category is towerstrategy.TowerWarning]
        if traces and hidden == "0" and asked is None:
            self.assertRegex(said[0], "one CPU tower.*/dev/nvidia0.*list_physical_devices")
            self.assertEqual(caught[0].filename, __file__)
        else:
            self.assertEmpty(said)

    def test_balanced(self):
        """Else one tower is balanced over nothing, or several are not."""
        self.assertTrue(devices_lib.place(2, "balanced").balanced)
        self.assertFalse(devices_lib.place(1, "balanced").balanced)
        self.assertFalse(devices_lib.place(2, "cpu").balanced)

    @parameterized.parameters((["CPU:0"], None, True), (["CPU:1"], None, False),
                              (["CPU:0"], "CPU:1", False), (["CPU:1"], "CPU:0", False),
                              (2, None, False))
    def test_compiles(self, asked, merge_device, wanted):
        """Else XLA is asked for a step that it cannot place, and dies in the middle of it."""
        self.assertEqual(devices_lib.place(asked, merge_device).compiles, wanted)

    def test_micro_batches(self):
        """Else a tower's micro-batches run elsewhere, or XLA orders them as it likes."""
        placed = devices_lib.place(["CPU:0", "CPU:1"], "balanced", micro_batches=3)
        self.assertEqual([names.short_name(device) for device in placed.towers],
                         ["CPU:0"] * 3 + ["CPU:1"] * 3)
        self.assertEqual([names.short_name(device) for device in placed.devices],
                         ["CPU:0", "CPU:1"])
        self.assertEqual(placed.name(4), "micro-batch 1 of tower 1")
        alone = devices_lib.place(["CPU:0"], None, micro_batches=2)
        self.assertEqual((alone.merge, alone.compiles), (alone.towers[0], False))


class SplitCpuTest(parameterized.TestCase):

    @parameterized.parameters(8, 8.0, np.int32(8))
    def test_same_count_again(self, count):
        """Else a script that is imported twice fails, or one in R, whose numbers are doubles."""
        self.assertEqual(towerstrategy.split_cpu(count), [f"CPU:{index}" for index in range(8)])
        self.assertLen(tf.config.list_logical_devices("CPU"), 8)
