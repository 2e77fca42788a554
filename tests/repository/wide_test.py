"""wide: what the default run leaves out of a product, and that ``--wide`` leaves out nothing."""

import itertools
from unittest import mock

from absl.testing import absltest, parameterized

import wide

SIZES = (2, 3, 2, 5)


def cases_of(decorator):
    """The cases that a class has by a decorator."""
    found = []

    class Case(parameterized.TestCase):
        @decorator
        def test(self, one, other):
            found.append((one, other))

    case = absltest.unittest.TestSuite(map(Case, filter(
        lambda name: name.startswith("test"), vars(Case))))
    case.run(absltest.unittest.TestResult())
    return found


class WideTest(parameterized.TestCase):

    @parameterized.parameters(1, 2)
    def test_few_have_every_combination(self, together):
        """Else a value, or a pair of them, is tried by nobody before a release."""
        chosen = wide.few(together, [range(size) for size in SIZES])
        for places in itertools.combinations(range(len(SIZES)), together):
            self.assertEqual(
                {tuple(case[place] for place in places) for case in chosen},
                set(itertools.product(*(range(SIZES[place]) for place in places))))
        self.assertLen(chosen, {1: 5, 2: 3 * 5}[together])

    def test_versions_take_turns(self):
        """Else one of the two Keras versions has all cases but one."""
        self.assertEqual(wide.few(1, [range(2), range(4)]), [(0, 0), (0, 2), (1, 1), (1, 3)])

    def test_product(self):
        """Else a case is lost, or all of them are run by ``make test``."""
        options = {"one": "ab", "other": (3, 4, 5)}
        self.assertLen(cases_of(wide.product(**options)), 3)
        with mock.patch.object(wide, "ALL", True):
            self.assertCountEqual(cases_of(wide.product(**options)),
                                  itertools.product(*options.values()))


if __name__ == "__main__":
    absltest.main()
