"""benchmarks gpus: what is simulated follows from the operations, their costs and the links."""

import dataclasses
import pathlib
import tempfile

import keras
import pytest
from absl.testing import parameterized
from matplotlib import image

from benchmarks import flat, gpus, gpus_chart, links, memory, ring, schedule

pytestmark = pytest.mark.wide

MIB = 2**20
NVLINK, HOST = links.MACHINES["A100 NVLink"], links.MACHINES["A100 PCIe 4, no peers"]
SMALL = gpus.Case("two layers", lambda: keras.Sequential([
    keras.Input([256]), keras.layers.Dense(512), keras.layers.Dense(10)]), (256,), "float32", 64)


def operation(name, device, inputs=(), size=MIB, kind="MatMul"):
    return flat.Operation(name, kind, device, [(number, 0) for number in inputs], [], [size])


class LinksTest(parameterized.TestCase):

    @parameterized.parameters(
        (NVLINK, "GPU:0", "GPU:5", {"GPU:0 nvlink out": 300, "GPU:5 nvlink in": 300}),
        (NVLINK, "GPU:0", "CPU:0", {"GPU:0 out": 25, "switch 0 up": 25}),
        (NVLINK, "CPU:0", "GPU:3", {"GPU:3 in": 25, "switch 1 down": 25}),
        (HOST, "GPU:0", "GPU:1", {"GPU:0 out": 25, "GPU:1 in": 25, "switch 0 up": 25,
                                  "switch 0 down": 25}),
        (links.MACHINES["A100 PCIe 4, peers"], "GPU:0", "GPU:1", {"GPU:0 out": 25, "GPU:1 in": 25}))
    def test_way(self, machine, source, target, wanted):
        """Else tensors cross links that they do not cross, and another merge device looks best."""
        self.assertEqual(machine.way(source, target), wanted)

    def test_ring(self):
        """Else MirroredStrategy is made slower, or faster, than it can be."""
        self.assertEqual(NVLINK.ring(1e9, 1), 0)
        self.assertAlmostEqual(NVLINK.ring(300e9, 4), 1.5)
        self.assertAlmostEqual(HOST.ring(25e9, 4), 1.5 * 2)


class ScheduleTest(parameterized.TestCase):

    def test_one_device_runs_one_after_another(self):
        """Else a GPU does everything at once."""
        line = schedule.run([operation("a", "GPU:0"), operation("b", "GPU:0")],
                            {"a": 1., "b": 2.}, NVLINK, factor=2.)
        self.assertAlmostEqual(line.seconds, 6.)

    def test_a_tensor_crosses_once_a_device(self):
        """Else each reader of a weight costs a transfer of its own."""
        size = 300 * 10**9
        steps = [operation("a", "GPU:0", size=size), operation("b", "GPU:1", [0]),
                 operation("c", "GPU:1", [0]), operation("d", "GPU:0", [0])]
        line = schedule.run(steps, dict.fromkeys("abcd", 1.), NVLINK)
        self.assertAlmostEqual(line.seconds, 1 + 1 + 2, places=3)
        self.assertEqual(line.link_bytes, {"GPU:0 nvlink out": size, "GPU:1 nvlink in": size})

    def test_a_link_is_shared(self):
        """Else two GPUs behind a switch both have its link to the host."""
        size = 25 * 10**9
        steps = [operation("a", "GPU:0", size=size), operation("b", "GPU:1", size=size),
                 operation("c", "CPU:0", [0, 1])]
        line = schedule.run(steps, dict.fromkeys("abc", 1.), NVLINK)
        self.assertAlmostEqual(line.seconds, 1 + 2 + 1, places=3)
        self.assertEqual(line.busiest, "switch 0 up")


class MemoryTest(parameterized.TestCase):

    def test_a_tensor_is_there_until_it_is_read(self):
        """Else what a step needs is the sum of all that it makes, or nothing of what is sent."""
        steps = [operation("read", "CPU:0", size=4 * MIB, kind="ReadVariableOp"),
                 operation("a", "GPU:0", [0]), operation("same", "GPU:0", [1], kind="Reshape"),
                 operation("b", "GPU:0", [2], size=2 * MIB), operation("c", "GPU:1", [3])]
        line = schedule.run(steps, dict.fromkeys(("a", "b", "c"), 1.), NVLINK)
        # The weight goes when `a` has been made; it is what `b` reads, under another name.
        self.assertEqual(memory.peaks(steps, line), {"GPU:0": 5 * MIB, "GPU:1": 3 * MIB})


class StepTest(parameterized.TestCase):

    def test_costs_are_those_of_the_peak(self):
        """Else what TensorFlow says is read in another unit, or of another device."""
        step = gpus.traced(SMALL, 1, gpus.ONE)
        seconds = flat.Costs(NVLINK).of(step.operations)
        products = [each for each in step.operations if each.type == "MatMul"]
        self.assertEqual({each.device for each in products}, {"GPU:0"})
        first = max(seconds[each.name] for each in products)
        self.assertAlmostEqual(first * 1e6, 2 * 64 * 256 * 512 / 156e6
                               + 4 * (64 * 256 + 256 * 512 + 64 * 512) / 1555e3, delta=1.1)
        line = schedule.run(step.operations, seconds, NVLINK)
        self.assertGreater(memory.peaks(step.operations, line)["GPU:0"],
                           4 * (256 * 512 + 64 * 256))

    def test_an_update_in_one_kernel_costs_its_passes(self):
        """Else an optimizer's update is free, and a merge device that is slow looks good."""
        step = gpus.traced(SMALL, 2, "GPU:0")
        seconds = flat.Costs(NVLINK).of(step.operations)
        largest = max(seconds[each.name] for each in step.operations
                      if each.type == "ResourceApplyAdam")
        passes = 7  # variable and two slots are read and written, the gradient is read
        self.assertAlmostEqual(largest * 1e9, passes * 4 * 256 * 512 / 1555, places=3)
        self.assertTrue(all(each.asked for each in step.operations if each.type == "MatMul"))

    @parameterized.parameters(("cpu", "CPU:0"), ("GPU:0", "GPU:0"))
    def test_what_is_where(self, merge, home):
        """Else the weights' way to the towers, or the gradients' back, is left out."""
        step = gpus.traced(SMALL, 4, merge)
        weights = 4 * (256 * 512 + 512 + 512 * 10 + 10)
        self.assertEqual(max(step.state, key=step.state.get), home)
        for number in range(4):
            products = [each for each in step.operations
                        if each.type == "MatMul" and each.device == f"GPU:{number}"]
            # Of the wide layer's gradient rows may cross: it is made once, where the weights are.
            self.assertBetween(len(products), 4, 6)
        line = schedule.run(step.operations, flat.Costs(NVLINK).of(step.operations), NVLINK)
        crossing = 2 * 4 * weights if merge == "cpu" else 2 * 3 * weights
        sent = sum(size for link, size in line.link_bytes.items()
                   if link.endswith((" in", " down")) and "GPU" in link) \
            + sum(size for link, size in line.link_bytes.items()
                  if link.endswith(" out") and "nvlink" not in link)
        self.assertBetween(sent, crossing / 2, 1.02 * crossing)

    def test_mirrored(self):
        """Else its ring costs nothing, or the update begins before the gradients have come."""
        case = dataclasses.replace(SMALL, build=lambda: keras.Sequential([
            keras.Input([8], dtype="int32"), keras.layers.Embedding(1000, 64),
            keras.layers.Flatten(), keras.layers.Dense(512), keras.layers.Dense(10)]),
            shape=(8,), dtype="int32")
        step = gpus.traced(case, 8, gpus.MIRRORED)
        seconds = flat.Costs(NVLINK).of(step.operations) | ring.seconds(step.operations, NVLINK, 8)
        line = schedule.run(step.operations, seconds, NVLINK)
        slices = 64 * 8 * (4 * 64 + 4)
        dense = 4 * (512 * 512 + 512 + 512 * 10 + 10)
        self.assertAlmostEqual(line.link_seconds[ring.LINK],
                               (7 * slices + 2 * 7 / 8 * dense) / 300e9)
        passed = {number for number, each in enumerate(step.operations) if each.link}
        self.assertLen(passed, 6)
        for number, each in enumerate(step.operations):
            for source, _ in each.inputs:
                if source in passed:
                    self.assertGreaterEqual(line.spans[number][0], line.spans[source][1])
                    self.assertEmpty(each.link)

    def test_shown(self):
        """Else figures are computed and lost."""
        one = gpus.Result("mlp", "A100 NVLink", 1, gpus.ONE, 10., 1.)
        slow = gpus.Result("mlp", "A100 NVLink", 4, gpus.MIRRORED, 80., 0.125)
        text = gpus.shown([one, slow], [gpus.Check("ResNet-50", 8., 7.)])
        self.assertIn("MirroredStrategy", text)
        self.assertIn("0.125", text)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "chart.png"
            gpus_chart.draw(path, [one, slow])
            self.assertGreater(image.imread(path).shape[0], 200)
