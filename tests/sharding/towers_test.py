"""sharding/towers: what the kinds of the towers' devices decide."""

import tensorflow as tf
from absl.testing import absltest

from towerstrategy.sharding.builder import Builder
from towerstrategy.sharding.towers import MOST_TO_EXCHANGE, Towers


def towers(*kinds, on_cpu=False):
    devices = [[f"/device:{kind}:{number}"] for number, kind in enumerate(kinds)]
    scopes = [f"tower_{number}/" for number in range(len(kinds))]
    return Towers(Builder(tf.Graph()), devices, "", "", scopes, lambda *_: None, on_cpu)


class TowersTest(absltest.TestCase):

    def test_few_gpus_exchange(self):
        """Else a tower that merges for all runs ahead of the others; or many towers send to all."""
        self.assertTrue(towers("GPU", "GPU").exchange)
        self.assertFalse(towers("CPU", "CPU", on_cpu=True).exchange)
        self.assertFalse(towers(*["GPU"] * (MOST_TO_EXCHANGE + 1)).exchange)


if __name__ == "__main__":
    absltest.main()
