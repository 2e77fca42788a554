"""benchmarks gpus: what XLA is said to make of a step is what it can make of it."""

import dataclasses

import keras
import pytest
from absl.testing import parameterized

from benchmarks import flat, fusion, gpus, links, schedule

pytestmark = pytest.mark.wide

MIB = 2**20
NVLINK = links.MACHINES["A100 NVLink"]
BANDWIDTH = links.GPUS["A100"].memory_bandwidth * 1e9


def operation(name, kind, inputs=(), size=MIB, device="GPU:0", xla_scope="tower"):
    return flat.Operation(name, kind, device, [(number, 0) for number in inputs], [], [size],
                          xla_scope=xla_scope)


class KernelsTest(parameterized.TestCase):

    def test_a_kernel_reads_and_writes_once(self):
        """Else one GPU's step is too long, and towers that compile less look good beside it."""
        steps = [operation("a", "MatMul"), operation("b", "Relu", [0]),
                 operation("c", "Mul", [1, 0]), operation("d", "Sum", [2], 4),
                 operation("e", "MatMul", [2]), operation("f", "Sub", [2, 3])]
        made, seconds = fusion.kernels(steps, {each.name: 1. for each in steps}, NVLINK, True)
        self.assertEqual([each.type for each in made], ["MatMul", "Fusion", "MatMul", "Sub"])
        # Reads a, writes c and the sum; b is in no memory.
        self.assertAlmostEqual(seconds["b"] * BANDWIDTH, 2 * MIB + 4)
        self.assertEqual(seconds["e"], 1.)
        # What needs the whole sum comes after it.
        self.assertEqual(made[3].inputs, [(1, 0), (1, 1)])

    def test_batch_norm_of_given_moments(self):
        """Else towers, which are given the moments of all rows, wait for kernels of a library."""
        steps = [operation("a", "MatMul"), operation("b", "Relu", [0]),
                 operation("c", "InferenceFusedBatchNormV3", [1]), operation("d", "MatMul", [2]),
                 operation("e", "InferenceFusedBatchNormGradV3", [3, 0]),
                 operation("f", "Relu", [4]), operation("g", "FusedBatchNormV3", [5]),
                 operation("h", "Relu", [6])]
        made, _ = fusion.kernels(steps, {}, NVLINK, True)
        self.assertEqual([each.type for each in made], [
            "MatMul", "Fusion", "MatMul", "InferenceFusedBatchNormGradV3", "Relu",
            "FusedBatchNormV3", "Relu"])

    def test_what_only_a_later_kernel_needs_is_not_written(self):
        """Else each tensor of the forward pass costs a kernel of its own."""
        steps = [operation("a", "MatMul"), operation("b", "Relu", [0]),
                 operation("c", "MatMul", [0]), operation("d", "Mul", [1, 2]),
                 operation("e", "MatMul", [3])]
        made, seconds = fusion.kernels(steps, {}, NVLINK, True)
        self.assertEqual([each.type for each in made], ["MatMul", "MatMul", "Fusion", "MatMul"])
        self.assertAlmostEqual(seconds["b"] * BANDWIDTH, 3 * MIB)

    def test_what_is_handed_on_is_written_once(self):
        """Else a reshape, or padding by nothing, costs a tower what it costs no one else."""
        steps = [operation("a", "MatMul"), operation("b", "Relu", [0]),
                 operation("c", "Reshape", [1]), operation("d", "MatMul", [1, 2])]
        made, seconds = fusion.kernels(steps, {}, NVLINK, True)
        self.assertEqual([each.type for each in made], ["MatMul", "Fusion", "MatMul"])
        self.assertAlmostEqual(seconds["b"] * BANDWIDTH, 2 * MIB)

    def test_only_what_is_marked(self):
        """Else towers are given kernels that nobody asked XLA for."""
        steps = [operation("a", "Relu", xla_scope=""), operation("b", "Relu", [0]),
                 operation("c", "Relu", [1], device="CPU:0")]
        made, seconds = fusion.kernels(steps, {"a": 1., "b": 2.}, NVLINK, False)
        self.assertEqual([each.name for each in made], ["a", "b", "c"])
        self.assertEqual((seconds["a"], seconds["b"]), (1., 2.))

    def test_an_update_is_one_kernel(self):
        """Else Keras' operations for Adam on one GPU are compared with one kernel on towers."""
        case = gpus.Case("one layer", lambda: keras.Sequential([
            keras.Input([256]), keras.layers.Dense(512, use_bias=False)]), (256,), "float32", 64)
        step = gpus.traced(case, 1, gpus.ONE)
        made, _ = fusion.kernels(step.operations, {}, NVLINK, True)
        most = max(each.accessed_bytes for each in made if each.type == "Fusion" and "adam" in
                   each.traced_name)
        passes = 7  # variable and two slots are read and written, the gradient is read
        self.assertBetween(most / (4 * 256 * 512), passes, passes + .01)


class ClustersTest(parameterized.TestCase):

    @parameterized.parameters(("tower", 3 + 2), ("", 3 + 1))
    def test_a_cluster_waits_for_all_that_it_takes(self, xla_scope, wanted):
        """Else compiled towers start on weights that have come while others are on their way."""
        steps = [operation("remote", "MatMul", device="GPU:1", xla_scope=""),
                 operation("a", "MatMul", xla_scope=xla_scope),
                 operation("b", "MatMul", [1, 0], xla_scope=xla_scope)]
        made, seconds = fusion.clusters(steps, {"remote": 3., "a": 1., "b": 1.}, NVLINK, 1.)
        self.assertAlmostEqual(schedule.run(made, seconds, NVLINK).seconds, wanted, places=3)

    @parameterized.parameters(("tower", 2 + 4), ("", 1 + 4))
    def test_a_cluster_gives_all_at_its_end(self, xla_scope, wanted):
        """Else compiled towers seem to send gradients while they make others."""
        steps = [operation("a", "MatMul", xla_scope=xla_scope),
                 operation("b", "MatMul", [0], xla_scope=xla_scope),
                 operation("c", "MatMul", [0], device="GPU:1", xla_scope="")]
        made, seconds = fusion.clusters(steps, {"a": 1., "b": 1., "c": 4.}, NVLINK, 1.)
        self.assertAlmostEqual(schedule.run(made, seconds, NVLINK).seconds, wanted, places=3)

    def test_the_host_starts_compiled_functions_one_after_another(self):
        """Else many short functions seem as fast as a long one; of ResNet-50 they were not."""
        steps = [operation("a", "MatMul"), operation("b", "MatMul", [0], xla_scope=""),
                 operation("c", "MatMul", [1])]
        made, seconds = fusion.clusters(steps, dict.fromkeys("abc", 1e-6), NVLINK, 1.)
        took = schedule.run(made, seconds, NVLINK).seconds
        self.assertBetween(took, 2 * links.COMPILED, 3 * links.COMPILED)

    def test_no_circle(self):
        """Else a step that TensorFlow runs cannot be put in order here."""
        steps = [operation("a", "Relu"), operation("there", "Relu", [0], device="GPU:1"),
                 operation("b", "Relu", [0, 1]), operation("c", "Relu", [2])]
        made, _ = fusion.clusters(steps, {}, NVLINK, 1.)
        self.assertEqual([dataclasses.astuple(each)[2:4] for each in made],
                         [("GPU:0", []), ("GPU:1", [(0, 0)]), ("GPU:0", [(0, 0), (1, 0)])])
