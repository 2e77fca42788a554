"""Errors in users' functions: short tracebacks, and what was made outside of the scope."""

import contextlib
import os
import traceback

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide

PACKAGE = os.path.dirname(towerstrategy.__file__)
X, Y = np.ones([7, 3], "float32"), np.ones([7, 1], "float32")


def bug(x):
    return tf.reshape(x, [x.not_there])


class TracebacksTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        tf.debugging.enable_traceback_filtering()  # tests before this one may have switched it off
        keras.config.enable_traceback_filtering()
        self.strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"])

    def ours(self, call):
        """How many frames of the package an error shows, in its traceback and in its message."""
        try:
            call()
        except AttributeError as error:
            self.assertIn("not_there", str(error))
            frames = traceback.extract_tb(error.__traceback__)
            self.assertIn("bug", frames[-1].name + frames[-2].name)
            return (sum(frame.filename.startswith(PACKAGE) for frame in frames)
                    + str(error).count(PACKAGE))
        self.fail("no error")

    def test_loops_of_ones_own(self):
        """Else a user looks for his line between fifteen of ours."""
        parts, run = self.strategy.split(X), self.strategy.run
        for call in (lambda: run(bug, (parts,)), lambda: run(tf.function(bug), (parts,)),
                     lambda: tf.function(lambda x: run(bug, (x,)))(parts),
                     lambda: self.strategy.function(bug)(parts)):
            self.assertLessEqual(self.ours(call), 2)

    @parameterized.product(kit=("keras", "tf_keras"), run_eagerly=(True, False))
    def test_steps_of_keras(self, kit, run_eagerly):
        """Else so does who writes a train_step."""
        class Wrong({"keras": keras, "tf_keras": tf_keras}[kit].Model):
            def train_step(self, data):
                return bug(data[0])

            test_step = train_step

            def predict_step(self, data):
                return bug(data)

        with self.strategy.scope():
            model = Wrong()
            model.compile("sgd", run_eagerly=run_eagerly)
        for call in (lambda: model.fit(X, Y, verbose=0), lambda: model.evaluate(X, Y, verbose=0),
                     lambda: model.predict(X, verbose=0), lambda: model.train_on_batch(X, Y)):
            self.assertLessEqual(self.ours(call), 2)

    def test_all_frames_on_demand(self):
        """Else nobody can tell where in the package something happened."""
        tf.debugging.disable_traceback_filtering()
        self.addCleanup(tf.debugging.enable_traceback_filtering)
        self.assertGreater(self.ours(lambda: self.strategy.run(bug, (self.strategy.split(X),))), 5)

    @wide.product(kit=("keras", "tf_keras"), eager=(True, False), rule=("SGD", "Adam"))
    def test_made_outside_of_the_scope(self, kit, eager, rule):
        """Else who forgets the scope reads of colocation, or gets the statistics of a tower."""
        kit = {"keras": keras, "tf_keras": tf_keras}[kit]
        for within in (False, True):
            model = kit.Sequential([kit.Input([3]), kit.layers.Dense(1, name="mine")])
            with self.strategy.scope() if within else contextlib.nullcontext():
                optimizer = getattr(kit.optimizers, rule)(0.1)

            def step(x, y, model=model, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum((model(x) - y) ** 2) / 7
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))
                return loss

            run = self.strategy.run
            if not eager:
                run = tf.function(run)
            parts = self.strategy.split((X, Y))
            with self.assertRaisesRegex(ValueError, r"mine/kernel.*with strategy\.scope.*adopt\("):
                run(step, parts)
            self.strategy.function(step)(*parts)  # which takes it as it is
            self.strategy.adopt(model)
            run(step, parts)


if __name__ == "__main__":
    absltest.main()
