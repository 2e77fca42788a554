"""The core of promise 1: each case in each Keras version, on towers that take turns."""

from absl.testing import absltest, parameterized

from . import runner


def _named(index, item):
    case, keras, towers = item
    return (f"_{index}_{case.name}_{keras}_{towers}".replace(" ", "_"), case, keras, towers)


class ParityTest(parameterized.TestCase):

    @parameterized.named_parameters(_named(*item) for item in enumerate(runner.core()))
    def test_towers_train_as_one_device(self, case, keras, towers):
        """Else a user's model trains differently because of how many devices there are."""
        found = runner.compare(case, runner.keras_module(keras), towers)
        self.assertLessEqual(found.worst, case.bound, str(found))


if __name__ == "__main__":
    absltest.main()
