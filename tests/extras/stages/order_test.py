"""Micro-batches: one after another on a device, and the result of one device."""

import collections
import graphlib
import re

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import wide
from tests.placement.placement_test import function_in
from towerstrategy import TowerStrategy
from towerstrategy.batch import prefetching
from towerstrategy.extras.stages import order

SCOPE = re.compile(r"tower_(\d+)_CPU_\d+")


def conv_net(kit, optimizer="sgd"):
    kit.utils.set_random_seed(3)
    inputs = kit.Input([8, 8, 2])
    x = inputs
    for filters in (3, 4):
        x = kit.layers.Conv2D(filters, 3, padding="same")(x)
        x = kit.layers.BatchNormalization()(x)
        x = kit.layers.Dropout(.5)(kit.layers.Activation("relu")(x))
    model = kit.Model(inputs, kit.layers.Dense(1)(kit.layers.GlobalAveragePooling2D()(x)))
    model.compile(optimizer, "mse")
    return model


class Nodes:
    """The operations of the function in which the replicas are: what waits for what."""

    def __init__(self, concrete):
        graph = concrete.graph.as_graph_def()
        bodies = [graph.node, *(function.node_def for function in graph.library.function)]
        body = max(bodies, key=lambda nodes: sum(bool(SCOPE.search(node.name)) for node in nodes))
        self.ops = {node.name: node for node in body}
        self.waits = {name: [part.lstrip("^").split(":")[0] for part in node.input]
                      for name, node in self.ops.items()}

    def of(self, kind):
        """The names of the operations of a kind, by replica."""
        found = collections.defaultdict(list)
        for name, node in self.ops.items():
            replica = SCOPE.search(name)
            if node.op == kind and replica:
                found[int(replica[1])].append(name)
        return found

    def before(self, name):
        """All that ``name`` waits for."""
        seen, waiting = set(), [name]
        while waiting:
            for other in self.waits.get(waiting.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return seen


def traced(strategy, fn, *batch):
    """``fn`` on the replicas of a batch, in a function that has been traced."""
    strategy.extended.keep_graphs = True
    step = tf.function(lambda *parts: strategy.run(fn, parts), autograph=False)
    return Nodes(step.get_concrete_function(*strategy.split(batch)))


class OrderTest(parameterized.TestCase):

    @parameterized.product(kit=[keras, tf_keras], way=["run", "fit", "prefetched"])
    def test_one_round_in_fit(self, kit, way):
        """Else micro-batches wait for one another halfway, and all of them hold activations."""
        strategy = TowerStrategy(["CPU:1"], micro_batches=4)
        with strategy.scope():
            model = kit.Sequential([kit.Input([8, 8, 2]), *(
                kit.layers.Conv2D(3, 3, activation="relu") for _ in range(3)),
                kit.layers.GlobalAveragePooling2D(), kit.layers.Dense(1)])
            model.compile("sgd", "mse")
        batch = tf.zeros([12, 8, 8, 2]), tf.zeros([12, 1])
        with strategy.scope(), strategy.extended.step():
            if way == "run":
                nodes = traced(strategy, lambda *rows: model.train_step(rows), *batch)
            else:
                data = tf.data.Dataset.from_tensor_slices(batch).batch(12)
                model.fit(data, verbose=0, shuffle=False)
                distributed = strategy.experimental_distribute_dataset(data)
                if way == "prefetched":  # as for GPUs
                    distributed.fetch = prefetching.Fetch(("CPU:1",) * 4, "CPU:0")
                nodes = Nodes(function_in(model.train_function).get_concrete_function(
                    iter(distributed)))
        ends = [name for name in nodes.ops if "end_of_micro_batch" in name]
        self.assertLen(ends, 3)

    @wide.parameters((keras, False, ["CPU:1"]), wide=[
        (tf_keras, True, ["CPU:1", "CPU:2"]), (keras, True, ["CPU:1"])])
    def test_backward_before_the_next_forward(self, kit, trace_once, towers):
        """Else all micro-batches run at once, and a batch that does not fit is not made to."""
        strategy = TowerStrategy(towers, micro_batches=3)
        strategy.extended.trace_once = trace_once
        with strategy.scope():
            model = conv_net(kit)
        x, y = np.ones([6 * len(towers), 8, 8, 2], "f"), np.ones([6 * len(towers), 1], "f")
        model.train_on_batch(x, y)
        nodes = traced(strategy, lambda *rows: model.train_step(rows), x, y)
        forward, backward = nodes.of("Conv2D"), nodes.of("Conv2DBackpropFilter")
        self.assertEqual([*map(len, backward.values())], [2] * 3 * len(towers))
        for replica in range(3 * len(towers)):
            for convolution in forward[replica]:
                waits = nodes.before(convolution)
                for other, gradients in backward.items():
                    same_tower_earlier = (other // 3, True) == (replica // 3, other < replica)
                    self.assertEqual(waits.issuperset(gradients), same_tower_earlier,
                                     f"{replica} {other}")

    def test_random_masks_wait_too(self):
        """Else what needs no rows, such as dropout's masks, is made for all parts at once."""
        strategy = TowerStrategy(["CPU:1"], micro_batches=3, draws="per tower")

        def drawn(x):
            return tf.reduce_sum(tf.random.uniform([1000]) * x)

        nodes = traced(strategy, drawn, np.ones([6, 1000], "f"))
        draws, sums = nodes.of("RandomUniform"), nodes.of("Sum")
        self.assertLen(draws, 3)
        for replica in (1, 2):
            self.assertContainsSubset(sums[replica - 1], nodes.before(draws[replica][0]))

    @parameterized.parameters(True, False)
    def test_gradients_are_added_as_they_come(self, of_known_rows):
        """Else a device holds a gradient for each micro-batch."""
        strategy = TowerStrategy(["CPU:1", "CPU:2"], micro_batches=4)
        with strategy.scope():
            weight = tf.Variable(tf.ones([3, 3, 2, 2]))
            optimizer = keras.optimizers.SGD()
            optimizer.build([weight])

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.conv2d(x, weight, 1, "SAME"))
            optimizer.apply([tape.gradient(loss, weight)], [weight])

        strategy.extended.keep_graphs = True
        function = tf.function(lambda *parts: strategy.run(step, parts), autograph=False)
        parts = strategy.split((tf.ones([16, 8, 8, 2]),))
        if not of_known_rows:
            parts = tf.nest.map_structure(
                lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype)
                if isinstance(part, tf.TensorSpec) else part, parts)
        nodes = Nodes(function.get_concrete_function(*parts))
        gradients = {name for names in nodes.of("Conv2DBackpropFilter").values() for name in names}
        self.assertLen(gradients, 8)
        takers = [sum(part in gradients for part in waits) for name, waits in nodes.waits.items()
                  if nodes.ops[name].op != "NoOp"]
        self.assertLessEqual(max(takers), 2)

    def test_what_couples_rows_makes_all_meet(self):
        """Else a mean over the whole batch waits for itself, and the step never runs."""
        strategy = TowerStrategy(["CPU:1", "CPU:2"], micro_batches=2)
        with strategy.scope():  # what is made of the inputs alone is in no order
            one = tf.Variable(1.)

        def centred(x):
            context = tf.distribute.get_replica_context()
            x = x * one
            total = context.all_reduce("SUM", tf.reduce_sum(x))
            x = tf.exp(x - total / 10.)
            return x / context.all_reduce("SUM", tf.reduce_sum(x))

        x = np.arange(10, dtype="f") / 10
        wanted = np.exp(x - x.mean()) / np.exp(x - x.mean()).sum()
        run = tf.function(lambda parts: strategy.run(centred, (parts,)))
        got = tf.concat(strategy.experimental_local_results(run(strategy.split(x))), 0)
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
        nodes = traced(strategy, centred, x[:8])
        exponents = nodes.of("Exp")
        for replica in range(4):
            waits = nodes.before(exponents[replica][0])
            self.assertContainsSubset([name for names in nodes.of("Sum").values() for name in names
                                       if "Exp" not in str(nodes.waits[name])], waits)
            self.assertEqual(exponents[replica - replica % 2][0] in waits, replica % 2 == 1)

    def test_assertions_of_several_towers(self):
        """Else a tower begins its second micro-batch when the tower before has ended its last."""
        strategy = TowerStrategy(["CPU:1", "CPU:2"], micro_batches=3)
        with strategy.scope():
            one = tf.Variable(1.)

        def step(x):
            x = x * one
            holds = tf.raw_ops.Assert(condition=tf.reduce_all(x < 100.), data=[x])
            with tf.control_dependencies([holds]):
                return tf.exp(x)

        nodes = traced(strategy, step, np.arange(12, dtype="f"))
        asserted, exponents = nodes.of("Assert"), nodes.of("Exp")
        for replica in range(6):
            waits = nodes.before(exponents[replica][0])
            for other in range(6):  # of what is stateful TensorFlow makes a row
                self.assertEqual(asserted[other][0] in waits,
                                 (other % 3, other) <= (replica % 3, replica))

    @parameterized.parameters(True, False)
    def test_effects_on_the_world(self, trace_once):
        """Else what TensorFlow keeps in order of its own waits in a circle."""
        strategy = TowerStrategy(["CPU:1", "CPU:2"], micro_batches=2)
        strategy.extended.trace_once = trace_once
        with strategy.scope():
            seen = tf.Variable(0., aggregation=tf.VariableAggregation.SUM)
        told = []

        def step(x):
            tf.py_function(lambda value: told.append(float(value)), [tf.reduce_sum(x)], [])
            seen.assign_add(tf.reduce_sum(x))
            tf.py_function(lambda value: told.append(float(value)), [seen + tf.reduce_sum(x)], [])

        parts = strategy.split(np.float32([1, 2, 3, 4]))
        tf.function(lambda parts: strategy.run(step, (parts,)))(parts)
        self.assertEqual(float(seen), 10.)
        self.assertCountEqual(told, [1., 2., 3., 4., 11., 12., 13., 14.])


class SameTest(parameterized.TestCase):

    def test_a_stage_runs_one_pass_at_a_time(self):
        """Else a forward pass takes turns with a backward one, and the stages after it wait."""
        stages, parts = 3, 5
        strategy = TowerStrategy([["CPU:1", "CPU:2", "CPU:3"]], micro_batches=parts)
        with strategy.scope():
            model = keras.Sequential([keras.Input([4]), *(
                keras.layers.Dense(4, "tanh") for _ in range(stages))])
            model.compile("sgd", "mse")
        x = np.ones([10, 4], "f")
        model.train_on_batch(x, x)
        nodes = traced(strategy, lambda *rows: model.train_step(rows), x, x)
        passes = {}
        for kind in ("Tanh", "TanhGrad"):
            for replica, names in nodes.of(kind).items():
                for name in names:
                    stage = int(re.search(r"tower_stage_(\d+)", name)[1])
                    passes[stage, replica, kind] = name
        self.assertLen(passes, 2 * stages * parts)
        for stage in range(stages):
            ahead = stages - stage
            turns = [("Tanh", number) for number in range(min(ahead, parts))]
            for number in range(parts):
                turns.append(("TanhGrad", number))
                if number + ahead < parts:
                    turns.append(("Tanh", number + ahead))
            names = [passes[stage, number, kind] for kind, number in turns]
            for first, then in zip(names, names[1:]):
                self.assertIn(first, nodes.before(then))

    def test_what_needs_an_earlier_backward_pass(self):
        """Else a forward pass that reads what the last backward one has left waits for ever."""
        strategy = TowerStrategy([["CPU:1", "CPU:2"]], micro_batches=2)
        replicas, waits = ([], []), {}
        with tf.Graph().as_default() as graph:
            left = tf.zeros([])
            for replica in replicas:
                for scope in ("tower_stage_0", "tower_stage_1", "gradient_tape/tower_stage_1",
                              "gradient_tape/tower_stage_0"):
                    with tf.name_scope(f"{len(graph.get_operations())}/{scope}/"):
                        left = left + 1.
                    replica += [left.op.name, left.op.inputs[1].op.name]
            order.put(graph, replicas, strategy.extended.placement, left)
        for operation in graph.get_operations():
            waits[operation.name] = [other.name for other in (
                *(tensor.op for tensor in operation.inputs), *operation.control_inputs)]
        self.assertTrue(any("end_of_micro_batch" in name for name in waits))
        graphlib.TopologicalSorter(waits).prepare()

    @parameterized.parameters(False, True)
    def test_loops_count_micro_batches(self, eager):
        """Else a loop that divides by the number of replicas trains with another learning rate."""
        strategy = TowerStrategy(["CPU:1", "CPU:2"], micro_batches=2)
        with strategy.scope():
            weight = tf.Variable(2.)
            optimizer = keras.optimizers.SGD(1.)
            optimizer.build([weight])
        self.assertEqual(strategy.num_replicas_in_sync, 4)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(weight * x) / strategy.num_replicas_in_sync
            optimizer.apply(tape.gradient(loss, [weight]), [weight])
            return loss

        def run(parts):
            return strategy.run(step, (parts,))

        results = (run if eager else tf.function(run))(strategy.split(np.float32([1, 2, 3, 6])))
        losses = strategy.experimental_local_results(results)
        np.testing.assert_allclose(losses, [.5, 1., 1.5, 3.])
        self.assertEqual(float(strategy.reduce("SUM", results, axis=None)), 6.)
        self.assertEqual(float(weight), 2. - 3.)

    def test_batches_of_replicas(self):
        """Else a pipeline that makes a replica's batches loses, or repeats, some of them."""
        strategy = TowerStrategy(["CPU:1"], micro_batches=2)

        def make(context):
            self.assertEqual(context.get_per_replica_batch_size(8), 4)
            return tf.data.Dataset.range(8).batch(4)

        batch, = strategy.distribute_datasets_from_function(make)
        self.assertEqual([part.numpy().tolist()
                          for part in strategy.experimental_local_results(batch)],
                         [[0, 1, 2, 3], [4, 5, 6, 7]])

    def test_each_draws_its_own(self):
        """Else all micro-batches drop the same units."""
        strategy = TowerStrategy(["CPU:1"], micro_batches=4)
        layer = keras.layers.Dropout(.5, seed=1)
        with strategy.scope():
            model = keras.Sequential([keras.Input([50]), layer])
        run = tf.function(lambda parts: strategy.run(lambda x: model(x, training=True), (parts,)))
        masks = strategy.experimental_local_results(run(strategy.split(np.ones([4, 50], "f"))))
        self.assertLen({mask.numpy().tobytes() for mask in masks}, 4)

    def test_an_error_names_the_micro_batch(self):
        """Else whoever reads the error does not know which rows it was."""
        strategy = TowerStrategy(["CPU:1", "CPU:2"], micro_batches=2)

        def fails(x):
            if float(x[0]) == 2:
                raise ValueError("no")

        with self.assertRaises(ValueError) as caught:
            strategy.run(fails, (strategy.split(np.float32([0, 1, 2, 3])),))
        told = "".join([str(caught.exception), *getattr(caught.exception, "__notes__", ())])
        self.assertIn("micro-batch 0 of tower 1 on CPU:2", told)


if __name__ == "__main__":
    absltest.main()
