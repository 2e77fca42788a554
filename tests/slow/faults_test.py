"""What is too slow for every run: Ctrl-C in processes of their own, and running out of memory."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy

# A program that prints a line a step and another ten times a second while it is traced.
PROGRAM = """
    import sys
    import threading
    import time

    import numpy as np
    import tensorflow as tf
    import towerstrategy

    what, when = sys.argv[1:]
    towerstrategy.split_cpu(3)
    strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"])
    strategy.extended.trace_once = when != "tracing each"

    def work(x):
        for _ in range(0 if when == "steps" else 600):
            print("tracing", flush=True)
            time.sleep(.1)
        tf.py_function(lambda: print("step", flush=True), [], [])
        tf.numpy_function(lambda: time.sleep(.05), [], [])
        return x

    x, y = np.ones([64, 4], "f"), np.ones([64, 1], "f")
    try:
        if what == "eager":
            while True:
                strategy.run(work, (strategy.split(x),))
        if what == "function":
            step = tf.function(lambda batch: strategy.run(work, (batch,)))
            while True:
                step(strategy.split(x))
        kit = __import__(what)

        class Work(kit.layers.Layer):
            def call(self, x):
                return x if tf.distribute.in_cross_replica_context() else work(x)

        with strategy.scope():
            model = kit.Sequential([kit.Input([4]), Work(), kit.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, y, batch_size=8, epochs=1000, verbose=0)
    except KeyboardInterrupt:
        print("interrupted:", *(thread.name for thread in threading.enumerate()), flush=True)
        raise
    """


class InterruptTest(parameterized.TestCase):

    @parameterized.parameters(*itertools.product(["keras", "tf_keras"], ["steps", "tracing"]),
                              *itertools.product(["eager", "function"],
                                                 ["steps", "tracing", "tracing each"]))
    def test_ctrl_c(self, what, when):
        """Else Ctrl-C is lost, or waits for more than the step."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        program = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), what, when], env=environment,
            # What a script starts in the background ignores Ctrl-C, and so does what that starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        told = "step" if when == "steps" else "tracing"
        try:
            for _ in range(8):
                self.assertEqual(program.stdout.readline().strip(), told)
            program.send_signal(signal.SIGINT)
            out, errors = program.communicate(timeout=60)
        finally:
            program.kill()
        lines = out.splitlines()
        self.assertEqual(lines[-1:], ["interrupted: MainThread"], errors[-2000:])
        # Two towers print a line a step: no more than the step that was running.
        self.assertLess(lines.count(told), 8)
        self.assertEqual(program.returncode, -signal.SIGINT)
        self.assertEndsWith(errors.rstrip(), "KeyboardInterrupt")


class MemoryTest(parameterized.TestCase):

    @parameterized.parameters(None, keras, tf_keras)
    def test_out_of_memory_in_one_tower(self, kit):
        """Else nobody knows which device is too small, or the strategy cannot go on."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "CPU:0")
        sick = np.zeros([8, 3], "f")
        sick[6] = 99.

        def step(x):
            large = tf.reduce_max(x) > 50.
            size = tf.where(large, tf.constant(10**14, tf.int64), tf.constant(1, tf.int64))
            return x + tf.reduce_sum(tf.zeros(tf.stack([size])))

        if kit is None:
            function = tf.function(lambda batch: strategy.run(step, (batch,)))

            def train(x):
                return function(strategy.split(x))
        else:
            with strategy.scope():
                model = kit.Sequential([
                    kit.Input([3]), kit.layers.Lambda(step, output_shape=(3,)),
                    kit.layers.Dense(1)])
                model.compile("sgd", "mse")

            def train(x):
                return model.train_on_batch(x, np.zeros([8, 1], "f"))

        train(np.zeros([8, 3], "f"))
        # A largest number of all rows is nobody's alone in a step that is one program.
        where = "tower_1_CPU_2" if kit is None else "merge/.*zeros"
        with self.assertRaisesRegex(tf.errors.ResourceExhaustedError, where):
            train(sick)
        train(np.zeros([8, 3], "f"))
