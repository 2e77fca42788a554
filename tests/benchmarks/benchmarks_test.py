"""benchmarks: what is counted and compared is what the tables say."""

import os
import pathlib
import subprocess
import sys
import tempfile

import keras
import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
from benchmarks import (
    cases,
    chart,
    jax_peer,
    machines,
    measure,
    micro_batches,
    results,
    strategies,
    table,
    traffic,
)

pytestmark = pytest.mark.wide


def _counted(function, *args, replicas=2):
    return traffic.count(tf.function(function).get_concrete_function(*args), replicas)


class TrafficTest(parameterized.TestCase):

    def test_counts_a_tensor_once_for_each_device_that_takes_it(self):
        """Else a strategy that reads each weight once a tower looks as bad as any."""
        with tf.device("CPU:0"):
            weight = tf.Variable(tf.ones([10, 5]))  # 200 bytes

        def step():
            with tf.device("CPU:0"):
                read = weight.read_value()
            results_ = []
            for tower in ("CPU:1", "CPU:2"):
                with tf.device(tower):
                    results_.append(tf.reduce_sum(read) + tf.reduce_max(read))
            with tf.device("CPU:0"):
                return results_[0] + results_[1]

        found = _counted(step)
        self.assertEqual(found.sent, {"CPU:0": 400, "CPU:1": 4, "CPU:2": 4})
        self.assertEqual(found.received, {"CPU:1": 200, "CPU:2": 200, "CPU:0": 8})
        self.assertEqual((found.total, found.busiest, found.unknown), (408, 400, 0))

    def test_walks_into_functions_with_the_callers_tensors(self):
        """Else what a traced-once step moves is not seen."""
        inner = tf.function(lambda x: tf.reduce_sum(x))

        def step(x):
            with tf.device("CPU:1"):
                x = x * 2.
            parts = []
            for tower in ("CPU:1", "CPU:2"):
                with tf.device(tower):
                    parts.append(inner(x))
            with tf.device("CPU:0"):
                return tf.add_n(parts)

        found = _counted(step, tf.ones([25]))
        self.assertEqual(found.batch, 100)
        self.assertEqual(found.sent, {"CPU:1": 104, "CPU:2": 4})

    def test_counts_the_branch_that_moves_more(self):
        """Else a merge that stands inside a condition is counted double, or not at all."""

        def step(x, use):
            with tf.device("CPU:1"):
                x = x * 2.
            with tf.device("CPU:0"):
                return tf.cond(use, lambda: tf.reduce_sum(x), lambda: tf.constant(0.))

        found = _counted(step, tf.ones([25]), tf.constant(True))
        self.assertEqual(found.sent, {"CPU:1": 100})

    def test_what_reads_a_variable_sits_with_it(self):
        """Else a gather on another device looks as if the whole table crossed."""
        with tf.device("CPU:1"):
            table_ = tf.Variable(tf.ones([1000, 4]))

        def step(ids):
            with tf.device("CPU:0"):
                return tf.reduce_sum(tf.gather(table_, ids))

        found = _counted(step, tf.constant([1, 2, 3]))
        self.assertEqual(found.sent, {"CPU:1": 3 * 4 * 4})
        self.assertEqual(found.batch, 12)

    def test_shapes_of_several_tensors(self):
        """Else a kernel's gradient, which asks for two shapes, looks as if the kernel crossed."""
        def step():
            with tf.device("CPU:1"):
                x = tf.random.normal([4, 25])
            with tf.device("CPU:2"):
                kernel = tf.random.normal([25, 8])
                product = x @ kernel
                return product, tf.raw_ops.ShapeN(input=[x, kernel])

        found = _counted(step)
        self.assertEqual(found.received, {"CPU:2": 4 * 4 * 25})

    @parameterized.parameters(None, "balanced")
    def test_towers_move_weights_out_and_gradients_back(self, merge_device):
        """Else the target for the busiest link compares with nothing real."""
        strategy = towerstrategy.TowerStrategy(["CPU:0", "CPU:1"], merge_device)
        case = cases.CASES["mlp"]
        with strategy.scope():
            model = cases.compiled(case, keras, small=True)
        model.fit(cases.dataset(case), steps_per_epoch=1, shuffle=False, verbose=0)
        found = measure.step_traffic(model, case, strategy)
        weights, rows = 4 * model.count_params(), case.batch // 2
        # One of two towers is at home: every weight crosses once, and so does its gradient.
        self.assertBetween(found.total - found.batch, 2 * weights, 2 * weights + 100)
        self.assertEqual(found.unknown, 0)
        self.assertEqual(found.batch, rows * (1024 * 4 + 4))  # tower 0 is the host


class MeasureTest(parameterized.TestCase):

    @parameterized.named_parameters(("input_keras", keras, "input", 256 * 10 + 10),
                                    ("input_tf_keras", tf_keras, "input", 256 * 10 + 10),
                                    ("embedding_keras", keras, "embedding", 500_000 * 2 + 30))
    def test_measures_a_small_case(self, which, name, parameters):
        """Else an afternoon of measuring ends in an exception, or in figures that are not there."""
        strategy = strategies.STRATEGIES["tower"](["CPU:0", "CPU:1"], None)
        found = measure.measure(which, cases.CASES[name], strategy, seconds=0, small=True,
                                with_traffic=True)
        self.assertGreater(found["steps"], 5)
        for figure in ("first_step_s", "step_ms", "peak_mb"):
            self.assertGreater(found[figure], 0)
        self.assertEqual(found["parameter_bytes"], 4 * parameters)
        self.assertEqual(list(found["state_bytes"]), ["CPU:0"])
        self.assertGreater(found["state_bytes"]["CPU:0"], 3 * found["parameter_bytes"])
        gradients = found["traffic"]["sent"]["CPU:1"]
        if name == "embedding":  # each id as it is looked up and as an index, and two rows for it:
            # Adam scales those of the gradient for one of its slots, and squares them for another.
            ids = cases.CASES[name].batch // 2 * 32
            self.assertBetween(gradients, ids * (4 + 4), ids * (4 + 4) + 1500)
        else:
            self.assertBetween(gradients, 4 * parameters, 4 * parameters + 100)

    @parameterized.parameters(*cases.CASES)
    def test_cases_have_the_sizes_that_they_are_named_for(self, name):
        """Else figures of one release cannot be compared with those of the next."""
        wanted = {"mlp": 18_900_000, "embedding": 16_000_330, "deep": 150 * 64 * 65 + 650,
                  "input": 2_570, "conv": 273_000}
        if name == "embedding":  # 64 MB need not be made to be counted
            count = sum(size for size in (500_000 * 32, 32 * 10 + 10))
        else:
            model = cases.CASES[name].build(keras, False)
            count = model.count_params()
            if name == "deep":
                self.assertLen(model.trainable_variables, 302)
        self.assertAlmostEqual(count / wanted[name], 1, delta=0.02)


class ResultsTest(parameterized.TestCase):

    def _runs(self):
        steps = {"none": [10., 11., 30.], "tower": [12., 11., 13.], "mirrored": [50., 40., 41.]}
        return [
            results.Run(results.Job("mlp", who, 4), number, {
                "step_ms": step, "first_step_s": 1., "peak_mb": 100., "gpu_peak_mb": 0., "steps": 9,
                "parameter_bytes": 1000, "largest_bytes": 250, "state_bytes": {"CPU:0": 3000},
                "traffic": {"total": 6000, "batch": 0, "busiest": 3000, "sent": {"CPU:0": 3000},
                            "received": {"CPU:0": 3000}, "unknown": 0} if number == 0 else None})
            for who, values in steps.items() for number, step in enumerate(values)
        ] + [results.Run(results.Job("mlp", "central", 4), 0, {"error": "ValueError: no"})]

    def test_targets_compare_medians(self):
        """Else a target is called reached that is not."""
        figures = results.medians(self._runs())
        found = {verdict.what: verdict for verdict in results.verdicts(figures, 4, True)}
        self.assertAlmostEqual(found["mlp: step over none"].measured, 12 / 11)
        self.assertTrue(found["mlp: step over none"].holds)
        self.assertAlmostEqual(found["mlp: step over mirrored"].measured, 12 / 41)
        self.assertFalse(found["mlp: peak memory over mirrored"].holds)
        self.assertAlmostEqual(found["mlp: busiest link over the ring all-reduce"].measured, 2)
        self.assertAlmostEqual(found["mlp: fullest tower over the mean"].measured, 4)

    def test_one_large_variable_is_no_fault_of_balanced(self):
        """Else a target is missed that no placement of whole variables could reach."""
        figures = results.medians(self._runs())
        figures[results.Job("mlp", "tower", 4)]["largest_bytes"] = 251
        found = [verdict.what for verdict in results.verdicts(figures, 4, True)]
        self.assertNotIn("mlp: fullest tower over the mean", found)

    def test_shows_what_failed_beside_what_was_measured(self):
        """Else a strategy that cannot train a case takes the whole report with it."""
        figures = results.medians(self._runs())
        text = table.jobs(figures)
        self.assertIn("mlp central R=4 failed: ValueError: no", text)
        self.assertIn("12.00", text)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "chart.png"
            chart.draw(path, figures, 4, "a machine")
            self.assertGreater(matplotlib.image.imread(path).shape[0], 300)


class JaxTest(parameterized.TestCase):

    def test_needs_no_tensorflow(self):
        """Else the environment in which JAX is measured has to hold TensorFlow as well."""
        code = ("import sys; sys.modules['tensorflow'] = None; from benchmarks import jax_peer; "
                "rows, labels = next(jax_peer.cases.batches(jax_peer.cases.CASES['mlp'])); "
                "print(rows.shape, labels.shape)")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        shown = subprocess.run([sys.executable, "-c", code], env=environment, check=True,
                               capture_output=True, text=True).stdout
        self.assertEqual(shown.strip(), "(64, 1024) (64,)")

    def test_batches_are_those_of_the_others(self):
        """Else the peers train on different data."""
        case = cases.CASES["embedding"]
        for (x, y), (x_there, y_there) in zip(cases.dataset(case).take(5), cases.batches(case)):
            np.testing.assert_array_equal(x, x_there)
            np.testing.assert_array_equal(y, y_there)

    def test_says_what_is_missing(self):
        """Else who has no JAX finds its figures missing without a word."""
        self.assertIn("no nowhere/python; `make bench-jax`", jax_peer.missing("nowhere/python"))
        self.assertEqual(jax_peer.missing(sys.executable), "")

    def test_has_the_devices_that_are_asked_for(self):
        """Else figures of one device pass for those of four."""
        line, environment = jax_peer.command("python", "mlp", 4, 2., True, pathlib.Path("a.json"))
        self.assertEqual(line[:6], ["python", "-m", "benchmarks.jax_peer", "mlp", "4", "a.json"])
        self.assertEndsWith(environment["XLA_FLAGS"], "=4")
        with self.assertRaisesRegex(ValueError, "devices, but 3 were asked for.*count=3"):
            jax_peer.measure(keras, cases.CASES["input"], 3, 0)


class MicroBatchesTest(parameterized.TestCase):

    def _figures(self):
        runs = [("conv", count, {"added_mb": added, "held_mb": 800., "step_ms": 100.,
                                 "first_step_s": 2.})
                for count in micro_batches.MICRO_BATCHES
                for added in (80. / max(count, 1), 9., 300.)]
        return micro_batches.medians([*runs, ("mlp", 8, {"error": "ValueError: no"})])

    def test_target_compares_medians(self):
        """Else micro-batches are said to save memory that they do not."""
        found, = micro_batches.verdicts(self._figures())
        self.assertAlmostEqual(found.measured, 10 / 80)
        self.assertTrue(found.holds)


class MachinesTest(parameterized.TestCase):

    def _figures(self):
        runs = []
        for job in machines.jobs(["mlp"]):
            for step in (30., 10., 20.) if job.strategy == "tower" else (40., 50., 60.):
                runs.append((job, {"step_ms": step, "cpu_ms": step, "first_step_s": 1.,
                                   "first_cpu_s": 1., "peak_mb": 100., "worker_mb": 50.,
                                   "between_mb": 160. if job.strategy == "tower" else 240.}))
        runs.append((machines.Job("deep", "multi_worker", 2, 2), {"error": "ValueError: no"}))
        return machines.medians(runs)

    def test_targets_compare_medians(self):
        """Else a target is called reached that is not."""
        step, between = machines.verdicts(self._figures())
        self.assertAlmostEqual(step.measured, 20 / 50)
        self.assertTrue(step.holds)
        self.assertAlmostEqual(between.measured, 160 / 240)
        self.assertFalse(between.holds)

    def test_growth_is_a_workers(self):
        """Else what grows faster than the workers does not show."""
        figures = {}
        for job in machines.jobs(["mlp"], machines.parse_shapes(["2x1", "8x1", "4x2"])):
            figures[job] = dict.fromkeys(machines.FIGURES, 1. * job.workers)
            figures[job]["between_mb"] = job.workers ** 2
        lines = [line.split() for line in machines.format_growth(figures).splitlines()[2:]]
        self.assertEqual([line[1] for line in lines], list(machines.STRATEGIES))
        self.assertEqual(lines[0][-4:], ["1.00", "1.00", "1.00", "4.00"])
        for wrong in ("4", "4x", "0x1", "2x2x2", "-1x2"):
            with self.assertRaisesRegex(ValueError, f"4x2, but got '{wrong}'"):
                machines.parse_shapes([wrong])

    def test_a_worker_that_fails_is_named(self):
        """Else half a cluster's figures pass for all of them."""
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "0.json").write_text('{"step_ms": 1}')
            (folder / "1.log").write_text("Traceback\nMemoryError: no\n")
            self.assertEqual(machines._cluster_figures(folder, 2, ""),
                             {"error": "worker 1: MemoryError: no"})
