"""report: what describe() says is where things are, what TowerReport says is what happened."""

import copy
import ctypes
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock
from xml.etree import ElementTree

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import wide
from towerstrategy import TowerStrategy
from towerstrategy.batch import iterators
from towerstrategy.extras.report import (
    description,
    epochs as epochs_lib,
    picture,
    quiet as quiet_lib,
    sample as sample_lib,
    tower_report,
)
from towerstrategy.placement import devices
from towerstrategy.variables import creation

TOWERS = ["CPU:1", "CPU:2", "CPU:3"]
KITS = (("keras", keras), ("tf_keras", tf_keras))


def rows(text: str) -> dict[str, tuple[str, int, int]]:
    """The table's lines: device -> role, variables, bytes."""
    found = {}
    for line in text.splitlines()[3:]:
        device, *role, variables, size = line.split()
        found[device] = (" ".join(role), int(variables), int(size.replace(",", "")))
    return found


class DescribeTest(parameterized.TestCase):

    def test_title_and_roles(self):
        """Else someone cannot see which device is a tower and where it all meets."""
        text = TowerStrategy(TOWERS).describe()
        self.assertStartsWith(text, "TowerStrategy: 3 towers, merge device CPU:0\n")
        self.assertEqual(rows(text), {"CPU:1": ("tower 0", 0, 0), "CPU:2": ("tower 1", 0, 0),
                                      "CPU:3": ("tower 2", 0, 0), "CPU:0": ("merge", 0, 0)})

    def test_integers(self):
        """Else integers that TensorFlow keeps on the host are counted on a GPU."""
        strategy = TowerStrategy(TOWERS, "CPU:2")

        def on_the_host(**kwargs):  # as TensorFlow does where a device has no kernel
            with tf.device("CPU:0"):
                return tf.Variable(**kwargs)

        made = creation.create(strategy, on_the_host, initial_value=tf.zeros([9], tf.int32))
        found = rows(strategy.describe())
        self.assertEqual((found["CPU:0"][2], found["CPU:2"][2]), (made.shape[0] * 4, 0))

    def test_a_notebook_shows_a_table(self):
        """Else a notebook shows a line of text, or none of what is named like a tag."""
        strategy = TowerStrategy(TOWERS)
        with strategy.scope():
            tf.Variable(tf.zeros([1000]), name="<kept>")
        root = ElementTree.fromstring(strategy._repr_html_())
        self.assertEqual((root.tag, root.text), ("pre", strategy.describe()))

    def test_what_is_done_with_all_rows(self):
        """Else somebody whose step is slow cannot see what gathers, in which line and why."""
        strategy = TowerStrategy(TOWERS)
        with self.assertLogs("towerstrategy", "INFO") as logs:
            strategy.function(lambda x: tf.sort(x, axis=0))(strategy.split(np.ones([6, 2], "f4")))
        self.assertIn("Its inputs: (2, None) Sharded(dim=1, times=1", logs.output[-1])
        *_, header, _, row = strategy.describe().splitlines()
        self.assertStartsWith(header, "done with all rows  bytes an example")
        self.assertRegex(row, r"^TopKV2 +8 .*report_test.py:\d+$")

    def test_components_that_are_not_sharded(self):
        """Else a model of sparse or ragged inputs trains on one device, and nobody says so."""
        strategy = TowerStrategy(TOWERS)
        rows = tf.RaggedTensor.from_row_lengths(tf.ones([6]), [1, 2, 3])
        with self.assertLogs("towerstrategy", "INFO") as logs:
            strategy.function(lambda x: tf.reduce_sum(x, 1))(strategy.split(rows))
        self.assertIn("on a RaggedTensor of the batch", logs.output[-1])
        self.assertIn("RaggedTensor", strategy.describe())

    def test_a_tower_that_merges_has_one_line(self):
        """Else a device is listed twice, and its bytes with it."""
        found = rows(TowerStrategy(TOWERS, "CPU:2").describe())
        self.assertEqual(list(found), TOWERS)
        self.assertEqual(found["CPU:2"][0], "tower 1 and merge")

    def test_one_tower(self):
        """Else the plain case reads like a plural of nothing."""
        text = TowerStrategy(["CPU:1"]).describe()
        self.assertStartsWith(text, "TowerStrategy: 1 tower, merge device CPU:1\n")

    def test_micro_batches(self):
        """Else a tower is listed once for each of its micro-batches."""
        text = TowerStrategy(TOWERS, micro_batches=4).describe()
        self.assertStartsWith(text, "TowerStrategy: 3 towers of 4 micro-batches, merge device CPU")
        self.assertEqual({device: row[0] for device, row in rows(text).items()},
                         {"CPU:1": "tower 0", "CPU:2": "tower 1", "CPU:3": "tower 2",
                          "CPU:0": "merge"})

    @parameterized.parameters(None, "CPU:2", "balanced")
    def test_counts_what_is_there(self, merge_device):
        """Else the bytes say nothing about the memory a device needs."""
        strategy = TowerStrategy(TOWERS, merge_device)
        with strategy.scope():
            kept = [tf.Variable(tf.zeros([size])) for size in (100, 50, 25, 25)]
            local = tf.Variable(0, synchronization=tf.VariableSynchronization.ON_READ,
                                aggregation=tf.VariableAggregation.SUM)
        found = rows(strategy.describe())
        self.assertEqual(sum(count for _, count, _ in found.values()), len(kept) + len(TOWERS))
        self.assertEqual(sum(size for _, _, size in found.values()), 800 + 4 * len(TOWERS))
        for device, (_, count, size) in found.items():
            here = [variable for variable in [*kept, *local.values]
                    if variable.device.endswith(device)]
            self.assertEqual((count, size), (len(here), sum(
                int(np.prod(variable.shape)) * variable.dtype.size for variable in here)))

    def test_balanced_spreads_bytes(self):
        """Else one tower holds everything and the others' memory is idle."""
        strategy = TowerStrategy(TOWERS, "balanced")
        with strategy.scope():
            kept = [tf.Variable(tf.zeros([size])) for size in (100, 50, 25, 25)]
        sizes = {device: size for device, (_, _, size) in rows(strategy.describe()).items()}
        self.assertLen(kept, 4)
        self.assertEqual(sizes, {"CPU:1": 400, "CPU:2": 200, "CPU:3": 200})

    def test_variables_that_are_gone_are_not_counted(self):
        """Else the table grows while the memory does not."""
        strategy = TowerStrategy(TOWERS)
        with strategy.scope():
            variable = tf.Variable(tf.zeros([10]))
        self.assertEqual(rows(strategy.describe())["CPU:0"][1:], (1, 40))
        del variable
        self.assertEqual(rows(strategy.describe())["CPU:0"][1:], (0, 0))

    @parameterized.named_parameters(*KITS)
    def test_adopted_variables_are_counted_where_they_are(self, kit):
        """Else a model that was adopted seems to need no memory."""
        strategy = TowerStrategy(TOWERS, "CPU:1")
        with tf.device("CPU:4"):
            model = kit.Sequential([kit.Input([3]), kit.layers.Dense(2)])
        strategy.adopt(model)
        self.assertEqual(rows(strategy.describe())["CPU:4"], ("variables only", 2, 32))


class DescribeModelTest(parameterized.TestCase):

    @wide.turns(*KITS)
    def test_state_and_its_rules(self, kit):
        """Else who keeps an extreme, or ranks rows, does not see how the towers' are merged."""
        strategy = TowerStrategy(TOWERS)
        with strategy.scope():
            norm = kit.layers.BatchNormalization(name="norm")
            model = kit.Sequential([kit.layers.Input([3]), norm, kit.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[kit.metrics.MeanMetricWrapper(
                lambda true, predicted: predicted, name="own")])
        model.train_on_batch(tf.ones([4, 3]), tf.ones([4, 1]))
        strategy.merge_rule(norm.moving_mean, "max")
        table = strategy.describe(model).partition("\n\n")[2]
        self.assertStartsWith(table, "State of the model\n")
        lines = dict(line.split("  ", 1) for line in table.splitlines()[3:])
        found = {name.rpartition("norm/")[2]: rest for name, rest in lines.items()}
        self.assertIn("gradients: sum of all rows'", found["4 trained weights"])
        self.assertRegex(found["moving_mean"], "one copy +largest")
        self.assertRegex(found["moving_variance"], "one copy +mean by share of rows")
        self.assertRegex(found["own/total"], "a part on each tower +sum, when it is read")

    @wide.turns(*KITS)
    def test_another_model(self, kit):
        """Else a table of a model that does not train on these towers is believed."""
        strategy = TowerStrategy(TOWERS)
        model = kit.Sequential([kit.layers.Input([3]), kit.layers.Dense(1)])
        with self.assertRaisesRegex(ValueError, "compile it in the strategy's scope"):
            strategy.describe(model)
        with self.assertRaisesRegex(TypeError, "model must be a Keras or tf_keras model"):
            strategy.describe(3)


class TableTest(parameterized.TestCase):

    def test_numbers_align_right(self):
        """Else bytes cannot be compared at a glance."""
        text = description.table(("what", "bytes"), [("a", "1"), ("bcdef", "1,000")], numbers=(1,))
        self.assertEqual(text, "what   bytes\n-----  -----\na          1\nbcdef  1,000")


def small_model(kit, strategy, **compile_args):
    with strategy.scope():
        model = kit.Sequential([kit.Input([3]), kit.layers.Dense(4), kit.layers.Dense(1)])
        model.compile("sgd", "mse", **compile_args)
    return model


def data(rows):
    return np.ones([rows, 3], "float32"), np.ones([rows, 1], "float32")


def quiet(**arguments):
    """A report that samples whenever it can."""
    return tower_report.TowerReport(**{"print_fn": None, "most": 1., **arguments})


class TrainingTest(parameterized.TestCase):
    """What the callback finds in trainings."""

    @wide.product(kit=KITS, options=({}, {"steps_per_execution": 3}))
    def test_rows_with_a_remainder_and_towers_without_rows(self, kit, options):
        """Else the table says that a tower worked on rows that it never saw."""
        model = small_model(kit[1], TowerStrategy(TOWERS), **options)
        found = quiet()
        # 7 and 7 rows: 3, 2, 2; then 2 rows: 1, 1, 0.
        model.fit(*data(16), batch_size=7, epochs=3, verbose=0, callbacks=[found])
        self.assertEqual([epoch.rows for epoch in found.epochs], 3 * [(7, 5, 4)])
        self.assertEqual([epoch.number for epoch in found.epochs], [0, 1, 2])
        for epoch in found.epochs[1:]:
            self.assertEqual(epoch.sampled_in, epoch.number)
            self.assertGreater(min(epoch.sample.towers), 0)
            for part in (epoch.sample.merge, epoch.sample.update):
                self.assertBetween(part, 1e-9, epoch.sample.step)

    @parameterized.parameters(*KITS)
    def test_eager_steps_are_done_once(self, name, kit):
        """Else the table says that a tower worked on rows that another device had."""
        model = small_model(kit, TowerStrategy(TOWERS), run_eagerly=True)
        found = quiet()
        model.fit(*data(16), batch_size=7, epochs=2, verbose=0, callbacks=[found])
        epoch = found.epochs[1]
        self.assertEqual(epoch.rows, (0, 0, 0))
        self.assertEqual({part.name: part.rows for part in epoch.parts}["merge"], 16)
        self.assertStartsWith(str(epoch), "epoch 2: 16 rows in")
        self.assertIsNone(epoch.sample)

    @wide.turns(*KITS)
    @pytest.mark.wide
    def test_validation_and_prediction_are_not_training(self, kit):
        """Else the rows of a validation are told as trained on."""
        model = small_model(kit, TowerStrategy(TOWERS))
        x, y = data(12)
        predict = kit.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: model.predict(x, verbose=0))
        found = quiet()
        model.fit(x, y, batch_size=6, epochs=2, verbose=0, validation_data=(x, y),
                  callbacks=[predict, found])
        self.assertEqual([epoch.rows for epoch in found.epochs], 2 * [(4, 4, 4)])

    @wide.turns(*KITS)
    def test_epochs_of_a_dataset_without_end(self, kit):
        """Else what the pipeline holds ready is counted, or an epoch has the rows of all before."""
        batches = tf.data.Dataset.from_tensors(data(8)).repeat()
        for fetched in (False, True):  # to the towers' own memory
            found = quiet()
            with self.subTest(fetched=fetched), mock.patch.object(
                    devices.Placement, "towers_on_host", not fetched):
                model = small_model(kit, TowerStrategy(TOWERS))
                model.fit(batches, steps_per_epoch=4, epochs=3, verbose=0, callbacks=[found])
                self.assertEqual([epoch.rows for epoch in found.epochs], 3 * [(12, 12, 8)])

    @wide.turns(*KITS)
    def test_data_of_unknown_length(self, kit):
        """Else the end of an epoch's data is taken for the training's, and later epochs have none.
        """
        model = small_model(kit, TowerStrategy(TOWERS))
        batches = tf.data.Dataset.from_tensor_slices(data(20)).batch(5).filter(lambda *_: True)
        found, other = quiet(), small_model(kit, model.distribute_strategy)
        beside = kit.callbacks.LambdaCallback(  # is trained, too, and not looked at
            on_epoch_begin=lambda epoch, logs: other.fit(*data(6), verbose=0))
        model.fit(batches, epochs=3, verbose=0, callbacks=[found, beside])
        self.assertEqual([epoch.rows for epoch in found.epochs], 3 * [(8, 8, 4)])
        self.assertEqual([epoch.sampled_in for epoch in found.epochs], [0, 1, 2])

    @wide.turns(*KITS)
    def test_micro_batches(self, kit):
        """Else rows and time of a tower's parts are told as those of towers that are not there."""
        model = small_model(kit, TowerStrategy(TOWERS[:2], micro_batches=3))
        found = quiet()
        # 10 rows: 2, 2, 2, then 2, 1, 1.
        model.fit(*data(30), batch_size=10, epochs=2, verbose=0, callbacks=[found])
        epoch = found.epochs[1]
        self.assertEqual(epoch.rows, (18, 12))
        self.assertLen(epoch.sample.towers, 2)
        self.assertGreater(min(epoch.sample.towers), 0)

    @wide.product(kit=KITS, options=({}, {"steps_per_execution": 2}))
    def test_stages(self, kit, options):
        """Else nobody sees which stage the others wait for, or how long all of them stand idle."""
        strategy = TowerStrategy([["CPU:1", "CPU:2"], ["CPU:3", "CPU:4"]], micro_batches=2)
        model = small_model(kit[1], strategy, **options)
        found = quiet()
        model.fit(*data(40), batch_size=10, epochs=2, verbose=0, callbacks=[found])
        epoch = found.epochs[1]
        self.assertEqual(epoch.rows, (24, 16))  # 3, 3, 2, 2 a batch
        self.assertEqual([(part.name, part.device) for part in epoch.parts[:6]], [
            ("tower 0", "2 stages"), ("tower 0, stage 0", "CPU:1"), ("tower 0, stage 1", "CPU:2"),
            ("tower 1", "2 stages"), ("tower 1, stage 0", "CPU:3"), ("tower 1, stage 1", "CPU:4")])
        stages = [part for part in epoch.parts if part.is_stage]
        for part in stages:
            self.assertBetween(part.seconds, 1e-9, epoch.sample.step)
            self.assertAlmostEqual(part.idle, 1 - part.seconds / epoch.sample.step)
        self.assertAlmostEqual(epoch.bubble, sum(part.idle for part in stages) / 4)
        longer = dataclasses.replace(
            epoch, sample=dataclasses.replace(epoch.sample, towers=(1., 1.)))
        self.assertIn(f"; bubble {epoch.bubble:.0%}\n", str(longer))

    @wide.some(3, (0.0005, 0.02, True), (0.0005, 0.001, False), (0.002, 0.1, False))
    def test_a_step_too_short_to_measure(self, busy, step, too_short):
        """Else the first report that a user sees says that the towers are idle, of a toy."""
        model = small_model(keras, TowerStrategy(TOWERS))
        found = quiet()
        model.fit(*data(20), batch_size=5, verbose=0, callbacks=[found])
        epoch = dataclasses.replace(found.epochs[0], sample=dataclasses.replace(
            found.epochs[0].sample, towers=(busy, 0., busy / 2), step=step))
        self.assertEqual("too short to measure" in str(epoch), too_short)
        self.assertEqual("%" in str(epoch), not too_short)
        png = picture.draw([epoch])
        with mock.patch.object(picture, "_style") as styled:
            picture.draw([epoch])
        self.assertEqual(png[:4], b"\x89PNG")
        self.assertEqual(styled.call_count, 1 if too_short else 2)

    def test_the_picture_says_what_rows_are_of(self):
        """Else an epoch's rows are read as those of the step whose time stands beside them."""
        model = small_model(keras, TowerStrategy(TOWERS))
        found = quiet()
        model.fit(*data(20), batch_size=5, verbose=0, callbacks=[found])
        with mock.patch.object(picture, "_style") as styled:
            picture.draw(found.epochs)
        axes = styled.call_args_list[0].args[0]
        first = axes.get_yticklabels()[0].get_text()
        self.assertEqual(first, "tower 0, CPU:1\n8 rows in the epoch")
        self.assertNotIn("rows", "".join(text.get_text() for text in axes.texts))

    def test_a_short_training_has_numbers(self):
        """Else of a first try of two epochs the second has one line: nothing was looked at."""
        model = small_model(keras, TowerStrategy(TOWERS))
        found = tower_report.TowerReport(print_fn=None)
        with mock.patch.object(epochs_lib, "_SHORT", 1000):  # however slow the machine is
            model.fit(*data(20), batch_size=5, epochs=2, verbose=0, callbacks=[found])
        self.assertEqual([epoch.sampled_in for epoch in found.epochs], [0, 1])

    @pytest.mark.wide
    def test_a_stage_with_more_work_is_busier(self):
        """Else someone balances stages by numbers that are another stage's."""
        strategy = TowerStrategy([["CPU:1", "CPU:2", "CPU:3"]], micro_batches=2)

        with strategy.scope():
            model = keras.Sequential([keras.Input([3])])
            for stage in range(3):
                with strategy.stage(stage):
                    model.add(keras.layers.Dense(3))
                    if stage == 1:
                        model.add(keras.layers.Dense(2000))
                        model.add(keras.layers.Dense(1000))
            model.compile("sgd", "mse")
        found = quiet()
        model.fit(*data(12), batch_size=4, epochs=4, verbose=0, callbacks=[found])
        first, slow, last = np.min([epoch.sample.stages[0] for epoch in found.epochs[1:]], 0)
        self.assertGreater(slow, max(first, last))

    @wide.turns(*KITS)
    def test_one_tower(self, kit):
        """Else who tries the script on one device first gets an error."""
        model = small_model(kit, TowerStrategy(["CPU:1"]))
        found = quiet()
        model.fit(*data(10), batch_size=4, epochs=2, verbose=0, callbacks=[found])
        self.assertEqual(found.epochs[1].rows, (10,))
        self.assertGreater(found.epochs[1].sample.towers[0], 0)

    @wide.turns(*KITS)
    def test_a_tower_with_more_work_is_busier(self, kit):
        """Else someone cannot see that one tower does all the work."""
        with TowerStrategy(TOWERS, shares=[1, 10, 1]).scope():
            # Of wide layers rows cross to where the weights are.
            model = kit.Sequential([
                kit.Input([3]), kit.layers.RepeatVector(100), kit.layers.Conv1D(32, 5),
                kit.layers.Conv1D(32, 5), kit.layers.Flatten(), kit.layers.Dense(1)])
            model.compile("sgd", "mse")
        found = quiet()
        model.fit(*data(1920), batch_size=480, epochs=3, verbose=0, callbacks=[found])
        for epoch in found.epochs:
            self.assertEqual(epoch.rows, (160, 1600, 160))
        # The CPU may be taken from a tower in the midst of an operation, but hardly each time.
        samples = [epoch.sample for epoch in found.epochs]
        self.assertEqual(np.argmax(np.min([sample.towers for sample in samples], 0)), 1)
        self.assertEqual(np.argmin(np.max([[sample.idle(tower) for tower in range(3)]
                                           for sample in samples], 0)), 1)

    @wide.turns(*KITS)
    def test_weights_are_those_of_a_training_without(self, kit):
        """Else to look changes what is looked at."""
        x, y = np.random.rand(30, 3).astype("float32"), np.random.rand(30, 1).astype("float32")
        weights = []
        for callbacks in ([], [quiet()]):
            kit.utils.set_random_seed(1)
            model = small_model(kit, TowerStrategy(TOWERS))
            model.fit(x, y, batch_size=7, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
            weights.append(model.get_weights())
        for alone, watched in zip(*weights):
            np.testing.assert_array_equal(alone, watched)

    @wide.turns(*KITS)
    def test_nothing_stays_behind(self, kit):
        """Else a training without the report pays for one that had it."""
        model = small_model(kit, TowerStrategy(TOWERS))
        model.fit(*data(9), batch_size=3, verbose=0)
        model.fit(*data(9), batch_size=3, verbose=0, callbacks=[quiet()])
        self.assertIsNone(iterators.counting.follow)
        self.assertIsNone(model.distribute_strategy.extended.modes.watch)
        dataset = model.distribute_strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensors(data(3)))
        self.assertIsNone(iter(dataset).row_count)

    @wide.turns(*KITS)
    def test_nothing_stays_behind_an_error(self, kit):
        """Else a step that fails leaves the next training watched by nobody."""
        model = small_model(kit, TowerStrategy(TOWERS), run_eagerly=True)
        x, y = data(30)
        x[20:] = np.nan
        with self.assertRaisesRegex(Exception, "Inf|NaN|nan"):
            tf.debugging.enable_check_numerics()
            try:
                model.fit(x, y, batch_size=5, verbose=0, shuffle=False, callbacks=[quiet()])
            finally:
                tf.debugging.disable_check_numerics()
        self.assertIsNone(model.distribute_strategy.extended.modes.watch)
        self.assertIsNone(iterators.counting.follow)

    @wide.turns(*KITS)
    @pytest.mark.wide
    def test_after_an_error_between_two_steps(self, kit):
        """Else the next training with a report counts for the one that failed."""
        model = small_model(kit, TowerStrategy(TOWERS))
        model.fit(*data(9), batch_size=3, verbose=0)

        class Fails(kit.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            model.fit(*data(9), batch_size=3, verbose=0, callbacks=[quiet(), Fails()])
        found = quiet()
        model.fit(*data(9), batch_size=3, epochs=2, verbose=0, callbacks=[found])
        self.assertEqual([epoch.rows for epoch in found.epochs], 2 * [(3, 3, 3)])
        self.assertIsNone(iterators.counting.follow)

    def test_costs_no_more_than_it_may(self):
        """Else the report takes more of a training than was allowed."""
        model = small_model(keras, TowerStrategy(TOWERS))
        found = quiet(most=1e-9)
        model.fit(*data(20), batch_size=5, epochs=3, verbose=0, callbacks=[found])
        self.assertEqual([epoch.sampled_in for epoch in found.epochs], [0, 0, 0])
        self.assertIs(found.epochs[0].sample, found.epochs[2].sample)

    def test_someone_elses_profile(self):
        """Else the training stops where TensorBoard takes a profile, or spoils it."""
        model = small_model(keras, TowerStrategy(TOWERS))
        found = quiet()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        with tf.profiler.experimental.Profile(folder):
            model.fit(*data(20), batch_size=5, verbose=0, callbacks=[found])
        self.assertIsNone(found.epochs[0].sample)
        self.assertIn("no step sampled yet", str(found.epochs[0]))
        self.assertNotEmpty(list(pathlib.Path(folder).rglob("*.xplane.pb")))

    def test_prints_and_draws(self):
        """Else there is nothing to look at."""
        model = small_model(keras, TowerStrategy(TOWERS))
        printed = []
        path = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "towers.png")
        model.fit(*data(20), batch_size=5, epochs=2, verbose=0,
                  callbacks=[quiet(picture=path, print_fn=printed.append)])
        self.assertLen(printed, 2)
        self.assertStartsWith(printed[1], "\nepoch 2: 20 rows in")
        self.assertEqual(pathlib.Path(path).read_bytes()[:4], b"\x89PNG")


def events(folder):
    """What TensorBoard would read: (run, tag) -> (plugin, {step: value})."""
    found = {}
    for path in sorted(pathlib.Path(folder).rglob("*tfevents*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                plugin, values = found.setdefault(
                    (path.parent.name, value.tag), (value.metadata.plugin_data.plugin_name, {}))
                values[event.step] = tf.make_ndarray(value.tensor)
    return found


class TensorBoardTest(parameterized.TestCase):
    """log_dir."""

    @wide.turns(*KITS)
    def test_writes_what_it_found(self, kit):
        """Else TensorBoard shows nothing, or other numbers than the table."""
        folder = self.enter_context(tempfile.TemporaryDirectory())
        model = small_model(kit, TowerStrategy(TOWERS))
        kept = quiet(log_dir=folder, most=1.)
        model.fit(*data(20), batch_size=5, epochs=2, verbose=0, callbacks=[kept])
        found = events(folder)
        for number in range(3):
            plugin, rows = found.pop((f"tower_{number}", "towers/rows"))
            self.assertEqual(plugin, "scalars")
            self.assertEqual(rows, {epoch.number: epoch.rows[number] for epoch in kept.epochs})
            for tag, of in (("busy_ms_a_step", lambda part: 1e3 * part.seconds),
                            ("idle_share", lambda part: part.idle)):
                _, values = found.pop((f"tower_{number}", f"towers/{tag}"))
                self.assert_near(values, {epoch.number: of(epoch.parts[number])
                                          for epoch in kept.epochs})
        for part in ("step", "merge", "update", "split", "input"):
            _, values = found.pop(("step", f"step/{part}_ms"))
            self.assert_near(values, {epoch.number: 1e3 * getattr(epoch.sample, part)
                                      for epoch in kept.epochs})
        self.assertEmpty(found)

    def test_stages(self):
        """Else TensorBoard shows towers of stages, but not which stage is idle."""
        folder = self.enter_context(tempfile.TemporaryDirectory())
        model = small_model(keras, TowerStrategy([["CPU:1", "CPU:2"]], micro_batches=2))
        kept = quiet(log_dir=folder, most=1., picture=os.path.join(folder, "stages.png"))
        model.fit(*data(20), batch_size=5, epochs=2, verbose=0, callbacks=[kept])
        found = events(folder)
        self.assertEqual({run for run, _ in found}, {"step", "tower_0", "tower_0_stage_0",
                                                     "tower_0_stage_1"})
        for stage in range(2):
            for tag, name, factor in (("busy_ms_a_step", "seconds", 1e3),
                                      ("idle_share", "idle", 1)):
                _, values = found[f"tower_0_stage_{stage}", f"stages/{tag}"]
                self.assert_near(values, {epoch.number: factor * getattr(
                    epoch.parts[1 + stage], name) for epoch in kept.epochs})
        self.assert_near(found["step", "step/bubble"][1],
                         {epoch.number: epoch.bubble for epoch in kept.epochs})
        self.assertIn(("step", "step/merge_ms"), found)
        self.assertEqual(pathlib.Path(folder, "stages.png").read_bytes()[:4], b"\x89PNG")

    def assert_near(self, found, wanted):
        self.assertEqual(list(found), list(wanted))
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-6)

    @pytest.mark.wide
    def test_a_sample_is_written_once(self):
        """Else an old sample looks like what every epoch after it took."""
        folder = self.enter_context(tempfile.TemporaryDirectory())
        model = small_model(keras, TowerStrategy(TOWERS))
        model.fit(*data(20), batch_size=5, epochs=3, verbose=0,
                  callbacks=[quiet(log_dir=pathlib.Path(folder), most=1e-9)])
        found = events(folder)
        self.assertEqual(list(found["tower_2", "towers/rows"][1]), [0, 1, 2])
        self.assertEqual(list(found["tower_2", "towers/idle_share"][1]), [0])
        self.assertEqual(list(found["step", "step/merge_ms"][1]), [0])

    @pytest.mark.wide
    def test_beside_keras_own_callback(self):
        """Else one of the two overwrites the other's files, or both measure each other."""
        folder = self.enter_context(tempfile.TemporaryDirectory())
        model = small_model(keras, TowerStrategy(TOWERS))
        model.fit(*data(20), batch_size=5, epochs=2, verbose=0, callbacks=[
            keras.callbacks.TensorBoard(folder, write_graph=False), quiet(log_dir=folder)])
        found = events(folder)
        self.assertIn(("train", "epoch_loss"), found)
        self.assertIn(("tower_0", "towers/rows"), found)


class CallbackTest(parameterized.TestCase):
    """The callback among others."""

    @wide.turns(*KITS)
    def test_has_what_callbacks_have(self, kit):
        """Else a Keras that calls another method on its callbacks fails in the middle of fit."""
        wanted = {attribute for attribute in dir(kit.callbacks.Callback)
                  if attribute.startswith(("on_", "set_", "_implements", "_supports"))}
        report = tower_report.TowerReport()
        self.assertEmpty({attribute for attribute in wanted if not hasattr(report, attribute)})
        self.assertFalse(report._implements_train_batch_hooks())  # so tf_keras waits for no batch

    @wide.turns(*KITS)
    def test_model_of_no_strategy(self, kit):
        """Else the report is silent, and its user believes in towers that there are not."""
        model = kit.Sequential([kit.Input([3]), kit.layers.Dense(1)])
        model.compile("sgd", "mse")
        with self.assertRaisesRegex(
                ValueError, "for models that a TowerStrategy trains, but .* is trained by another"):
            model.fit(*data(4), verbose=0, callbacks=[tower_report.TowerReport()])

    @parameterized.parameters(({"picture": 3}, TypeError, "picture must be None or the path"),
                              ({"log_dir": 3}, TypeError, "log_dir must be None or the path of"),
                              ({"most": 0}, ValueError, "most must be a share.*got 0"),
                              ({"most": 2}, ValueError, "most must be a share.*got 2"),
                              ({"most": "a"}, TypeError, "most must be a number.*got 'a'"),
                              ({"most": True}, TypeError, "most must be a number.*got True"),
                              ({"print_fn": 3}, TypeError, "print_fn must be.*got 3 of type int"),
                              ({"picture": "."}, ValueError, "picture must be.*'.' is a folder"),
                              ({"picture": "no/such/a.png"}, ValueError,
                               "picture is to be.*'no/such/a.png'.*no folder 'no/such'"),
                              ({"picture": "a.doc"}, ValueError, "picture must.*ends in '.doc'"),
                              ({"picture": "a"}, ValueError, "picture must.*'a', which ends in ''"),
                              ({"log_dir": __file__}, ValueError, "log_dir must be a folder"))
    def test_arguments(self, arguments, error, message):
        """Else a mistake shows after an epoch of training."""
        with self.assertRaisesRegex(error, message):
            tower_report.TowerReport(**arguments)

    def test_picture_without_matplotlib(self):
        """Else a training fails when it ends, hours after the mistake, and its history is lost."""
        with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
            with self.assertRaisesRegex(ModuleNotFoundError, r"matplotlib.*towerstrategy\[demo\]"):
                tower_report.TowerReport("a.png")
            tower_report.TowerReport()

    def test_can_be_copied(self):
        """Else a tuner, which copies its callbacks for each trial, fails."""
        self.assertEqual(copy.deepcopy(tower_report.TowerReport("a.png")).picture, "a.png")


def fails(*args, **kwargs):
    raise OSError("no space left")


class HarmlessTest(parameterized.TestCase):
    """A report that goes wrong, in a training that does not."""

    @wide.product(0, 2, kit=KITS, where=(
        "print", "picture.draw", "events.Events.write", "events.Events.close",
        "epochs.Watch.__init__", "epochs.Watch.begin", "epochs.Watch.end",
        "epochs._tf.map_in_place", "epochs.Watch._rows_taken", "sample.read",
        "tempfile.TemporaryDirectory",
        "tensorflow.profiler.experimental.start", "tensorflow.profiler.experimental.stop"))
    def test_never_ends_a_training(self, kit, where):
        """Else hours of training, their history and the callbacks after this one are lost."""
        folder = self.enter_context(tempfile.TemporaryDirectory())
        model = small_model(kit[1], TowerStrategy(TOWERS))
        ended = []
        found = quiet(picture=os.path.join(folder, "a.png"), log_dir=folder,
                      print_fn=fails if where == "print" else None)
        later = kit[1].callbacks.LambdaCallback(on_train_end=ended.append)
        stop = tf.profiler.experimental.stop
        if where != "print":
            ours = "" if where.startswith("te") else "towerstrategy.extras.report."
            self.enter_context(mock.patch(ours + where, fails))
        try:
            with self.assertWarnsRegex(RuntimeWarning, "TowerReport could not .*no space left"):
                history = model.fit(*data(20), batch_size=5, epochs=2, verbose=0,
                                    callbacks=[found, later])
        finally:
            if where.endswith("stop"):
                stop(save=False)
        self.assertLen(history.history["loss"], 2)
        self.assertLen(ended, 1)
        self.assertEqual(int(model.optimizer.iterations), 8)
        self.assertIsNone(iterators.counting.follow)

    @pytest.mark.wide
    def test_console(self):
        """Else tables are torn by a progress bar, and TensorFlow's lines stand between them."""
        code = (
            "import os, tensorflow as tf, numpy as np, towerstrategy\n"
            "child = os.fork()\n"  # which imports the other Keras
            "os.environ['TF_USE_LEGACY_KERAS'] = '0' if child else '1'\n"
            "if child:\n"
            "    assert not os.waitpid(child, 0)[1]\n"
            "    print('End of tf_keras', flush=True)\n"
            "from towerstrategy.report import TowerReport\n"
            "assert tf.keras.Model.__module__.split('.')[0] == ('keras' if child else 'tf_keras')\n"
            "with towerstrategy.TowerStrategy(towerstrategy.split_cpu(2)).scope():\n"
            "    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])\n"
            "    model.compile('sgd', 'mse')\n"
            "model.fit(np.ones([32, 3]), np.ones([32, 1]), batch_size=8, epochs=2,\n"
            "          callbacks=[TowerReport(most=1e-9)])\n")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
        done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, check=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = done.stdout.replace("\b", "").replace("\r", "\n")
        self.assertNotRegex(said, r"(?i)profiler|xspace")
        for one in said.split("End of tf_keras"):
            first, second = one.split("Epoch 1/2")[1].split("Epoch 2/2")
            self.assertRegex(first, r"(?s)4/4[^\n]*loss: .*\n\s*epoch 1: 32 rows.*tower 1 .*input ")
            self.assertRegex(
                second, r"(?s)4/4[^\n]*loss: .*\nepoch 2: .*; rows of the towers: 16, 16")
            self.assertNotIn("tower 0", second)


class QuietTest(absltest.TestCase):
    """quiet: what a report keeps from the training."""

    @pytest.mark.wide
    def test_keeps_what_others_write(self):
        """Else an error that TensorFlow logs while a sample begins or ends is lost."""
        kept = os.dup(2)
        with tempfile.TemporaryFile() as written:
            os.dup2(written.fileno(), 2)
            try:
                with quiet_lib.profiler():
                    for line in (b"I0000 00:00:17.6 2574 profiler_session.cc:117] Profiler s\n",
                                 b"2024-01-02 03:04:05.6: I a/b/save_profile.cc:1] Collecting\n",
                                 b"E0000 00:00:17.6 2574 cupti_tracer.cc:7] no privilege\n",
                                 b"mine: profiler_session.cc:117] is named\n"):
                        os.write(2, line)
            finally:
                os.dup2(kept, 2)
                os.close(kept)
            written.seek(0)
            self.assertEqual(written.read().splitlines(), [
                b"E0000 00:00:17.6 2574 cupti_tracer.cc:7] no privilege",
                b"mine: profiler_session.cc:117] is named"])

    def freed_while_stopping(self):
        """What is left of 2,000 bytes that are freed as the profiler stops."""
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        library.free.argtypes = [ctypes.c_void_p]
        address = library.malloc(2000)
        ctypes.memset(address, 7, 2000)
        left = []

        def stop(save):
            library.free(address)
            left.append(ctypes.string_at(address + 64, 1000))

        recording = sample_lib.Recording("sample")
        with mock.patch.object(tf.profiler.experimental, "stop", stop), \
                self.assertRaisesRegex(OSError, "no space"):
            recording.run(fails)
        tf.profiler.experimental.stop(save=False)
        return left[0]

    @unittest.skipUnless(sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"),
                         "for glibc")
    @pytest.mark.wide
    def test_the_profiler_finds_nothing_in_what_it_has_freed(self):
        """Else it writes there, and samples end one of four workers in most trainings."""
        self.assertNotIn(b"\7" * 8, self.freed_while_stopping())


def profile(lines, names=(), plane="/host:CPU"):
    """An XSpace with one plane: line name -> (event, start, length) in ms; names: tf_op stats."""
    space = xplane_pb2.XSpace()
    made = space.planes.add(name=plane)
    made.stat_metadata[1].name = "tf_op"
    for line_name, events in lines.items():
        line = made.lines.add(name=line_name, timestamp_ns=1000)
        for name, start, length in events:
            key = len(made.event_metadata) + 1
            made.event_metadata[key].name = name
            event = line.events.add(metadata_id=key, offset_ps=int(start * 1e9),
                                    duration_ps=int(length * 1e9))
            if plane != "/host:CPU":
                event.stats.add(metadata_id=1, str_value=name)
    return space


def read(*spaces, kinds=("CPU", "CPU"), merge_kind="CPU", seconds=1.):
    towers = tuple(f"/device:{kind}:{number}" for number, kind in enumerate(kinds))
    placement = devices.Placement(towers, f"/device:{merge_kind}:0", balanced=False)
    return sample_lib.read(spaces, seconds, placement)


class SampleTest(parameterized.TestCase):
    """What is made of TensorFlow's profile."""

    def assert_ms(self, seconds, *wanted):
        np.testing.assert_allclose(1e3 * np.array(seconds), wanted, atol=1e-6)

    def test_operations_belong_to_the_scope_they_are_in(self):
        """Else one tower's time is told as another's, or as the merge's."""
        found = read(profile({"tf_Compute": [
            ("towerstrategy_sample", 0, 50),
            ("f/tower_0_CPU_1/dense/MatMul:MatMul", 1, 2),
            ("f/gradient_tape/tower_1_CPU_2/merge/MatMul:MatMul", 5, 4),
            ("f/merge/AddN:AddN", 10, 8),
            ("f/merge/tower_update/adam/Mul:Mul", 20, 16),
            ("f/merge/tower_update_1/adam/Mul:Mul", 40, 1),
            ("tower_0_CPU_1x/MatMul:MatMul", 45, 1),
            ("f/tower_1_CPU_2/Read/_3:_Send", 46, 0.5),
            ("f/merge/while/body/_3/merge/while/tower_1_CPU_2/Mul:Mul", 47, 0.125),
            ("f/tower_1_CPU_2/while/body/_9/tower_0_CPU_1/while/Mul:Mul", 48, 0.25),
            ("StatefulPartitionedCall:StatefulPartitionedCall", 0, 50)],
            "tf_data_private": [("tower_split/strided_slice:StridedSlice", 30, 0.25)],
            "tf_data_next": [("IteratorGetNextOp::DoCompute", 0, 0.125)]}))
        self.assert_ms([found.step, *found.towers], 50, 2, 4.875)
        self.assert_ms([found.merge, found.update, found.split, found.input], 8, 17, 0.25, 0.125)
        self.assertAlmostEqual(found.idle(0), 0.96)

    def test_a_loop_in_a_replica_function(self):
        """Else all towers' loops are tower 0's time, and measured shares leave it no rows."""
        strategy = TowerStrategy(TOWERS[:2])
        value = tf.ones([200, 200]) / 200

        def step(x):
            return tf.while_loop(lambda turn, _: turn < tf.shape(x)[0],
                                 lambda turn, kept: (turn + 1, value @ kept), (0, value))[1]

        run = tf.function(lambda x: strategy.run(step, (x,)))
        parts = strategy.experimental_distribute_values_from_function(
            lambda context: tf.ones([1 + 300 * context.replica_id_in_sync_group, 1]))
        run(parts)
        samples = []
        for _ in range(3):
            recording = sample_lib.Recording("sample")
            run(parts)
            samples.append(recording.end(strategy.extended.placement).towers)
        self.assertGreater(*reversed(np.min(samples, 0)))

    def test_operations_at_the_same_time_count_once(self):
        """Else a tower is busy for longer than the step takes."""
        found = read(profile({
            "a": [("towerstrategy_sample", 0, 10), ("tower_0_CPU_1/A:A", 1, 4)],
            "b": [("tower_0_CPU_1/B:B", 2, 1), ("tower_0_CPU_1/C:C", 4, 3)]}))
        self.assert_ms(found.towers, 6, 0)

    def test_outside_of_the_step_nothing_counts(self):
        """Else the pipeline's work before and after the step is the step's."""
        found = read(profile({"a": [("towerstrategy_sample", 10, 10), ("tower_0_CPU_1/A:A", 8, 4),
                                    ("tower_split/A:A", 5, 2), ("tower_split/A:A", 19, 2)]}))
        self.assert_ms([found.towers[0], found.split], 2, 1)

    def test_several_steps_in_a_call(self):
        """Else steps_per_execution makes steps seem to take as many times longer."""
        found = read(profile({"a": [("towerstrategy_sample", 0, 12), ("tower_0_CPU_1/A:A", 1, 4),
                                    ("tower_0_CPU_1/A:A", 6, 2)],
                              "b": [("IteratorGetNextAsOptionalOp::DoCompute", 0, 1),
                                    ("IteratorGetNextAsOptionalOp::DoCompute", 5, 1)]}))
        self.assertEqual(found.steps, 2)
        self.assert_ms([found.step, found.towers[0], found.input], 6, 3, 1)

    def test_accelerators(self):
        """Else a GPU tower's time is that of starting its kernels."""
        host = profile({"a": [("towerstrategy_sample", 0, 20), ("tower_0_GPU_0/A:A", 1, 1),
                              ("merge/A:A", 3, 2)]})
        device = profile({"Stream #1": [("tower_0_GPU_0/A:A", 2, 5), ("merge/A:A", 9, 1)],
                          "TensorFlow Ops": [("tower_0_GPU_0/A:A", 0, 20)]},
                         plane="/device:GPU:0")
        found = read(host, device, kinds=("GPU", "GPU"))
        self.assert_ms([*found.towers, found.merge], 5, 0, 2)
        self.assert_ms([read(host, device, kinds=("GPU", "GPU"), merge_kind="GPU").merge], 1)

    def test_operations_belong_to_the_stage_they_are_in(self):
        """Else one stage's time is told as another's."""
        placement = TowerStrategy([["CPU:1", "CPU:2"], ["CPU:3", "CPU:4"]],
                                  micro_batches=2).extended.placement
        found = sample_lib.read([profile({"tf_Compute": [
            ("towerstrategy_sample", 0, 100),
            ("f/tower_0_CPU_1/tower_stage_0/dense/MatMul:MatMul", 0, 1),
            ("f/tower_0_CPU_1/gradient_tape/tower_stage_1/x/Mul:Mul", 2, 2),
            ("f/tower_1_CPU_1/loss/Mean:Mean", 5, 4),
            ("f/tower_2_CPU_3/tower_stage_0_1/x/tower_stage_1/MatMul:MatMul", 10, 8),
            ("merge/AddN:AddN", 20, 16),
            ("merge/tower_update/If/then/Mul:Mul", 40, 32),
            ("merge/other:Mul", 80, 1), ("f/tower_3_CPU_3/unknown:Mul", 90, 1)]})], 1., placement)
        self.assert_ms([*found.stages[0], *found.stages[1]], 1, 2, 0, 8)
        self.assert_ms([*found.towers, found.merge, found.update], 7, 9, 17, 32)

    def test_one_tower_has_all_operations(self):
        """Else one tower, which has no scope, is never busy."""
        found = read(profile({"tf_Compute": [("towerstrategy_sample", 0, 10), ("f/A:MatMul", 1, 4)],
                              "tf_data": [("map/A:MatMul", 5, 4)]}), kinds=("CPU",))
        self.assert_ms(found.towers, 4)

    def test_one_tower_that_waits_for_other_machines(self):
        """Else the fastest worker, which waits longest, looks busiest, and gets fewer rows."""
        found = read(profile({
            "tf_Compute": [("towerstrategy_sample", 0, 20), ("f/A:MatMul", 1, 4)],
            "collective_ops": [("CollectiveReduceV2:CollectiveReduceV2", 5, 9)],
            "tf_Compute/2": [("_27:_Send", 15, 2)]}), kinds=("CPU",))
        self.assert_ms(found.towers, 4)

    def test_profile_without_anything(self):
        """Else a TensorFlow that notes less stops the training."""
        found = read(profile({}), seconds=0.5)
        self.assertEqual((found.step, found.towers, found.idle(0)), (0.5, (0, 0), 1))


if __name__ == "__main__":
    absltest.main()
