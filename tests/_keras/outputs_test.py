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


def model_of(kit, kind):
    """A model with an output of rows and one of ``kind``."""

    class Model(kit.Model):
        def __init__(self):
            super().__init__()
            self.dense = kit.layers.Dense(2, kernel_initializer="ones")

        def call(self, x):
            y = self.dense(x)
            table = tf.reshape(tf.convert_to_tensor(self.dense.kernel), [3, 2])
            return y, {
                "table": lambda: table,
                "numbers": lambda: tf.argmax(table, 0),
                "mean": lambda: tf.reduce_mean(x, 0),
                "many_rows": lambda: tf.reshape(x, [-1]),
                "some_rows": lambda: tf.boolean_mask(x, x[:, 0] > .5),
                "vector_of_rows": lambda: x[:, 0],
            }[kind]()

    return Model()


KINDS = ("table", "numbers", "mean", "many_rows", "some_rows", "vector_of_rows")


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

    @wide.product(kit=[keras, tf_keras], kind=KINDS, towers=[1, 3, 4])
    def test_predict(self, kit, kind, towers):
        """Else ``predict`` returns such an output R times, or a mean of uneven sub-batches."""
        alone = model_of(kit, kind)
        strategy = towerstrategy.TowerStrategy(towers)
        with strategy.scope():
            together = model_of(kit, kind)
            together.compile()
        calls = [lambda model: model.predict(X, batch_size=10, verbose=0),
                 lambda model: model.predict_on_batch(X[:7]),
                 lambda model: model.predict(X[:2], batch_size=10, verbose=0)]
        if kind not in ("numbers", "mean"):  # as long as a whole multiple of each tower's one row
            calls.append(lambda model: model.predict_on_batch(X[:2]))
        for number, call in enumerate(calls):
            with self.subTest(call=number):
                for one, other in zip(call(alone), call(together), strict=True):
                    np.testing.assert_allclose(np.array(other), np.array(one), rtol=1e-6)

    @wide.product(kit=[keras, tf_keras], kind=KINDS)
    def test_predict_eagerly(self, kit, kind):
        """Else the same where steps are not traced."""
        alone = model_of(kit, kind)
        strategy = towerstrategy.TowerStrategy(3)
        with strategy.scope():
            together = model_of(kit, kind)
            together.compile(run_eagerly=True)
        for rows in (7, 5):
            pairs = zip(*(model.predict(X[:rows], verbose=0) for model in (alone, together)))
            for one, other in pairs:
                np.testing.assert_allclose(np.array(other), np.array(one), rtol=1e-6)
