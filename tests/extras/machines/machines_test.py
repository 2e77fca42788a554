"""machines, shards: two workers of two towers each train, evaluate and predict as one device."""

import json
import os
import re
from unittest import mock

import pytest
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
from tests.extras.machines import machines_workers
from towerstrategy import _tensorflow as _tf
from towerstrategy.extras.machines import clusters, collectives
from towerstrategy.merge import merging, shares as shares_lib

WORKERS, TOWERS = 2, 2


@pytest.mark.wide
class ClusterTest(machines_workers.ClusterTestCase):
    workers, towers = WORKERS, TOWERS
    same = ("verbs", "uneven-keras", "function", "loop-keras", "embedded-tf_keras", "wide-keras",
            "handed-keras", "whole-keras", "in_batch", "looped-keras", "classified-tf_keras")
    cases = (*same, "ends_early", "counted-keras", "unseeded", "sharded", "random_start-keras")

    @parameterized.parameters(*same)
    def test_as_on_one_device(self, case):
        """Else weights, logs, evaluations or predictions depend on the number of machines."""
        self.assert_as_on_one_device(case)

    def test_verbs(self):
        """Else a sum, a mean or a gathered row counts the towers of one machine only."""
        seen = self.seen("verbs")
        for mode in ("eager", "graph"):
            self.assertEqual(seen[f"{mode}_mean"], 0)
            self.assertEqual(seen[f"{mode}_sum"], seen[f"{mode}_expected_sum"])
            self.assertEqual(seen[f"{mode}_rows"], seen[f"{mode}_expected_rows"])
        self.assertEqual(seen["replicas"], [(WORKERS - 1) * TOWERS])

    def test_data_that_ends_early(self):
        """Else the worker with less data hangs the others, or ends their epoch."""
        rows = [2 * WORKERS * TOWERS * (worker + 1) for worker in range(WORKERS)]
        steps = max(rows) // 2 // TOWERS
        seen = self.seen("ends_early")
        self.assertEqual([seen["steps"], seen["eager_steps"], seen["fetched_eager_steps"]],
                         [steps] * 3)
        for name in ("rows", "fetched_rows"):
            self.assertEqual(seen[name].tolist(),
                             [count // TOWERS for count in rows for _ in range(TOWERS)])
        self.assertEqual(seen["found"], sum(sum(range(count)) for count in rows))

    def test_what_crosses(self):
        """Else a step's cost grows with the number of variables: each collective waits for all."""
        seen = self.seen("counted-keras")
        # Row counts; gradients with what metrics count.
        self.assertEqual(seen["counts"].tolist(), [2, 2])
        # Parts stay with the towers that they were prefetched to.
        self.assertEqual(seen["in_loops"].tolist(), [0, 0])

    def test_shuffled_without_a_seed(self):
        """Else fit, which shuffles, trains on some rows twice and on others never."""
        self.assertCountEqual(self.seen("unseeded")["rows"], range(23))
        self.seen("drawn")  # Python's draws, by which Keras shuffles a PyDataset, are the same

    def test_sharding(self):
        """Else rows are trained on twice or never, or a step has more rows than its batch."""
        seen = self.assert_sharded()
        for policy in ("AUTO", "DATA"):
            self.assertEqual(seen[f"{policy}_steps"].tolist(), [8, 8, 8, 2])
        for policy in ("FILE", "HINT", "OFF"):
            self.assertLessEqual(max(seen[f"{policy}_steps"]), 8)
            self.assertEqual(seen[f"{policy}_steps"][0], 8)

    def test_draws_of_ones_own_loop(self):
        """Else all towers of all workers drop the same units."""
        masks = self.seen("random_start-keras")["masks"]
        self.assertLen({mask.tobytes() for mask in masks}, len(masks))


@pytest.mark.wide
class OneTowerTest(machines_workers.ClusterTestCase):
    workers, towers = 2, 1
    cases = ("on_batch-tf_keras", "on_batch-keras", "loop-tf_keras", "whole-tf_keras")

    @parameterized.parameters(*cases)
    def test_as_on_one_device(self, case):
        """Else a machine's only tower takes what all have summed for its own part of it."""
        self.assert_as_on_one_device(case)


def resolver(jobs, task_type, task_id):
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type=task_type, task_id=task_id)


TWO = ["127.0.0.1:1", "127.0.0.1:2"]


class LeavesEarlyTest(parameterized.TestCase):

    def machines(self):
        """Two workers as a graph needs them, which is never run."""
        machines = collectives.Machines.__new__(collectives.Machines)
        machines.__dict__.update(
            count=2, index=0, first=0, here=slice(1), towers=1, replicas=2,
            _device="/device:CPU:0", _order=[0, 1],
            _launcher=_tf.CollectiveLauncher("/device:CPU:0", 2, None))
        return machines

    def test_while_the_backward_pass_runs(self):
        """Else a worker's network idles while it computes, and its GPUs while gradients cross."""
        layers, width = 6, 32  # a pack holds two of them, with their biases
        machines = self.machines()

        @tf.function
        def step(x, rows):
            weights = [tf.ones([width, width]) / width for _ in range(layers)]
            biases = [tf.zeros([width]) for _ in range(layers)]
            variables = [value for pair in zip(weights, biases) for value in pair]
            with tf.GradientTape() as tape:
                tape.watch(variables)
                for number, (weight, bias) in enumerate(zip(weights, biases)):
                    with tf.name_scope(f"layer_{number}"):
                        x = tf.tanh(x @ weight + bias)
            found = tape.gradient(x, variables)
            shares = shares_lib.Shares(tf.unstack(rows), workers=machines)
            return merging.gradients([[value] for value in found],
                                     ["/device:CPU:0"] * len(found), shares,
                                     ["sum"] * len(found))

        with mock.patch.object(collectives, "LARGE", 2 * 4 * width * (width + 1)):
            graph = step.get_concrete_function(
                tf.TensorSpec([None, width]), tf.TensorSpec([2], tf.int64)).graph
        reduced = [operation for operation in graph.get_operations()
                   if operation.type == "CollectiveReduceV2"]
        self.assertLen(reduced, layers // 2)
        for number, operation in enumerate(reduced):
            reached, names = [operation], set()
            while reached:
                before = reached.pop()
                if before.name not in names:
                    names.add(before.name)
                    reached += [tensor.op for tensor in before.inputs] + before.control_inputs
            earliest = layers - 2 * (number + 1)
            backward = {int(name.split("layer_")[1].split("/")[0]) for name in names
                        if name.startswith("gradient_tape/") and "layer_" in name}
            self.assertEqual(min(backward), earliest, f"all-reduce {number} waits for others")
            self.assertLen(names & {other.name for other in reduced}, number + 1)


class RefusedTest(parameterized.TestCase):

    @parameterized.parameters(
        ({"worker": TWO}, None, None, "this one is None None"),
        ({"worker": TWO}, "evaluator", 0, "this one is 'evaluator' 0"),
        ({"worker": TWO}, "worker", 2, "this one is 'worker' 2"),
        ({"worker": TWO}, "worker", None, "this one is 'worker' None"),
        ({"worker": TWO}, "chief", 0, "this one is 'chief' 0"),
        ({"worker": TWO, "ps": ["127.0.0.1:3"]}, "worker", 0, "parameter servers"),
        ({"worker": [TWO[0], "127.0.0.1"]}, "worker", 0, "port .* but worker 1 has '127.0.0.1'"),
        ({"worker": [TWO[0], "a:99999"]}, "worker", 0, "port .* but worker 1 has 'a:99999'"),
        ({"worker": [TWO[0], TWO[0]]}, "worker", 0, "address of its own.* but worker 0 has"),
    )
    def test_task(self, jobs, task_type, task_id, message):
        """Else a wrong TF_CONFIG shows as a hang, or as training on one machine alone."""
        with self.assertRaisesRegex(ValueError, message):
            towerstrategy.TowerStrategy(cluster_resolver=resolver(jobs, task_type, task_id))

    @parameterized.parameters(
        "not json", '{"cluster": {"worker": "127.0.0.1:1"}}', '["worker"]',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "a"}}')
    def test_what_cannot_be_read(self, config):
        """Else all that is said is "Expecting value: line 1 column 1", of nobody knows what."""
        with mock.patch.dict(os.environ, TF_CONFIG=config), self.assertRaisesRegex(
                ValueError, f"TF_CONFIG must be .*but got {re.escape(repr(config))}"):
            towerstrategy.TowerStrategy()

    def test_types(self):
        """Else a wrong argument fails deep inside TensorFlow."""
        with self.assertRaisesRegex(TypeError, "cluster_resolver must be None or"):
            towerstrategy.TowerStrategy(cluster_resolver={"worker": TWO})
        with self.assertRaisesRegex(TypeError, "communication_options must be None or"):
            towerstrategy.TowerStrategy(communication_options="RING")
        towerstrategy.TowerStrategy(
            ["CPU:1"],
            communication_options=tf.distribute.experimental.CommunicationOptions(
                timeout_seconds=9))

    def test_after_tensorflow_has_started(self):
        """Else the script trains alone, or fails without saying what to move where."""
        tf.config.list_logical_devices()
        with self.assertRaisesRegex(RuntimeError, "first thing after `import tensorflow`"):
            towerstrategy.TowerStrategy(cluster_resolver=resolver({"worker": TWO}, "worker", 0))

    @parameterized.parameters({"worker": ["127.0.0.1:1"]}, {"chief": ["127.0.0.1:1"]}, {})
    def test_a_cluster_of_one(self, **jobs):
        """Else a TF_CONFIG of one machine pays for a server."""
        config = {"cluster": jobs, "task": {"type": next(iter(jobs), "worker"), "index": 0}}
        with mock.patch.dict(os.environ, TF_CONFIG=json.dumps(config)):
            strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"])
        self.assertIsNone(strategy.extended.workers)
        self.assertEqual(strategy.num_replicas_in_sync, 2)
        self.assertFalse(strategy.extended._in_multi_worker_mode())

    def test_places(self):
        """Else a chief and a worker take each other's number, and hang."""
        jobs = {"chief": TWO[:1], "worker": TWO[1:]}
        chief, worker = (clusters.place_in(resolver(jobs, kind, 0)) for kind in jobs)
        self.assertEqual((chief.index, worker.index), (0, 1))
        self.assertEqual(worker.task_of(1), "/job:worker/replica:0/task:0")
        self.assertEqual(chief.tasks, worker.tasks)
