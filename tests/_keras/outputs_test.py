"""Outputs of a model: in any structure, and those that have no row for each row of the batch."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide

X = np.random.RandomState(0).rand(22, 3).astype("f")


def model_of(kit):
    """A model with an output of rows and others, most of which have no row for each of them."""

    class Model(kit.Model):
        def __init__(self):
            super().__init__()
            self.dense = kit.layers.Dense(2, kernel_initializer="ones")

        def call(self, x):
            y = self.dense(x)
            table = tf.reshape(tf.convert_to_tensor(self.dense.kernel), [3, 2])
            return y, {
                "table": table,
                "numbers": tf.argmax(table, 0),
                "mean": tf.reduce_mean(x, 0),
                "many_rows": tf.reshape(x, [-1]),
                "some_rows": tf.boolean_mask(x, x[:, 0] > .5),
                "vector_of_rows": x[:, 0],
            }

    return Model()


class Distribution(tf.Module):
    """Stands for a tensor, as TensorFlow Probability's distributions do."""

    def __init__(self, mean):
        super().__init__()
        self.mean = mean


tf.register_tensor_conversion_function(
    Distribution, lambda value, dtype=None, name=None, as_ref=False: value.mean)


class OutputsTest(parameterized.TestCase):

    @parameterized.product(rows=[22, 21, 2])
    def test_predict_of_what_stands_for_a_tensor(self, rows):
        """Else a model that ends in TensorFlow Probability's layer trains but cannot predict."""

        class Model(tf_keras.Sequential):
            def predict_step(self, data):
                return Distribution(self(data))

        strategy = towerstrategy.TowerStrategy(3)
        with strategy.scope():
            model = Model([tf_keras.layers.Dense(2, kernel_initializer="ones")])
            model.compile()
        np.testing.assert_allclose(model.predict(X[:rows], batch_size=10, verbose=0),
                                   np.tile(X[:rows].sum(1, keepdims=True), [1, 2]), rtol=1e-6)

    @wide.product(kit=[keras, tf_keras], form=[
        lambda output: [output], lambda output: (output,), lambda output: {"y": output}])
    def test_a_structure_of_one_output(self, kit, form):
        """Else Keras 3 compares the first row alone, as a call of the model gives the tensor."""
        def evaluated(scope):
            with scope:
                inputs = kit.Input([3])
                model = kit.Model(inputs, form(kit.layers.Dense(
                    2, kernel_initializer="ones", name="y")(inputs)))
                model.compile("sgd", "mse", metrics=["mae"])
            labels = {"y": X[:, :2]} if isinstance(form(0), dict) else X[:, :2]
            return [*model.fit(X, labels, batch_size=10, shuffle=False, verbose=0)
                    .history.values(), *model.evaluate(X, labels, batch_size=10, verbose=0)]

        np.testing.assert_allclose(
            np.hstack(evaluated(towerstrategy.TowerStrategy(3).scope())),
            np.hstack(evaluated(contextlib.nullcontext())), rtol=1e-5)

    def assert_equal(self, got, wanted, but=()):
        self.assertEqual(got[1].keys(), wanted[1].keys())
        for name in ("rows", *wanted[1].keys() - set(but)):
            with self.subTest(name):
                one, other = (rows if name == "rows" else others[name]
                              for rows, others in (wanted, got))
                np.testing.assert_allclose(np.array(other), np.array(one), rtol=1e-6)

    @wide.product(kit=[keras, tf_keras], towers=[1, 3, 4])
    def test_predict(self, kit, towers):
        """Else ``predict`` returns such an output R times, or a mean of uneven sub-batches."""
        alone = model_of(kit)
        strategy = towerstrategy.TowerStrategy(towers)
        with strategy.scope():
            together = model_of(kit)
            together.compile()
        for rows in (22, 2):
            self.assert_equal(*(model.predict(X[:rows], batch_size=10, verbose=0)
                                for model in (together, alone)))
        for rows in (7, 2):  # of 2 rows, as long as a whole multiple of each tower's one row
            self.assert_equal(*(model.predict_on_batch(X[:rows]) for model in (together, alone)),
                              but=("numbers", "mean") if rows == 2 else ())

    @parameterized.parameters(keras, tf_keras)
    def test_predict_eagerly(self, kit):
        """Else the same where steps are not traced."""
        alone = model_of(kit)
        strategy = towerstrategy.TowerStrategy(3)
        with strategy.scope():
            together = model_of(kit)
            together.compile(run_eagerly=True)
        for rows in (7, 5):
            self.assert_equal(*(model.predict(X[:rows], verbose=0) for model in (together, alone)))
