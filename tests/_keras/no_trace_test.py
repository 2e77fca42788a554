"""No trace left behind: TensorFlow and Keras are the same before, beside and after our work."""

import copy
import hashlib
import inspect
import pathlib
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import peers
import towerstrategy
import wide
from towerstrategy import _keras, _tensorflow as _tf
from towerstrategy._keras import adopting
from towerstrategy._keras.keras3 import hooks as keras3_hooks
from towerstrategy._keras.tf_keras import hooks as tf_keras_hooks

ROOT = pathlib.Path(__file__).parents[2]
X = np.random.RandomState(0).normal(size=[14, 4]).astype("float32")
Y = X.sum(1, keepdims=True)
HOOKED = [(owner, name) for tables in (keras3_hooks, tf_keras_hooks)
          for owner, name in {**tables.HOOKS, **tables.STAGES}]
HOOKED += [(owner, place.name) for place in (
    _tf.AVERAGE, _tf.REGULARIZATION, _tf.KEYS, _tf.RECORD, _tf.CAPTURE) for owner in place.owners]


def names():
    """Owner, name and object of all that is public, and of all that is hooked."""
    modules = [tf, tf.nn, tf.random, tf.math, tf.compat.v1.nn, tf.compat.v1.random]
    modules += [getattr(kit, part) for kit in (keras, tf_keras) for part in (
        "callbacks", "initializers", "layers", "losses", "metrics", "models", "optimizers")]
    classes = {found for module in modules for found in list(vars(module).values())
               if inspect.isclass(found)} | {keras.Model, tf_keras.Model, tf.random.Generator}
    classes = {parent for found in classes for parent in found.__mro__ if parent is not object}
    found = {(owner, name): value for owner in (*modules, *classes)
             for name, value in list(vars(owner).items()) if callable(value)}
    return {**found, **{(owner, name): getattr(owner, name) for owner, name in HOOKED}}


BEFORE = names()


def changed():
    """The names behind which there is another object than before the first strategy."""
    now = names()
    return sorted(f"{_tf.owner_name(owner)}.{name}" for (owner, name), value in BEFORE.items()
                  if now.get((owner, name)) is not value)


def model_of(kit):
    initial = kit.initializers.GlorotUniform(seed=1)
    return kit.Sequential([kit.Input([4]), kit.layers.Dense(6, kernel_initializer=initial),
                           kit.layers.BatchNormalization(), kit.layers.Dropout(0.5, seed=3),
                           kit.layers.Dense(1, kernel_initializer=initial)])


def trained(kit, strategy):
    """A digest of all that a training without us leaves."""
    with strategy.scope():
        model = model_of(kit)
        model.compile(kit.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = model.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False).history
    found = [*model.get_weights(), *map(np.array, history.values()), model.predict(X, verbose=0)]
    return hashlib.sha256(b"".join(part.tobytes() for part in found)).hexdigest()


def all_trained():
    scopes = tf.distribute.get_strategy(), peers.mirrored()
    return [trained(kit, scope) for kit in (keras, tf_keras) for scope in scopes]


class NoTraceTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        tf.random.set_seed(7)
        self.addCleanup(lambda: self.assertEmpty(changed()))
        self.strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"])

    @wide.some(2, keras, tf_keras)
    def test_a_model_is_used_outside_of_its_scope(self, kit):
        """Else Keras is ours, for every program in the process, from the first model on; or a model
        that was made in the scope is none of the towers' outside of it."""
        with self.strategy.scope():
            model = model_of(kit)
        model.compile("sgd", "mse")
        for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch",
                     "predict_on_batch"):  # whose results are parity's
            quiet = {} if name.endswith("on_batch") else {"verbose": 0}
            getattr(model, name)(*(X,) if name.startswith("predict") else (X, Y), **quiet)
            self.assertEmpty(changed())
        self.assertTrue(self.strategy.extended.crossings)

    @wide.parameters(wide=[keras, tf_keras])
    def test_loops_of_ones_own(self, kit):
        """Else an optimizer that a loop has used is another one in the next program."""
        with self.strategy.scope():
            model, optimizer = model_of(kit), kit.optimizers.SGD(0.1)
        distributed = self.strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices((X, Y)).batch(6))

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss((model(x, training=True) - y)[:, 0] ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        whole = self.strategy.function(step)
        traced = tf.function(lambda *batch: self.strategy.run(step, batch))
        x, y = next(iter(distributed))
        for run in (whole, traced, lambda *batch: self.strategy.run(step, batch)):
            run(x, y)
            self.assertEmpty(changed())

    def test_stages(self):
        """Else every layer of the process is slower once there was a strategy with stages."""
        strategy = towerstrategy.TowerStrategy([["CPU:1", "CPU:2"]])
        with strategy.scope():
            model = model_of(keras)
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)

    def test_an_error_ends_it_too(self):
        """Else one bug in a step leaves Keras changed."""
        class Failing(keras.Model):
            def train_step(self, data):
                raise KeyError("mine")

        with self.strategy.scope():
            model = Failing()
            model.compile("sgd")
        with self.assertRaisesRegex(KeyError, "mine"):
            model.fit(X, Y, verbose=0)
        with self.assertRaisesRegex(KeyError, "mine"), self.strategy.scope():
            raise KeyError("mine")
        with self.assertRaisesRegex(RuntimeError, "Mixing"), self.strategy.scope(), \
                towerstrategy.TowerStrategy(1).scope():
            self.fail("two scopes at once")

    def test_the_last_of_several_threads_ends_it(self):
        """Else a scope that ends in one thread takes the towers from a training in another."""
        inside, end = threading.Event(), threading.Event()

        def stay():
            with self.strategy.scope():
                inside.set()
                end.wait()

        thread = threading.Thread(target=stay)
        thread.start()
        inside.wait()
        try:
            self.assertLen({name for name in changed() if "Trainer.compile" in name}, 1)
            for drawn in (tf.random.uniform, tf.random.normal, tf.nn.dropout, tf.nn.relu):
                self.assertIn(drawn, BEFORE.values())
            with self.strategy.scope():
                pass
            self.assertNotEmpty(changed())
        finally:
            end.set()
            thread.join()

    @pytest.mark.wide
    def test_other_trainings_are_the_same_to_the_last_bit(self):
        """Else a program is another one because a thread of its process trains on towers."""
        before = all_trained()
        stop, rounds = threading.Event(), []

        def train():
            while not stop.is_set():
                for kit in (keras, tf_keras):
                    with self.strategy.scope():
                        model = model_of(kit)
                        model.compile("sgd", "mse")
                    model.fit(X, Y, verbose=0)
                    rounds.append(kit)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            beside = all_trained()
        finally:
            stop.set()
            thread.join()
        self.assertNotEmpty(rounds)
        self.assertEqual(beside, before)

    def test_what_others_wrap_meanwhile_stays_theirs(self):
        """Else a profiler that a user starts in a scope is thrown out when the scope ends."""
        original = keras.Model.compile
        with self.strategy.scope():
            ours = keras.Model.compile
            keras3_hooks.names.MODEL.compile = theirs = lambda *args: ours(*args)
        self.assertIs(keras.Model.compile, theirs)
        keras3_hooks.names.MODEL.compile = original

    @parameterized.parameters(keras, tf_keras)
    def test_twins_and_copies_enter_for_themselves(self, kit):
        """Else a second handle trains the first one's model."""
        with self.strategy.scope():
            model = model_of(kit)
            twin = adopting.make_twin(self.strategy, model, _keras.names_of(model))
        self.assertIs(model.compile.__self__, model)
        self.assertIs(twin.compile.__self__, twin)
        for copied in kit.models.clone_model(model), copy.copy(model), copy.deepcopy(model):
            self.assertIs(copied.compile.__self__, copied)
            self.assertNotIn("compile", vars(copied))

    @pytest.mark.wide
    def test_keras_is_imported_in_the_scope(self):
        """Else ``tf.keras``, which is imported where it is first used, trains on one device."""
        program = """
import numpy as np, tensorflow as tf, towerstrategy
towerstrategy.split_cpu(2)
strategy = towerstrategy.TowerStrategy(2)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
import keras
model.compile("sgd", "mse")
model.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
print(bool(strategy.extended.crossings), keras.Model.compile.__module__, keras.Model.fit.__module__)
"""
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True,
                              text=True, check=False)
        self.assertIn("True keras.src", done.stdout, done.stderr[-2000:])
        self.assertNotIn("towerstrategy", done.stdout)


if __name__ == "__main__":
    absltest.main()
