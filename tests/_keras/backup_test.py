"""_keras.callbacks: a run killed at any moment of a backup goes on as if it had not been."""

import contextlib
import json
import os
import tempfile
import types
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import wide
from peers import two_towers
from towerstrategy._keras.keras3 import callbacks as callbacks_lib

X = np.random.RandomState(0).rand(5, 3).astype("f")
EPOCHS = 3


class Killed(BaseException):
    """Stands for the end of the process."""


class BackupTest(parameterized.TestCase):

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with two_towers().scope():
            cls.model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
            cls.model.compile(keras.optimizers.Adam(0.1), "mse")
            cls.model.optimizer.build(cls.model.trainable_variables)
        cls.fresh = [variable.numpy() for variable in cls.variables()]
        cls.wanted = cls.train(cls.enter_context(tempfile.TemporaryDirectory()))

    @classmethod
    def variables(cls):
        return [*cls.model.variables, *cls.model.optimizer.variables]

    @classmethod
    def train(cls, folder):
        """The weights that a new process ends with."""
        for variable, value in zip(cls.variables(), cls.fresh):
            variable.assign(value)
        cls.model._initial_epoch = None
        cls.model.fit(X, X.sum(1), batch_size=4, epochs=EPOCHS, shuffle=False, verbose=0,
                      callbacks=[keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"))])
        return cls.model.get_weights()

    def killed_at(self, owner, name, call, after, folder):
        """Trains, and is killed at a call of ``owner.name``, before or after it has been done."""
        original, calls = getattr(owner, name), []

        def killing(*args, **kwargs):
            calls.append(name)
            if len(calls) == call and not after:
                raise Killed
            result = original(*args, **kwargs)
            if len(calls) == call:
                raise Killed
            return result

        with self.subTest(after=after), self.assertRaises(Killed):
            setattr(owner, name, killing)
            try:
                self.train(folder)
            finally:
                setattr(owner, name, original)

    @wide.parameters(
        (keras.Model, "save_weights", 2), (tf.io.gfile, "rename", 3),
        wide=[(json, "dumps", 2), (tf.io.gfile, "rename", 1), (tf.io.gfile, "rename", 4),
              (tf.io.gfile, "rename", 2 * EPOCHS + 1), (tf.io.gfile, "rmtree", 1)])
    def test_goes_on(self, owner, name, call):
        """Else a machine that fails while it saves takes the training of days with it."""
        for after in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                self.killed_at(owner, name, call, after, folder)
                resumed = self.train(folder)
                self.assertEqual(os.listdir(folder), [])
            for one, other in zip(resumed, self.wanted, strict=True):
                np.testing.assert_array_equal(one, other)

    def test_half_a_file(self):
        """Else weights that were cut off in the middle are what training goes on from."""
        with tempfile.TemporaryDirectory() as folder:
            self.killed_at(tf.io.gfile, "rename", 3, False, folder)
            names = sorted(os.listdir(os.path.join(folder, "backup")))
            self.assertEqual(names, ["latest.new.weights.h5", "latest.weights.h5",
                                     "training_metadata.json", "training_metadata.json.new"])
            for name in (names[0], names[3]):
                os.truncate(os.path.join(folder, "backup", name), 10)
            resumed = self.train(folder)
        for one, other in zip(resumed, self.wanted, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_files_are_keras(self):
        """Else a backup made on towers cannot be taken up on one device."""
        with tempfile.TemporaryDirectory() as folder:
            self.killed_at(keras.callbacks.BackupAndRestore, "on_epoch_end", 2, True, folder)
            alone = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
            alone.compile(keras.optimizers.Adam(0.1), "mse")
            alone.fit(X, X.sum(1), batch_size=4, epochs=EPOCHS, shuffle=False, verbose=0,
                      callbacks=[keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"))])
        for one, other in zip(alone.get_weights(), self.wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)

    def test_two_files_kept(self):
        """Else ``double_checkpoint`` keeps nothing."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.fit(X, X.sum(1), epochs=3, verbose=0, callbacks=[
                keras.callbacks.BackupAndRestore(folder, double_checkpoint=True,
                                                 delete_checkpoint=False)])
            with open(os.path.join(folder, "training_metadata.json.bkp")) as file:
                self.assertEqual(json.load(file)["epoch"], 2)
            self.assertLen(os.listdir(folder), 4)

    @parameterized.parameters(keras, tf_keras)
    def test_state_is_the_users(self, keras_):
        """Else what a callback of the user's own has counted is not there after ``fit``."""

        class Counting(keras_.callbacks.BackupAndRestore):
            epochs = 0

            def on_epoch_end(self, epoch, logs=None):
                super().on_epoch_end(epoch, logs)
                self.epochs += 1

        with two_towers().scope():
            model = keras_.Sequential([keras_.Input([3]), keras_.layers.Dense(1)])
            model.compile("sgd", "mse")
        with tempfile.TemporaryDirectory() as folder:
            backup = Counting(os.path.join(folder, "backup"))
            for _ in range(2):
                model.fit(X, X.sum(1), epochs=3, verbose=0, callbacks=[backup])
        self.assertEqual(backup.epochs, 6)
        self.assertIs(type(backup), Counting)
        self.assertIs(backup.model, model)

    @parameterized.parameters(True, False)
    def test_one_machine_writes(self, is_chief):
        """Else several machines write the same files, or a callback is another one afterwards."""
        made = keras.callbacks
        with tempfile.TemporaryDirectory() as folder:
            callbacks = [
                made.ModelCheckpoint(f"{folder}/{{epoch}}.keras", "loss", save_best_only=True),
                made.CSVLogger(f"{folder}/csv"),
                made.TensorBoard(f"{folder}/events"), made.BackupAndRestore(f"{folder}/backup")]
            before = [{name: value for name, value in vars(callback).items()
                       if isinstance(value, str)} for callback in callbacks]
            broken = made.LambdaCallback(on_epoch_end=mock.Mock(side_effect=ValueError("broken")))
            machines = types.SimpleNamespace(is_chief=is_chief)
            with mock.patch.object(callbacks_lib, "_send_backup"), \
                    mock.patch.object(self.model.distribute_strategy.extended, "workers", machines):
                for failing in (False, True):
                    with self.model.distribute_strategy.scope():
                        every = keras.callbacks.CallbackList(
                            [*callbacks, *[broken] * failing], model=self.model)
                    every.on_train_begin()
                    every.on_epoch_begin(0)
                    with self.assertRaises(ValueError) if failing else contextlib.nullcontext():
                        every.on_epoch_end(0, {"loss": 1.0})
                    if not failing:
                        every.on_train_end()
                    for callback, attributes in zip(callbacks, before):
                        now = vars(callback)
                        self.assertEqual({name: now[name] for name in attributes}, attributes)
                        self.assertNotIn("_save_model", now)
                    self.assertEqual(callbacks[0].best, 1.0)
            wanted = ["1.keras", "backup", "csv", "events"] if is_chief else []
            self.assertEqual(sorted(os.listdir(folder)), wanted)

    def test_deleted_at_once_in_tf_keras(self):
        """Else a run that is killed at its end leaves a checkpoint that lacks some of its files."""
        with two_towers().scope():
            model = tf_keras.Sequential([tf_keras.Input([3]), tf_keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        seen, rmtree = [], tf.io.gfile.rmtree

        def watching(path):
            seen.append((os.listdir(folder), len(os.listdir(path)) > 1))
            rmtree(path)

        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.object(tf.io.gfile, "rmtree", watching):
            backup = tf_keras.callbacks.BackupAndRestore(folder)
            model.fit(X, X.sum(1), verbose=0, callbacks=[backup])
            self.assertEqual(seen, [(["chief.towerstrategy-deletes"], True)])
            self.assertEqual(os.listdir(folder), [])
