"""benchmarks stages: what is counted and simulated is what a traced step of stages does."""

import pathlib
import tempfile

import keras
import matplotlib.image
import pytest
from absl.testing import parameterized

import towerstrategy
from benchmarks import cases, results, stages, stages_chart

pytestmark = pytest.mark.wide

ROWS, WIDTH = 48, 6
CASE = cases.Case("a small one", ROWS, cases.dense([WIDTH] * 4, WIDTH), cases.floats(WIDTH))


def traced(job):
    devices = job.rows if job.stages > 1 else [name for name, in job.rows]
    strategy = towerstrategy.TowerStrategy(devices, micro_batches=job.parts)
    with strategy.scope():
        model = cases.compiled(CASE, keras)
    model.fit(cases.dataset(CASE), steps_per_epoch=1, shuffle=False, verbose=0)
    return stages.traced(model, CASE, strategy)


class StepTest(parameterized.TestCase):

    def test_a_tower_of_stages(self):
        """Else a table says that little crosses, or that stages work, where it is not so."""
        job = stages.Job("small", 1, 3, 4)
        step = traced(job)
        cuts = 2 * ROWS * WIDTH * 4
        found = stages.crossing_bytes(step, job, ROWS)
        self.assertEqual((found["activations"], found["gradients"], found["other"]),
                         (cuts, cuts, 0))
        batch = ROWS * (WIDTH * 4 + 4)
        self.assertBetween(found["batch"], batch, batch + ROWS * 4)  # labels may go on by stage 0
        self.assertLess(found["scalars"], 400)
        paper = stages.simulate(step, job)
        # Less where a stage hands its gradient on before it has those of its weights.
        self.assertLess(paper["idle"], stages.bubble(job) + .001)
        self.assertEqual(paper["held"], [3, 2, 1])
        self.assertGreater(paper["idle_costed"], paper["idle"])

    def test_weights_that_cross(self):
        """Else weights may go from device to device, and the table says that nothing does."""
        job = stages.Job("small", 2)
        found = stages.crossing_bytes(traced(job), job, ROWS)
        weights = 4 * 4 * (WIDTH * WIDTH)
        self.assertGreater(found["other"], weights)
        self.assertEqual((found["activations"], found["gradients"]), (0, 0))


class TablesTest(parameterized.TestCase):

    def _figures(self):
        runs = []
        for job in stages.jobs(["mlp16", "conv"], quick=False):
            for step in (10. * job.parts, 30. * job.parts, 20. * job.parts):
                mine = {"added_mb": 80. / job.parts, "held_mb": 700., "step_ms": step,
                        "cpu_ms": 9., "first_step_s": 2.}
                if job.towers:
                    mine.update(dict.fromkeys(stages.CROSSING, 0))
                if job.stages > 1:
                    mine["other"] = 100 if job.parts == 8 else 0
                    mine["simulated"] = {"idle": 1.2 * stages.bubble(job), "idle_costed": .5,
                                         "held": [min(2, job.parts)] * job.stages}
                runs.append((job, mine))
        return stages.medians([*runs, (stages.Job("conv", 1, 4, 8), {"error": "MemoryError: no"})])

    def test_targets(self):
        """Else a target is called reached that is not."""
        found = {each.what: each for each in stages.verdicts(self._figures())}
        memory = found["conv, 1 stage, 8 micro-batches: MB added over 1 micro-batch"]
        self.assertEqual((memory.measured, memory.holds), (1 / 8, True))
        step = found["mlp16, 2 stages, 8 micro-batches: step over no strategy"]
        self.assertEqual((step.measured, step.holds), (8., False))
        self.assertFalse(found["mlp16, 1 x 4 x 2: idle over (P-1)/(M+P-1), simulated"].holds)
        held = "mlp16, 1 x 4 x {}: micro-batches held beyond the stages left, simulated"
        self.assertEqual(found[held.format(1)].measured, 0)
        self.assertEqual(found[held.format(4)].measured, 1)  # the last stage holds two
        other = "mlp16, 1 x 2 x 8: bytes between stages that are neither activations nor " \
                "their gradients"
        self.assertEqual(found[other], results.Verdict(other, 100, 0))

    def test_shows_what_failed(self):
        """Else one job that runs out of memory takes the whole table, or picture, with it."""
        figures = self._figures()
        text = stages.format_tables(figures)
        self.assertIn("conv, 1 x 4 x 8 failed: MemoryError: no", text)
        measured, simulated = text.split("\n\n")
        self.assertLen(measured.splitlines(), 2 + 2 * 15 - 1)  # the failed one is below
        self.assertLen(simulated.splitlines(), 2 + 2 * 8 - 1 + 1)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "stages.png"
            stages_chart.draw(path, figures, "a machine")
            self.assertGreater(matplotlib.image.imread(path).shape[0], 300)
