"""benchmarks gpus: what is simulated follows from the operations, their costs and the links."""

import dataclasses
import pathlib
import tempfile

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized
from matplotlib import image

from benchmarks import flat, gpus, gpus_chart, links, memory, on_gpus, ring, schedule

pytestmark = pytest.mark.wide

MIB = 2**20
NVLINK, HOST = links.MACHINES["A100 NVLink"], links.MACHINES["A100 PCIe 4, no peers"]
CUBE = links.MACHINES["V100 NVLink"]
GIGA = 10**9
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
        (links.MACHINES["A100 PCIe 4, peers"], "GPU:0", "GPU:1", {"GPU:0 out": 25, "GPU:1 in": 25}),
        (CUBE, "GPU:0", "GPU:3", {"GPU:0 nvlink to GPU:3": 50}),
        (CUBE, "GPU:5", "GPU:7", {"GPU:5 nvlink to GPU:7": 25}),
        (CUBE, "GPU:1", "GPU:4", {"GPU:1 out": 12.5, "switch 0 up": 12.5, "switch 2 down": 12.5,
                                  "GPU:4 in": 12.5}))
    def test_way(self, machine, source, target, wanted):
        """Else tensors cross links that they do not cross, and another merge device looks best."""
        self.assertEqual(machine.route(source, target), wanted)

    def test_a_cube(self):
        """Else V100s reach more peers by NVLink than a DGX-1 has wires for."""
        for number in range(8):
            ways = {other: CUBE.route(f"GPU:{number}", f"GPU:{other}") for other in range(8)
                    if other != number}
            joined = {other: sum(way.values()) for other, way in ways.items() if len(way) == 1}
            self.assertLen(joined, 4)
            self.assertEqual(sum(joined.values()), 6 * 25)
            for other, rate in joined.items():
                self.assertEqual(sum(CUBE.route(f"GPU:{other}", f"GPU:{number}").values()), rate)

    def test_ring(self):
        """Else MirroredStrategy is made slower, or faster, than it can be."""
        self.assertEqual(NVLINK.all_reduce_seconds(1e9, 1), 0)
        self.assertAlmostEqual(NVLINK.all_reduce_seconds(300e9, 4), 1.5)
        self.assertAlmostEqual(HOST.all_reduce_seconds(25e9, 4), 1.5 * 2)
        self.assertAlmostEqual(CUBE.all_reduce_seconds(150e9, 4), 1.5)


class ScheduleTest(parameterized.TestCase):

    def test_one_device_runs_one_after_another(self):
        """Else a GPU does everything at once."""
        line = schedule.run([operation("a", "GPU:0"), operation("b", "GPU:0")],
                            {"a": 1., "b": 2.}, NVLINK, factor=2.)
        self.assertAlmostEqual(line.seconds, 6., places=4)

    def test_the_host_starts_one_after_another(self):
        """Else a step of thousands of operations that take no time takes none."""
        chain = [operation(str(number), "GPU:0", [number - 1] if number else [], size=4)
                 for number in range(1000)]
        line = schedule.run(chain, {}, NVLINK)
        self.assertAlmostEqual(line.seconds, 1000 * links.EXECUTOR)
        self.assertEqual(line.busy, {})

    def test_the_host_runs_ahead(self):
        """Else each operation of a GPU costs what the host needs to start it, too."""
        chain = [operation(str(number), "GPU:0", [number - 1] if number else [])
                 for number in range(1000)]
        line = schedule.run(chain, dict.fromkeys(map(str, range(1000)), 1e-3), NVLINK)
        self.assertAlmostEqual(line.seconds, 1. + links.EXECUTOR)

    def test_a_tensor_crosses_once_a_device(self):
        """Else each reader of a weight costs a transfer of its own."""
        size = 300 * GIGA
        steps = [operation("a", "GPU:0", size=size), operation("b", "GPU:1", [0]),
                 operation("c", "GPU:1", [0]), operation("d", "GPU:0", [0])]
        line = schedule.run(steps, dict.fromkeys("abcd", 1.), NVLINK)
        self.assertAlmostEqual(line.seconds, 1 + 1 + 2, places=3)
        self.assertEqual(line.link_bytes, {"GPU:0 nvlink out": size, "GPU:1 nvlink in": size})

    @parameterized.parameters((300 * GIGA, 5 + 1 + 1), (0, 5 + 1))
    def test_a_copy_waits_for_what_its_target_computes(self, size, wanted):
        """Else gradients seem to cross under a backward pass that TensorFlow lets them wait for."""
        steps = [operation("long", "GPU:1"), operation("a", "GPU:0", size=size),
                 operation("b", "GPU:1", [1])]
        line = schedule.run(steps, {"long": 5., "a": 1., "b": 1.}, NVLINK)
        self.assertAlmostEqual(line.seconds, wanted, places=3)

    def test_a_copy_waits_for_what_its_source_computes(self):
        """Else a tensor leaves while the GPU that made it has other kernels before the copy."""
        steps = [operation("a", "GPU:0", size=300 * GIGA), operation("long", "GPU:0"),
                 operation("b", "GPU:1", [0])]
        line = schedule.run(steps, {"a": 1., "long": 5., "b": 1.}, NVLINK)
        self.assertAlmostEqual(line.seconds, 1 + 5 + 1 + 1, places=3)

    def test_copies_of_a_gpu_queue(self):
        """Else a copy that has to wait lets the next one go first, to a GPU that is idle."""
        steps = [operation("a", "GPU:0", size=150 * GIGA), operation("long", "GPU:1"),
                 operation("b", "GPU:1", [0]), operation("c", "GPU:2", [0])]
        line = schedule.run(steps, {"a": 1., "long": 5., "b": .1, "c": 2.}, NVLINK)
        self.assertAlmostEqual(line.seconds, 5 + .5 + .5 + 2, places=3)

    def test_a_link_is_shared(self):
        """Else two GPUs behind a switch both have its link to the host."""
        size = 25 * GIGA
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
        seconds = flat.Costs(NVLINK).seconds(step.operations)
        products = [each for each in step.operations if each.type == "MatMul"]
        self.assertEqual({each.device for each in products}, {"GPU:0"})
        first = max(seconds[each.name] for each in products)
        self.assertAlmostEqual(first * 1e6, 2 * 64 * 256 * 512 / 156e6
                               + 4 * (64 * 256 + 256 * 512 + 64 * 512) / 1555e3, delta=1.1)
        line = schedule.run(step.operations, seconds, NVLINK)
        self.assertGreater(memory.peaks(step.operations, line)["GPU:0"],
                           4 * (256 * 512 + 64 * 256))

    def test_what_is_given_as_it_is_costs_nothing(self):
        """Else one GPU and MirroredStrategy pay for what a partitioned step leaves out."""
        @tf.function(autograph=False)
        def step(x):
            with tf.device(on_gpus.towers(1)[0]):
                return [tf.reduce_sum(x, [1], keepdims=True), tf.reduce_sum(x, []),
                        tf.transpose(x, [0, 1]), tf.transpose(x), tf.reduce_max(x, 0)]

        made = flat.flatten(step.get_concrete_function(tf.TensorSpec([64, 1])), ["GPU:0"])
        found = [each.type for each in made if each.type != "Const"
                 and each.traced_name.startswith(("Sum", "transpose", "Max"))]
        self.assertCountEqual(found, ["Identity"] * 3 + ["Transpose", "Max"], found)

    @parameterized.parameters("balanced", gpus.OWN_STATISTICS)
    def test_convolutions_cost_the_same_on_towers(self, merge):
        """Else towers' backward pass is nearly free, and so is what their gradients take to cross;
        or all that comes behind a function in which a tower normalizes its rows by itself.
        """
        case = gpus.Case("two convolutions", lambda: keras.Sequential([
            keras.Input([8, 8, 3]), keras.layers.Conv2D(16, 3), keras.layers.BatchNormalization(),
            keras.layers.Conv2D(32, 3), keras.layers.Flatten(), keras.layers.Dense(10)]),
            (8, 8, 3), "float32", 64)
        one, two = (gpus.traced(case, count, merge).operations for count in (1, 2))
        costs = flat.Costs(NVLINK)
        alone, towers = ([(each.type, each.sizes, value[each.name]) for each in found
                           if each.type.startswith("Conv2D") and each.device == "GPU:0"]
                          for found in (one, two) for value in [costs.seconds(found)])
        self.assertCountEqual(alone, towers)
        self.assertLen(alone, 5)
        # A tower's row of padding is there when it has no rows; else TensorFlow copies nothing.
        self.assertNotIn("PadV2", {each.type for each in two})
        # A kernel may have further outputs of no entries.
        self.assertLessEqual({each.type for each in two if each.query and each.sizes[:1] == [0]},
                             {"Range"})

    def test_an_update_in_one_kernel_costs_its_passes(self):
        """Else an optimizer's update is free, and a merge device that is slow looks good."""
        step = gpus.traced(SMALL, 2, "GPU:0")
        seconds = flat.Costs(NVLINK).seconds(step.operations)
        largest = max(seconds[each.name] for each in step.operations
                      if each.type == "ResourceApplyAdam")
        passes = 7  # variable and two slots are read and written, the gradient is read
        self.assertAlmostEqual(largest * 1e9, passes * 4 * 256 * 512 / 1555, places=3)
        self.assertTrue(all(each.query for each in step.operations if each.type == "MatMul"))

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
        line = schedule.run(step.operations, flat.Costs(NVLINK).seconds(step.operations), NVLINK)
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
        seconds = flat.Costs(NVLINK).seconds(step.operations)
        seconds |= ring.seconds(step.operations, NVLINK, 8)
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
        one = gpus.Result("mlp", "A100 NVLink", 1, gpus.ONE, True, 10., 1.)
        slow = gpus.Result("mlp", "A100 NVLink", 4, gpus.MIRRORED, False, 80., 0.125)
        text = gpus.format_tables([one, slow], [gpus.Check("ResNet-50", 8., 7.)])
        self.assertIn("MirroredStrategy", text)
        self.assertIn("0.125", text)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "chart.png"
            gpus_chart.draw(path, [one, slow])
            self.assertGreater(image.imread(path).shape[0], 200)
