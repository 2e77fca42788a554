"""``Model.predict``: rows in the data's order, whatever takes the batches and ends the data."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide
from towerstrategy import _tensorflow

X = np.random.default_rng(0).normal(size=[21, 5]).astype("float32")


def network(library):
    """Outputs of several kinds: a dictionary with a list, rows of numbers and of one number."""
    inputs = library.Input([5])
    hidden = library.layers.Dense(
        3, kernel_initializer=library.initializers.GlorotUniform(seed=1))(inputs)
    first = library.layers.Dense(1, kernel_initializer="ones")(hidden)
    return library.Model(inputs, {"a": hidden, "b": [hidden * 2, library.layers.Flatten()(first)]})


def on_towers(library, **compiled):
    with towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"], "CPU:0").scope():
        model = network(library)
        model.compile("sgd", "mse", **compiled)
    return model


def generated():
    return tf.data.Dataset.from_generator(
        lambda: ((X[start:start + 8],) for start in range(0, 21, 8)),
        output_signature=(tf.TensorSpec([None, 5]),))


DATA = {
    "array": (lambda: X, {"batch_size": 8}, 21),
    "fewer_rows_than_towers": (lambda: X[:2], {}, 2),
    "unknown_length": (generated, {}, 21),
    "steps": (lambda: X, {"batch_size": 8, "steps": 2}, 16),
    "endless": (lambda: tf.data.Dataset.from_tensor_slices(X).batch(7).repeat(), {"steps": 3}, 21),
}


class PredictTest(parameterized.TestCase):

    @wide.product(library=(keras, tf_keras),
                  compiled=({}, {"steps_per_execution": 2}, {"run_eagerly": True}))
    def test_rows_as_on_one_device(self, library, compiled):
        """Else predictions are lost, doubled or of other rows, or the data's end is an error."""
        model, alone = on_towers(library, **compiled), network(library)
        for name, (data, arguments, rows) in DATA.items():
            if "steps_per_execution" in compiled and ("steps" in arguments or data is generated):
                continue  # Keras predicts whole executions, or refuses
            with self.subTest(name):
                found = model.predict(data(), verbose=0, **arguments)
                for value, wanted in zip(tf.nest.flatten(found),
                                         tf.nest.flatten(alone(X[:rows])), strict=True):
                    np.testing.assert_allclose(value, wanted, 1e-5, 1e-6)

    @parameterized.parameters(keras, tf_keras)
    def test_batches_of_all_sizes(self, library):
        """Else a step is traced anew for many a size, as where a tower alone had as many rows."""
        traced = []
        with towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"]).scope():
            model = library.Sequential([library.layers.Lambda(lambda x: traced.append(x) or x * 2)])
            model.compile("sgd", "mse")
        for rows in (5, 3, 4, 21, 8):
            np.testing.assert_allclose(model.predict_on_batch(X[:rows]), X[:rows] * 2)
        self.assertLessEqual(len(traced), 3)  # one to build it, one for 5, one for all

    def test_batches_are_taken_by_the_step(self):
        """Else Python takes each batch apart and hands it over, for most of a small step's time."""
        model = on_towers(keras)
        with mock.patch.object(_tensorflow.OwnedIterator, "_next_internal", autospec=True,
                               side_effect=_tensorflow.OwnedIterator._next_internal) as taken:
            model.predict(X, batch_size=3, verbose=0)
        self.assertLen(taken.call_args_list, 1)  # while the step was traced

    @pytest.mark.wide
    def test_training_meanwhile(self):
        """Else a callback that trains or evaluates the model while it predicts breaks it."""
        model = on_towers(keras)
        other = on_towers(keras)
        targets = {"a": X[:, :3], "b": [X[:, :3], X[:, :1]]}
        callback = keras.callbacks.LambdaCallback()
        callback.on_predict_batch_end = lambda batch, logs: other.fit(
            X, targets, batch_size=8, verbose=0)
        found = model.predict(X, batch_size=8, verbose=0, callbacks=[callback])
        self.assertEqual(found["a"].shape, (21, 3))

    def test_own_predict_function(self):
        """Else a model with a predict function of its own gets an iterator for a batch."""
        seen = []

        class Own(keras.Model):
            def call(self, x):
                return x * 2

            def make_predict_function(self, force=False):
                def function(batches):
                    seen.append(len(batches))
                    return self.distribute_strategy.gather(
                        tf.nest.flatten(batches[0])[0], 0) * 2

                self.predict_function = function
                return function

        with towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "CPU:0").scope():
            model = Own()
            model.compile("sgd", "mse")
        np.testing.assert_allclose(model.predict(X, batch_size=8, verbose=0), X * 2)
        self.assertEqual(seen, [1, 1, 1])
