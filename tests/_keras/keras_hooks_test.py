"""The hooks into Keras: every name is still where we hook it."""

import inspect
import pathlib
import sys
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
from towerstrategy import _keras, _tensorflow as _tf
from towerstrategy._keras.keras3 import hooks as keras3_hooks, names as keras3_names
from towerstrategy._keras.tf_keras import hooks as tf_keras_hooks, names as tf_keras_names
from towerstrategy._tensorflow import wrapping

TABLES = {"keras": {**keras3_hooks.HOOKS, **keras3_hooks.STAGES},
          "tf_keras": {**tf_keras_hooks.HOOKS, **tf_keras_hooks.STAGES}}
MARK = "_towerstrategy_original"


def numbers(version):
    return tuple(map(int, version.split(".")[:2]))


def hooked_names():
    for package, table in TABLES.items():
        for (owner, name), hook in table.items():
            label = f"{package}_{owner.__name__}_{name}".replace(".", "_")
            yield label, package, owner, name, hook


class HooksTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        towerstrategy.TowerStrategy([["CPU:1", "CPU:2"]])  # with stages, for which there are more
        self.enter_context(_tf.at_work())

    @parameterized.named_parameters(*hooked_names())
    def test_stands_where_we_hook_it(self, package, owner, name, hook):
        """Else a new release trains wrongly, because a hook of ours is never called."""
        hooked = owner.__dict__[name]
        original = getattr(hooked, MARK)
        self.assertEqual(original.__module__.split(".")[0], package)
        self.assertNotEmpty(hook.reason)
        self.assertIsNot(inspect.unwrap(hooked), hooked)
        self.assertEqual(inspect.signature(hooked), inspect.signature(original))
        if name == "__init__":  # of which Keras asks in this way, too
            self.assertEqual(inspect.getfullargspec(hooked), inspect.getfullargspec(original))

    def test_installed_once(self):
        """Else each variable that is made adds a call to every call of a layer."""
        before = {key: key[0].__dict__[key[1]] for table in TABLES.values() for key in table}
        _keras.install_hooks()
        for table in TABLES.values():
            _keras.hooks.install(table)
        for (owner, name), hooked in before.items():
            self.assertIs(owner.__dict__[name], hooked)

    @parameterized.parameters(keras3_hooks, tf_keras_hooks)
    def test_few(self, tables):
        """Else each Keras release breaks more, as before a step was one program."""
        self.assertLessEqual(len(tables.HOOKS), 17)

    @parameterized.parameters(keras, tf_keras)
    def test_layers_without_an_init_are_made(self, kit):
        """Else the plainest layer of one's own fails as soon as there is a strategy."""
        class Doubled(kit.layers.Layer):
            def call(self, x):
                return 2 * x

        np.testing.assert_array_equal(Doubled()(tf.ones([2])), [2, 2])

    @parameterized.parameters(
        ("keras", keras3_names.MODEL), ("tf_keras", tf_keras_names.MODEL))
    def test_a_moved_name_is_one_error(self, package, owner):
        """Else a release that moved a name fails in the middle of a training, or trains wrongly."""
        _tf.leave_work()
        self.addCleanup(_tf.enter_work)
        original, another = owner.compile, next(iter(TABLES[package]))
        sentence = (rf"tested with {package} [\d.]+ to [\d.]+, but the one installed is "
                    rf"{sys.modules[package].__version__}, .*{owner.__name__}.compile. .*pip")
        try:
            del owner.compile
            with mock.patch.object(_keras, "_installed", {}), \
                    mock.patch.dict(wrapping._wrapped, clear=True):
                with self.assertRaisesRegex(RuntimeError, sentence):
                    towerstrategy.TowerStrategy(1)
                with _tf.at_work():
                    self.assertFalse(hasattr(getattr(*another), MARK))  # none or all
        finally:
            owner.compile = original

    def test_a_moved_module_is_one_error(self):
        """Else an ImportError in our files is all that somebody with a new Keras is told."""
        package = "towerstrategy._keras.keras3"
        kept = {name: sys.modules.pop(name) for name in list(sys.modules)
                if name.startswith(package)}
        try:
            with mock.patch.dict(sys.modules, {"keras.src.optimizers": None}), \
                    mock.patch.object(_keras, "_installed", {"tf_keras": tf_keras_hooks}), \
                    self.assertRaisesRegex(RuntimeError, "tested with keras .*src.optimizers"):
                del _keras.keras3
                towerstrategy.TowerStrategy(1)
        finally:
            sys.modules.update(kept)
            _keras.keras3 = kept[package]

    def test_keras_on_another_backend_is_refused(self):
        """Else its models train on one device in the scope, without a word."""
        with mock.patch.dict(sys.modules, {"keras.src.backend.jax.trainer": mock.Mock()}), \
                mock.patch.object(_keras.hooks, "install") as install:
            strategy = towerstrategy.TowerStrategy(1)
        (hook,) = install.call_args.args[0].values()
        compiled, model = mock.Mock(), keras.Sequential(name="model")
        hook.replacement(compiled, model, "sgd", loss="mse")
        compiled.assert_called_once_with(model, "sgd", loss="mse")
        with strategy.scope(), mock.patch.object(keras.src.backend, "backend", lambda: "jax"), \
                self.assertRaisesRegex(
                    ValueError, "model 'model' is compiled in .*runs on 'jax'.*KERAS_BACKEND"):
            hook.replacement(compiled, model, "sgd")

    def test_all_is_built_before_the_trace(self):
        """Else a name that Keras moved is an error that we suppress, and first steps take twice."""
        strategy = towerstrategy.TowerStrategy(2)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae"])
        rows = tf.zeros([4, 2])
        model._maybe_symbolic_build(data_batch=(rows, rows[:, :1]))
        for part in (model, model._compile_loss, model._compile_metrics, model.optimizer):
            self.assertTrue(part.built, part)

    @parameterized.parameters((keras, keras3_names), (tf_keras, tf_keras_names))
    def test_attributes_are_called_as_names_say(self, kit, names):
        """Else what a release renames a model shares with its twin, and nothing says so."""
        if numbers(kit.__version__) < numbers(_keras.TESTED[kit.__name__][1]):
            self.skipTest("names has those of newer releases, too")
        model, x, found = kit.Sequential([kit.layers.Dense(1)]), np.ones([4, 2]), set()
        model.compile("sgd", "mse")
        model.fit(x, x[:, :1], validation_data=(x, x[:, :1]), verbose=0, callbacks=[
            kit.callbacks.LambdaCallback(on_epoch_end=lambda *_: found.update(dir(model)))])
        model.predict(x, verbose=0)
        said = {names.OWNER, *names.BUILDERS, *names.ENTRIES, *names.TRAINING_STATE}
        self.assertEmpty(said - found - set(dir(model)))

    @parameterized.parameters("keras", "tf_keras")
    def test_tested_versions_are_those_asked_for(self, package):
        """Else pip installs a Keras that the package then refuses."""
        oldest, newest = map(numbers, _keras.TESTED[package])
        self.assertBetween(numbers(sys.modules[package].__version__), oldest, newest)
        if package == "keras":
            setup = (pathlib.Path(__file__).parents[2] / "setup.cfg").read_text()
            self.assertIn(f"\n    keras>={_keras.TESTED['keras'][0]}\n", setup)
