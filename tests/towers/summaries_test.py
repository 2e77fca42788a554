"""Summaries of a replica function are named as on one device."""

import contextlib
import pathlib
import tempfile

import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy


class TagTest(parameterized.TestCase):

    @parameterized.product(eagerly=[False, True], count=[1, 3])
    def test_as_on_one_device(self, eagerly, count):
        """Else one line changed starts another curve in TensorBoard."""
        def replica(x):
            with tf.name_scope("outer"):
                tf.summary.scalar("merge/loss", tf.reduce_sum(x), step=1)
            tf.summary.histogram("rows", x, step=1)
            return x

        towers = towerstrategy.TowerStrategy([f"CPU:{tower}" for tower in range(count)])
        tags = []
        for strategy in (None, towers):
            with tempfile.TemporaryDirectory() as folder:
                writer = tf.summary.create_file_writer(folder)
                x = tf.range(6.)
                with writer.as_default(), strategy.scope() if strategy else \
                        contextlib.nullcontext():
                    run, x = ((lambda x, run=strategy.run: run(replica, (x,)), strategy.split(x))
                              if strategy else (replica, x))
                    (run if eagerly else tf.function(run))(x)
                writer.close()
                (path,) = pathlib.Path(folder).iterdir()
                tags.append([value.tag for event in tf.compat.v1.train.summary_iterator(str(path))
                             for value in event.summary.value])
        self.assertEqual(tags[0], ["outer/merge/loss", "rows"])
        self.assertCountEqual(tags[1], tags[0])


if __name__ == "__main__":
    absltest.main()
