"""Cutting a row of layers into stages."""

import itertools

import numpy as np
from absl.testing import absltest, parameterized

from towerstrategy._keras import stages as cuts


def worst(costs, stages, micro_batches):
    """The cost of the costliest stage."""
    count = max(stages) + 1
    return max(sum(cost.held + cost.in_flight * min(micro_batches, count - stage)
                   for cost, its in zip(costs, stages) if its == stage) for stage in range(count))


class CutTest(parameterized.TestCase):

    @parameterized.product(seed=[0, 1, 2, 3], stages=[1, 2, 3, 4], micro_batches=[1, 3])
    def test_no_cut_is_better(self, seed, stages, micro_batches):
        """Else a device is full while another has room."""
        random = np.random.default_rng(seed)
        costs = [cuts.Cost(*pair) for pair in random.integers(0, 50, [8, 2]).tolist()]
        found = cuts.cut(costs, stages, micro_batches)
        self.assertEqual(found, sorted(found))
        self.assertEqual(set(found), set(range(stages)))
        every = ([sum(place >= begin for begin in begins) for place in range(len(costs))]
                 for begins in itertools.combinations(range(1, len(costs)), stages - 1))
        self.assertEqual(worst(costs, found, micro_batches),
                         min(worst(costs, other, micro_batches) for other in every))

    def test_as_many_stages_as_layers(self):
        """Else a device has no layer and stands idle."""
        self.assertEqual(cuts.cut([cuts.Cost(100.), cuts.Cost(0.), cuts.Cost(0.)], 3), [0, 1, 2])


if __name__ == "__main__":
    absltest.main()
