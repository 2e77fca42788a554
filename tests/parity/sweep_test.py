"""The sweep itself: a few classes of it, and that it finds what differs.

The whole sweep is `python -m tests.parity.sweep`, a part of `make test-parity`.
"""

from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import wide
from towerstrategy import _keras

from . import cases, runner, sweep, sweep_cases, sweep_tables


def towers():
    """2 where there are any, else 1; nothing should depend on it."""
    return float(tf.distribute.has_strategy()) + 1


class TowerCount(keras.layers.Layer):

    def call(self, x):
        return x + towers()


class TowerCountMetric(keras.metrics.Mean):

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(towers())


class TowerCountLoss(keras.losses.Loss):

    def call(self, y_true, y_pred):
        return tf.reduce_mean(tf.square(y_pred), -1) * towers()


class SweepTest(parameterized.TestCase):

    @wide.parameters(wide=[
        (cases.TF_KERAS, "layers.Conv1D"), (cases.TF_KERAS, "losses.Huber / not reduced"),
        (cases.KERAS_3, "metrics.F1Score"), (cases.KERAS_3, "layers.BatchNormalization")])
    def test_is_as_listed(self, version, name):
        """Else a public class of Keras gives other results on towers, and nothing says so."""
        found = sweep.compare(version, name)
        self.assertTrue(found.is_as_listed, f"{found}\n{found.details}")

    @wide.parameters(
        ("layers", TowerCount),
        wide=[("metrics", TowerCountMetric), ("losses", TowerCountLoss, ("sum",))])
    def test_finds_what_depends_on_the_towers(self, group, cls, reductions=()):
        """Else the sweep passes whatever a layer, loss or metric does."""
        item = sweep_cases.Item(f"{group}.{cls.__name__}", group, cls, reductions)
        found = sweep.compare_items(keras, item)
        self.assertGreater(found.worst, 1e-3)
        self.assertFalse(found.fails, found.details)
        self.assertFalse(found.is_as_listed)

    @pytest.mark.wide
    def test_fails_where_a_listed_class_no_longer_differs(self):
        """Else the list of exceptions, which users rely on, grows stale."""
        with mock.patch.dict(sweep_tables.DIFFERS, {("", "layers.Identity"): "says who"}):
            found = sweep.compare(cases.KERAS_3, "layers.Identity")
            self.assertFalse(found.is_as_listed)
            self.assertIn("NO LONGER DIFFERS", str(found))

    def test_a_class_that_cannot_be_made_fails(self):
        """Else a class that a new Keras release brings is left out in silence."""
        class Odd(keras.layers.Layer):
            def __init__(self, something_unheard_of):
                super().__init__()

        found = sweep.compare_items(keras, sweep_cases.Item("layers.Odd", "layers", Odd))
        self.assertTrue(found.fails)
        self.assertFalse(found.is_as_listed)

    @parameterized.parameters(cases.KERAS_3, cases.TF_KERAS)
    def test_the_tables_name_classes_that_exist(self, version):
        """Else an exception outlives its class, or names it wrongly and excepts nothing."""
        module = runner.keras_module(version)
        if not keras.__version__.startswith(_keras.TESTED["keras"][1]):
            self.skipTest("the tables have classes of newer releases, too")
        self.assertEmpty(sweep_cases.unknown(module))
        with mock.patch.dict(sweep_tables.CANNOT, {"layers.Dens": "a slip"}):
            self.assertLen(sweep_cases.unknown(module), 1)

    def test_has_every_public_class(self):
        """Else a class that users train with is never compared."""
        for version in (cases.KERAS_3, cases.TF_KERAS):
            module = runner.keras_module(version)
            swept = {item.cls for item in sweep_cases.items(module)}
            for group, base in (("layers", module.layers.Layer), ("losses", module.losses.Loss),
                                ("metrics", module.metrics.Metric)):
                public = [one for one in vars(getattr(module, group)).values()
                          if isinstance(one, type) and issubclass(one, base)]
                self.assertGreater(len(public), 15)
                for cls in public:
                    self.assertNotEqual(
                        cls in swept, f"{group}.{cls.__name__}" in sweep_tables.CANNOT, cls)

    def test_every_exception_has_a_reason(self):
        """Else a class is excepted and nobody knows why."""
        for table in (sweep_tables.CANNOT, sweep_tables.DIFFERS, sweep_tables.FLOAT64):
            for name, reason in table.items():
                self.assertNotEmpty(reason, name)

    def test_batches_have_remainders_and_towers_without_rows(self):
        """Else the sweep only sees batches that every strategy gets right."""
        size, towers = sweep_cases.FIT["batch_size"], sweep.TOWERS.count
        last = sweep_cases.ROWS % size
        self.assertTrue(size % towers and 0 < last < towers)


if __name__ == "__main__":
    absltest.main()
