"""multi_gpu_model: what it takes, what it returns, and the template beside it."""

import tempfile

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import small_models
import wide
from towerstrategy import TowerStrategy, multi_gpu_model
from towerstrategy.placement import homes as homes_lib

TOWERS = ["CPU:1", "CPU:2", "CPU:3"]
IN_TURN = wide.turns(*small_models.KERAS)
OTHER_KINDS = [kind for kind in small_models.KINDS if kind not in ("functional", "subclassed")]


def compile_(kit, model, **kwargs):
    model.compile(kit.optimizers.SGD(0.05), "mse", **kwargs)
    return model


def fit(model, kind, epochs=1):
    x, y = small_models.data(kind)
    return model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history


def tf_variables(model):
    return [getattr(variable, "_value", variable) for variable in model.weights]


class MultiGpuTest(parameterized.TestCase):

    def assert_same_weights(self, one, other):
        for expected, got in zip(small_models.weights(one), small_models.weights(other),
                                 strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    @wide.parameters((keras, "functional"), (tf_keras, "subclassed"), wide=[
        ((keras, tf_keras)[at % 2], kind) for at, kind in enumerate(OTHER_KINDS)], rest=[
        (keras, "subclassed"), (tf_keras, "functional"), *(
            ((tf_keras, keras)[at % 2], kind) for at, kind in enumerate(OTHER_KINDS))])
    def test_trains_like_one_device_and_shares_its_weights(self, kit, kind):
        """Lost otherwise: that the two models are one, whichever of them is built and trained."""
        template, alone = small_models.make(kit, kind), small_models.make(kit, kind)
        parallel = multi_gpu_model(template, TOWERS)
        compile_(kit, parallel)
        compile_(kit, template)
        compile_(kit, alone)

        logs = [fit(model, kind)["loss"][0] for model in (parallel, template, parallel)]
        expected = fit(alone, kind, epochs=3)["loss"]

        np.testing.assert_allclose(logs, expected, rtol=1e-5)
        self.assert_same_weights(alone, template)
        self.assertIs(type(parallel), type(template))
        self.assertEqual([id(variable) for variable in tf_variables(parallel)],
                         [id(variable) for variable in tf_variables(template)])
        self.assertEqual([layer.name for layer in parallel.layers],
                         [layer.name for layer in template.layers])
        x, _ = small_models.data(kind)
        for got, wanted in zip(tf.nest.flatten(parallel.predict(x, verbose=0)),
                               tf.nest.flatten(alone(x)), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)

    @wide.product(kit=[keras, tf_keras],
                  kind=["unbuilt_sequential", "subclassed", "own_weight"])
    def test_template_built_first(self, kit, kind):
        """Lost otherwise: sharing, where the template is built after the call."""
        template, alone = small_models.make(kit, kind), small_models.make(kit, kind)
        parallel = multi_gpu_model(template, TOWERS)
        compile_(kit, template)
        compile_(kit, parallel)
        compile_(kit, alone)
        fit(template, kind)
        fit(parallel, kind)
        fit(alone, kind, epochs=2)
        self.assert_same_weights(alone, parallel)
        self.assertEqual([id(variable) for variable in tf_variables(parallel)],
                         [id(variable) for variable in tf_variables(template)])

    @IN_TURN
    def test_used_like_any_model(self, kit):
        """Lost otherwise: evaluate, the *_on_batch methods, callbacks and metrics."""
        template, alone = (small_models.make(kit, "functional") for _ in range(2))
        parallel = compile_(kit, multi_gpu_model(template, TOWERS), metrics=["mae"])
        compile_(kit, alone, metrics=["mae"])
        x, y = small_models.data("functional", rows=7)
        results = []
        for model in (parallel, alone):
            seen = []
            history = model.fit(
                x, y, batch_size=3, epochs=2, verbose=0, shuffle=False, validation_data=(x, y),
                callbacks=[kit.callbacks.LambdaCallback(
                    on_train_batch_end=lambda batch, logs, seen=seen: seen.append(logs["loss"])),
                    kit.callbacks.EarlyStopping(patience=5)]).history
            results.append([
                *(history[name] for name in sorted(history)), seen, model.evaluate(x, y, verbose=0),
                model.train_on_batch(x, y), model.test_on_batch(x, y), model.predict_on_batch(x)])
        for got, expected in zip(*results, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    @IN_TURN
    def test_template_trains_beside_it_with_an_optimizer_of_its_own(self, kit):
        """Lost otherwise: a template compiled and trained before keeps its momentum."""
        template, alone = (small_models.make(kit, "functional") for _ in range(2))
        for model in (template, alone):
            model.compile(kit.optimizers.SGD(0.05, momentum=0.9), "mse")
            fit(model, "functional")
        slots = template.optimizer.variables
        parallel = compile_(kit, multi_gpu_model(template, TOWERS))
        fit(template, "functional")
        fit(alone, "functional")
        self.assert_same_weights(alone, template)
        self.assertEqual([id(slot) for slot in template.optimizer.variables],
                         [id(slot) for slot in slots])
        self.assertIsNot(parallel.optimizer, template.optimizer)

    @IN_TURN
    def test_loaded_from_disk(self, kit):
        """Lost otherwise: the usual way to a template."""
        path = self.enter_context(tempfile.TemporaryDirectory()) + "/model.keras"
        saved = compile_(kit, small_models.make(kit, "functional"))
        fit(saved, "functional")
        saved.save(path)
        template = kit.models.load_model(path)
        parallel = compile_(kit, multi_gpu_model(template, TOWERS))
        fit(parallel, "functional")
        fit(saved, "functional")
        self.assert_same_weights(saved, template)

    @IN_TURN
    def test_own_train_step_and_metrics(self, kit):
        """Lost otherwise: models with a training step and metrics of their own."""

        class Own(kit.Model):
            def __init__(self):
                super().__init__()
                self.head = small_models.dense(kit, 1, "head")
                self.seen = kit.metrics.Sum(name="seen")

            def call(self, x):
                return self.head(x)

            def train_step(self, data):
                x, _ = data
                logs = super().train_step(data)
                self.seen.update_state(tf.ones_like(x[:, 0]))
                return {**logs, "rows": self.seen.result()}

        template = Own()
        parallel = compile_(kit, multi_gpu_model(template, TOWERS))
        self.assertEqual(fit(parallel, "functional")["rows"], [10.])
        compile_(kit, template)
        self.assertEqual(fit(template, "functional")["rows"], [10.])
        self.assertEqual(fit(parallel, "functional")["rows"], [10.])

    @IN_TURN
    def test_output_of_a_layer(self, kit):
        """Lost otherwise: looking into the parallel model, as Keras' FAQ does."""
        parallel = multi_gpu_model(small_models.make(kit, "functional"), TOWERS)
        inner = kit.Model(parallel.input, parallel.get_layer("hidden").output)
        x, _ = small_models.data("functional")
        on_towers = multi_gpu_model(inner, TOWERS)
        self.assertEqual(inner.predict(x, verbose=0).shape, (10, 4))
        np.testing.assert_allclose(on_towers.predict(x, verbose=0), inner.predict(x, verbose=0),
                                   rtol=1e-6)

    @IN_TURN
    def test_frozen_layers(self, kit):
        """Lost otherwise: fine-tuning."""
        template = small_models.make(kit, "functional")
        parallel = multi_gpu_model(template, TOWERS)
        parallel.get_layer("hidden").trainable = False
        compile_(kit, parallel)
        before = small_models.weights(template)
        fit(parallel, "functional")
        after = small_models.weights(template)
        np.testing.assert_array_equal(before[0], after[0])
        self.assertGreater(np.abs(before[2] - after[2]).max(), 0)


class PlacementTest(parameterized.TestCase):

    @IN_TURN
    def test_cpu_merge(self, kit):
        """Lost otherwise: where weights made later live and gradients are merged."""
        for cpu_merge, home in ((True, "CPU:0"), (False, "CPU:1")):
            parallel = multi_gpu_model(small_models.make(kit, "functional"), TOWERS,
                                       cpu_merge=cpu_merge)
            placement = parallel.distribute_strategy.extended.placement
            self.assertEndsWith(placement.merge, home)
            self.assertLen(placement.towers, 3)
            compile_(kit, parallel)
            fit(parallel, "functional")

    @wide.parameters((keras, True, "functional"),
                     wide=[(keras, False, "subclassed"), (tf_keras, False, "functional")])
    def test_cpu_relocation_keeps_values_and_identity(self, kit, cpu_merge, kind):
        """Lost otherwise: a template that was built, and trained, on another device."""
        with tf.device("CPU:3"):
            template = compile_(kit, small_models.make(kit, kind))
            fit(template, kind)
        alone = compile_(kit, small_models.make(kit, kind))
        fit(alone, kind)
        before, held = small_models.weights(template), tf_variables(template)
        for variable in held:
            self.assertEndsWith(variable.device, "CPU:3")

        parallel = multi_gpu_model(template, TOWERS, cpu_merge=cpu_merge, cpu_relocation=True)

        for variable, same in zip(held, tf_variables(template), strict=True):
            self.assertIs(variable, same)
            self.assertEndsWith(variable.device, "CPU:0")
            self.assertEndsWith(homes_lib.home_of(variable), "CPU:0")
        for old, new in zip(before, small_models.weights(parallel), strict=True):
            np.testing.assert_array_equal(old, new)
        fit(compile_(kit, parallel), kind)
        fit(template, kind)  # compiled before the weights moved
        fit(alone, kind, epochs=2)
        for expected, got in zip(small_models.weights(alone), small_models.weights(template)):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    @IN_TURN
    def test_weights_stay_where_they_are_unless_told(self, kit):
        """Lost otherwise: memory on the device that the user chose."""
        with tf.device("CPU:3"):
            template = small_models.make(kit, "functional")
        multi_gpu_model(template, TOWERS)
        for variable in tf_variables(template):
            self.assertEndsWith(variable.device, "CPU:3")

    @IN_TURN
    def test_no_gpu_trains_on_one_device(self, kit):
        """Lost otherwise: scripts that run on a laptop; Keras' own raised TypeError."""
        template = compile_(kit, small_models.make(kit, "functional"))
        parallel = multi_gpu_model(template)
        self.assertIs(parallel, template)
        fit(parallel, "functional")

    def test_one_tower(self):
        """Lost otherwise: a list of one device, which a script may have computed."""
        template, alone = (small_models.make(keras, "functional") for _ in range(2))
        fit(compile_(keras, multi_gpu_model(template, ["CPU:2"])), "functional")
        fit(compile_(keras, alone), "functional")
        for expected, got in zip(alone.get_weights(), template.get_weights()):
            np.testing.assert_allclose(got, expected, rtol=1e-6)

    @IN_TURN
    def test_called_again(self, kit):
        """Lost otherwise: notebook cells that are run twice."""
        template = small_models.make(kit, "functional")
        first, second = multi_gpu_model(template, TOWERS), multi_gpu_model(template, TOWERS)
        self.assertIs(first.distribute_strategy, second.distribute_strategy)
        for model in (first, second):
            fit(compile_(kit, model), "functional")
        with self.assertRaisesRegex(ValueError, "belongs to another strategy"):
            multi_gpu_model(template, TOWERS[:2])

    @IN_TURN
    def test_of_a_parallel_model_that_is_not_built(self, kit):
        """Lost otherwise: a helper function that makes parallel what is parallel already."""
        first = multi_gpu_model(small_models.make(kit, "unbuilt_sequential"), TOWERS)
        second = compile_(kit, multi_gpu_model(first, TOWERS))
        fit(second, "unbuilt_sequential")
        self.assertEqual([id(variable) for variable in tf_variables(first)],
                         [id(variable) for variable in tf_variables(second)])

    def test_relocation_that_comes_too_late(self):
        """Lost otherwise: a first parallel model would train weights that nobody sees."""
        with tf.device("CPU:3"):
            template = small_models.make(keras, "functional")
        multi_gpu_model(template, TOWERS)
        with self.assertRaisesRegex(ValueError, "cpu_relocation=True comes too late"):
            multi_gpu_model(template, TOWERS, cpu_relocation=True)


class ArgumentsTest(parameterized.TestCase):

    @parameterized.parameters(
        0, -1, True, False, 2.5, float("nan"), float("inf"), "GPU:0", 9, ([],), ([0, 0],),
        ([0, 9],), ([True, False],), ([0.5],), ([0.0, 1.0],), (["CPU:1", "CPU:1"],),
        (["CPU:1", "CPU:99"],), (["CPU:1", "GPU:0"],), (["nonsense"],), ([None],),
        {"gpus": {0: 1}})
    def test_impossible_gpus(self, gpus):
        """Lost otherwise: which value was wrong and which devices there are."""
        model = small_models.make(keras, "functional")
        with self.assertRaises((TypeError, ValueError)) as caught:
            multi_gpu_model(model, gpus)
        self.assertRegex(str(caught.exception), "^gpus")
        self.assertIn("The devices here: CPU:0, CPU:1", str(caught.exception))
        self.assertNotRegex(str(caught.exception), "(?<!The )devices (names|has|mixes)|shares")
        self.assertIsNone(model._distribute_strategy)

    @parameterized.parameters(2, 2.0, np.int64(2))
    def test_counts(self, gpus):
        """Lost otherwise: counts as R hands them over (it has no integers in this place)."""
        model = multi_gpu_model(small_models.make(keras, "functional"), gpus)
        self.assertEqual(model.distribute_strategy.devices, ["CPU:0", "CPU:1"])

    @IN_TURN
    def test_model_of_another_strategy(self, kit):
        """Lost otherwise: who owns the model; TensorFlow's own errors come steps later."""
        mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"],
                                                  tf.distribute.ReductionToOneDevice())
        for strategy in (mirrored, TowerStrategy(TOWERS[:2])):
            with strategy.scope():
                model = small_models.make(kit, "functional")
            with self.assertRaisesRegex(ValueError, "belongs to another strategy"):
                multi_gpu_model(model, TOWERS)
