"""TensorFlow's own suite for strategies, run against TowerStrategy.

Goes in: the base classes of ``tensorflow.python.distribute.strategy_test_lib`` that apply to a
synchronous strategy on one machine, used as TensorFlow's ``mirrored_strategy_test`` uses them.
Comes out: each of their checks for two towers (merging elsewhere, on tower 0 and balanced) and one.

What is left out: graph mode (TowerStrategy refuses it, see ``strategy_test``), and
``RemoteSingleWorkerMirroredStrategyBase``, which needs a cluster.
"""

import pytest
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.distribute import strategy_test_lib

import towerstrategy

REDUCTIONS = ("run", "all_reduce_sum", "all_reduce_sum_gradients", "all_reduce_sum_gradient_tape",
              "all_reduce_mean", "all_reduce_mean_gradients", "all_reduce_mean_gradient_tape")


class _Checks(strategy_test_lib.DistributionTestBase, parameterized.TestCase):
    """What holds for any number of towers."""

    devices: list[str]
    merge_device: str | None = None

    def setUp(self):
        super().setUp()
        self.strategy = towerstrategy.TowerStrategy(self.devices, self.merge_device)

    @parameterized.parameters(
        "minimize_loss_eager", "replica_id", "call_and_merge_exceptions", "global_step_update",
        "summary_for_replica_zero_only", "trainable_variable", "numpy_dataset")
    def test_as_other_strategies(self, name):
        """Else the simplest loop does not learn, towers cannot tell who they are, an error in one
        or in a merge is lost or hangs the program, a counter or a summary is written once a tower,
        metrics' variables get gradients, or (the last) a check that skips TensorFlow 2 no longer
        does."""
        getattr(self, f"_test_{name}")(self.strategy)

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

    @parameterized.product(name=REDUCTIONS, in_function=(False, True))
    def test_run_and_all_reduce(self, name, in_function):
        """Else the towers' sums or means, or gradients through them, are wrong."""
        getattr(self, f"_test_{name}")(self.strategy, in_function)


@pytest.mark.wide
class TwoTowersMergingOnTheFirstTest(TwoTowersTest):

    merge_device = "CPU:1"


@pytest.mark.wide
class TwoTowersBalancedTest(TwoTowersTest):

    merge_device = "balanced"


class OneTowerTest(_Checks, strategy_test_lib.OneDeviceDistributionTestBase):

    devices = ["CPU:1"]

    @parameterized.parameters(*REDUCTIONS)
    def test_run_and_all_reduce(self, name):
        """Else a sum or a mean over one tower is not the value, or has another gradient."""
        getattr(self, f"_test_{name}")(self.strategy)

    def test_device_and_input_device_are_colocated(self):
        """Else the suite's graph-mode check (which skips eager programs) has changed."""
        self._test_device_and_input_device_are_colocated(self.strategy)
        self._test_device_and_input_device_are_colocated_with_function(self.strategy)


@pytest.mark.wide
class OneTowerMergingElsewhereTest(OneTowerTest):

    merge_device = "CPU:0"


del _Checks  # holds no strategy: pytest must not collect it
