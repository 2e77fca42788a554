"""wide: what the default run leaves to `make test-all`, and that the two leave out nothing."""

import itertools
import pathlib

from absl.testing import absltest, parameterized

import wide

SIZES = (2, 3, 2, 5)
MARKS = [set(), {"wide"}, {"wide", "rest"}]


def cases_of(decorator):
    """The cases of a test with a decorator, and which of :data:`MARKS` each has."""
    found = []

    class Case(parameterized.TestCase):
        @decorator
        def test(self, one, other):
            found.append((one, other))

    for name in filter(lambda name: name.startswith("test"), vars(Case)):
        Case(name).run(absltest.unittest.TestResult())
        marks = {mark.name for mark in getattr(getattr(Case, name), "pytestmark", [])}
        found[-1] = (found[-1], MARKS.index(marks))
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
        for in_wide, counts in ((2, [3, 3, 0]), (1, [3, 0, 3])):
            found = cases_of(wide.product(1, in_wide, one="ab", other=(3, 4, 5)))
            self.assertEqual([case for case, _ in found], list(itertools.product("ab", (3, 4, 5))))
            marks = [mark for _, mark in found]
            self.assertEqual([marks.count(mark) for mark in range(3)], counts)

    def test_parameters(self):
        """Else a case is lost, or all of them are run by ``make test``."""
        self.assertEqual(cases_of(wide.parameters((1, 2), wide=[(3, 4)], rest=[(5, 6)])),
                         [((1, 2), 0), ((3, 4), 1), ((5, 6), 2)])
        self.assertEqual(
            cases_of(wide.named_parameters(("_a", 1, 2), ("_b", 3, 4),
                                           marks=lambda one, _: wide.WIDE if one > 1 else ())),
            [((1, 2), 0), ((3, 4), 1)])

    def test_turns(self):
        """Else one of the two Keras versions has no test at all in ``make test``."""
        versions = wide.turns(("_a", 1, 2), ("_b", 3, 4))
        first, second = cases_of(versions), cases_of(versions)
        self.assertEqual([case for case, _ in first], [(1, 2), (3, 4)])
        self.assertEqual(first, [(case, 1 - mark) for case, mark in second])

    def test_marks_are_below_the_parameters(self):
        """Else they are lost, and ``make test`` runs what takes long."""
        for path in pathlib.Path(__file__).parents[1].rglob("*_test.py"):
            self.assertNotRegex(
                path.read_text(), r"@pytest.mark.wide\n +@(parameterized|wide|[A-Z_]+\n)", path)


if __name__ == "__main__":
    absltest.main()
