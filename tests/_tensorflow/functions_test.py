"""_tensorflow/functions: how functions are called."""

import tensorflow as tf
from absl.testing import absltest

from towerstrategy._tensorflow import functions


class GraphOptimizerTest(absltest.TestCase):

    def test_options_of_the_user(self):
        """Else who has chosen among TensorFlow's optimizers gets others, in silence."""
        config = tf.compat.v1.ConfigProto()
        rewrites = config.graph_options.rewrite_options

        def lightly():
            return options(light=True)

        def options(light):
            options = functions._options(config.SerializeToString(), None, light)
            found = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
            return found.graph_options.rewrite_options

        self.assertEqual(lightly().optimizers, ["dependency"])
        self.assertTrue(lightly().disable_tfg_optimizer)  # a tenth of a first step's run
        rewrites.scoped_allocator_optimization = rewrites.ON  # TensorFlow's own, of a cluster
        self.assertEqual(lightly().optimizers, ["dependency"])
        rewrites.constant_folding = rewrites.OFF
        self.assertEqual(lightly(), rewrites)
        self.assertEqual(options(light=False).constant_folding, rewrites.OFF)
        self.assertEqual(options(light=False).remapping, rewrites.OFF)
        rewrites.remapping = rewrites.ON
        self.assertEqual(options(light=False).remapping, rewrites.ON)
