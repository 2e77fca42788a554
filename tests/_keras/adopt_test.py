"""Adopting a model that was built outside of the strategy's scope."""

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import small_models
import wide
from towerstrategy import TowerStrategy
from towerstrategy.placement import devices as devices_lib
from towerstrategy.variables import one_copy, tower_local

IN_TURN = wide.turns(*small_models.KERAS)


def fit(model, kind="functional", epochs=1):
    x, y = small_models.data(kind)
    return model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history


def held(keras_variables):
    return [getattr(variable, "_value", variable) for variable in keras_variables]


def slots(optimizer):
    found = optimizer.variables
    return held(found() if callable(found) and not isinstance(found, list) else found)


class AdoptTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        self.strategy = TowerStrategy(["CPU:1", "CPU:2"])

    def assert_same_weights(self, one, other):
        for expected, got in zip(small_models.weights(one), small_models.weights(other),
                                 strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    def assert_on_towers(self, model):
        """The step that was traced has operations of both towers."""
        for variable in held(model.weights):
            self.assertIsInstance(variable, one_copy.TowerVariable)
            self.assertIs(variable.distribute_strategy, self.strategy)
        self.assertIs(model.distribute_strategy, self.strategy)

    @wide.product(kit=[keras, tf_keras],
                  kind=["functional", "unbuilt_sequential", "subclassed"])
    def test_compile_in_the_scope(self, kit, kind):
        """Lost otherwise: models built or loaded outside; MirroredStrategy fails on them."""
        model, alone = small_models.make(kit, kind), small_models.make(kit, kind)
        before = held(model.weights) if model.built else None
        with self.strategy.scope():
            model.compile("adam", "mse", metrics=["mae"])
        alone.compile("adam", "mse", metrics=["mae"])
        logs, expected = fit(model, kind, 2), fit(alone, kind, 2)
        for name in expected:
            np.testing.assert_allclose(logs[name], expected[name], rtol=1e-5)
        self.assert_same_weights(alone, model)
        self.assert_on_towers(model)
        for old, new in zip(before or (), held(model.weights)):
            self.assertIs(old, new)

    @IN_TURN
    def test_weights_keep_their_device_and_references(self, kit):
        """Lost otherwise: what else refers to the weights, and where the user put them."""
        with tf.device("CPU:3"):
            model = small_models.make(kit, "functional")
        kernel = held(model.weights)[0]
        reader = tf.function(lambda: tf.reduce_sum(kernel))
        reader()
        with self.strategy.scope():
            model.compile("sgd", "mse")
        fit(model)
        self.assertEndsWith(kernel.device, "CPU:3")
        np.testing.assert_allclose(reader(), small_models.weights(model)[0].sum(), rtol=1e-6)
        kernel.assign(tf.ones_like(kernel))
        np.testing.assert_array_equal(small_models.weights(model)[0], 1.)

    @IN_TURN
    def test_optimizer_and_metrics_come_along(self, kit):
        """Lost otherwise: momentum and counts of the training so far."""
        model, alone = (small_models.make(kit, "functional") for _ in range(2))
        for each in (model, alone):
            each.compile(kit.optimizers.Adam(0.01), "mse",
                         metrics=[kit.metrics.MeanAbsoluteError()])
            fit(each)
        before = slots(model.optimizer)
        values = [np.array(slot) for slot in before]
        logged = model.evaluate(*small_models.data("functional"), verbose=0, return_dict=True)
        kept = {metric.name: float(metric.result()) for metric in model.metrics
                if metric.name == "loss"}

        with self.assertLogs("towerstrategy", "INFO") as logged_lines:
            self.assertIs(self.strategy.adopt(model), model)

        self.assertRegex(logged_lines.output[-1], "for 2 towers: .* with one copy")
        self.assertEqual(kept, {metric.name: float(metric.result()) for metric in model.metrics
                                if metric.name == "loss"})
        for slot, same, value in zip(before, slots(model.optimizer), values, strict=True):
            self.assertIs(slot, same)
            self.assertIsInstance(slot, one_copy.TowerVariable)
            np.testing.assert_array_equal(slot, value)
        again = model.evaluate(*small_models.data("functional"), verbose=0, return_dict=True)
        for name in logged:
            np.testing.assert_allclose(again[name], logged[name], rtol=1e-5)
        logs, expected = fit(model), fit(alone)
        for name in expected:
            np.testing.assert_allclose(logs[name], expected[name], rtol=1e-5)
        self.assert_same_weights(alone, model)
        self.assert_on_towers(model)

    @IN_TURN
    @pytest.mark.wide
    def test_given_optimizer_and_metric(self, kit):
        """Lost otherwise: optimizers and metrics made, and used, before compile in the scope."""
        models = [small_models.make(kit, "functional") for _ in range(2)]
        optimizers = [kit.optimizers.Adam(0.01) for _ in models]
        metrics = [kit.metrics.MeanSquaredError(name="error") for _ in models]
        for model, optimizer in zip(models, optimizers):
            model.compile(optimizer, "mse")
            fit(model)
        with self.strategy.scope():
            models[0].compile(optimizers[0], "mse", metrics=[metrics[0]])
        models[1].compile(optimizers[1], "mse", metrics=[metrics[1]])
        logs, expected = (fit(model) for model in models)
        np.testing.assert_allclose(logs["error"], expected["error"], rtol=1e-5)
        self.assert_same_weights(models[1], models[0])
        np.testing.assert_allclose(metrics[0].result(), metrics[1].result(), rtol=1e-5)
        self.assertLen(metrics[0].variables, 2)
        for variable in held(metrics[0].variables):
            self.assertIsInstance(variable, tower_local.TowerLocalVariable)

    @IN_TURN
    def test_adopt_between_compile_and_fit(self, kit):
        """Lost otherwise: what compile makes but does not build: loss trackers, metrics, slots."""
        model, alone = (small_models.make(kit, "functional") for _ in range(2))
        for each in (model, alone):
            each.compile("adam", "mse", metrics=["mae"])
        self.strategy.adopt(model)
        logs, expected = fit(model, epochs=2), fit(alone, epochs=2)
        for name in expected:
            np.testing.assert_allclose(logs[name], expected[name], rtol=1e-5)
        self.assert_same_weights(alone, model)

    @IN_TURN
    def test_built_outside_after_compile(self, kit):
        """Lost otherwise: weights made between compile and fit; the towers would race on them."""
        model, alone = (small_models.make(kit, "subclassed") for _ in range(2))
        with self.strategy.scope():
            model.compile("adam", "mse")
        alone.compile("adam", "mse")
        for each in (model, alone):
            each(small_models.data("subclassed")[0])
            fit(each, "subclassed")
        self.assert_same_weights(alone, model)
        self.assert_on_towers(model)

    @IN_TURN
    def test_several_optimizers(self, kit):
        """Lost otherwise: GANs, whose compile keeps an optimizer a network."""

        class Two(small_models.subclass_of(kit)):
            def compile(self, hidden, head):
                super().compile(head, "mse")
                self.hidden_optimizer = hidden

            def train_step(self, data):
                x, y = data
                with tf.GradientTape(persistent=True) as tape:
                    loss = tf.reduce_sum((y - self(x, training=True)) ** 2) / 10
                for layer, optimizer in ((self.hidden, self.hidden_optimizer),
                                         (self.head, self.optimizer)):
                    weights = layer.trainable_variables
                    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
                return {"rows": tf.reduce_sum(tf.ones_like(y))}

        models = [Two(), Two()]
        for model in models:
            model.compile(kit.optimizers.Adam(0.1), kit.optimizers.SGD(0.1, momentum=0.5))
            model(small_models.data("subclassed")[0])
            fit(model, "subclassed")
        self.strategy.adopt(models[0])
        for model in models:
            fit(model, "subclassed")
        self.assert_same_weights(models[1], models[0])
        for slot in slots(models[0].hidden_optimizer):
            self.assertIsInstance(slot, one_copy.TowerVariable)

    @wide.parameters("Adam", wide=["SGD"])
    def test_legacy_optimizer(self, name):
        """Lost otherwise: tf_keras models saved with optimizers of TensorFlow 2.10 and before."""
        models = [small_models.make(tf_keras, "functional") for _ in range(2)]
        for model in models:
            model.compile(getattr(tf_keras.optimizers.legacy, name)(0.01), "mse")
            fit(model)
        self.strategy.adopt(models[0])
        for model in models:
            fit(model)
        self.assert_same_weights(models[1], models[0])

    @wide.some(2, tf_keras.optimizers, tf_keras.optimizers.legacy)
    def test_optimizer_of_optimizers(self, kit):
        """Lost otherwise: TensorFlow Recommenders; its `variables` fails of new optimizers."""

        class Both(tf_keras.optimizers.legacy.Optimizer):
            def apply_gradients(self, grads_and_vars, name=None, **kwargs):
                pairs = list(grads_and_vars)
                for index, part in enumerate(self.parts):
                    part.apply_gradients(pairs[index::2], **kwargs)

            def variables(self):
                return [weight for part in self.parts for weight in part.weights]

        models = [small_models.make(tf_keras, "functional") for _ in range(2)]
        for model, strategy in zip(models, (self.strategy, tf.distribute.get_strategy())):
            with strategy.scope():
                optimizer = Both("both")
                optimizer.parts = [kit.Adam(0.1), kit.SGD(0.1, momentum=0.5)]
                model.compile(optimizer, "mse")
                fit(model)
        self.assert_same_weights(models[1], models[0])

    def test_adopt_twice(self):
        """Lost otherwise: scripts that adopt a model which compile has adopted."""
        model = small_models.make(keras, "functional")
        with self.strategy.scope():
            model.compile("sgd", "mse")
        with self.assertLogs("towerstrategy", "INFO") as logged:
            for _ in range(2):
                self.strategy.adopt(model)
        self.assertLen(set(logged.output), 1)

    @IN_TURN
    def test_one_tower(self, kit):
        """Lost otherwise: the same script on a machine with one device."""
        model, alone = (small_models.make(kit, "functional") for _ in range(2))
        metrics = [kit.metrics.MeanSquaredError(name="error") for _ in range(2)]
        optimizers = [kit.optimizers.Adam(0.01) for _ in range(2)]
        with TowerStrategy(["CPU:1"]).scope():
            model.compile(optimizers[0], "mse", metrics=metrics[:1])
        alone.compile(optimizers[1], "mse", metrics=metrics[1:])
        np.testing.assert_allclose(fit(model)["error"], fit(alone)["error"], rtol=1e-5)
        self.assert_same_weights(alone, model)

    @parameterized.parameters(False, True)
    def test_callbacks_of_tf_keras(self, trained):
        """Lost otherwise: other models in callbacks; tf_keras calls these in the scope of fit."""
        x, y = small_models.data("functional")

        def results(strategy):
            other, found = small_models.make(tf_keras, "functional"), []
            other.compile("adam", "mse", metrics=["mae", tf_keras.metrics.AUC()])
            if trained:
                fit(other)
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = small_models.make(tf_keras, "functional")
                model.compile("sgd", "mse")

            def use(epoch, logs):
                del logs
                found.extend([fit(other), other.evaluate(x, y > epoch / 2, batch_size=4, verbose=0),
                              other.train_on_batch(x[:3], y[:3]), other.test_on_batch(x, y)])

            model.fit(x, y, epochs=2, shuffle=False, verbose=0,
                      callbacks=[tf_keras.callbacks.LambdaCallback(on_epoch_end=use)])
            if strategy:
                strategy.adopt(other)
            fit(other)
            return found, small_models.weights(other), small_models.weights(model)

        for expected, got in zip(tf.nest.flatten(results(None)),
                                 tf.nest.flatten(results(self.strategy)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


class RefusedTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        self.strategy = TowerStrategy(["CPU:1", "CPU:2"])

    def test_never_compiled_in_the_scope(self):
        """Lost otherwise: that training runs on one device, or each tower writes for itself."""
        model = small_models.make(keras, "functional")
        model.compile("sgd", "mse")
        x, y = small_models.data("functional")
        with self.strategy.scope():
            for use in (model.fit, model.evaluate, model.train_on_batch, model.test_on_batch):
                with self.assertRaisesRegex(ValueError, r"call strategy\.adopt\(model\)"):
                    use(x, y)
        fit(model)
        with self.strategy.scope():
            with self.assertRaisesRegex(ValueError, r"call strategy\.adopt\(model\)"):
                model.fit(x, y)
            self.strategy.adopt(model)
            fit(model)

    @IN_TURN
    def test_predicting_needs_no_adoption(self, kit):
        """Lost otherwise: prediction with a model that was loaded."""
        model = small_models.make(kit, "functional")
        x, _ = small_models.data("functional")
        expected = model.predict(x, verbose=0)
        model = small_models.make(kit, "functional")
        with self.strategy.scope():
            predicted = model.predict(x, batch_size=4, verbose=0)
            np.testing.assert_allclose(predicted, expected, rtol=1e-5)
            np.testing.assert_allclose(model.predict_on_batch(x), expected, rtol=1e-5)
        np.testing.assert_allclose(model.predict_on_batch(x), expected, rtol=1e-5)

    @wide.product(kit=[keras, tf_keras], before=["no scope", "another scope"])
    def test_predicting_without_adoption_after_another_prediction(self, kit, before):
        """Lost otherwise: the whole batch, of which each tower takes its rows for all."""
        inputs = kit.Input([1])
        model = kit.Model(inputs, kit.layers.Lambda(lambda x: x - tf.reduce_mean(x, 0))(inputs))
        x = np.arange(8, dtype="float32")[:, None]
        other = TowerStrategy(["CPU:3", "CPU:4"])
        with other.scope() if before == "another scope" else contextlib.nullcontext():
            expected = model.predict(x, verbose=0)
        with self.strategy.scope():
            np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
            np.testing.assert_allclose(expected, x - 3.5)

    @IN_TURN
    def test_metrics_that_are_made_after_compile(self, kit):
        """Lost otherwise: a model whose own ``metrics`` need what is made behind ``compile``."""
        class Model(kit.Sequential):
            @property
            def metrics(self):
                return [self.trackers["loss"]]

        with self.strategy.scope():
            model = Model([kit.Input([3]), kit.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.trackers = {"loss": kit.metrics.Mean(name="loss")}
        model.layers[0].trainable = False
        self.assertIn("0 trained weights", self.strategy.describe(model))

    @IN_TURN
    def test_another_strategys(self, kit):
        """Lost otherwise: whose the model is; nothing of it is changed by the attempt."""
        mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"],
                                                  tf.distribute.ReductionToOneDevice())
        for owner in (mirrored, TowerStrategy(["CPU:3"])):
            with owner.scope():
                model = small_models.make(kit, "functional")
                model.compile("sgd", "mse")
            with self.assertRaisesRegex(
                    ValueError, "belongs to another strategy.*cannot be adopted"):
                self.strategy.adopt(model)
            with self.strategy.scope(), self.assertRaisesRegex(ValueError, "another strategy"):
                model.compile("sgd", "mse")
            self.assertIs(model.distribute_strategy, owner)
            fit(model)

    @IN_TURN
    def test_layers_of_another_strategys(self, kit):
        """Lost otherwise: a model around a trained one; half of it would be adopted."""
        with TowerStrategy(["CPU:3"]).scope():
            inner = small_models.make(kit, "functional")
        model = kit.Model(inner.inputs, inner(inner.inputs))
        with self.assertRaisesRegex(ValueError, "variable .* belongs to another strategy"):
            self.strategy.adopt(model)
        model.compile("sgd", "mse")
        fit(model)

    def test_auto_jit_compile(self):
        """Else XLA is lost on GPU towers, which a GPU without a strategy has; or CPU towers, which
        gain nothing by it, get it on a machine with a GPU."""
        gpu = mock.Mock(device_type="GPU")
        for kind, wanted in ("GPU", True), ("CPU", False):
            with mock.patch.object(tf.config, "list_physical_devices", lambda *_: [gpu]), \
                    mock.patch.object(devices_lib.Placement, "kinds", frozenset({kind})):
                strategy = TowerStrategy(["CPU:1", "CPU:2"], "CPU:0")
                model = small_models.make(keras, "functional")
                with strategy.scope():
                    model.compile("sgd", "mse")
                self.assertIs(model.jit_compile, wanted)
                fit(model)
                model = small_models.make(keras, "functional")
                model.compile("sgd", "mse")
                strategy.adopt(model)
                self.assertTrue(model.jit_compile)  # as it was compiled
        with mock.patch.object(devices_lib.Placement, "kinds", frozenset({"GPU"})), \
                TowerStrategy(["CPU:1", "CPU:2"], "CPU:0").scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
            model.layers[0].supports_jit = False
            model.compile("sgd", "mse")
        self.assertFalse(model.jit_compile)
