"""Nodes of a partitioned step, while they are collected."""

import tensorflow as tf
from absl.testing import absltest

from towerstrategy import TowerStrategy
from towerstrategy.sharding.builder import Builder


class BuilderTest(absltest.TestCase):

    def test_what_is_the_same_is_made_once(self):
        """Else TensorFlow keeps 7 KB of each count of a batch norm's rows, and of its parts."""
        builder = Builder(tf.Graph())
        two = builder.constant(2, tf.int64, "/CPU:0")

        def made(type="Neg", device="/CPU:0", name="tower_0/Neg", **attrs):
            return builder.make(type, [two], device, name, **attrs)

        self.assertEqual(made(), made(name="tower_0/Other"))
        self.assertNotEqual(made(), made("Abs"))
        self.assertNotEqual(made(), made(device="/CPU:1"))
        self.assertNotEqual(made("Cast", DstT=tf.int32), made("Cast", DstT=tf.float32))
        # Micro-batches of one device wait for each other; a draw is another one each time.
        self.assertNotEqual(made(), made(name="tower_1/Neg"))
        self.assertNotEqual(*(builder.make("RandomUniform", [two], "/CPU:0", dtype=tf.float32)
                              for _ in range(2)))

    def test_rows_are_counted_where_they_are(self):
        """Else a GPU's batch is copied to the host in each step, to be asked how long it is."""
        strategy = TowerStrategy(["CPU:1", "CPU:2"], "CPU:0")
        mean = strategy.function(lambda x: tf.reduce_mean(x))
        graph = mean.get_concrete_function(strategy.split(tf.ones([6, 3]))).graph
        rows = {tensor.name for tensor in graph.inputs if tensor.shape.rank == 2}
        takers = [operation for operation in graph.get_operations()
                  if not rows.isdisjoint(tensor.name for tensor in operation.inputs)]
        self.assertIn("Shape", [operation.type for operation in takers])
        self.assertEqual({operation.device[-5:] for operation in takers}, {"CPU:1", "CPU:2"})


if __name__ == "__main__":
    absltest.main()
