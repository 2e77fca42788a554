"""Wrong arguments: what each public name refuses, and that the message tells what is possible."""

import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import small_models
import towerstrategy
import wide
from peers import mirrored, per_replica, plain, two_towers
from towerstrategy.extras.report import description

InputOptions = tf.distribute.InputOptions
X = np.ones([5, 8], "float32")
PER_REPLICA = tf.distribute.InputReplicationMode.PER_REPLICA
NAN, INFINITY = float("nan"), float("inf")


class Pair(tf.experimental.ExtensionType):
    left: tf.Tensor


def dataset(*shapes):
    return tf.data.Dataset.from_tensors(tuple(np.ones(shape, np.float32) for shape in shapes))


class DevicesTest(parameterized.TestCase):

    @parameterized.parameters(
        (0, ValueError, "micro_batches must be at least 1, but got 0"),
        (-2, ValueError, "micro_batches must be at least 1, but got -2"),
        (1.5, TypeError, "micro_batches must be a whole number, but got 1.5"),
        (True, TypeError, "micro_batches must be a whole number, but got True of type bool"),
        (None, TypeError, "micro_batches must be a whole number, but got None"),
        ("8", TypeError, "micro_batches must be a whole number, but got '8' of type str"),
        (10**9, ValueError, "micro_batches must be at most 1024, but got 1000000000"))
    def test_micro_batches(self, micro_batches, error, message):
        """Else a wrong number of parts is noticed in the middle of a training."""
        with self.assertRaisesRegex(error, message):
            towerstrategy.TowerStrategy(["CPU:1"], micro_batches=micro_batches)

    @parameterized.parameters(
        (NAN, TypeError, "devices must be None, a count, .*but got nan"),
        (INFINITY, TypeError, "devices must be None, a count, .*but got inf"),
        (2 + 0j, TypeError, r"devices must be None, a count, .*but got \(2\+0j\)"),
        (True, TypeError, "devices must be None, a count, .*but got True"),
        (1.5, TypeError, "devices must be None, a count, .*but got 1.5"),
        (0, ValueError, "devices=0 asks for 0 towers, but it must be from 1 to the 8 CPU"),
        (99, ValueError, "devices=99.*split_cpu"),
        ([], ValueError, r"devices is \[\], but at least one"),
        (["CPU:1", "cpu:1"], ValueError, "names CPU:1 twice"),
        (["CPU:1", "CPU:77"], ValueError, "'CPU:77'.*which is not there.*split_cpu"),
        ("gpu", ValueError, "'gpu'.*split_cpu"),
        ([0, 1], ValueError, "names 0 .GPU:0.*split_cpu"),
        ([0.0, 1.0], ValueError, "GPU:0.*which is not there"),
        ([None], TypeError, "A list holds GPU ids or device strings"),
        (-1, ValueError, "devices=-1 asks for -1 towers, but it must be from 1 to the 8 CPU"),
        (b"CPU:1", TypeError, "devices must be None, a count, or a list.*bytes"),
        ({"CPU:1": 1}, TypeError, "devices must be None, a count, or a list.*dict"),
        (iter(["CPU:1"]), TypeError, "devices must be None, a count, or a list.*iterator"),
        ("cpu:1,cpu:2", ValueError, "'cpu:1,cpu:2', which is no device string"),
        ("", ValueError, "devices has '', which is no device string"),
        ("CPU:*", ValueError, r"'CPU:\*', which is no device string"),
        ([[["CPU:1", "CPU:2"]]], TypeError, r"devices has an item .*of type list"),
        ([["CPU:1", "CPU:2"], "CPU:3"], TypeError, "a list of lists.*but got both"),
        ([["CPU:1", "CPU:2"], ["CPU:3"]], ValueError, "as many stages.* towers of 2, 1 stages"),
        ([[], []], ValueError, "as many stages, at least one, but got towers of 0, 0 stages"),
        ([["CPU:1", "CPU:2"], ["CPU:3", "CPU:1"]], ValueError, "names CPU:1 twice"),
        ([["CPU:1", "CPU:9"]], ValueError, "devices names 'CPU:9' .CPU:9., which is not there"),
        ([True], TypeError, "devices has an item True of type bool"),
        (tf.config.list_physical_devices("CPU"), ValueError, "PhysicalDevice.*is no device string"),
        ([NAN], TypeError, "devices has an item nan of type float"),
        ([b"CPU:1"], TypeError, "devices has an item b'CPU:1' of type bytes"),
        ([-1], ValueError, "devices names -1 .GPU:-1., which is not there"),
        (["CPU:1", "GPU:0"], ValueError, "devices names 'GPU:0'"),
        (["/job:localhost/replica:1/task:0/device:CPU:0"], ValueError, "on another machine"))
    def test_devices(self, devices, error, message):
        """Else a wrong device ends in a message that does not say what is there."""
        with self.assertRaisesRegex(error, message) as caught:
            towerstrategy.TowerStrategy(devices)
        self.assertIn("The devices here: CPU:0, CPU:1", str(caught.exception))

    @parameterized.parameters(
        ([1], ValueError, r"a number for each of the 2 towers, but got 1: \[1\].*CPU:0, CPU:1"),
        ([1, 2, 3], ValueError, "a number for each of the 2 towers, but got 3"),
        ([], ValueError, "a number for each of the 2 towers, but got 0"),
        ([1, 0], ValueError, "above 0 and finite, but got 0 for CPU:1.*leave it out"),
        ([0, 0], ValueError, "above 0 and finite, but got 0 for CPU:0"),
        ([-1, 2], ValueError, "above 0 and finite, but got -1 for CPU:0"),
        ([1, NAN], ValueError, "above 0 and finite, but got nan for CPU:1"),
        ([INFINITY, 1], ValueError, "above 0 and finite, but got inf for CPU:0"),
        ([1, 10**400], ValueError, "above 0 and finite, but got 10*"),
        (np.ones([2, 2]), TypeError, r"shares must be numbers, but got \[1.0, 1.0\] of type list"),
        ([1, True], TypeError, "shares must be numbers, but got True of type bool for CPU:1"),
        (["1", "2"], TypeError, "shares must be numbers, but got '1' of type str"),
        ([1, None], TypeError, "shares must be numbers, but got None"),
        ([[1], [2]], TypeError, r"shares must be numbers, but got \[1\] of type list"),
        (3, TypeError, 'shares must be None, a list .*"measured" or "memory", but got 3 of type'),
        ({"CPU:0": 1}, TypeError, "shares must be None, a list .*of type dict"),
        ("equal", ValueError, "shares must be None, a list .*but got 'equal'"),
        ("", ValueError, "shares must be None, a list .*but got ''"),
        ("memory", ValueError, "needs to know the memory of each tower.*CPU:0, CPU:1"))
    def test_shares(self, shares, error, message):
        """Else a tower gets no rows, or rows that nobody has asked for."""
        with self.assertRaisesRegex(error, message):
            towerstrategy.TowerStrategy(["CPU:0", "CPU:1"], shares=shares)

    def test_what_shares_may_be(self):
        """Else shares that were computed are refused, with an error about something else."""
        for shares in (np.array([3, 1]), tf.constant([3., 1.]), (3., 1.)):
            strategy = towerstrategy.TowerStrategy(["CPU:0", "CPU:1"], shares=shares)
            self.assertEqual(strategy.shares, [3., 1.])

    def test_cluster_resolver(self):
        """Else what is no cluster resolver is taken for none at all."""
        with self.assertRaisesRegex(TypeError, "cluster_resolver must be None or.*got 0 of type"):
            towerstrategy.TowerStrategy(["CPU:0"], cluster_resolver=0)

    @parameterized.parameters(
        (True, TypeError, "merge_device must be None.*got True of type bool"),
        ("balance", ValueError, """'balance'.*"cpu", "balanced" or a device string"""),
        (["CPU:0"], TypeError, "merge_device must be.*of type list"),
        ("", ValueError, "merge_device has '', which is no device string"),
        ("GPU:0", ValueError, "merge_device names 'GPU:0'.*not there"),
        ("/job:worker/task:1/device:CPU:0", ValueError, "merge_device names.*on another machine"))
    def test_merge_device(self, merge_device, error, message):
        """Else a wrong merge device is noticed when the first variable is made."""
        with self.assertRaisesRegex(error, message) as caught:
            towerstrategy.TowerStrategy(2, merge_device)
        self.assertIn("The devices here: CPU:0, CPU:1", str(caught.exception))

    @parameterized.parameters(
        (0, ValueError, "at least 1, but got 0"), (10**9, ValueError, "at most 1024, but got"),
        (3, RuntimeError, "TensorFlow had started with 8 CPU"),
        ("2", TypeError, "whole number, but got '2' of type str"),
        (True, TypeError, "whole number, but got True"), (1.5, TypeError, "number, but got 1.5"),
        (NAN, TypeError, "number, but got nan"), (INFINITY, TypeError, "number, but got inf"),
        (None, TypeError, "number, but got None"), ([4], TypeError, r"number, but got \[4\]"))
    def test_split_cpu(self, count, error, message):
        """Else a wrong count fills the memory, or is one device."""
        with self.assertRaisesRegex(error, message):
            towerstrategy.split_cpu(count)

    def test_stages_for_gpus(self):
        """Else multi_gpu_model trains on the first device of each inner list, without a word."""
        with self.assertRaisesRegex(ValueError, "gpus must be a list.*The devices here: CPU:0"):
            towerstrategy.multi_gpu_model(small_models.make(keras, "functional"),
                                          [["CPU:1", "CPU:2"]])

    @parameterized.product(argument=["cpu_merge", "cpu_relocation"], value=[None, "no", 2, []])
    def test_switches(self, argument, value):
        """Else "no" merges on the CPU, and moves the weights there."""
        with self.assertRaisesRegex(TypeError, f"{argument} must be True or False, but got"):
            towerstrategy.multi_gpu_model(small_models.make(keras, "functional"),
                                          ["CPU:1", "CPU:2"], **{argument: value})

    @parameterized.parameters("adopt", "multi_gpu_model")
    def test_model(self, name):
        """Else what is no model is noticed in its training."""
        take = two_towers().adopt if name == "adopt" else (
            lambda model: towerstrategy.multi_gpu_model(model, ["CPU:1", "CPU:2"]))
        for model in (None, 3, "model", [1], keras.layers.Dense(1), keras.Model, tf.Module(), len):
            with self.assertRaisesRegex(TypeError, "model must be a Keras or tf_keras model, but"):
                take(model)


    def test_describe(self):
        """Else another strategy ends in a message about an attribute."""
        for strategy in (3, mirrored()):
            with self.assertRaisesRegex(TypeError, "strategy must be a TowerStrategy, but got"):
                description.describe(strategy)


class ProcessTest(parameterized.TestCase):
    """What fixes a process' devices or mode."""

    def run_script(self, script):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment,
                              capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        return done.stdout

    @pytest.mark.wide
    def test_graph_mode_and_late_split_cpu(self):
        """Else a TensorFlow 1 program fails inside, or a late split_cpu is ignored."""
        self.assertEqual(self.run_script("""
            import tensorflow as tf
            import towerstrategy

            def error_of(call):
                try:
                    call()
                except Exception as error:
                    return f"{type(error).__name__}: {error}"

            towerstrategy.split_cpu(2)
            print(towerstrategy.split_cpu(3))
            tf.constant(1)
            print(error_of(lambda: towerstrategy.split_cpu(2)))
            print(error_of(lambda: towerstrategy.split_cpu(3)))
            tf.compat.v1.disable_eager_execution()
            print(error_of(lambda: towerstrategy.TowerStrategy(["CPU:0"])))
            """).splitlines(), [
                "['CPU:0', 'CPU:1', 'CPU:2']",
                "RuntimeError: split_cpu(count=2) came after TensorFlow had started with 3 CPU "
                "device(s), and that number is fixed for the life of the process. Call split_cpu "
                "first thing after `import tensorflow`, before any tensor, variable, model or "
                "strategy is made.",
                "None",
                "RuntimeError: TowerStrategy needs TensorFlow 2 behaviour, but eager execution is "
                "off (a tf.compat.v1 graph, or tf.compat.v1.disable_eager_execution)."])


class BatchTest(parameterized.TestCase):

    @parameterized.named_parameters(
        ("scalar", lambda: 3, ValueError, "the batch is a scalar of dtype int32"),
        ("list_of_rows", lambda: [1., 2.], ValueError, "component 0 is a scalar.*make an array"),
        ("scalar_component", lambda: {"x": np.ones(2), "n": 3}, ValueError,
         "component n is a scalar"),
        ("nothing", lambda: (None, {}), ValueError, "no component with rows"),
        ("rows", lambda: {"x": np.ones(2), "y": np.ones(3), "z": np.ones(2)}, ValueError,
         "x has 2, y has 3, z has 2"),
        ("ragged_rows", lambda: (np.ones(2), tf.ragged.constant([[1], [2], [3]])), ValueError,
         "0 has 2, 1 has 3"),
        ("objects", lambda: {"a": np.array([1, None], object)}, TypeError,
         "component a must be a tensor or array with rows, but got ndarray"),
        ("dataset", lambda: tf.data.Dataset.range(4), TypeError,
         "must be a tensor or array.*experimental_distribute_dataset"),
        ("function", lambda: (np.ones(2), len), TypeError, "component 1 must be a tensor"),
        ("spec", lambda: tf.TensorSpec([2]), TypeError, "must be a tensor or array"),
        ("own_type", lambda: {"x": np.ones(2), "y": Pair([1., 2.])}, TypeError,
         "component y must be a tensor or array.*, but got Pair.*Let the batch have its tensors"))
    def test_split(self, batch, error, message):
        """Else a wrong batch trains on something, or ends in a message about tensors."""
        with self.assertRaisesRegex(error, message):
            two_towers().split(batch())

    def test_what_split_takes(self):
        """Else batches that are right are refused."""
        strategy = two_towers()
        self.assertEqual(plain(strategy.split((np.ones([2]), None)))[1], None)
        self.assertEqual(plain(strategy.split(np.ones([0, 1]))), ("per replica", [[], []]))
        self.assertEqual(plain(strategy.split(tf.Variable([1., 2., 3.]))),
                         ("per replica", [[1., 2.], [3.]]))

    def test_rows_that_differ_in_a_function(self):
        """Else features and labels that do not belong together are trained on."""
        strategy = two_towers()

        @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
        def split(x, y):
            return strategy.experimental_local_results(strategy.split({"x": x, "y": y}))

        with self.assertRaisesRegex(tf.errors.InvalidArgumentError,
                                    r"same number of rows, but x, y have\] \[3 2\]"):
            split(tf.ones([3]), tf.ones([2]))

    def test_inside_a_tower(self):
        """Else each tower splits its part again, or does what is to be done once for all."""
        strategy, batches = two_towers(), dataset([4, 2])
        for call in (lambda: strategy.split(np.ones(4)),
                     lambda: strategy.adopt(small_models.make(keras, "functional")),
                     lambda: strategy.experimental_distribute_dataset(batches),
                     lambda: strategy.distribute_datasets_from_function(lambda _: batches),
                     lambda: strategy.experimental_distribute_values_from_function(lambda _: 1.)):
            with self.assertRaisesRegex(RuntimeError, "outside of the function given to strategy"):
                strategy.run(call)

    @parameterized.parameters(2, 1)
    def test_dataset_whose_components_differ(self, towers):
        """Else a dataset whose labels do not fit its features is noticed in the loss, or not."""
        strategy = towerstrategy.TowerStrategy(towers)
        with self.assertRaisesRegex(ValueError, "same number of rows, but 0 has 3, 1 has 1"):
            strategy.experimental_distribute_dataset(dataset([3, 2], [1, 2]))

    @parameterized.parameters(2, 1)
    def test_unbatched_dataset_with_vector_targets(self, towers):
        """Else a newcomer who forgot to batch looks for labels that do not fit their features."""
        examples = tf.data.Dataset.from_tensor_slices((np.ones([6, 8]), np.ones([6, 1])))
        with self.assertRaisesRegex(ValueError, "dataset is not batched: call dataset.batch"):
            towerstrategy.TowerStrategy(towers).experimental_distribute_dataset(examples)

    def test_arrays_for_a_dataset(self):
        """Else who forgets from_tensor_slices gets pages of numbers for an error."""
        with self.assertRaisesRegex(TypeError, r"dataset must be a tf.data.Dataset, but got \["
                                    r"<ndarray of float32, shape \(5, 8\)>, 1\] of type list"):
            two_towers().experimental_distribute_dataset([X, 1])

    def test_dataset_functions(self):
        """Else a wrong function ends in a message that does not say which one."""
        strategy = two_towers()
        with self.assertRaisesRegex(TypeError, "dataset_fn must be a function, but got <.*Dataset"):
            strategy.distribute_datasets_from_function(dataset([3]))
        with self.assertRaisesRegex(TypeError, "value_fn must be a function, but got 3"):
            strategy.experimental_distribute_values_from_function(3)
        with self.assertRaisesRegex(ValueError, r"for tower 1 it returned \[1\], and for tower 0"):
            strategy.experimental_distribute_values_from_function(
                lambda context: [1] * context.replica_id_in_sync_group)

    @parameterized.named_parameters(("dtype", lambda: tf.data.Dataset.range(4).batch(2)),
                                    ("structure", lambda: dataset([3], [3])))
    def test_datasets_of_towers_that_differ(self, other):
        """Else the towers' own datasets are zipped into nonsense."""
        options = InputOptions(experimental_replication_mode=PER_REPLICA)
        with self.assertRaisesRegex(TypeError, "one structure and dtype, but for tower 1 they are"):
            two_towers().distribute_datasets_from_function(
                lambda context: other() if context.input_pipeline_id else dataset([3]), options)

    def test_input_options(self):
        """Else a wrong option has no effect, without a word."""
        strategy, options = two_towers(), InputOptions(experimental_replication_mode="PER_REPLICA")
        with self.assertRaisesRegex(TypeError, "replication_mode must be"):
            strategy.experimental_distribute_dataset(dataset([3]), options)
        with self.assertRaisesRegex(TypeError, "replication_mode must be"):
            strategy.distribute_datasets_from_function(lambda _: dataset([3]), options)


class CallsTest(parameterized.TestCase):

    @parameterized.named_parameters(
        ("fn", (None,), {}, TypeError, "fn must be a function, but got None"),
        ("args", (len, 1), {}, ValueError, "args must be a list or tuple, got <class 'int'>"),
        ("kwargs", (len, (), [1]), {}, TypeError, "kwargs must be None or a dictionary"),
        ("options", (len,), {"options": "x"}, TypeError, "options must be None or a tf.distribute"))
    def test_run(self, args, kwargs, error, message):
        """Else the error comes out of a tower and is about Python."""
        for strategy in (two_towers(), towerstrategy.TowerStrategy(["CPU:1"])):
            with self.assertRaisesRegex(error, message):
                strategy.run(*args, **kwargs)

    def test_function_that_does_not_run(self):
        """Else a step with a forgotten ``yield``, or ``async``, trains nothing without a word."""
        def generates():
            yield 1

        async def waits():
            return 1

        for fn in (generates, waits):
            with self.assertRaisesRegex(TypeError, "fn must be a function that runs when it is"):
                two_towers().run(fn)

    @parameterized.product(others=[3, 1], in_function=[False, True])
    def test_batch_of_another_strategy(self, others, in_function):
        """Else the rows of the towers that are not there are lost without a word."""
        if others == 1:
            strategy, other = towerstrategy.TowerStrategy(["CPU:1"]), two_towers()
        else:
            strategy, other = two_towers(), towerstrategy.TowerStrategy(3)

        def step(batch):
            return strategy.run(lambda x: x, kwargs={"x": {"a": batch}})

        with self.assertRaisesRegex(ValueError, "kwargs/x/a has a part for each of . towers, but"):
            (tf.function(step) if in_function else step)(other.split(np.ones(6)))
        with self.assertRaisesRegex(ValueError, "value has a part for each of . towers, but"):
            strategy.reduce("SUM", other.split(np.ones(6)), axis=0)

    @parameterized.parameters(("max", ValueError), (3, TypeError), (None, TypeError),
                              (tf.VariableAggregation.SUM, TypeError))
    def test_reduce_op(self, reduce_op, error):
        """Else an unknown reduction ends in an AssertionError without a word."""
        with self.assertRaisesRegex(error, "reduce_op must be 'SUM', 'MEAN'|'MAX' is not a valid"):
            two_towers().reduce(reduce_op, tf.ones([]), axis=None)

    @parameterized.parameters(
        (1.5, TypeError, "axis must be None, a whole number or.*got 1.5"),
        ("0", TypeError, "axis must be None, a whole number or.*got '0'"),
        ([0], TypeError, r"axis must be None, a whole number or.*got \[0\]"),
        (True, TypeError, "axis must be None, a whole number or.*got True"),
        (-3, ValueError, "(?s)axis=-3: .*float64.*(reduction dimension -3|is out of range for)"),
        (1, ValueError, r"axis=1: value of tower 0 on CPU:1 is float64 \(3, 2\); value of tower 1"),
        (None, ValueError, r"axis=None: value of tower 0 on CPU:1 is .*value of tower 1 on CPU:2"))
    def test_axis(self, axis, error, message):
        """Else a wrong axis ends in a message about a kernel, which says nothing of the towers."""
        strategy = two_towers()
        parts = strategy.split(np.ones([5, 2]))
        with self.assertRaisesRegex(error, message):
            strategy.reduce("SUM", parts, axis=axis)
        if axis is not None:
            with self.assertRaisesRegex(error, message.replace("None, a whole number or", "")):
                strategy.gather(parts, axis=axis)

    def test_values_that_have_no_sum(self):
        """Else the error is about a Python attribute, or a kernel."""
        strategy = two_towers()

        def of(*values):
            return strategy.experimental_distribute_values_from_function(
                lambda context: values[context.replica_id_in_sync_group])

        for values, error, message in (
                ((None, None), TypeError, "value of tower 0 on CPU:1 is None; value of tower 1 on"),
                ((1., object()), TypeError, "value of tower 1 on CPU:2 is <object"),
                ((tf.ones([2]), tf.ones([2], tf.int32)), ValueError, r"tower 1.*int32 \(2,\)"),
                ((tf.ones([2]), tf.ones([2, 2])), ValueError, r"\(2,\);.* tower 1.* \(2, 2\)")):
            with self.assertRaisesRegex(error, message):
                strategy.reduce("SUM", of(*values), axis=None)
        for value, error, message in (
                (["a", "b"], TypeError, "value of tower 0 on CPU:1 is string"),
                ([True, False], TypeError, "value of tower 0 on CPU:1 is bool")):
            with self.assertRaisesRegex(error, message):
                strategy.reduce("SUM", strategy.split(np.array(value)), axis=0)
        with self.assertRaisesRegex(ValueError, r"axis=\(0, -2\): value of tower 0.*\(2, 2\)"):
            strategy.reduce("SUM", strategy.split(np.ones([4, 2])), axis=(0, -2))
        with self.assertRaisesRegex(TypeError, "axis=0: value/a of tower 0 on CPU:1 is float64"):
            strategy.reduce("SUM", {"a": strategy.split(np.ones(4)), "b": None}, axis=0)
        with self.assertRaisesRegex(ValueError, "axis=0: value of tower 0 on CPU:1 is float32"):
            strategy.reduce("SUM", per_replica(strategy, 1., 2.), axis=0)
        with self.assertRaisesRegex(ValueError, "cannot be reduced"):
            strategy.reduce("SUM", np.ones(3), axis=None)


class OwnerTest(parameterized.TestCase):

    def test_inside_another_scope(self):
        """Else it is not said that the other scope is in the way."""
        strategy, other = two_towers(), two_towers()
        message = "Mixing different tf.distribute.Strategy objects"
        for call in (lambda: other.scope().__enter__(), lambda: other.run(lambda: 1),
                     lambda: other.reduce("SUM", tf.ones([]), axis=0),
                     lambda: strategy.run(lambda: other.run(lambda: 1))):
            with strategy.scope(), self.assertRaisesRegex(RuntimeError, message):
                call()

    @wide.turns(*small_models.KERAS)
    def test_model_of_another_strategy(self, kit):
        """Else a model trains on other towers than those of the scope."""
        with towerstrategy.TowerStrategy(3).scope():
            model = small_models.make(kit, "functional")
            model.compile("sgd", "mse")
        x, y = small_models.data("functional")
        with two_towers().scope():
            for train in (lambda: model.fit(x, y, verbose=0), lambda: model.evaluate(x, y),
                          lambda: model.train_on_batch(x, y), lambda: model.predict(x)):
                with self.assertRaisesRegex(RuntimeError, "Mixing different"):
                    train()
        model.train_on_batch(x, y)

    def test_tower_local_variable_of_another_strategy(self):
        """Else each tower's write is counted once a tower in the other strategy's variable."""
        strategy, other = two_towers(), two_towers()
        with other.scope():
            count = tf.Variable(0., synchronization=tf.VariableSynchronization.ON_READ,
                                aggregation=tf.VariableAggregation.SUM)
        for write in (count.assign, count.assign_add, count.assign_sub):
            with self.assertRaisesRegex(ValueError, "belongs to another strategy"):
                strategy.run(lambda write=write: write(1.))
        self.assertEqual(plain(count.read_value()), 0.)


class FixedBatchTest(parameterized.TestCase):
    """Models made for batches of one size."""

    @wide.turns(*small_models.KERAS)
    @pytest.mark.wide
    def test_stateful_rnn(self, kit):
        """Else a state that has a row for each row of a batch is lost, or is other rows'."""
        def make():
            kit.utils.set_random_seed(1)
            model = kit.Sequential([kit.Input([5, 4], batch_size=7),
                                    kit.layers.LSTM(2, stateful=True, name="memory"),
                                    kit.layers.Dense(2)])
            model.compile("sgd", "mse")
            return model

        x = np.random.default_rng(0).normal(size=[21, 5, 4])
        alone, on_towers, on_stages = make(), make(), make()
        towerstrategy.TowerStrategy(3).adopt(on_towers)
        towerstrategy.TowerStrategy([["CPU:1", "CPU:2"], ["CPU:3", "CPU:4"]]).adopt(on_stages)
        wanted, *found = ([*one.fit(x, x[:, 0, :2], batch_size=7, shuffle=False,
                                   verbose=0).history["loss"],
                          one.predict(x, batch_size=7, verbose=0),
                          *small_models.weights(one)] for one in (alone, on_towers, on_stages))
        for got in found:
            for one, other in zip(wanted, got):
                np.testing.assert_allclose(one, other, 1e-5, 1e-6)

    @wide.turns(*small_models.KERAS)
    def test_input_with_a_batch_size(self, kit):
        """Else a model is refused that works on sub-batches of another size."""
        inputs = kit.Input([3], batch_size=8)
        same = kit.layers.Lambda(lambda x: tf.reshape(x, x.shape), output_shape=(3,))(inputs)
        model = kit.Model(inputs, kit.layers.Dense(1)(same))
        with two_towers().scope():
            model.compile("sgd", "mse")
        model.fit(np.ones([8, 3]), np.ones([8, 1]), batch_size=8, verbose=0)
        self.assertEqual(model.input_shape, (8, 3))

    def test_operation_on_no_rows(self):
        """Else nobody knows that it was the small last batch which the operation could not take."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"])

        def step():
            def no_empty_rows(x):
                if x.shape[0] == 0:
                    raise ValueError("wrong shape")
                return tf.reduce_sum(x)

            return strategy.run(no_empty_rows, (strategy.split(np.ones([2, 3])),))

        with self.assertRaisesRegex(ValueError, "wrong shape") as caught:
            step()
        told = str(caught.exception) + " ".join(getattr(caught.exception, "__notes__", []))
        self.assertIn("tower 2 on CPU:3, which has none of the batch's 2 rows. Some operations "
                      "fail without rows", told)

    @wide.turns(*small_models.KERAS)
    def test_reshape_to_the_batch_size(self, kit):
        """Else a model that is right on one device is refused, or wrong."""
        random = np.random.default_rng(0)
        x, y = random.normal(size=[8, 3]), random.normal(size=[8, 1])
        found = []
        for strategy in (two_towers(), tf.distribute.get_strategy()):
            kit.utils.set_random_seed(1)
            inputs = kit.Input([3])
            folded = kit.layers.Lambda(lambda x: tf.reshape(x, [8, 3]), output_shape=(3,))(inputs)
            model = kit.Model(inputs, kit.layers.Dense(1)(folded))
            with strategy.scope():
                model.compile("sgd", "mse")
            model.fit(x, y, batch_size=8, verbose=0)
            found.append(small_models.weights(model))
        for one, other in zip(*found):
            np.testing.assert_allclose(one, other, 1e-6)
