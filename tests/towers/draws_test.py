"""Random draws in towers: each tower's are its rows of what one device draws, bit for bit."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide

SEED = (3, 7)
WIDTH = 13  # no multiple of four, so that towers begin between counters


def strategy_of(count, **options):
    return towerstrategy.TowerStrategy([f"CPU:{number}" for number in range(count)], "CPU:0",
                                       **options)


def uniform(dtype, **options):
    return lambda x: tf.random.stateless_uniform(tf.shape(x), SEED, dtype=dtype, **options)


def normal(dtype):
    return lambda x: tf.random.stateless_normal(tf.shape(x), SEED, dtype=dtype)


def truncated(dtype):
    return lambda x: tf.random.stateless_truncated_normal(tf.shape(x), SEED, dtype=dtype)


def in_a_loop(x):
    total = tf.zeros_like(x)
    for turn in tf.range(3):
        total += tf.random.stateless_uniform(tf.shape(x), tf.stack([turn, 5]))
    return total


def from_split_seeds(x):
    first, second = tf.unstack(tf.random.split(SEED, 2))
    return (tf.random.stateless_uniform(tf.shape(x), first)
            + tf.random.stateless_normal(tf.shape(x), tf.random.fold_in(second, 5)))


@tf.function
def nested(x):
    return tf.random.stateless_uniform(tf.shape(x), SEED)


DRAWS = {
    "uniform": uniform(tf.float32), "uniform_half": uniform(tf.float16),
    "uniform_bfloat16": uniform(tf.bfloat16), "uniform_double": uniform(tf.float64),
    "normal": normal(tf.float32), "normal_half": normal(tf.float16),
    "normal_double": normal(tf.float64),
    "truncated": truncated(tf.float32), "truncated_double": truncated(tf.float64),
    "int": uniform(tf.int32, minval=-3, maxval=1000),
    "int_long": uniform(tf.int64, minval=-3, maxval=1000),
    "philox": uniform(tf.float32, alg="philox"),
    "gamma_each": lambda x: tf.random.stateless_gamma(tf.shape(x), SEED, tf.abs(x) + 0.5),
    "gamma_one": lambda x: tf.random.stateless_gamma(tf.shape(x), SEED, 0.5),
    "gamma_columns": lambda x: tf.random.stateless_gamma(
        tf.shape(x), SEED, tf.range(1.0, WIDTH + 1)),
    "poisson": lambda x: tf.random.stateless_poisson(tf.shape(x), SEED, tf.abs(x) + 0.5),
    "binomial": lambda x: tf.random.stateless_binomial(tf.shape(x), SEED, 10.0, tf.sigmoid(x)),
    "categorical": lambda x: tf.random.stateless_categorical(x, 3, SEED),
    "truncated_by_parameters": lambda x: tf.random.stateless_parameterized_truncated_normal(
        tf.shape(x), SEED, 0., 1., -1., 2.),
    "dropout": lambda x: tf.nn.experimental.stateless_dropout(x, 0.4, SEED),
    "one_a_row": lambda x: tf.random.stateless_uniform([tf.shape(x)[0], 1, 1], SEED),
    "split_seeds": from_split_seeds,
    "of_weights": lambda x: 0.0 * x + tf.random.stateless_normal([WIDTH], SEED),
    "one_number": lambda x: 0.0 * x + tf.random.stateless_normal([], SEED),
    "in_a_branch": lambda x: tf.cond(tf.reduce_sum(x) < 1e9, lambda: uniform(tf.float32)(x),
                                     lambda: x),
    "in_a_loop": in_a_loop,
    "in_a_function": nested,
    "in_a_function_again": lambda x: nested(x) + 0.0 * nested(tf.concat([x, x], 0))[
        :tf.shape(x)[0]],
}


def drawn(strategy, fn, x, how):
    """What the towers draw in place of the rows of ``x``, in order."""
    if how == "eagerly":
        parts = strategy.run(fn, (strategy.split(x),))
    elif how == "static":
        parts = tf.function(lambda batch: strategy.run(fn, (batch,)))(strategy.split(x))
    else:
        strategy.extended.trace_once = how != "a trace each"
        batches = tf.data.Dataset.from_tensor_slices(x).batch(len(x))
        # Given, not captured: a function is a cycle, and would keep it until garbage is collected.
        parts = tf.function(lambda elements: strategy.run(fn, (next(elements),)))(
            iter(strategy.experimental_distribute_dataset(batches)))
    return np.concatenate([part.numpy() for part in strategy.experimental_local_results(parts)])


def rows_of(count):
    return np.random.RandomState(0).randn(count, WIDTH).astype("float32")


class StatelessTest(parameterized.TestCase):

    @parameterized.named_parameters(*DRAWS.items())
    def test_rows_of_one_devices_draw(self, fn):
        """Else noise in a replica function depends on how many devices there are."""
        x = rows_of(11)
        wanted = tf.function(fn)(tf.constant(x)).numpy()
        for count, how in ((3, "dynamic"), (4, "static")):
            np.testing.assert_array_equal(drawn(strategy_of(count), fn, x, how), wanted, how)

    @wide.product(2, name=["uniform", "poisson"],
                  how=["eagerly", "a trace each", "dynamic", "static"], rows=[3, 9])
    def test_however_the_towers_run(self, name, how, rows):
        """Else a remainder, or eager mode, draws other numbers."""
        x, fn = rows_of(rows), DRAWS[name]
        wanted = tf.function(fn)(tf.constant(x)).numpy()
        np.testing.assert_array_equal(drawn(strategy_of(4), fn, x, how), wanted)

    def test_rows_times_something(self):
        """Else a layer that makes one dimension of rows and steps draws alike on every tower."""
        def fn(x):
            return tf.reshape(tf.random.stateless_uniform([tf.size(x)], SEED), tf.shape(x))

        x = rows_of(11)
        np.testing.assert_array_equal(drawn(strategy_of(4), fn, x, "dynamic"), fn(x).numpy())

    @parameterized.product(how=["eagerly", "dynamic"])
    def test_without_a_batch(self, how):
        """Else noise that belongs to no row differs between towers, and one device has none such.
        """
        strategy = strategy_of(3)

        def step():
            return strategy.run(lambda: tf.random.stateless_normal([4], SEED))

        parts = strategy.experimental_local_results(
            step() if how == "eagerly" else tf.function(step)())
        for part in parts:
            np.testing.assert_array_equal(part, tf.random.stateless_normal([4], SEED))
        gammas = tf.function(lambda: strategy.run(lambda: tf.random.gamma([4], 2.0, seed=3)))()
        first, *others = strategy.experimental_local_results(gammas)
        for part in others:
            np.testing.assert_array_equal(part, first)

    def test_outside_of_towers(self):
        """Else the package changes what others draw."""
        with strategy_of(3).scope():
            inside = tf.random.stateless_normal([7, 3], SEED)
        np.testing.assert_array_equal(inside, tf.random.stateless_normal([7, 3], SEED))


def sampled(x):
    """A loss of each row, from classes that are drawn once for all."""
    labels = tf.cast(tf.abs(x[:, :1]) * 7, tf.int64)
    table = tf.reshape(tf.range(20.0 * WIDTH) / 99, [20, WIDTH])
    return tf.nn.sampled_softmax_loss(table, tf.zeros([20]), labels, x, 6, 20)


WITH_STATE = {
    "categorical": lambda x: tf.random.categorical(x, 3),
    "categorical_of_weights": lambda x: 0.0 * x + tf.cast(tf.random.categorical(
        tf.ones([1, 50]), WIDTH, seed=3), tf.float32),
    "gamma": lambda x: tf.random.gamma(tf.shape(x), 2.0),
    "gamma_each": lambda x: tf.random.gamma([], tf.abs(x) + 0.5, seed=3),
    "gamma_of_weights": lambda x: 0.0 * x + tf.random.gamma([WIDTH], 2.0),
    "poisson": lambda x: tf.random.poisson(tf.shape(x), 2.0),
    "poisson_each": lambda x: tf.random.poisson([], tf.abs(x) + 0.5),
    "sampled_softmax": sampled,
    "bounding_box": lambda x: 0.0 * x + tf.cast(tf.reduce_sum(
        tf.image.sample_distorted_bounding_box(
            [500, 500, 3], tf.zeros([1, 0, 4]), seed=3, min_object_covered=0.1,
            use_image_if_no_bounding_boxes=True)[0]), tf.float32),
    "fractional_pool": lambda x: tf.nn.fractional_max_pool(
        x[:, :, None, None] + tf.zeros([1, 1, 9, 1]), [1, 1.4, 1.4, 1], True, seed=3)[0],
}


def with_state(fn, call, strategy, x=None, how=None):
    """What three calls of a step draw, by kernels that are its own."""
    tf.random.set_seed(4)
    if strategy is None:
        step = tf.function(fn, input_signature=[tf.TensorSpec([None, WIDTH])])
        return [call(step).numpy() for _ in range(3)]
    strategy.extended.trace_once = how != "a trace each"
    batches = tf.data.Dataset.from_tensor_slices(x).batch(len(x)).repeat()
    batches = iter(strategy.experimental_distribute_dataset(batches))
    step = tf.function(lambda elements: strategy.run(fn, (next(elements),)))
    return [call(lambda: step(batches)) for _ in range(3)]


# How a function of rows, plain and as a tf.function, is called.
PLACES = {
    "a loop": lambda plain, _, x: tf.while_loop(
        lambda turn, _: turn < 3, lambda turn, x: (turn + 1, plain(x)), (0, x))[1],
    "a branch": lambda plain, _, x: tf.cond(tf.shape(x)[1] > 3, lambda: plain(x), lambda: x),
    "a nested function": lambda _, nested, x: nested(nested(x)),
}


class StateTest(parameterized.TestCase):

    @wide.product(2, how=["eagerly", "dynamic", "a trace each"], in_scope=[False, True],
                  count=[1, 3])
    def test_a_generator(self, how, in_scope, count):
        """Else a generator's numbers, or what it is left with, depend on the towers."""
        def fn(generator, x):
            before = generator.skip(tf.constant(7, tf.uint64))
            return tf.cast(before[0] % 1000, tf.float32) + tf.stack([
                generator.normal(tf.shape(x)), 0.0 * x + generator.uniform([WIDTH]),
                tf.random.stateless_normal(tf.shape(x), generator.make_seeds()[:, 0])], -1)

        x, strategy = rows_of(7), strategy_of(count)
        alone = tf.random.Generator.from_seed(5)
        with strategy.scope() if in_scope else contextlib.nullcontext():
            generator = tf.random.Generator.from_seed(5)
        for _ in range(2):
            np.testing.assert_array_equal(
                drawn(strategy, lambda x: fn(generator, x), x, how), fn(alone, x))
        np.testing.assert_array_equal(generator.state, alone.state)

    @wide.product(how=["eagerly", "dynamic", "a trace each"], count=[1, 3])
    def test_shuffled_rows(self, how, count):
        """Else rows are mixed with those of their tower alone, or indices with another's."""
        shuffles = {
            "rows": lambda x: tf.random.experimental.stateless_shuffle(x, SEED),
            "with a state": lambda x: tf.random.shuffle(x, seed=3),
            "keras.random": lambda x: keras.random.shuffle(x, seed=5),
            "columns": lambda x: keras.random.shuffle(x, axis=1, seed=6),
            "numbers": lambda x: 0.0 * x + tf.random.experimental.stateless_shuffle(
                tf.range(float(WIDTH)), SEED)}
        x, strategy = rows_of(7), strategy_of(count)
        for name, fn in shuffles.items():
            with self.subTest(name):
                tf.random.set_seed(4)
                wanted = tf.function(fn)(x) if how != "eagerly" else fn(x)
                tf.random.set_seed(4)
                np.testing.assert_array_equal(drawn(strategy, fn, x, how), wanted)
        own = drawn(strategy, lambda x: tf.gather(x, tf.random.experimental.stateless_shuffle(
            tf.range(tf.shape(x)[0]), SEED)), x, how)
        np.testing.assert_array_equal(np.sort(own, 0), np.sort(x, 0))  # a row of its tower each

    @parameterized.product(how=["eagerly", "dynamic", "static"])
    def test_operations_with_a_state(self, how):
        """Else tf_keras' dropout, which draws by them, depends on the towers."""
        def fn(x):
            whole = tf.random.uniform(tf.shape(x), 0, 9, tf.int32)
            return tf.stack([
                tf.random.uniform(tf.shape(x)), tf.random.normal(tf.shape(x), seed=3),
                tf.random.truncated_normal(tf.shape(x)), 0.0 * x + tf.random.uniform([WIDTH]),
                tf.cast(whole, tf.float32)], -1)

        x, strategy = rows_of(11), strategy_of(4)
        step = fn if how == "eagerly" else tf.function(fn)
        parts = tf.function(lambda batch: strategy.run(fn, (batch,)))
        seen = []
        for run in (lambda: step(tf.constant(x)), lambda: np.concatenate(
                strategy.experimental_local_results(
                    strategy.run(fn, (strategy.split(x),)) if how == "eagerly"
                    else parts(strategy.split(x))))):
            tf.random.set_seed(4)
            seen.append(np.array([run() for _ in range(3)]))
        np.testing.assert_array_equal(*seen)
        self.assertFalse(np.array_equal(seen[0][0], seen[0][1]))

    @parameterized.product(how=["dynamic", "a trace each"], draws=["per row", "per tower"])
    def test_several_runs_in_a_function(self, how, draws):
        """Else the second step of a pair that train in turn draws what the first has drawn."""
        def noise(x):
            return tf.nn.dropout(x + 1., 0.5) + tf.random.uniform(tf.shape(x))

        x, strategy = rows_of(7), strategy_of(3, draws=draws)
        strategy.extended.trace_once = how == "dynamic"

        def wanted(x):
            return noise(x) + noise(x), tf.random.normal([]), noise(x)

        def step(batch):
            first = strategy.run(lambda x: noise(x) + noise(x), (batch,))
            return first, tf.random.normal([]), strategy.run(noise, (batch,))

        tf.random.set_seed(4)
        first, between, second = tf.function(wanted)(tf.constant(x))
        tf.random.set_seed(4)
        got = tf.function(step)(strategy.split(x))
        parts = [strategy.experimental_local_results(got[place]) for place in (0, 2)]
        self.assertEqual(got[1], between)
        if draws == "per row":
            np.testing.assert_array_equal(np.concatenate(parts[0]), first)
            np.testing.assert_array_equal(np.concatenate(parts[1]), second)
        else:
            flat = np.concatenate([np.ravel(part) for run in parts for part in run])
            self.assertGreater(len(np.unique(flat)), 0.95 * len(flat))  # no mask or noise twice

    @parameterized.named_parameters(*WITH_STATE.items())
    def test_operations_with_a_state_alone(self, fn):
        """Else what has no stateless twin, as sampled losses, depends on the towers."""
        x = rows_of(7)
        wanted = with_state(fn, lambda step: step(x), None)
        for how in ("dynamic", "a trace each"):
            strategy = strategy_of(3)
            got = with_state(fn, lambda step, strategy=strategy: np.concatenate(
                [part.numpy() for part in strategy.experimental_local_results(step())]),
                strategy, x, how)
            np.testing.assert_array_equal(got, wanted, how)

    @wide.product(how=["dynamic", "a trace each"], where=list(PLACES))
    def test_a_generator_where_towers_cannot_meet(self, how, where):
        """Else recurrent dropout with rng_type="stateful" draws what other towers drew."""
        seen = []
        for strategy in (None, strategy_of(3)):
            with strategy.scope() if strategy else contextlib.nullcontext():
                generator = tf.random.Generator.from_seed(5)

            def more(x, generator=generator):
                generator.skip(3)
                return x + tf.cast(generator.uniform(tf.shape(x), 0, 99, tf.int32), tf.float32)

            nested = tf.function(more)

            def fn(x, more=more, nested=nested):
                return more(PLACES[where](more, nested, more(x)))

            x, step = np.rint(rows_of(7)), tf.function(fn)
            seen.append([drawn(strategy, fn, x, how) if strategy else step(x) for _ in range(2)])
            seen[-1].append(generator.state)
        for one, other in zip(*seen):
            np.testing.assert_array_equal(other, one)

    @parameterized.product(version=[keras, tf_keras])
    def test_seeds_that_are_used_up_by_one_draw(self, version):
        """Else the same mask is drawn in each step, or a saved seed is another than one device's.
        """
        strategy = strategy_of(3)
        with strategy.scope():
            model = version.Sequential([version.Input([8]), version.layers.Dropout(0.5, seed=2),
                                        version.layers.Dense(2)])
            model.compile("sgd", "mse")
        model.fit(np.ones([11, 8]), np.ones([11, 2]), batch_size=4, epochs=2, verbose=0)
        if version is keras:
            state = model.layers[0].seed_generator.state
            self.assertEqual(np.array(state).tolist(), [2, 6])


    @wide.product(version=[keras, tf_keras], traced=[False, True])
    def test_initial_values(self, version, traced):
        """Else a model that its first step builds fails, or starts from other weights.

        The kernel has as many rows as each tower has of the batch.
        """
        weights = []
        for strategy in (tf.distribute.get_strategy(), strategy_of(3)):
            version.utils.set_random_seed(3)
            with strategy.scope():
                model = version.Sequential([version.layers.Dense(4), version.layers.Dense(2)])

            def step(x, strategy=strategy, model=model):
                return strategy.run(model, (x,))

            batches = strategy.experimental_distribute_dataset(
                tf.data.Dataset.from_tensors(tf.ones([12, 4])))
            (tf.function(step) if traced else step)(next(iter(batches)))
            weights.append(model.get_weights())
        self.assertLen(weights[0], 4)
        for one, other in zip(*weights):
            np.testing.assert_array_equal(other, one)


class PerTowerTest(parameterized.TestCase):

    @wide.product(version=[keras, tf_keras], eagerly=[False, True])
    def test_towers_draw_their_own(self, version, eagerly):
        """Else ``draws="per tower"`` is taken and does nothing."""
        class Always(version.layers.Layer):
            """Draws in ``predict``, too: Keras 3 forgets ``training=True`` there."""

            def __init__(self):
                super().__init__()
                self.inner = version.layers.Dropout(0.5)

            def call(self, x):
                return self.inner(x, training=True)

        def masks(scope):
            version.backend.clear_session()
            version.utils.set_random_seed(3)
            with scope:
                model = version.Sequential([version.Input([64]), Always()])
                model.compile("sgd", "mse", run_eagerly=eagerly)
            return model.predict(np.ones([8, 64], "float32"), batch_size=8, verbose=0)

        alone = masks(contextlib.nullcontext())
        own = masks(strategy_of(4, draws="per tower").scope())
        np.testing.assert_array_equal(masks(strategy_of(4).scope()), alone)
        self.assertEqual(np.array_equal(own, alone), eagerly)
        self.assertLen({row.tobytes() for row in alone}, 8)
        self.assertLen({row.tobytes() for row in own}, 8)

    @parameterized.parameters(
        ("per device", ValueError, "draws must be 'per row' or 'per tower', but got 'per device'"),
        (None, TypeError, "draws must be 'per row' or 'per tower', but got None of type NoneType"),
        (True, TypeError, "draws must be .* but got True of type bool"))
    def test_refused(self, draws, error, message):
        """Else a slip chooses for the user."""
        with self.assertRaisesRegex(error, message):
            towerstrategy.TowerStrategy(2, draws=draws)


if __name__ == "__main__":
    absltest.main()
