"""TensorFlow's own suite for strategies, run against TowerStrategy.

Goes in: the base classes of ``tensorflow.python.distribute.strategy_test_lib`` that apply to a
synchronous strategy on one machine, used as TensorFlow's ``mirrored_strategy_test`` uses them.
Comes out: each of their checks for two towers (merging elsewhere, on tower 0 and balanced) and one.

What is left out: graph mode (TowerStrategy refuses it, see ``strategy_test``), and
``RemoteSingleWorkerMirroredStrategyBase``, which needs a cluster.
"""

import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.distribute import strategy_test_lib

import towerstrategy

IN_AND_OUT = parameterized.named_parameters(("eager", False), ("in_function", True))


class _Checks(strategy_test_lib.DistributionTestBase, parameterized.TestCase):
    """What holds for any number of towers."""

    devices: list[str]
    merge_device: str | None = None

    def setUp(self):
        super().setUp()
        self.strategy = towerstrategy.TowerStrategy(self.devices, self.merge_device)

    def test_minimize_loss(self):
        """Else the simplest custom loop (call, reduce_to, update, read_var) does not learn."""
        self._test_minimize_loss_eager(self.strategy)

    def test_replica_id(self):
        """Else towers cannot tell who they are."""
        self._test_replica_id(self.strategy)

    def test_call_and_merge_exceptions(self):
        """Else an error in a tower or in a merge is lost or hangs the program."""
        self._test_call_and_merge_exceptions(self.strategy)

    def test_global_step_update(self):
        """Else a step counter counts once a tower."""
        self._test_global_step_update(self.strategy)

    def test_summary_for_replica_zero_only(self):
        """Else TensorBoard shows every point once a tower."""
        self._test_summary_for_replica_zero_only(self.strategy)

    def test_trainable_variable(self):
        """Else metrics' variables get gradients, or weights get none."""
        self._test_trainable_variable(self.strategy)

    def test_numpy_dataset(self):
        """Else the suite's check of this old API (which skips TensorFlow 2) has changed."""
        self._test_numpy_dataset(self.strategy)

    def test_distribute_datasets_from_function(self):
        """Else a dataset function gets a wrong context, or its elements reach the wrong towers."""
        input_fn, rows = self._input_fn_and_rows()
        self._test_input_fn_iterable(self.strategy, input_fn, rows)

    def test_input_fn_iterator(self):
        """Else loops written for tf.distribute's first iterators cannot read their data."""
        input_fn, rows = self._input_fn_and_rows()
        self._test_input_fn_iterator(self.strategy.make_input_fn_iterator(input_fn),
                                     self.strategy.extended.worker_devices, rows)

    def _input_fn_and_rows(self):
        count = self.strategy.num_replicas_in_sync
        input_fn = self._input_fn_to_test_input_context(
            lambda: tf.data.Dataset.range(10), expected_num_replicas_in_sync=count,
            expected_num_input_pipelines=1, expected_input_pipeline_id=0)
        return input_fn, [list(range(start, start + count)) for start in range(0, 10, count)]


class TwoTowersTest(_Checks, strategy_test_lib.TwoDeviceDistributionTestBase):

    devices = ["CPU:1", "CPU:2"]
    merge_device = "CPU:0"

    @IN_AND_OUT
    def test_run(self, in_function):
        """Else ``run`` passes or groups values wrongly."""
        self._test_run(self.strategy, in_function)

    @IN_AND_OUT
    def test_all_reduce_sum(self, in_function):
        """Else the towers' sums are wrong."""
        self._test_all_reduce_sum(self.strategy, in_function)

    @IN_AND_OUT
    def test_all_reduce_sum_gradients(self, in_function):
        """Else ``tf.gradients`` through a sum is wrong."""
        self._test_all_reduce_sum_gradients(self.strategy, in_function)

    @IN_AND_OUT
    def test_all_reduce_sum_gradient_tape(self, in_function):
        """Else a tape's gradient through a sum is wrong."""
        self._test_all_reduce_sum_gradient_tape(self.strategy, in_function)

    @IN_AND_OUT
    def test_all_reduce_mean(self, in_function):
        """Else the towers' means are wrong."""
        self._test_all_reduce_mean(self.strategy, in_function)

    @IN_AND_OUT
    def test_all_reduce_mean_gradients(self, in_function):
        """Else ``tf.gradients`` through a mean is wrong."""
        self._test_all_reduce_mean_gradients(self.strategy, in_function)

    @IN_AND_OUT
    def test_all_reduce_mean_gradient_tape(self, in_function):
        """Else a tape's gradient through a mean is wrong."""
        self._test_all_reduce_mean_gradient_tape(self.strategy, in_function)


class TwoTowersMergingOnTheFirstTest(TwoTowersTest):

    merge_device = "CPU:1"


class TwoTowersBalancedTest(TwoTowersTest):

    merge_device = "balanced"


class OneTowerTest(_Checks, strategy_test_lib.OneDeviceDistributionTestBase):

    devices = ["CPU:1"]

    def test_run(self):
        """Else ``run`` with one tower passes or groups values wrongly."""
        self._test_run(self.strategy)

    def test_all_reduce_sum(self):
        """Else a sum over one tower is not the value."""
        self._test_all_reduce_sum(self.strategy)

    def test_all_reduce_sum_gradients(self):
        """Else ``tf.gradients`` through it is wrong."""
        self._test_all_reduce_sum_gradients(self.strategy)

    def test_all_reduce_sum_gradient_tape(self):
        """Else a tape's gradient through it is wrong."""
        self._test_all_reduce_sum_gradient_tape(self.strategy)

    def test_all_reduce_mean(self):
        """Else a mean over one tower is not the value."""
        self._test_all_reduce_mean(self.strategy)

    def test_all_reduce_mean_gradients(self):
        """Else ``tf.gradients`` through it is wrong."""
        self._test_all_reduce_mean_gradients(self.strategy)

    def test_all_reduce_mean_gradient_tape(self):
        """Else a tape's gradient through it is wrong."""
        self._test_all_reduce_mean_gradient_tape(self.strategy)

    def test_device_and_input_device_are_colocated(self):
        """Else the suite's graph-mode check (which skips eager programs) has changed."""
        self._test_device_and_input_device_are_colocated(self.strategy)
        self._test_device_and_input_device_are_colocated_with_function(self.strategy)


class OneTowerMergingElsewhereTest(OneTowerTest):

    merge_device = "CPU:0"


del _Checks  # holds no strategy: pytest must not collect it
