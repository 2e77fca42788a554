"""Towers of stages: what is where, what crosses, and the result of one device."""

import collections
import contextlib
import json
import os
import re
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized
from order_test import Nodes

import wide
from benchmarks import traffic
from towerstrategy import TowerStrategy

STAGE = re.compile(r"tower_stage_(\d+)")
IN_TURN = wide.turns(("keras", keras), ("tf_keras", tf_keras))
nothing = contextlib.nullcontext()


def device(variable):
    return getattr(variable, "value", variable).device[-5:] if hasattr(variable, "path") \
        else variable.device[-5:]


def deep(kit, sizes=(16, 16, 16, 4, 1), regularizer="l2"):
    kit.utils.set_random_seed(3)
    return kit.Sequential([kit.Input([8]), *(kit.layers.Dense(
        size, "tanh", kernel_regularizer=regularizer, name=f"layer_{number}")
        for number, size in enumerate(sizes))])


def traced(strategy, model, rows, steps=()):
    """A training step of a model with 8 features on that many rows, of so many steps in time."""
    strategy.extended.keep_graphs = True
    x, y = np.ones([rows, *steps, 8], "f"), np.ones([rows, *steps, 1], "f")
    model.train_on_batch(x, y)
    step = tf.function(lambda *parts: strategy.run(lambda *own: model.train_step(own), parts),
                       autograph=False)
    with strategy.extended.step():
        return step.get_concrete_function(*strategy.split((x, y)))


def by_hand(kit, strategy, how):
    """A model of two stages, said in one of the ways there are."""
    def stage(index):
        if strategy is None:
            return nothing
        return tf.device(f"CPU:{1 + index}") if how == "tf.device" else strategy.stage(index)

    class Net(kit.Model):
        """Layers of its own, in a stage where they are made, or where they are called."""

        def __init__(self):
            super().__init__()
            with stage(0) if how == "made" else nothing:
                self.first = kit.layers.Dense(7, "tanh")
            with stage(1) if how == "made" else nothing:
                self.second, self.third = kit.layers.Dense(5, "tanh"), kit.layers.Dense(1)

        def call(self, x):
            with stage(0) if how == "called" else nothing:
                x = self.first(x)
            with stage(1) if how == "called" else nothing:
                return self.third(self.second(x))

    kit.utils.set_random_seed(5)
    if how in ("made", "called"):
        return Net()
    inputs, shared = kit.Input([8]), kit.layers.Dense(8, "tanh")
    with stage(0):
        x = shared(inputs)
    with stage(1):
        x = shared(x) + inputs
        return kit.Model(inputs, kit.layers.Dense(1)(x))


def held(kit, strategy):
    """A model with a call of its own around one around functional models, one with one layer."""
    class Inner(kit.Model):
        """Two functional models."""

        def __init__(self):
            super().__init__()
            inputs = kit.Input([8])
            x = kit.layers.Dense(7, "tanh")(kit.layers.Dense(6, "tanh")(inputs))
            self.first = kit.Model(inputs, x)
            self.second = kit.Sequential([kit.Input([7]), kit.layers.Dense(5, "tanh")])

        def call(self, x):
            with strategy.stage(0):
                x = self.first(x)
            with strategy.stage(1):
                return self.second(x)

    class Outer(kit.Model):
        """It, and a layer."""

        def __init__(self):
            super().__init__()
            self.inner, self.last = Inner(), kit.layers.Dense(1)

        def call(self, x):
            x = self.inner(x)
            with strategy.stage(1):
                return self.last(x)

    return Outer()


class SameTest(parameterized.TestCase):

    @wide.product(0, 2, kit=[keras, tf_keras],
                  devices=[["CPU:1", "CPU:2"], [["CPU:1", "CPU:2"], ["CPU:3", "CPU:4"]]])
    def test_tables(self, kit, devices):
        """Else a model that looks words up cannot be compiled: tables are among its weights."""
        words, y = np.array([["a"], ["b"], ["c"], ["a"], ["d"]]), np.arange(5.)[:, None]

        def trained(strategy):
            kit.utils.set_random_seed(3)
            with strategy.scope() if strategy else nothing:
                looked_up = kit.layers.StringLookup()
                looked_up.adapt(["a", "b", "c"])
                model = kit.Sequential([
                    kit.Input([1], dtype="string"), looked_up,
                    kit.layers.Embedding(4, 6), kit.layers.Flatten(), kit.layers.Dense(1)])
                model.compile("adam", "mse")
            model.fit(tf.data.Dataset.from_tensor_slices((words, y)).batch(3), epochs=2, verbose=0)
            return model.get_weights()[-3:]

        for got, wanted in zip(trained(TowerStrategy(devices)), trained(None)):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)

    @wide.parameters((keras, "called", 3),
                     wide=[(tf_keras, "made", 1), (keras, "tf.device", 1)])
    def test_any_rows(self, kit, how, micro_batches):
        """Else a model over several devices trains or predicts something else than on one."""
        random = np.random.default_rng(0)
        x, y = random.random([11, 8]).astype("f"), random.random([11, 1]).astype("f")

        def trained(strategy):
            with nothing if strategy is None else strategy.scope():
                model = by_hand(kit, strategy, how)
                model.compile(kit.optimizers.Adam(.05), "mse")
            logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
            if strategy is not None:
                self.assertEqual({device(weight) for weight in model.weights}, {"CPU:1", "CPU:2"})
                self.assertEmpty(strategy.extended.own_trace_reasons)
            return [logs["loss"], model.predict(x, batch_size=8, verbose=0),
                    model.test_on_batch(x[:1], y[:1]), *model.get_weights()]

        wanted = trained(None)
        strategy = TowerStrategy([["CPU:1", "CPU:2"]], micro_batches=micro_batches)
        for one, other in zip(trained(strategy), wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)

    def test_rows_that_are_mixed(self):
        """Else a lone tower keeps one row of those that a layer mixes, and the step fails."""
        random = np.random.default_rng(0)
        x, y = random.random([7, 4, 4, 1]).astype("f"), random.random([7, 1]).astype("f")

        def trained(strategy):
            keras.utils.set_random_seed(1)
            with nothing if strategy is None else strategy.scope():
                model = keras.Sequential([
                    keras.Input([4, 4, 1]), keras.layers.MixUp(.5), keras.layers.Flatten(),
                    keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
            return model.get_weights()

        for one, other in zip(trained(TowerStrategy([["CPU:1", "CPU:2"]])), trained(None)):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(True, False)
    def test_loop_of_ones_own(self, trace_once):
        """Else two models that are trained together in a loop are not divided, or not rightly."""
        x = np.random.default_rng(0).random([6, 3]).astype("f")

        def trained(strategy):
            keras.utils.set_random_seed(1)
            with nothing if strategy is None else strategy.scope():
                with nothing if strategy is None else strategy.stage(0):
                    encoder = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, "tanh")])
                decoder = keras.Sequential([keras.Input([2]), keras.layers.Dense(3)])
                optimizer = keras.optimizers.SGD(.5)
                weights = [*encoder.trainable_variables, *decoder.trainable_variables]
                optimizer.build(weights)

            def step(x):
                with tf.GradientTape() as tape:
                    code = encoder(x)
                    with nothing if strategy is None else strategy.stage(1):
                        loss = tf.reduce_mean((decoder(code) - x)**2)
                    if strategy is not None:
                        loss = strategy.scale_loss(loss)
                optimizer.apply(tape.gradient(loss, weights), weights)

            if strategy is None:
                step(x)
            else:
                tf.function(lambda part: strategy.run(step, (part,)))(strategy.split(x))
            return [weight.numpy() for weight in weights]

        strategy = TowerStrategy([["CPU:1", "CPU:2"]], micro_batches=2)
        strategy.extended.trace_once = trace_once
        for one, other in zip(trained(strategy), trained(None), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class PlacesTest(parameterized.TestCase):

    @parameterized.parameters((keras, 2), (tf_keras, 1))
    def test_activations_alone_cross(self, kit, towers):
        """Else weights or gradients go from device to device in each step, and links decide."""
        strategy = TowerStrategy([["CPU:1", "CPU:2"], ["CPU:3", "CPU:4"]][:towers],
                                 micro_batches=2)
        with strategy.scope():
            model = deep(kit, regularizer="l2" if towers == 1 else None)
            model.compile("sgd", "mse")
        counted = traffic.count(traced(strategy, model, 32 * towers), 1)
        activations = 2 * 16 * 16 * 4  # two micro-batches of 16 rows of 16 floats
        weights = 4 * sum(int(np.prod(weight.shape)) for weight in model.weights)
        scalars = 1000
        if towers == 1:
            for moved in (counted.sent["CPU:1"], counted.received["CPU:1"]):
                self.assertBetween(moved, activations, activations + scalars)
        else:  # and each weight to the tower that has it not, and its gradient back
            self.assertLess(sum(counted.sent.values()),
                            2 * 2 * activations + 2 * weights + 4 * scalars)

    @parameterized.parameters(True, False)
    def test_a_function_given_to_run(self, trace_once):
        """Else a tower in a loop of one's own runs all stages, or their gradients, on one device.

        What has no stage of its own, such as a loss, would take activations back to the first.
        """
        strategy = TowerStrategy([["CPU:1", "CPU:2"], ["CPU:3", "CPU:4"]])
        strategy.extended.trace_once, strategy.extended.keep_graphs = trace_once, True
        with strategy.scope():
            model = deep(keras, regularizer=None)
            model.compile("sgd", "mse")
        batch = np.ones([8, 8], "f"), np.ones([8, 1], "f")
        model.train_on_batch(*batch)
        step = tf.function(lambda *parts: strategy.run(lambda *own: model.train_step(own), parts))
        graph, found = step.get_concrete_function(*strategy.split(batch)).graph, set()
        for operation in graph.get_operations():
            tower, stage = (re.search(scope, operation.name) for scope in (r"tower_(\d)_", STAGE))
            if operation.type in ("MatMul", "TanhGrad", "Square"):
                said = int(stage[1]) if stage else 1
                self.assertEndsWith(operation.device, f"CPU:{1 + 2 * int(tower[1]) + said}")
                found.add((operation.type, tower[1], said))
        self.assertLen(found, 2 * 5)

    @IN_TURN
    def test_what_is_recomputed(self, kit):
        """Else a model that saves memory by tf.recompute_grad does a stage's work in another one.
        """
        class Block(kit.layers.Layer):
            def __init__(self):
                super().__init__()
                self.inner = [kit.layers.Dense(16, "tanh") for _ in range(2)]

            def build(self, shape):
                self.inner[0].build(shape)
                self.inner[1].build([None, 16])
                self.built = True

            def call(self, x):
                return tf.recompute_grad(lambda x: self.inner[1](self.inner[0](x)))(x)

        strategy = TowerStrategy([["CPU:1", "CPU:2"]], micro_batches=2)
        with strategy.scope():
            model = kit.Sequential([kit.Input([8]), Block(), Block(), kit.layers.Dense(1)])
            model.compile("sgd", "mse")
        counted = traffic.count(traced(strategy, model, 32), 1)
        activations = 2 * 16 * 16 * 4  # two micro-batches of 16 rows of 16 floats
        for moved in (counted.sent["CPU:1"], counted.received["CPU:1"]):
            self.assertBetween(moved, activations, activations + 1000)

    def test_each_stage_holds_its_weights_and_slots(self):
        """Else a device runs out of memory that has room for its part."""
        strategy = TowerStrategy([["CPU:1", "CPU:2"], ["CPU:3", "CPU:4"]])
        with strategy.scope():
            model = deep(keras, (*[64] * 8, 1))
            model.compile("adam", "mse")
        model.train_on_batch(np.ones([4, 8], "f"), np.ones([4, 1], "f"))
        homes = [{device(weight) for weight in layer.weights} for layer in model.layers]
        first = {"CPU:1", "CPU:3"}
        stages = [homes_ <= first for homes_ in homes]
        self.assertEqual(stages, sorted(stages, reverse=True))
        sizes = collections.Counter()
        for variable in [*model.weights, *model.optimizer.variables]:
            sizes[device(variable)] += int(np.prod(variable.shape))
        for stage in (("CPU:1", "CPU:3"), ("CPU:2", "CPU:4")):
            one, other = (sizes[name] for name in stage)
            self.assertLess(max(one, other), .8 * (one + other))
            self.assertLess(one + other, .7 * sum(sizes.values()))

    @IN_TURN
    def test_a_part_of_a_model(self, kit):
        """Else weights go to and fro between stages once a part of a model predicts, or it cannot.
        """
        strategy = TowerStrategy([["CPU:1", "CPU:2", "CPU:3"]])
        with strategy.scope():
            model = deep(kit)
            model.compile("sgd", "mse")
            first = kit.Model(model.inputs, model.layers[0].output)
            most = kit.Model(model.inputs, model.layers[-2].output)
        homes = [device(weight) for weight in model.weights]
        self.assertEqual({*homes}, {"CPU:1", "CPU:2", "CPU:3"})
        x = np.random.default_rng(0).random([5, 8]).astype("f")
        kernel, bias = model.layers[0].get_weights()
        np.testing.assert_allclose(first.predict(x, verbose=0), np.tanh(x @ kernel + bias),
                                   rtol=1e-5)
        most.predict(x, verbose=0)
        self.assertEqual([device(weight) for weight in model.weights], homes)
        self.assertEqual(strategy.describe(most).count("layer_"), 4)

    @IN_TURN
    def test_parts_that_are_called_in_stages(self, kit):
        """Else weights of a functional model that a call puts into a stage cross in each step."""
        strategy = TowerStrategy([["CPU:1", "CPU:2"]])
        with strategy.scope():
            model = held(kit, strategy)
            model.compile("sgd", "mse")
        model.fit(np.ones([4, 8], "f"), np.ones([4, 1], "f"), verbose=0)
        for part, stage in ((model.inner.first, "CPU:1"), (model.inner.second, "CPU:2"),
                            (model.last, "CPU:2")):
            self.assertEqual({device(weight) for weight in part.weights}, {stage})
        self.assertNotIn("not known", strategy.describe(model))

    @IN_TURN
    def test_layers_that_are_trained_from_now_on(self, kit):
        """Else slots that a first compile did not know of are all on one device."""
        def homes(model):
            return [device(layer.kernel) for layer in model.layers]

        def frozen():
            model = deep(kit, [16] * 6)
            for layer in model.layers[:4]:
                layer.trainable = False
            model.compile("adam", "mse")
            return model

        strategy = TowerStrategy([["CPU:1", "CPU:2"]])
        halves = ["CPU:1"] * 3 + ["CPU:2"] * 3
        with strategy.scope():
            model, used = frozen(), frozen()
            used.predict(np.ones([2, 8], "f"), verbose=0)
            before = homes(model)
            self.assertNotEqual(before, halves)
            for one in (model, used):
                for layer in one.layers:
                    layer.trainable = True
                one.compile("adam", "mse")
            self.assertEqual(homes(model), halves)
            self.assertEqual(homes(used), before)  # a function may read them there
            again = kit.models.clone_model(used)
            again.set_weights(used.get_weights())
            again.compile("adam", "mse")
        self.assertEqual(homes(again), halves)

    @IN_TURN
    def test_weights_that_the_first_step_makes(self, kit):
        """Else they stay where the first cut was, which knew no weights, and cross in each step."""
        strategy = TowerStrategy([["CPU:1", "CPU:2"]])
        with strategy.scope():
            model = kit.Sequential([kit.layers.Dense(size) for size in (4, 4, 4, 64, 64, 1)])
            model.compile("sgd", "mse")
        x, y = np.ones([4, 8], "f"), np.ones([4, 1], "f")
        model.fit(x, y, verbose=0)
        homes = {layer.name: device(layer.kernel) for layer in model.layers}
        model.predict(x, verbose=0)
        lines = strategy.describe(model).splitlines()
        for stage, home in enumerate(("CPU:1", "CPU:2")):
            listed = next(line for line in lines if line.startswith(f"{stage} "))
            for layer in model.layers:
                self.assertEqual(layer.name in listed.replace(",", " ").split(),
                                 homes[layer.name] == home)

    def test_alternating_forward_and_backward(self):
        """Else a stage holds the activations of all micro-batches, or waits for the others."""
        stages, parts = 3, 6
        strategy = TowerStrategy([["CPU:1", "CPU:2", "CPU:3"]], micro_batches=parts)
        with strategy.scope():
            model = deep(keras, (16, 16, 1))
            model.compile("sgd", "mse")
        nodes = Nodes(traced(strategy, model, 24))
        forward, backward = collections.defaultdict(set), collections.defaultdict(set)
        for name, node in nodes.ops.items():
            if node.op in ("Tanh", "TanhGrad"):
                key = int(re.search(r"tower_(\d+)_CPU", name)[1]), int(STAGE.search(name)[1])
                (forward if node.op == "Tanh" else backward)[key].add(name)
        self.assertLen(forward, stages * parts)
        self.assertLen(backward, stages * parts)
        for (part, stage), names in forward.items():
            before = set().union(*map(nodes.before, names))
            for other in range(parts):
                held = stages - stage
                self.assertEqual(backward[other, stage] <= before, other <= part - held,
                                 f"{part} and {other} in stage {stage}")
                self.assertEqual(forward[other, stage] <= before, other < part)
        # Where nothing is held for it, the first stage does not wait for the last one.
        self.assertFalse(any(forward[0, 2] & nodes.before(name) for name in forward[2, 0]))


    @IN_TURN
    def test_a_mask_that_all_rows_count_in(self, kit):
        """Else the activations of all micro-batches are held where there is a mask."""
        parts = 4
        strategy = TowerStrategy([["CPU:1", "CPU:2"]], micro_batches=parts)
        with strategy.scope():
            inputs = kit.Input([3, 8])
            with strategy.stage(0):
                x = kit.layers.Dense(4, "tanh")(kit.layers.Masking()(inputs))
            with strategy.stage(1):
                model = kit.Model(inputs, kit.layers.Dense(1, "tanh")(x))
            model.compile("sgd", "mse")
        nodes = Nodes(traced(strategy, model, 2 * parts, [3]))
        found = collections.defaultdict(set)
        for name, node in nodes.ops.items():
            if node.op in ("Tanh", "TanhGrad", "NotEqual"):
                found[node.op, int(re.search(r"tower_(\d+)_CPU", name)[1])].add(name)
        masks = set().union(*(found["NotEqual", part] for part in range(parts)))
        for part in range(parts):
            before = set().union(*map(nodes.before, found["Tanh", part]))
            for other in range(parts):  # the last stage holds one micro-batch
                self.assertEqual(bool(found["TanhGrad", other] & before), other < part)
            for name in found["TanhGrad", part]:
                self.assertLessEqual(masks, nodes.before(name))


class DescribeTest(absltest.TestCase):

    def test_layers_and_bytes_of_stages(self):
        """Else nobody sees which layer is where, or which device is full."""
        strategy = TowerStrategy([["CPU:1", "CPU:2"], ["CPU:3", "CPU:4"]], micro_batches=2)
        with strategy.scope():
            model = deep(keras, (4, 4, 4))
            model.compile("adam", "mse")
        model.train_on_batch(np.ones([4, 8], "f"), np.ones([4, 4], "f"))
        text = strategy.describe(model)
        self.assertIn("2 towers of 2 stages and 2 micro-batches", text)
        self.assertRegex(text, r"CPU:4 +tower 1, stage 1 ")
        # Weights and two slots each: (8 * 4 + 4 + 4 * 4 + 4) and (4 * 4 + 4) floats.
        self.assertRegex(text, r"\n0 +432  layer_0\n1 +480  layer_1, layer_2\n")
        self.assertIn(strategy.extended.placement.title, repr(strategy))


class RefusedTest(parameterized.TestCase):

    @parameterized.parameters(
        ({"merge_device": "CPU:0"}, "merge_device='CPU:0' does not go with towers of 2 stages"),
        ({"shares": "measured"}, "shares='measured' does not go with towers of 2 stages"),
        ({"shares": "memory"}, "shares='memory' does not go with towers of 2 stages"))
    def test_arguments(self, arguments, message):
        """Else what cannot be done together is done by halves."""
        with self.assertRaisesRegex(ValueError, message):
            TowerStrategy([["CPU:1", "CPU:2"]], **arguments)

    @parameterized.parameters(
        (7, ValueError, "index must be from 0 to 1, as each tower has 2 stages, but got 7"),
        (-1, ValueError, "index must be from 0 to 1.*but got -1.*CPU:1, CPU:2"),
        (.5, TypeError, "index must be a whole number, but got 0.5"),
        (None, TypeError, "index must be a whole number, but got None"))
    def test_stage(self, index, error, message):
        """Else layers are in another stage than the user thinks."""
        strategy = TowerStrategy([["CPU:1", "CPU:2"]])
        with self.assertRaisesRegex(error, message), strategy.stage(index):
            pass

    def test_stage_of_towers_without_any(self):
        """Else a model that was meant to be divided is copied."""
        strategy = TowerStrategy(["CPU:1", "CPU:2"])
        with self.assertRaisesRegex(ValueError, "one device each: CPU:1, CPU:2"), strategy.stage(0):
            pass

    @IN_TURN
    def test_models_that_cannot_be_cut(self, kit):
        """Else all of a model that is too large for a device is on that device."""
        strategy = TowerStrategy([["CPU:1", "CPU:2"]])
        with strategy.scope():
            few = kit.Sequential([kit.Input([8]), kit.layers.Dense(1)])
            with strategy.stage(1):
                late = kit.Sequential([kit.Input([8]), kit.layers.Dense(2), kit.layers.Dense(1)])
            own = by_hand(kit, strategy, "called")
            own.call = lambda x: own.third(own.second(own.first(x)))
        for model, missing in (few, "1"), (late, "0"), (own, "0 and 1"):
            model.compile("sgd", "mse")
            with self.assertRaisesRegex(
                    ValueError, f"went to stage {missing} of the 2.*strategy.stage"):
                model.fit(np.ones([4, 8]), np.ones([4, 1]), verbose=0)

    @IN_TURN
    def test_a_stage_inside_of_a_layer(self, kit):
        """Else a block whose own layers are in stages is refused, although no device is idle."""
        strategy = TowerStrategy([["CPU:1", "CPU:2", "CPU:3"]])

        class Block(kit.layers.Layer):
            def __init__(self):
                super().__init__()
                with strategy.stage(1):
                    self.inner = kit.layers.Dense(4)

            def build(self, shape):
                self.inner.build(shape)
                self.built = True

            def call(self, x):
                return self.inner(x)

        with strategy.scope():
            inputs = kit.Input([8])
            x = Block()(inputs)
            with strategy.stage(2):
                model = kit.Model(inputs, kit.layers.Dense(1)(x))
            model.compile("sgd", "mse")
        self.assertEqual([device(weight) for weight in model.weights],
                         ["CPU:2", "CPU:2", "CPU:3", "CPU:3"])

    @IN_TURN
    def test_a_stage_that_a_call_leaves_out(self, kit):
        """Else a device stands idle unseen, where the stages are said in a call."""
        strategy = TowerStrategy([["CPU:1", "CPU:2", "CPU:3"]])
        with strategy.scope():
            model = by_hand(kit, strategy, "called")
            model.compile("sgd", "mse")
        x, y = np.ones([4, 8], "f"), np.ones([4, 1], "f")
        with self.assertRaisesRegex(
                ValueError, "no layer of model .* went to stage 2 of the 3"):
            model.fit(x, y, verbose=0)
        self.assertEqual(model.predict(x, verbose=0).shape, (4, 1))  # may well be a part of it

    @parameterized.parameters("argument", "environment")
    def test_several_machines(self, how):
        """Else a worker joins its cluster, and fails when the others wait for it already."""
        jobs = {"worker": ["one:1234", "two:1234"]}
        resolver = None
        if how == "argument":
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(jobs), task_type="worker", task_id=1)
        else:
            self.enter_context(mock.patch.dict(os.environ, TF_CONFIG=json.dumps(
                {"cluster": jobs, "task": {"type": "worker", "index": 1}})))
        with self.assertRaisesRegex(
                ValueError, "devices gives each tower 2 stages, which does not go with several "
                            "machines, but the cluster .* 2 workers: one:1234, two:1234"):
            TowerStrategy([["CPU:1", "CPU:2"]], cluster_resolver=resolver)


if __name__ == "__main__":
    absltest.main()
