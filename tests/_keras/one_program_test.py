"""Steps of Keras that are traced once and partitioned over the towers: one device's results.

Each training runs on one device and on three towers, in Keras 3 and in tf_keras.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide

DEVICES = towerstrategy.split_cpu(8)
KITS = {"keras": keras, "tf_keras": tf_keras}
DRAW = np.random.RandomState(3)
# Batches of 8 and of 2 rows: the last is smaller than the towers.
X, Y = DRAW.rand(18, 4).astype("f"), DRAW.rand(18, 2).astype("f")
IN_TURN = wide.turns(*((name, name) for name in KITS))


def towers():
    return towerstrategy.TowerStrategy(DEVICES[:3])


def trained(kit, make, strategy):
    """Logs and weights of a training, and what it predicts."""
    kit.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make(kit)
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [history, model.get_weights(), model.predict(X, batch_size=8, verbose=0)]


class OneProgramTest(parameterized.TestCase):

    def assert_as_one_device(self, kit, make):
        strategy = towers()
        wanted, got = (trained(KITS[kit], make, where) for where in (None, strategy))
        tf.nest.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
        return strategy

    def test_metrics_of_a_steps_own_targets(self):
        """Else "accuracy" compares classes with the rows that mixing made of them, which fails."""
        class Smoothed(keras.Sequential):
            def train_step(self, data):
                x, y = data[0], tf.one_hot(tf.cast(data[1][:, 0] > .5, tf.int32), 2) * .9 + .05
                with tf.GradientTape() as tape:
                    predicted = self(x, training=True)
                    loss = self.compute_loss(x, y, predicted)
                weights = self.trainable_variables
                self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
                return {**self.compute_metrics(x, y, predicted), "loss": loss}

        def make(kit):
            model = Smoothed([kit.layers.Dense(2, "softmax")])
            model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
            return model

        self.assert_as_one_device("keras", make)

    @wide.product(0, 2, kit=list(KITS), late=("in_layer", "in_training", "in_loss"))
    def test_layers_that_only_the_step_builds(self, kit, late):
        """Else the optimizer is built without their weights, and the first step fails."""
        kit_, layers = KITS[kit], KITS[kit].layers

        class Block(layers.Layer):
            def __init__(self):
                super().__init__()
                self.inner = layers.Dense(3)

            def build(self, shape):  # as in many a published layer, without what is inside
                super().build(shape)

            def call(self, x):
                return self.inner(x)

            def compute_output_shape(self, shape):
                return (*shape[:-1], 3)

        class Heads(kit_.Model):
            def __init__(self):
                super().__init__()
                self.body, self.head, self.out = (layers.Dense(units) for units in (5, 1, 2))

            def call(self, x, training=None):
                x = self.body(x)
                if training and late == "in_training":
                    self.add_loss(.3 * tf.reduce_mean(self.head(x) ** 2))
                return self.out(x)

            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
                if late != "in_loss":
                    return super().compute_loss(x, y, y_pred, sample_weight, **kwargs)
                return tf.reduce_mean((self.head(y_pred) - y) ** 2)

        def make(kit):
            model = Heads()
            if late == "in_layer":
                x = kit.Input([4])
                model = kit.Model(x, kit.layers.Dense(2)(Block()(x)))
            model.compile("adam", None if late == "in_loss" else "mse")
            return model

        self.assert_as_one_device(kit, make)

    @parameterized.parameters(*KITS)
    def test_a_step_is_one_function(self, kit):
        """Else each variable is captured once more, which takes a tenth of a first step."""
        around = []

        def make(kit):
            class Noted(kit.Sequential):
                def train_step(self, data):
                    around.clear()
                    graph = tf.compat.v1.get_default_graph()
                    while hasattr(graph, "outer_graph"):
                        around.append(graph)
                        graph = graph.outer_graph
                    return super().train_step(data)

            model = Noted([kit.Input([4]), kit.layers.Dense(2)])
            model.compile("sgd", "mse")
            return model

        with towers().scope():
            make(KITS[kit]).fit(X, Y, batch_size=9, verbose=0)
        self.assertLen(around, 2)  # the step's, and its trace's

    @pytest.mark.wide
    def test_what_a_step_asks_of_an_optimizer_that_it_builds(self):
        """Else a step that makes variables is traced once: an own step's loss scale never falls."""
        class Scaled(keras.Sequential):
            def train_step(self, data):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
                    scaled = self.optimizer.scale_loss(loss)
                weights = self.trainable_variables
                self.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights))
                return {"scaled": scaled}

        def make(kit):
            model = Scaled([kit.layers.Dense(2)])
            model.compile(kit.optimizers.LossScaleOptimizer(
                kit.optimizers.SGD(.1, momentum=.9), 1024.0, dynamic_growth_steps=2))
            return model

        self.assert_as_one_device("keras", make)

    @wide.parameters("keras", wide=["tf_keras"])
    def test_a_step_that_changes_the_batch_first(self, kit):
        """Else the model is built for the data's shape, and refuses what the step hands it."""

        def make(kit):
            class Paired(kit.Sequential):
                def train_step(self, data):
                    x, y = data
                    return super().train_step((tf.concat([x, x ** 2], 1), y))

                def predict_step(self, x):
                    return self(tf.concat([x, x ** 2], 1))

            model = Paired([kit.layers.Dense(3, "tanh"), kit.layers.Dense(2)])
            model.compile("adam", "mse", metrics=["mae"])
            return model

        self.assert_as_one_device(kit, make)

    @IN_TURN
    def test_an_optimizer_of_what_its_step_trains(self, kit):
        """Else it keeps slots of weights that it never sees, in files too, or refuses others."""
        traced, slots = [], []

        def make(kit):
            class Model(kit.Sequential):
                def train_step(self, data):
                    traced.append(tf.distribute.has_strategy())
                    with tf.GradientTape() as tape:
                        hidden = self.layers[0](data[0]) * self.scale
                        loss = tf.reduce_mean((self.layers[1](hidden) - data[1]) ** 2)
                    trained = [*self.layers[1].trainable_variables, self.scale]
                    self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained))
                    return {"loss": loss, "scale": self.scale + 0.}

            model = Model([kit.Input([4]), kit.layers.Dense(3), kit.layers.Dense(2)])
            model.scale = tf.Variable(1.5)
            model.compile(kit.optimizers.Adam(.1), "mse")
            slots.append(model.optimizer)
            return model

        self.assert_as_one_device(kit, make)
        one, other = ([tuple(slot.shape) for slot in optimizer.variables] for optimizer in slots)
        self.assertEqual(other, one)
        self.assertLessEqual(traced.count(True), traced.count(False))

    @IN_TURN
    @pytest.mark.wide
    def test_states_that_go_from_batch_to_batch(self, kit):
        """Else a stateful layer goes on from a tower's rows, or from nothing."""
        kit, x = KITS[kit], X.reshape([18, 2, 2])

        def fitted(strategy):
            kit.utils.set_random_seed(1)
            model = kit.Sequential([kit.Input(batch_shape=(6, 2, 2)),
                                    kit.layers.GRU(3, stateful=True), kit.layers.Dense(2)])
            with strategy.scope() if strategy else contextlib.nullcontext():
                model.compile("sgd", "mse")  # in a scope tf_keras refuses to make such a layer
            model.fit(x, Y, batch_size=6, shuffle=False, verbose=0)
            return [*model.get_weights(), model.predict(x, batch_size=6, verbose=0)]

        for got, wanted in zip(fitted(towers()), fitted(None), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)

    @wide.product(0, kit=list(KITS), of=["own moments", "half", "a tensor for training"])
    def test_batch_norm_as_keras_has_it(self, kit, of):
        """Else a kernel takes the place of what a user's layer does, or fails."""
        def make(kit):
            class Layer(kit.layers.BatchNormalization):
                if of == "own moments":
                    def _moments(self, *args, **kwargs):
                        return tuple(each * .5 for each in super()._moments(*args, **kwargs))

                def call(self, inputs, training=None, mask=None):
                    if of == "a tensor for training" and kit is tf_keras:
                        training = tf.reduce_sum(inputs) > -9. if training else False
                    return super().call(inputs, training=training, mask=mask)

            layer = Layer(dtype="float16" if of == "half" and kit is keras else None)
            model = kit.Sequential([kit.Input([4]), layer, kit.layers.Dense(2, dtype="float32")])
            model.compile(kit.optimizers.SGD(.1), "mse")
            return model

        if of == "half":  # its statistics are rounded to three digits
            wanted, got = (trained(KITS[kit], make, where) for where in (None, towers()))
            tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3),
                                  got, wanted)
        else:
            self.assert_as_one_device(kit, make)

    @parameterized.parameters(2, 3)
    def test_inputs_with_a_batch_size(self, towers):
        """Else tf_keras refuses a model for 8 rows on 3 towers, and on 2 makes it for 4."""
        with towerstrategy.TowerStrategy(DEVICES[:towers]).scope():
            inputs = tf_keras.Input([3], batch_size=8)
            model = tf_keras.Model(inputs, tf_keras.layers.Dense(1)(inputs))
            model.compile("sgd", "mse")
        self.assertEqual(inputs.shape, [8, 3])
        model.fit(np.ones([16, 3]), np.ones([16, 1]), batch_size=8, verbose=0)

    @parameterized.product(kit=[*KITS], generates=[False, True])
    def test_a_model_that_its_first_batch_builds(self, kit, generates):
        """Else, in spite of a seed, weights start with other values than on one device."""
        kit = KITS[kit]

        class Batches(getattr(kit.utils, "PyDataset", kit.utils.Sequence)):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                return X[8 * index:8 * index + 8], Y[8 * index:8 * index + 8]

        def weights(strategy):
            kit.utils.set_random_seed(1)
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = kit.Sequential([kit.layers.Dense(3), kit.layers.Dense(2)])
                model.compile("sgd", "mse")
            model.fit((each for each in [(X, Y)]) if generates else Batches(), verbose=0,
                      shuffle=False)
            return model.get_weights()

        for one, other in zip(weights(None), weights(towers()), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)

    def test_step_functions_that_are_called_directly(self):
        """Else each tower takes all rows of an iterator of ``tf.data``, and metrics count them."""
        with towers().scope():
            model = tf_keras.Sequential([tf_keras.layers.InputLayer([4]), tf_keras.layers.Dense(2)])
            model.compile("sgd", "mse")
        batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(9)
        self.assertEqual(model.make_predict_function()(iter(batches)).shape, [9, 2])
        step, iterator = model.make_train_function(), iter(batches)
        for _ in batches:
            step(iterator)
        self.assertEqual(float(model.metrics[0].count), len(X))

    def test_outputs_that_depend_on_training(self):
        """Else metrics are made for what a model predicts, and count something else in ``fit``."""
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.out = keras.layers.Dense(2, "softmax")

            def call(self, x, training=False):
                return self.out(x) if training else tf.argmax(self.out(x), -1)[:, None]

        logs = []
        for strategy in (None, towers()):
            keras.utils.set_random_seed(1)
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = Model()
                model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
            logs.append(model.fit(X, Y[:, :1] > .5, batch_size=8, shuffle=False,
                                  verbose=0).history["accuracy"])
        np.testing.assert_allclose(*logs, rtol=1e-6)

    def test_a_step_set_on_the_model(self):
        """Else the model is built for the data, not for what its step makes of it."""
        def make(kit):
            model = kit.Sequential([kit.layers.Dense(2)])
            of_keras = model.train_step
            model.train_step = lambda data: of_keras((tf.concat([data[0]] * 2, 1), data[1]))
            model.compile(kit.optimizers.SGD(.1), "mse")
            return model

        weights = []
        for strategy in (None, towers()):
            keras.utils.set_random_seed(1)
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = make(keras)
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
            weights.append(model.get_weights())
        np.testing.assert_allclose(weights[1][0], weights[0][0], rtol=1e-5, atol=1e-6)

    def test_a_method_that_calls_the_class_s_fit(self):
        """Else Keras averages the parts of the first batch, which fails for uneven ones."""
        class Model(keras.Sequential):
            def train(self):
                return super().fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]

        losses = []
        for strategy in (None, towers()):
            keras.utils.set_random_seed(1)
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = Model([keras.layers.Dense(2)])
                model.compile("sgd", "mse")
            losses.append(model.train())
        np.testing.assert_allclose(*losses, rtol=1e-6)

    @IN_TURN
    def test_eagerly_prints_once(self, kit):
        """Else who debugs a step sees a part of the batch."""
        seen = []

        def make(kit):
            class Model(kit.Sequential):
                def train_step(self, data):
                    seen.append(len(data[0]))
                    return super().train_step(data)

            model = Model([kit.layers.Dense(2)])
            model.compile(kit.optimizers.SGD(.1), "mse", run_eagerly=True)
            return model

        self.assert_as_one_device(kit, make)
        self.assertEqual(seen, [8, 8, 2] * 4)

    @pytest.mark.wide
    def test_several_unrolled_steps_an_execution(self):
        """Else steps_per_execution, which loops over the step, trains differently."""

        def make(kit):
            model = kit.Sequential([
                kit.layers.Dense(6, "tanh", kernel_regularizer="l2"),
                kit.layers.Dropout(.3, seed=5), kit.layers.BatchNormalization(),
                kit.layers.Dense(2)])
            model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=2)
            model.unrolled_steps_per_execution = 2
            return model

        strategy = self.assert_as_one_device("keras", make)
        self.assertNotEmpty(strategy.extended.crossings)  # the step was partitioned

    @wide.parameters(True, wide=[False])
    def test_batches_that_are_sparse_or_of_unknown_rank(self, sparse):
        """Else inputs whose parts are not sharded lose rows."""

        def unknown(rows):
            return tf.ensure_shape(tf.py_function(lambda rows: rows, [rows], tf.float32), None)

        def model_of(kit):
            model = kit.Sequential([kit.Input([4], sparse=sparse), kit.layers.Dense(2)])
            model.compile(kit.optimizers.SGD(.1), "mse")
            return model

        strategy, results = towers(), []
        for where in (None, strategy):
            tf_keras.utils.set_random_seed(1)
            if where is None:
                model = model_of(tf_keras)
            else:
                with where.scope():
                    model = model_of(tf_keras)
            data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).map(
                lambda x, y: (tf.sparse.from_dense(tf.where(x > .5, x, 0.)), y) if sparse
                else (unknown(x), unknown(y)))
            history = model.fit(data, epochs=2, verbose=0)
            results.append([history.history, model.get_weights()])
        tf.nest.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)


if __name__ == "__main__":
    absltest.main()
