"""What a step on GPUs sends by way of the host, with ``merge_device="balanced"``: small numbers.

Steps are traced on logical CPU devices that stand for GPUs; ``CPU:0`` stands for the host.
"""

import collections

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import dtypes
import wide
from benchmarks import kernels, on_gpus, traffic
from tests.placement.placement_test import function_in
from towerstrategy import TowerStrategy

TOWERS = 3
ROWS = np.random.default_rng(0).normal(size=[12, 16]).astype("float32")
LABELS = np.arange(12) % 10
LAYERS = 4
SMALL = 24  # bytes: a shape of three dimensions


def loss_scaled(kit, optimizer):
    return (kit.optimizers if kit is keras else kit.mixed_precision).LossScaleOptimizer(optimizer)


def optimizer_of(kit, kind):
    adam = kit.optimizers.Adam
    return {"plain": adam, "clip": lambda: adam(global_clipnorm=1.),
            "clip each": lambda: adam(clipnorm=1.), "scale": lambda: loss_scaled(kit, adam()),
            "average": lambda: adam(use_ema=True),
            "accumulate": lambda: adam(gradient_accumulation_steps=2)}[kind]()


def model_of(kit):
    layers = kit.layers
    return kit.Sequential([
        kit.Input([16]), *(layers.Dense(16, "relu") for _ in range(LAYERS - 2)), layers.Dropout(.1),
        layers.BatchNormalization(), layers.Dense(16, "relu"), layers.Dense(10)])


def own_step(kit, model, optimizer):
    """A step of both: a ``train_step``, or a loop's."""
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                y, tf.cast(model(x, training=True), tf.float32))
            loss = tf.nn.compute_average_loss(losses)
            scaled = loss
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                scaled = optimizer.scale_loss(loss)
            elif hasattr(optimizer, "get_scaled_loss"):
                scaled = optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        if hasattr(optimizer, "get_unscaled_gradients"):
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


def traced(strategy, kit, kind, way):
    """The concrete function of a step, or of a loop of steps, that has been run."""
    data = tf.data.Dataset.from_tensor_slices((ROWS, LABELS)).batch(6)
    with strategy.scope():
        model, optimizer = model_of(kit), optimizer_of(kit, kind)
        distributed = strategy.experimental_distribute_dataset(data)
    if way in ("fit", "train_step"):
        if way == "train_step":
            step = own_step(kit, model, optimizer)
            model.train_step = lambda batch: {"loss": step(*batch)}
        with strategy.scope():
            model.compile(optimizer, kit.losses.SparseCategoricalCrossentropy(from_logits=True),
                          metrics=["accuracy"] if way == "fit" else None, jit_compile=False)
        model.fit(data, verbose=0, shuffle=False)
        with strategy.scope(), strategy.extended.step():
            return function_in(model.train_function).get_concrete_function(iter(distributed))
    with strategy.scope():
        optimizer.build(model.trainable_variables)
    own = own_step(kit, model, optimizer)
    step = strategy.function(own) if way == "function" else lambda *batch: strategy.run(own, batch)

    @tf.function
    def loop(batches):
        for _ in tf.range(2):
            step(*next(batches))

    with strategy.scope():
        loop(iter(distributed))
        return loop.get_concrete_function(iter(distributed))


def to_and_from_the_host(function):
    """What crosses between the host and a GPU, without the batch."""
    return [each for each in traffic.count(function, TOWERS).crossings
            if traffic.short(on_gpus.HOST) in (each.source, each.target) and not each.from_batch]


CASES = wide.product(0, 2, kit=(keras, tf_keras), way=("fit", "train_step", "function", "run"),
                     kind=("plain", "clip", "clip each", "scale", "average", "accumulate"))


class HostTest(parameterized.TestCase):

    @CASES
    def test_no_weight_or_gradient(self, kit, way, kind):
        """Else weights go to the host and back in each step, over the slowest link there is."""
        if kind == "accumulate" and kit is tf_keras:
            self.skipTest("tf_keras accumulates no gradients")
        with on_gpus.tracing():
            strategy = TowerStrategy(on_gpus.towers(TOWERS), "balanced")
            strategy.extended.keep_graphs = True
            function = traced(strategy, kit, kind, way)
        found = to_and_from_the_host(function)
        self.assertEmpty([each for each in found if each.size > SMALL])
        # Counts of rows, of the step; shapes. Never one a variable, or a tower's numbers.
        back = [each for each in found if each.target == on_gpus.HOST]
        self.assertLess(len(back), 2 * LAYERS + 2)
        if way != "run":  # what is given back stays where it is: nothing waits for it on the host
            self.assertEmpty([each for each in back if each.shape.rank == 0])
        sent = sum(each.size for each in traffic.count(function, TOWERS).crossings)
        self.assertGreater(sent, 2 * (TOWERS - 1) * LAYERS * 4 * 16 * 10)  # the rest was seen


class RowsTest(parameterized.TestCase):

    def _crossings(self, function, model):
        with on_gpus.tracing():
            strategy = TowerStrategy(on_gpus.towers(TOWERS), "balanced")
            strategy.extended.keep_graphs = True
            with strategy.scope():
                model = model()
            function = strategy.function(function(model))
            concrete = function.get_concrete_function(*strategy.split((tf.ones([96, 64]),)))
            return traffic.count(concrete, TOWERS).crossings

    def test_in_batch_loss(self):
        """Else the embeddings of a contrastive batch, and their gradients, go by way of the host.
        """
        def step(model):
            def contrast(x):
                with tf.GradientTape() as tape:
                    z = tf.math.l2_normalize(model(x), 1)
                    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                        tf.range(tf.shape(x)[0]), z @ tf.transpose(z)))
                return loss, tape.gradient(loss, model.trainable_variables)[0][0, 0]

            return contrast

        crossings = self._crossings(step, lambda: keras.Sequential([
            keras.Input([64]), keras.layers.Dense(32)]))
        rows = [each for each in crossings if 32 in each.shape and not each.from_batch]
        self.assertNotEmpty(rows)
        self.assertEmpty([each for each in rows
                          if traffic.short(on_gpus.HOST) in (each.source, each.target)])

    def test_predictions(self):
        """Else one GPU has to hold the predictions of all, and sends them on."""
        crossings = self._crossings(lambda model: model, lambda: keras.Sequential([
            keras.Input([64]), keras.layers.Dense(5)]))
        rows = [each for each in crossings if each.shape[1:] == [5] and each.shape[0] is None]
        self.assertEqual([each.target for each in rows], [on_gpus.HOST] * TOWERS)


class IntegersTest(absltest.TestCase):

    def test_words_of_tower_0(self):
        """Else the words of tower 0, which lie on its GPU, go to the host and back in a loop."""
        with on_gpus.tracing():
            strategy = TowerStrategy(on_gpus.towers(2), "balanced")
            strategy.extended.keep_graphs = True
            with strategy.scope():
                table = tf.Variable(tf.ones([20, 4]))
            words = strategy.split((tf.ones([7, 5], tf.int32),))  # 4 and 3 rows

            @tf.function
            def step(words):
                return strategy.run(lambda words: tf.gather(table, words), (words,))

            graph = step.get_concrete_function(*words).graph
            found = [np.asarray(part) for part in strategy.experimental_local_results(
                step(*words))]
        self.assertEqual([part.shape for part in found], [(4, 5, 4), (3, 5, 4)])
        nodes = [node for node in graph.as_graph_def().node if "CPU:1" in node.device]
        self.assertIn("ResourceGather", [node.op for node in nodes])
        kept = [node for node in nodes if tf.int32 in (node.attr["dtype"].type, node.attr["T"].type)
                and node.op != "Const" and len(node.attr["shape"].shape.dim) != 1
                and kernels.host_memory_args(node) - {"perm"}]
        self.assertEmpty([(node.op, node.name) for node in kept])


class HalvesTest(parameterized.TestCase):

    @wide.product(0, 2, kit=(keras, tf_keras), way=("fit", "function", "run"),
                  policy=("mixed_bfloat16", "mixed_float16"))
    def test_halves_cross_as_halves(self, kit, way, policy):
        """Else links, the scarce thing between GPUs, carry twice what a half policy is used for."""
        with on_gpus.tracing(), dtypes.policy(kit, policy):
            strategy = TowerStrategy(on_gpus.towers(TOWERS), "balanced")
            strategy.extended.keep_graphs = True
            function = traced(strategy, kit, "scale" if policy == "mixed_float16" else "plain", way)
        kernel, half = 16 * 16, 2
        sizes = collections.Counter(
            each.size for each in traffic.count(function, TOWERS).crossings
            if on_gpus.HOST not in (each.source, each.target) and not each.from_batch)
        # Each kernel goes to the other towers, and its gradient comes from them.
        halves = sum(count * (size // (half * kernel)) for size, count in sizes.items()
                     if size % (half * kernel) == 0)
        # A loop of tf_keras multiplies gradients itself, in float32, before it hands them over.
        own = kit is tf_keras and way == "run" and policy == "mixed_float16"
        self.assertEqual(halves, (3 if own else 2) * (TOWERS - 1) * (LAYERS - 1))


if __name__ == "__main__":
    absltest.main()
