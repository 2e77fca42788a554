"""sharding/towers: what the kinds of the towers' devices decide."""

import tensorflow as tf
from absl.testing import absltest, parameterized

from towerstrategy.sharding.builder import Builder
from towerstrategy.sharding.rules.registry import Plan
from towerstrategy.sharding.towers import MOST_TO_EXCHANGE, Towers


def towers(*kinds, on_cpu=False):
    devices = [[f"/device:{kind}:{number}"] for number, kind in enumerate(kinds)]
    scopes = [f"tower_{number}/" for number in range(len(kinds))]
    return Towers(Builder(tf.Graph()), devices, "", "", scopes, lambda tower: None, on_cpu)


class TowersTest(parameterized.TestCase):

    @parameterized.parameters((["GPU", "GPU"], False), (["GPU", "CPU"], True),
                              (["CPU", "CPU"], True))
    def test_padding_for_kernels_of_cpus(self, kinds, wanted):
        """Else a convolution of no rows fails on a CPU tower beside GPUs, or each GPU tower gives a
        copy of each layer's input."""
        self.assertEqual(towers(*kinds).must_pad(Plan([], [], padded="CPU")), wanted)
        self.assertTrue(towers(*kinds).must_pad(Plan([], [], padded=True)))
        self.assertFalse(towers(*kinds).must_pad(Plan([], [])))

    def test_few_gpus_exchange(self):
        """Else a tower that merges for all runs ahead of the others; or many towers send to all."""
        self.assertTrue(towers("GPU", "GPU").exchange)
        self.assertFalse(towers("CPU", "CPU", on_cpu=True).exchange)
        self.assertFalse(towers(*["GPU"] * (MOST_TO_EXCHANGE + 1)).exchange)


if __name__ == "__main__":
    absltest.main()
