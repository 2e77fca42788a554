"""Losses of one's own: what is scaled by whom, and what is said where nobody has."""

import contextlib
import warnings

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide
from parity import cases, runner
from towerstrategy.losses import own_losses

KITS = {"keras": keras, "tf_keras": tf_keras}

# One of each group, on numbers of towers that do not divide the batches; tests/parity has them all.
COMPARED = ("losses/several outputs, one unreduced", "losses/one number, a function",
            "losses/own compute_loss", "losses/own compute_loss, a sum and a term",
            "losses/own compute_loss, a sum over the global batch",
            "models/own train_step, scale_loss", "models/own train_step, compute_average_loss")


def compared():
    every = [(name, version, towers) for name in COMPARED for version in cases.CASES[name].keras
             for towers in (runner.Towers(1, "cpu"), runner.Towers(3, "tower 0"),
                            runner.Towers(4, "cpu"))]
    for name, version, towers in every if wide.ALL else every[::5]:
        yield f"{name}_{version}_{towers}".replace(" ", "_"), name, version, towers


def rows(count=8):
    random = np.random.RandomState(count)
    x = random.randn(count, 5).astype("f")
    return x, np.tanh(x[:, :3])


def squares(y, y_pred):
    return tf.reduce_mean(tf.square(y_pred - y), axis=-1)


def model_with(kit, loss_of):
    """A compiled model whose ``train_step`` differentiates ``loss_of(model, y, y_pred)``."""

    class Own(kit.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = loss_of(self, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients, _ = tf.clip_by_global_norm(gradients, 1e6)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"rows": tf.constant(1.0)}

    kit.utils.set_random_seed(3)
    x = kit.Input((5,))
    normal = kit.layers.BatchNormalization(trainable=False)(kit.layers.Dense(3)(x))
    model = Own(x, normal)
    model.compile(kit.optimizers.SGD(0.1), "mse")
    return model


def looped(strategy, model, size=8):
    """Two steps of a loop of one's own."""
    step = tf.function(lambda *parts: strategy.run(model.train_step, (parts,)), autograph=False)
    for _ in range(2):
        step(*strategy.split(rows(size)))


def loop(kit, loss_of, towers=3, size=8):
    """Trains for two steps; returns the weights, and what this package has warned of."""
    strategy = towerstrategy.TowerStrategy(towers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with strategy.scope():
            model = model_with(kit, loss_of)
        looped(strategy, model, size)
    return model.get_weights(), [str(warning.message) for warning in caught
                                 if str(warning.message).startswith("towerstrategy")]


class SameTest(parameterized.TestCase):

    @parameterized.named_parameters(*compared())
    def test_towers_train_as_one_device(self, name, version, towers):
        """Else a loss of one's own trains with another step, and logs another number."""
        found = runner.compare(cases.CASES[name], KITS[version], towers)
        self.assertLessEqual(found.worst, cases.CASES[name].bound, str(found))

    @wide.product(version=list(KITS), term=["own", "inherited and own"])
    def test_a_compute_loss_that_divides_by_the_replicas(self, version, term):
        """Else code written for MirroredStrategy trains with a fraction of its step."""
        kit = KITS[version]

        class Divides(kit.Model):
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
                replicas = tf.distribute.get_strategy().num_replicas_in_sync
                own = tf.reduce_mean(tf.abs(y_pred - y)) / replicas
                if term == "own":
                    return own
                return own + super().compute_loss(x, y, y_pred, sample_weight)

        def weights(strategy):
            with strategy.scope():
                kit.utils.set_random_seed(5)
                x = kit.Input((5,))
                model = Divides(x, kit.layers.Dense(3)(x))
                model.compile(kit.optimizers.SGD(0.1), "mse")
            history = model.fit(*rows(), batch_size=8, epochs=2, verbose=0).history
            return [*model.get_weights(), *history.get("loss", [])]

        one, four = weights(tf.distribute.get_strategy()), weights(towerstrategy.TowerStrategy(4))
        for got, wanted in zip(four, one, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


class OutputsTest(parameterized.TestCase):

    @wide.product(2, kit=[keras, tf_keras], size=[6, 7], sparse=[True, False])
    def test_each_outputs_loss_is_logged_as_on_one_device(self, kit, size, sparse):
        """Else the log of an output is as many times too large as there are towers."""
        random = np.random.default_rng(0)
        x = random.normal(size=[size, 5]).astype("f")
        y = {"a": random.integers(0, 2, [size]) if sparse else random.normal(size=[size, 2]),
             "b": random.normal(size=[size, 1])}
        weights = {name: random.uniform(size=[size]).astype("f") for name in y}

        def logged(scope):
            kit.utils.set_random_seed(0)
            with scope:
                inputs = kit.layers.Input([5])
                model = kit.Model(inputs, {"a": kit.layers.Dense(2, name="a")(inputs),
                                           "b": kit.layers.Dense(1, name="b")(inputs)})
                loss = kit.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile("sgd", {"a": loss if sparse else "mse", "b": "mae"})
            return {**model.test_on_batch(x, y, return_dict=True),
                    **{f"weighted {name}": value for name, value in model.test_on_batch(
                        x, y, sample_weight=weights, return_dict=True).items()}}

        one, towers = (logged(scope) for scope in (
            contextlib.nullcontext(), towerstrategy.TowerStrategy(3).scope()))
        self.assertEqual(one.keys(), towers.keys())
        for name, value in one.items():
            np.testing.assert_allclose(towers[name], value, rtol=1e-5, err_msg=name)


class ScaleLossTest(parameterized.TestCase):

    @parameterized.parameters(False, True)
    def test_counts_by_rows(self, traced):
        """Else a tower of few rows counts as much as one of many."""
        strategy = towerstrategy.TowerStrategy(3)

        def replica(x):
            return strategy.scale_loss(tf.reduce_mean(x))

        x = tf.range(7.0)
        replica = tf.function(replica) if traced else replica
        scaled = strategy.run(replica, (strategy.split(x),))
        self.assertAlmostEqual(float(strategy.reduce("SUM", scaled, axis=None)), 3.0, places=5)

    @parameterized.parameters(
        ("mean", True), ("mean", False), ("sum over count", True), ("sum over count", False),
        ("averaged", True), ("averaged", False), ("squared root", True))
    def test_fewer_rows_than_towers(self, kind, traced):
        """Else a tower without rows makes the loss, and what is made of it, a NaN."""
        strategy = towerstrategy.TowerStrategy(4)
        with strategy.scope():
            w = tf.Variable(2.0)

        def loss_of(x):
            if kind == "averaged":
                return tf.nn.compute_average_loss(x * w)
            if kind == "squared root":
                return strategy.scale_loss(tf.square(tf.sqrt(tf.reduce_mean(x * w))))
            return strategy.scale_loss(
                tf.reduce_mean(x * w) if kind == "mean" else
                tf.reduce_sum(x * w) / tf.cast(tf.shape(x)[0], tf.float32))

        def replica(x):
            with tf.GradientTape() as tape:
                loss = loss_of(x)
            return loss, tape.gradient(loss, w)

        replica = tf.function(replica) if traced else replica
        parts = strategy.run(replica, (strategy.split(tf.constant([1.0, 5.0])),))
        loss, gradient = (float(strategy.reduce("SUM", part, axis=None)) for part in parts)
        self.assertAlmostEqual(loss, 6.0, places=5)
        self.assertAlmostEqual(gradient, 3.0, places=5)

    def test_one_tower(self):
        """Else one device, which is a valid case everywhere, is another one."""
        strategy = towerstrategy.TowerStrategy(1)
        x = tf.constant(3.0)
        self.assertEqual(float(strategy.run(lambda: strategy.scale_loss(x))), 3.0)

    def test_scales_once(self):
        """Else a loss that Keras has scaled is scaled again, and the step is R times too small."""
        strategy = towerstrategy.TowerStrategy(4)

        @tf.function
        def replica(x):
            mean = keras.losses.MeanSquaredError()(tf.zeros_like(x), x)
            return strategy.scale_loss(2.0 * mean + tf.reduce_mean(x))

        x = tf.reshape(tf.range(12.0), [6, 2])
        got = strategy.reduce("SUM", strategy.run(replica, (strategy.split(x),)), axis=None)
        wanted = 2 * tf.reduce_mean(x ** 2) + tf.reduce_mean(x)
        self.assertAlmostEqual(float(got), float(wanted), places=3)

    def test_where_it_belongs(self):
        """Else a user is told nothing about why a loss was not scaled."""
        strategy, other = towerstrategy.TowerStrategy(2), towerstrategy.TowerStrategy(2)
        with self.assertRaisesRegex(RuntimeError, "inside of the function given to strategy.run"):
            strategy.scale_loss(tf.constant(1.0))
        with self.assertRaisesRegex(RuntimeError, "tower of another strategy"):
            other.run(lambda: strategy.scale_loss(tf.constant(1.0)))
        with self.assertRaisesRegex(TypeError, "loss must be a floating point tensor.*int32"):
            strategy.run(lambda: strategy.scale_loss(tf.constant(1)))
        with self.assertRaisesRegex(TypeError, "loss must be a floating point.* None of type None"):
            strategy.run(lambda: strategy.scale_loss(None))


def contrastive(y, y_pred):
    """Each row against all rows of both views, as in SimCLR."""
    both = tf.math.l2_normalize(tf.concat([y, y_pred], axis=0), axis=1)
    count = tf.shape(both)[0]
    alike = tf.matmul(both, both, transpose_b=True) / 0.1 - 1e9 * tf.eye(count)
    positives = tf.math.floormod(tf.range(count) + count // 2, count)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(positives, alike))


# Losses that are R times too large, and losses that are right.
UNSCALED = {
    "a mean": lambda model, y, y_pred: tf.reduce_mean(squares(y, y_pred)),
    "a mean of sums": lambda model, y, y_pred: tf.reduce_mean(
        tf.reduce_sum(tf.square(y_pred - y), axis=1)),
    "a sum by its rows": lambda model, y, y_pred: (
        tf.reduce_sum(squares(y, y_pred)) / tf.cast(tf.shape(y)[0], tf.float32)),
    "a root of a mean": lambda model, y, y_pred: tf.sqrt(tf.reduce_mean(squares(y, y_pred))),
    "a scaled loss and a mean": lambda model, y, y_pred: (
        model.compute_loss(None, y, y_pred) + 0.1 * tf.reduce_mean(y_pred ** 2)),
    "a sum and the weights": lambda model, y, y_pred: (
        tf.reduce_sum(squares(y, y_pred)) / 8.0
        + 0.1 * tf.nn.l2_loss(tf.convert_to_tensor(model.trainable_variables[0]))),
    "within a function": lambda model, y, y_pred: tf.function(
        lambda y, y_pred: tf.reduce_mean(squares(y, y_pred)))(y, y_pred),
    "an auto-encoder's": lambda model, y, y_pred: (
        tf.reduce_mean(tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(y, y_pred), axis=1))
        + tf.reduce_mean(tf.reduce_sum(
            -0.5 * (1 + y_pred - tf.square(y_pred) - tf.exp(y_pred)), axis=1))),
    "a contrastive one": lambda model, y, y_pred: contrastive(y, y_pred),
}
RIGHT = {
    "compute_loss": lambda model, y, y_pred: model.compute_loss(None, y, y_pred),
    "scale_loss": lambda model, y, y_pred: (
        tf.distribute.get_strategy().scale_loss(tf.reduce_mean(squares(y, y_pred)))),
    "a sum over the global batch": lambda model, y, y_pred: (
        tf.reduce_sum(squares(y, y_pred)) / 8.0),
    "a sum over the global batch, a number of the graph's": lambda model, y, y_pred: (
        tf.reduce_sum(squares(y, y_pred) * (1.0 / 8.0)) + 1e-7),
    "by all rows": lambda model, y, y_pred: (
        tf.reduce_sum(squares(y, y_pred)) / tf.distribute.get_replica_context().all_reduce(
            "SUM", tf.cast(tf.shape(y)[0], tf.float32))),
    "by replicas": lambda model, y, y_pred: (
        tf.reduce_mean(squares(y, y_pred)) / tf.distribute.get_strategy().num_replicas_in_sync),
    "compute_average_loss": lambda model, y, y_pred: (
        tf.nn.compute_average_loss(squares(y, y_pred), global_batch_size=8)
        + tf.nn.scale_regularization_loss(
            tf.nn.l2_loss(tf.convert_to_tensor(model.trainable_variables[0])))),
    "per row": lambda model, y, y_pred: squares(y, y_pred),
    "within a function": lambda model, y, y_pred: tf.function(
        lambda y, y_pred: tf.reduce_sum(squares(y, y_pred)) / 8.0)(y, y_pred),
}


class KerasStepTest(parameterized.TestCase):

    @parameterized.parameters(*KITS)
    def test_any_loss_is_one_devices(self, version):
        """Else a ``train_step`` that is right on one device, or by tf.distribute, is another."""
        def every(model, y, y_pred):
            losses = {**UNSCALED, **RIGHT}
            if not tf.distribute.has_strategy():
                losses["scale_loss"] = UNSCALED["a mean"]
            return tf.add_n([tf.reduce_sum(loss(model, y, y_pred)) for loss in losses.values()])

        def trained(strategy):
            with strategy.scope():
                model = model_with(KITS[version], every)
            model.fit(*rows(), batch_size=8, epochs=2, verbose=0)
            return model.get_weights()

        with warnings.catch_warnings():
            warnings.filterwarnings("error", "towerstrategy")
            got = trained(towerstrategy.TowerStrategy(3))
        for one, other in zip(got, trained(tf.distribute.get_strategy()), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(*KITS)
    def test_a_gan_of_keras_examples(self, version):
        """Else the usual GAN does not compile, is warned, or trains otherwise.

        It compiles before it makes the metrics that its own list names.
        """
        kit = KITS[version]
        loss_of = kit.losses.BinaryCrossentropy(from_logits=True)

        class Gan(kit.Model):
            def __init__(self):
                super().__init__()
                self.generator, self.critic = (
                    kit.Sequential([kit.Input([4]), kit.layers.Dense(units)]) for units in (4, 1))

            def compile(self, optimizers):
                super().compile()
                self.optimizers = optimizers
                self.trackers = [kit.metrics.Mean(name=name) for name in ("ours", "theirs")]

            @property
            def metrics(self):
                return self.trackers

            def train_step(self, real):
                fake = self.generator(tf.random.normal(tf.shape(real)))
                logits = {"critic": tf.concat([fake, real], 0), "generator": fake}
                labels = {"critic": tf.concat([tf.ones_like(fake), tf.zeros_like(real)], 0)[:, :1],
                          "generator": tf.zeros_like(fake)[:, :1]}
                for name, optimizer, tracker in zip(logits, self.optimizers, self.trackers):
                    with tf.GradientTape() as tape:
                        given = logits["critic"] if name == "critic" else self.generator(real)
                        loss = loss_of(labels[name], self.critic(given))
                    variables = getattr(self, name).trainable_variables
                    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
                    tracker.update_state(loss)
                return {tracker.name: tracker.result() for tracker in self.trackers}

        def trained(strategy):
            kit.utils.set_random_seed(4)
            with strategy.scope():
                model = Gan()
                model.compile([kit.optimizers.Adam(), kit.optimizers.Adam()])
            history = model.fit(np.ones([7, 4], "float32"), batch_size=7, verbose=0).history
            return [*model.get_weights(), *history.values()]

        with warnings.catch_warnings():
            warnings.filterwarnings("error", "towerstrategy")
            got = trained(towerstrategy.TowerStrategy(3))
        for one, other in zip(got, trained(tf.distribute.get_strategy()), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class WarningTest(parameterized.TestCase):

    @wide.product(version=list(KITS), name=list(UNSCALED))
    def test_what_nothing_has_scaled(self, version, name):
        """Else a step trains with R times the learning rate and nobody is told."""
        _, warned = loop(KITS[version], UNSCALED[name])
        self.assertLen(warned, 1)
        self.assertIn("strategy.scale_loss(loss)", warned[0])
        self.assertStartsWith(warned[0], own_losses.MESSAGE)

    @wide.product(version=list(KITS), name=list(RIGHT))
    def test_right_losses(self, version, name):
        """Else a warning of what is right teaches people to look away."""
        self.assertEqual(loop(KITS[version], RIGHT[name])[1], [])

    @parameterized.parameters(*KITS)
    def test_one_tower(self, version):
        """Else a script is warned on a machine on which nothing is wrong."""
        self.assertEqual(loop(KITS[version], UNSCALED["a mean"], towers=1)[1], [])

    @wide.product(version=list(KITS), size=[8, 7, 2])
    def test_what_it_says_to_write_is_right(self, version, size):
        """Else the advice is wrong."""
        kit, wanted = KITS[version], UNSCALED["a mean of sums"]
        kit.utils.set_random_seed(3)
        model = model_with(kit, wanted)
        model.fit(*rows(size), batch_size=size, epochs=2, verbose=0)
        got, warned = loop(kit, lambda model, y, y_pred: tf.distribute.get_strategy().scale_loss(
            wanted(model, y, y_pred)), size=size)
        self.assertEqual(warned, [])
        for one, other in zip(got, model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    def test_comes_before_the_weights_change(self):
        """Else who makes an error of the warning has a broken model already."""
        strategy = towerstrategy.TowerStrategy(3)
        with strategy.scope():
            model = model_with(keras, UNSCALED["a mean"])
        before = model.get_weights()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", own_losses.MESSAGE.rstrip())
            with self.assertRaisesRegex(UserWarning, "unscaled loss"):
                looped(strategy, model)
        for one, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_a_penalty_on_inputs_is_no_loss(self):
        """Else a gradient penalty, which is differentiated by its inputs, is taken for a loss."""
        def loss_of(model, y, y_pred):
            x = tf.ones_like(y_pred[:, :1]) * tf.ones([1, 5])
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = tf.reduce_mean(model(x))
            slope = inner.gradient(out, x)
            return tf.distribute.get_strategy().scale_loss(tf.reduce_mean(slope ** 2)
                                                           + tf.reduce_mean(y_pred))

        self.assertEqual(loop(keras, loss_of)[1], [])

    def test_some_of_the_rows_that_are_the_batchs_worst(self):
        """Else each tower trains on the hardest of its own rows, and nobody is told."""
        def hardest(model, y, y_pred):
            losses = tf.reduce_sum(tf.square(y_pred), 1)
            return tf.reduce_sum(tf.math.top_k(losses, 2).values) / 8.

        def of_columns(model, y, y_pred):
            return tf.reduce_sum(tf.math.top_k(tf.square(y_pred), 1).values) / 8.

        self.assertLen(loop(keras, hardest)[1], 1)
        self.assertEqual(loop(keras, of_columns)[1], [])

    def test_a_generator_and_a_critic(self):
        """Else every GAN with Keras' losses is warned."""
        bce = keras.losses.BinaryCrossentropy(from_logits=True)
        strategy = towerstrategy.TowerStrategy(3)
        with strategy.scope():
            generator, critic = (keras.Sequential([keras.Input([4]), keras.layers.Dense(units)])
                                 for units in (4, 1))
            optimizers = [keras.optimizers.Adam(), keras.optimizers.Adam()]

        @tf.function
        def step(x):
            def replica(x):
                with tf.GradientTape(persistent=True) as tape:
                    real, fake = critic(x), critic(generator(x))
                    ours = bce(tf.ones_like(fake), fake)
                    theirs = (bce(tf.ones_like(real), real) + bce(tf.zeros_like(fake), fake)) / 2
                for optimizer, model, loss in zip(optimizers, (generator, critic), (ours, theirs)):
                    variables = model.trainable_variables
                    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

            strategy.run(replica, (x,))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(strategy.split(tf.random.normal([7, 4])))
        self.assertEqual([str(each.message) for each in caught
                          if "towerstrategy" in str(each.message)], [])


class HelpersTest(parameterized.TestCase):

    @parameterized.product(count=[1, 3, 4], traced=[False, True], size=[7, 2])
    def test_by_rows(self, count, traced, size):
        """Else TensorFlow's helpers count a tower of one row as much as one of many."""
        strategy = towerstrategy.TowerStrategy(count)
        x = tf.range(float(size)) + 1

        def replica(x):
            return (tf.nn.compute_average_loss(x), tf.nn.compute_average_loss(x, x),
                    tf.nn.scale_regularization_loss(tf.constant([1.0, 2.0])))

        replica = tf.function(replica) if traced else replica
        parts = strategy.run(replica, (strategy.split(x),))
        got = [float(strategy.reduce("SUM", part, axis=None)) for part in parts]
        np.testing.assert_allclose(
            got, [tf.reduce_mean(x), tf.reduce_mean(x * x), 3.0], rtol=1e-5)

    def test_others_get_theirs(self):
        """Else using this package changes what TensorFlow does for others."""
        x = tf.constant([1.0, 2.0])
        self.assertEqual(float(tf.nn.compute_average_loss(x)), 1.5)
        self.assertEqual(float(tf.nn.scale_regularization_loss(x)), 3.0)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        parts = strategy.run(lambda: tf.nn.compute_average_loss(x))
        self.assertEqual([float(part) for part in parts.values], [0.75, 0.75])


class OneNumberTest(parameterized.TestCase):

    @parameterized.product(version=list(KITS), reduction=["sum", "none", None])
    def test_as_on_one_device(self, version, reduction):
        """Else a loss that is one number trains with another step than on one device."""
        kit = KITS[version]
        given = {} if reduction is None else {"reduction": reduction}

        class OneNumber(kit.losses.Loss):
            def __init__(self, made):
                super().__init__(**given)
                self.made = made

            def call(self, y_true, y_pred):
                return self.made(tf.square(y_pred - y_true), y_pred)

        class OwnCall(OneNumber):
            """Past Keras' reduction."""

            def __call__(self, y_true, y_pred, sample_weight=None):
                return self.made(tf.square(y_pred - y_true), y_pred)

        class Both(kit.losses.Loss):
            def __call__(self, y_true, y_pred, sample_weight=None):
                return super().__call__(y_true, y_pred) + tf.reduce_mean(y_pred ** 2)

            def call(self, y_true, y_pred):
                return tf.reduce_mean(tf.abs(y_pred - y_true), axis=-1)

        def entropy(squares, y_pred):
            likely = tf.reduce_mean(tf.nn.softmax(y_pred), axis=0)
            return tf.reduce_sum(likely * tf.math.log(likely))

        def differentiates(squares, y_pred):
            with tf.GradientTape() as tape:
                tape.watch(y_pred)
                cubes = tf.reduce_sum(y_pred ** 3)
            return tf.reduce_mean(tf.math.top_k(
                tf.reshape(squares * tape.gradient(cubes, y_pred), [-1]), 2)[0])

        made = {
            "mean": lambda squares, y_pred: tf.reduce_mean(squares),
            "sum": lambda squares, y_pred: tf.reduce_sum(squares),
            "farthest": lambda squares, y_pred: tf.reduce_max(
                tf.matmul(squares, squares, transpose_b=True)),
            "draws": lambda squares, y_pred: tf.reduce_max(
                squares * tf.random.uniform(tf.shape(squares), seed=3)),
            "entropy": entropy, "differentiates": differentiates}

        def trained(strategy):
            kit.utils.set_random_seed(1)
            with strategy.scope():
                calls = tf.Variable(0., trainable=False)

                def writes(squares, y_pred):
                    calls.assign_add(1.)
                    return tf.reduce_max(squares)

                losses = {kind.__name__ + name: kind(function) for kind in (OneNumber, OwnCall)
                          for name, function in {**made, "writes": writes}.items()}
                losses["both"] = Both()
                x = kit.Input((5,))
                model = kit.Model(x, {name: kit.layers.Dense(3, name=name)(x) for name in losses})
                model.compile(kit.optimizers.SGD(0.01), losses)
            x, y = rows()
            y = dict.fromkeys(losses, y)
            history = model.fit(x, y, batch_size=7, verbose=0, shuffle=False)  # of 7 rows, of 1
            return [*model.get_weights(), history.history["loss"],
                    model.evaluate(x, y, batch_size=8, verbose=0), calls.numpy()]

        with warnings.catch_warnings():
            warnings.filterwarnings("error", "towerstrategy")
            got = trained(towerstrategy.TowerStrategy(3))
        for one, other in zip(got, trained(tf.distribute.get_strategy()), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
