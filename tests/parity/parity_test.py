"""The core of promise 1: each case in each Keras version, on towers that take turns."""

from absl.testing import absltest, parameterized

import wide

from . import cases, runner


def _named(numbered):
    index, (case, keras, towers) = numbered
    return (f"_{index}_{case.name}_{keras}_{towers}".replace(" ", "_"), case, keras, towers)


class ParityTest(parameterized.TestCase):

    @wide.named_parameters(*map(_named, enumerate(runner.core())),
                           marks=lambda case, *_: wide.WIDE if case.wide else ())
    def test_towers_train_as_one_device(self, case, keras, towers):
        """Else a user's model trains differently because of how many devices there are."""
        found = runner.compare(case, runner.keras_module(keras), towers)
        self.assertLessEqual(found.worst, case.bound, str(found))

    @wide.parameters(
        ("models/nested", "tf_keras", runner.STAGED[1]),
        wide=[("losses/add_loss", "keras", runner.STAGED[1]),
              ("norms/convolution and dense", "keras", runner.STAGED[2]),
              ("fit/run_eagerly", "keras", runner.STAGED[0])])
    def test_stages_train_as_one_device(self, case, keras, towers):
        """Else a model over several devices is another one; more: ``--stages``."""
        case = cases.CASES[case]
        found = runner.compare(case, runner.keras_module(keras), towers)
        self.assertLessEqual(found.worst, case.bound, str(found))

    @wide.parameters(wide=[
        ("losses/add_loss", "tf_keras", runner.Towers(4, "balanced")),
        ("fit/steps_per_execution=3, predict", "keras", runner.Towers(3)),
        ("optimizers/clipnorm", "keras", runner.Towers(1)),
        ("draws/own train_step", "tf_keras", runner.Towers(1))])
    def test_towers_with_xla_train_as_one_device(self, case, keras, towers):
        """Else XLA on several devices changes a training; more: ``--quick --jit-compile``."""
        case = cases.CASES[case]
        found = runner.compare(case, runner.keras_module(keras), towers, jit_compile=True)
        self.assertLessEqual(found.worst, case.bound, str(found))


if __name__ == "__main__":
    absltest.main()
