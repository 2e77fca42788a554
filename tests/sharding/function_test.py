"""``strategy.function`` as users of ``tf.function`` meet it: options, datasets, methods, errors."""

import contextlib
import copy
import functools
import gc
import logging
import weakref

import keras
import numpy as np
import programs
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide

DEVICES = towerstrategy.split_cpu(8)
X = np.arange(10, dtype=np.float32)


def strategy_of(towers, **options):
    return towerstrategy.TowerStrategy(DEVICES[:towers], **options)


@tf.custom_gradient
def doubled_backwards(x):
    y = tf.tanh(x)
    return y, lambda upstream: 2 * upstream * (1 - y ** 2)


NORM = tf_keras.layers.BatchNormalization()
NORM.build([None, 2])
TAPED = {
    "constants": lambda y: tf.stop_gradient(y) * y,
    "own_gradient": doubled_backwards,
    "batch_norm": lambda y: NORM(y, training=True) * tf.reduce_sum(y, 1, keepdims=True),
    "loop": lambda y: tf.scan(lambda last, row: 0.5 * last + tf.tanh(row), y),
    "call": tf.function(lambda y: tf.tanh(y) * 2, jit_compile=True)}


class FunctionTest(parameterized.TestCase):

    @parameterized.parameters(1, 3)
    def test_decorates_like_tf_function(self, towers):
        """Else a name, a docstring or a keyword is lost when tf.function is replaced."""
        strategy = strategy_of(towers)

        @strategy.function(reduce_retracing=True)
        def normalize(x, scale=2.0):
            """Doc."""
            return {"scaled": x / tf.reduce_max(x) * scale}

        self.assertEqual((normalize.__name__, normalize.__doc__), ("normalize", "Doc."))
        self.assertEqual(normalize.python_function(tf.constant(X))["scaled"][-1], 2)
        for given in (normalize(strategy.split(X), 3.0), normalize(scale=3.0, x=strategy.split(X))):
            np.testing.assert_allclose(given["scaled"], X / 3, rtol=1e-6)
        self.assertEqual(normalize.experimental_get_tracing_count(), 1)
        self.assertIn("scale", normalize.pretty_printed_concrete_signatures())

    @parameterized.parameters((1,), (3,), (3, (3, 1, 2)))
    def test_rows_counted_in_python(self, towers, shares=None):
        """Else a published loop that asks for ``x.shape[0]`` ends in an error on towers."""
        strategy = strategy_of(towers, shares=shares)

        @strategy.function
        def in_turn(x):
            weights = np.arange(x.shape[0], dtype=np.float32)
            return x * weights, tf.reduce_sum(x * tf.ones([x.shape[0]]))

        for x in (X, X[:8], X[:1]):
            scaled, total = in_turn(strategy.split(x))
            np.testing.assert_allclose(scaled, x * np.arange(len(x)), rtol=1e-6)
            np.testing.assert_allclose(total, x.sum(), rtol=1e-6)
        dataset = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(X).batch(5, drop_remainder=True))
        totals = [in_turn(x)[1].numpy() for x in dataset]
        np.testing.assert_allclose(totals, [10, 35])
        self.assertEqual(in_turn.get_concrete_function(strategy.split(X))(
            strategy.split(X))[1].numpy(), 45)

    @wide.some(2, keras, tf_keras)
    def test_variables_made_before_rows_are_counted(self, kit):
        """Else an optimizer, or layers, that such a step builds start with no values."""
        strategy, outcomes = strategy_of(3), []
        for scope, wrap, split in ((contextlib.nullcontext(), tf.function, tf.constant),
                                   (strategy.scope(), strategy.function, strategy.split)):
            with scope:
                layer, optimizer = kit.layers.Dense(2, kernel_initializer="ones"), \
                    kit.optimizers.Adam(0.1)

            @wrap
            def step(x, layer=layer, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer(x) ** 2)
                weights = layer.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
                return loss / x.shape[0]

            totals = [step(split(x[:, np.newaxis])) for x in (X, X[:8])]
            outcomes.append([*totals, *layer.get_weights()])
        for one, other in zip(*outcomes):
            np.testing.assert_allclose(other, one, rtol=1e-6)
        layer = kit.layers.Dense(2)
        with self.assertRaisesRegex(Exception, "division by zero"):  # the user's error, as it is
            strategy.function(lambda x: (layer(x), 1 / 0))(strategy.split(X[:, np.newaxis]))

    @parameterized.parameters(False, True)
    def test_a_batch_size_in_shapes(self, in_python):
        """Else a published step with its batch size in shapes has all rows on one device, or runs
        for other batches, too."""
        strategy, weights = strategy_of(3), tf.Variable(np.arange(24.).reshape([4, 6]))

        def step(x):
            rows = x.shape[0] if in_python else 5
            with tf.GradientTape() as tape:
                pairs = tf.reshape(x @ weights, [rows, -1 if in_python else 2, 3])
                ends = tf.concat([pairs[:, 1], tf.zeros([rows, 1], pairs.dtype)], 1)
                repeated = tf.broadcast_to(tf.reduce_sum(pairs, 1, keepdims=True), [rows, 4, 3])
                loss = tf.reduce_mean(ends ** 2) + tf.reduce_mean(repeated ** 3)
            return tape.gradient(loss, weights)

        function, x = strategy.function(step), np.arange(28.).reshape([7, 4]) / 28
        np.testing.assert_allclose(function(strategy.split(x[:5])), step(x[:5]), rtol=1e-12)
        self.assertEmpty(strategy.extended.done_with_all_rows)
        if in_python:
            np.testing.assert_allclose(function(strategy.split(x)), step(x), rtol=1e-12)
        else:
            for rows in (x, x[:4]):
                with self.assertRaises(tf.errors.InvalidArgumentError):
                    function(strategy.split(rows))

    @wide.some(3, "the shape as it is", "behind the rows", "the rows are repeated")
    def test_rows_counted_in_a_compiled_function(self, what):
        """Else a tower reshapes its rows to the shape of all, which is an error."""
        strategy, weights = strategy_of(3), tf.Variable(np.arange(24.).reshape([4, 6]) / 24)

        @tf.function(jit_compile=True)
        def compiled(x, weights):
            y = tf.tanh(x @ weights)
            if what == "the rows are repeated":
                return tf.broadcast_to(tf.reduce_sum(y, 1, keepdims=True), [x.shape[0], 4])
            return tf.reshape(y, [x.shape[0], *([6] if what == "the shape as it is" else [2, 3])])

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(compiled(x, weights.read_value()) ** 2) * x.shape[0]
            return loss, tape.gradient(loss, weights)

        function = strategy.function(step)
        for rows in 7, 2:
            x = np.arange(rows * 4.).reshape([rows, 4]) / 28
            for one, other in zip(step(tf.constant(x)), function(strategy.split(x))):
                np.testing.assert_allclose(other, one, rtol=1e-9)

    def test_branches_where_rows_are_counted_in_python(self):
        """Else the gradient of a branch over rows ends in an error: what the branch kept for it has
        other rows on a tower than the static shape says."""
        weights = tf.Variable(np.eye(4) / 2)

        def step(x):
            rows, x = x.shape[0], tf.convert_to_tensor(x)
            with tf.GradientTape() as tape:
                hidden = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x @ weights),
                                 lambda: x * tf.ones([rows, 1], x.dtype))
                loss = tf.reduce_mean(hidden ** 2)
            return tape.gradient(loss, weights)

        strategy = strategy_of(3)
        function = strategy.function(step)
        for rows in (7, 2):
            x = np.arange(4. * rows).reshape([rows, 4]) / 28
            np.testing.assert_allclose(function(strategy.split(x)), step(x), rtol=1e-12)
        self.assertEmpty(strategy.extended.done_with_all_rows)

    def test_rows_that_a_loop_keeps_where_they_are_counted_in_python(self):
        """Else a loop's gradient for which all rows are needed ends in an error: what the loop kept
        for it has other rows on a tower than the static shape says."""
        weights = tf.Variable(np.eye(4) / 2)

        @tf.custom_gradient
        def sorted_backwards(x):
            y = tf.tanh(x)
            return y, lambda upstream: upstream * (1 - tf.sort(y, 0) ** 2)

        def step(x):
            state = tf.convert_to_tensor(x) * x.shape[0]
            with tf.GradientTape() as tape:
                state = tf.while_loop(lambda number, _: number < 3, lambda number, state: (
                    number + 1, sorted_backwards(state @ weights)), (0, state))[1]
                loss = tf.reduce_mean(state ** 2)
            return tape.gradient(loss, weights)

        strategy, x = strategy_of(3), np.arange(28.).reshape([7, 4]) / 28
        np.testing.assert_allclose(
            strategy.function(step)(strategy.split(x)), tf.function(step)(x), rtol=1e-12)

    @wide.parameters(1, wide=[2])
    def test_loops_where_rows_are_counted_in_python(self, micro_batches):
        """Else a recurrent layer, or a decoder, of such a step has all rows on one device; or a
        tower takes another's rows of what is the same for all."""
        weights = tf.Variable(np.eye(4) / 2)

        def step(x):
            rows, x = x.shape[0], tf.convert_to_tensor(x)

            def turn(number, state, states):
                state = tf.tanh(state @ weights + x) * tf.ones([rows, 4], x.dtype)
                return number + 1, state, states.write(number, state)

            with tf.GradientTape() as tape:
                _, state, states = tf.while_loop(lambda number, *_: number < 3, turn, (
                    0, tf.zeros([rows, 4], x.dtype),
                    tf.TensorArray(x.dtype, 3, element_shape=[rows, 4])))
                loss = tf.reduce_mean(states.stack()[:2] ** 2) + tf.reduce_mean(state ** 3)
            return loss, tape.gradient(loss, weights)

        strategy = strategy_of(3, micro_batches=micro_batches)
        function = strategy.function(step)
        for rows in (7, 2):
            x = np.arange(4. * rows).reshape([rows, 4]) / 28
            np.testing.assert_allclose(function(strategy.split(x))[1], step(x)[1], rtol=1e-12)
        self.assertEmpty(strategy.extended.done_with_all_rows)

    def test_an_error_of_ones_own(self):
        """Else a step that uses the number of rows in Python, and is broken behind that, is said to
        lack the number."""
        strategy = strategy_of(3)

        @strategy.function
        def broken(x):
            raise ValueError(f"broken for {x.shape[0]} rows")

        for _ in range(2):
            with self.assertRaisesRegex(ValueError, f"broken for {len(X)} rows"):
                broken(strategy.split(X))

    def test_a_batch_that_is_not_split_is_told_of(self):
        """Else who changes the decorator alone trains on one device and never knows."""
        strategy = strategy_of(3)
        with self.assertLogs("towerstrategy", "WARNING") as said:
            strategy.function(lambda x: x * 2)(tf.constant(X))
        self.assertIn("strategy.split(batch)", said.output[0])
        with self.assertNoLogs("towerstrategy", "WARNING"):
            strategy.function(lambda x: x * 2)(strategy.split(X))
            strategy.function(lambda rate: rate * 2)(tf.constant(.1))
            strategy.function(lambda: tf.zeros([3]))()
            strategy_of(1).function(lambda x: x * 2)(tf.constant(X))

    def test_a_lambda(self):
        """Else AutoGraph warns that it finds none in our own code."""
        with self.assertLogs(level="WARNING") as said:
            strategy = strategy_of(3)
            strategy.function(lambda x: x * 2)(strategy.split(X))
            logging.warning("Something has to be.")
        self.assertNotIn("AutoGraph", str(said.output))

    def test_many_functions(self):
        """Else TensorFlow takes several functions for one that is traced again and again, or
        AutoGraph warns that it finds no source."""
        class Callable:
            def __call__(self, x):
                return x

        strategy = strategy_of(2)
        with self.assertNoLogs("tensorflow", "WARNING"):
            for function in (tf.abs, tf.negative, tf.square, tf.sign, tf.exp,
                             functools.partial(tf.add, 1.), Callable()):
                strategy.function(function)(strategy.split(X))

    @parameterized.parameters(1, 3)
    def test_eagerly(self, towers):
        """Else who debugs with tf.config.run_functions_eagerly cannot call it."""
        strategy = strategy_of(towers)
        share = strategy.function(lambda x: x / tf.reduce_sum(x))
        tf.config.run_functions_eagerly(True)
        try:
            np.testing.assert_allclose(share(strategy.split(X)), X / X.sum(), rtol=1e-6)
        finally:
            tf.config.run_functions_eagerly(False)

    @parameterized.parameters(1, 3)
    def test_distributed_datasets(self, towers):
        """Else a loop over a dataset, eager or in a tf.function, cannot call it."""
        strategy = strategy_of(towers)
        dataset = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(X).batch(4))
        mean = strategy.function(lambda x: tf.reduce_mean(x))

        @tf.function
        def by_loop():
            total = 0.0
            for batch in dataset:
                total += mean(batch)
            return total

        @tf.function
        def by_next(iterator):
            total = 0.0
            for _ in tf.range(3):
                total += mean(next(iterator))
            return total

        self.assertEqual([float(mean(batch)) for batch in dataset], [1.5, 5.5, 8.5])
        self.assertEqual(by_loop(), 15.5)
        self.assertEqual(by_next(iter(dataset)), 15.5)
        if towers > 1:
            self.assertLessEqual(mean.experimental_get_tracing_count(), 3)

    @wide.product(towers=[1, 3, 8], within=["", "loop", "branch"])
    def test_tables_larger_than_what_is_looked_up(self, towers, within):
        """Else the rows of a table that towers look up, or add to, are others."""
        strategy = strategy_of(towers)
        with strategy.scope():
            table = tf.Variable(np.arange(9000, dtype=np.float32).reshape([3000, 3]))

        def passes(ids):
            with tf.GradientTape() as tape:
                found = tf.gather(tf.convert_to_tensor(table) / 9000, ids)
                loss = tf.reduce_mean(tf.square(found))
            return (found, tf.convert_to_tensor(tape.gradient(loss, table)),
                    tf.scatter_nd(ids[:, tf.newaxis], found, [3000, 3]))

        def step(ids):
            if within == "branch":
                return tf.cond(tf.size(ids) > 0, lambda: passes(ids), lambda: passes(ids + 1))
            if within == "loop":
                return tf.while_loop(
                    lambda turn, *_: turn < 2, lambda turn, *before: (turn + 1, *(
                        one + other for one, other in zip(before, passes(ids)))),
                    (0, *(one * 0 for one in passes(ids))))[1:]
            return passes(ids)

        ids = np.array([5, 2999, 5, 0, 7], np.int32)
        for found, wanted in zip(strategy.function(step)(strategy.split(ids)),
                                 step(tf.constant(ids))):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)

    def test_other_numbers_of_rows_are_not_traced_again(self):
        """Else the last batch of an epoch, and each new length, costs a trace."""
        strategy = strategy_of(3)
        total = strategy.function(lambda x: tf.reduce_sum(x))
        self.assertEqual([float(total(strategy.split(X[:rows]))) for rows in (9, 5, 2, 1)],
                         [36, 10, 1, 0])
        self.assertEqual(total.experimental_get_tracing_count(), 1)

    @parameterized.parameters(1, 3)
    def test_what_is_not_split_is_the_same_for_all(self, towers):
        """Else a tensor, a variable or a model that is handed over counts once a tower."""
        strategy = strategy_of(towers)
        variable, module = tf.Variable(3.0), tf.Module()
        module.weight = tf.Variable(2.0)

        @strategy.function
        def step(x, factors, written, module, flag):
            written.assign_add(1.0)
            return tf.reduce_sum(x * factors[0]) * module.weight if flag else None

        given = step(strategy.split(X), [tf.constant(2.0), None], variable, module, True)
        self.assertEqual((float(given), float(variable)), (180, 4))

    @parameterized.parameters(1, 3)
    def test_batches_of_different_sizes(self, towers):
        """Else labelled and unlabelled rows cannot be in one step."""
        strategy = strategy_of(towers)
        step = strategy.function(lambda a, b: tf.reduce_sum(a) * tf.reduce_mean(b))
        self.assertEqual(step(strategy.split(X), strategy.split(X[:5])), 90)
        self.assertEqual(step(strategy.split(X[:5]), strategy.split(X[:5])), 20)

    def test_a_nested_function_that_replicas_call_too(self):
        """Else the one that is traced later takes the other's trace: another number of replicas."""
        for first in ("run", "step"):
            strategy = strategy_of(4)

            @tf.function
            def nested(x, strategy=strategy):
                return tf.reduce_sum(x) * strategy.num_replicas_in_sync

            steps = {"step": strategy.function(nested), "run": tf.function(
                lambda x, strategy=strategy, nested=nested: strategy.reduce(
                    "SUM", strategy.run(lambda x: nested(x), (x,)), axis=None))}
            results = {name: float(steps[name](strategy.split(X))) for name in sorted(
                steps, key=lambda name, first=first: name != first)}
            self.assertEqual(results, {"step": X.sum(), "run": 4 * X.sum()})

    def test_one_row_that_broadcasts(self):
        """Else the towers take its one row for all rows, and the loss is silently wrong."""
        strategy, several = strategy_of(3), tf.Variable(X[:2])

        def of_itself(x):
            return tf.reduce_mean((x - tf.concat([x, 2 * x], 0)) ** 2)

        def of_several(x):
            return tf.reduce_mean((x - several) ** 2)

        one = strategy.split(X[:1])
        self.assertAlmostEqual(strategy.function(of_itself)(one).numpy(), of_itself(
            tf.constant(X[:1])).numpy(), 6)
        with self.assertRaises(tf.errors.InvalidArgumentError):
            strategy.function(of_several)(one)

    def test_sequences_of_an_open_length_taken_apart_again(self):
        """Else ``reshape(flat, [rows, -1, 4])`` gathers all rows; there are towers without rows."""
        strategy, signature = strategy_of(3), [tf.TensorSpec([None, None, 4], tf.float64)]
        w = tf.random.stateless_normal([4, 4], [1, 2], dtype=tf.float64)

        def step(x):
            flat = tf.tanh(tf.reshape(x, [-1, 4]) @ w)
            more = tf.ones([tf.shape(x)[1], 1], x.dtype)
            apart = tf.reshape(flat, [tf.shape(x)[0], -1, 4]) + more
            return tf.reduce_sum(tf.nn.softmax(apart, 1) * x), apart

        run = strategy.function(step, signature)
        for rows, length in (7, 5), (2, 3):
            x = tf.random.stateless_normal([rows, length, 4], [3, 4], dtype=tf.float64)
            for given, expected in zip(run(strategy.split(x)), step(x)):
                np.testing.assert_allclose(given, expected, rtol=1e-12)
        self.assertEmpty(strategy.extended.done_with_all_rows)

    def test_bodies_that_are_called_by_their_names(self):
        """Else the loops of CTC losses run on one device."""
        strategy = strategy_of(3)
        step, _ = programs.PROGRAMS["ctc"]()
        batch = tuple(map(tf.constant, programs.batches("ctc")[0]))
        strategy.function(step)(*strategy.split(batch))
        self.assertEmpty(strategy.extended.done_with_all_rows)

    def test_other_numbers_of_rows_beside_rows_or_two_views(self):
        """Else a loss of wrong pairs is silent: rows are left out, or the last one is repeated."""
        strategy = strategy_of(3)
        for views, batch, others in ((1, 4, 3), (2, 4, 7), (2, 4, 9), (2, 4, 16), (2, 1, 3)):
            several = tf.Variable(tf.range(others, dtype=tf.float32))
            step = strategy.function(lambda x: tf.concat([x] * views, 0) * several)  # noqa: B023
            with self.assertRaises(tf.errors.InvalidArgumentError):
                step(strategy.split(X[:batch]))

    def test_batches_of_different_sizes_in_a_graph(self):
        """Else rows are counted wrongly in silence, where only the step can know their numbers."""
        strategy = strategy_of(3)
        step = strategy.function(lambda a, b: tf.reduce_sum(a) * tf.reduce_mean(b))

        def datasets(*sizes):
            return [iter(strategy.experimental_distribute_dataset(
                tf.data.Dataset.from_tensor_slices(X).batch(size))) for size in sizes]

        both = tf.function(lambda a, b: step(next(a), next(b)))
        self.assertEqual(both(*datasets(4, 4)), 9)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "must be of one batch"):
            both(*datasets(4, 5))

    def test_an_assertion_over_rows(self):
        """Else a batch with a bad row is trained on, or gathered to be looked at."""
        strategy = strategy_of(3)
        with strategy.scope():
            total = tf.Variable(0.0)

        @strategy.function
        def step(x):
            tf.debugging.assert_less(x, 9.0, "too large a number")
            total.assign_add(tf.reduce_sum(x))

        step(strategy.split(X[:9]))
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "too large a number"):
            step(strategy.split(X))
        self.assertEqual(total, 36)
        self.assertEmpty(strategy.extended.done_with_all_rows)

    def test_words_of_rows(self):
        """Else a model that splits its texts into words runs on one device behind them."""
        strategy = strategy_of(3)
        table = tf.Variable(tf.random.stateless_normal([10, 4], [1, 2]))

        @strategy.function
        def step(texts, y):
            words = tf.strings.to_hash_bucket_fast(tf.strings.split(texts), 9).to_tensor(-1)
            with tf.GradientTape() as tape:
                rows = tf.tanh(tf.reduce_sum(tf.gather(table, words + 1), 1))
                loss = tf.reduce_mean((rows - y) ** 2)
            return rows, loss, tf.convert_to_tensor(tape.gradient(loss, table))

        texts = tf.constant(["a b", "", "c", "a c b b d", "d  e ", "b", "e a"])
        y = tf.random.stateless_normal([7, 4], [3, 4])
        for got, wanted in zip(step(*strategy.split((texts, y))), step.python_function(texts, y)):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        self.assertEmpty(strategy.extended.done_with_all_rows)

    @parameterized.parameters(1, 3)
    def test_input_signature(self, towers):
        """Else a signature written for one device is refused, or traced for each batch."""
        strategy = strategy_of(towers)
        step = strategy.function(
            lambda x, scale: tf.reduce_sum(x["a"]) * scale,
            input_signature=[{"a": tf.TensorSpec([None])}, tf.TensorSpec([])])
        for rows in (10, 5):
            given = step(strategy.split({"a": X[:rows]}), 2.0)
            self.assertEqual(given, 2 * X[:rows].sum())
        self.assertEqual(step({"a": X}, 2.0), 90)
        self.assertLessEqual(step.experimental_get_tracing_count(), 2)
        for wrong in ({"a": X.astype("i")}, {"a": X[:, None]}, {"b": X}):
            with self.assertRaises((TypeError, ValueError)) as caught:
                step(strategy.split(wrong), 2.0)
            if towers > 1:
                self.assertRegex(str(caught.exception), "x must .*input_signature says")

    @parameterized.parameters(1, 3)
    def test_get_concrete_function(self, towers):
        """Else who asks for the graph of a step does not get it."""
        strategy = strategy_of(towers)
        concrete = strategy.function(lambda x: tf.reduce_mean(x)).get_concrete_function(
            strategy.split(X))
        self.assertEqual(concrete(strategy.split(X)), 4.5)
        devices = {node.device for node in concrete.graph.as_graph_def().node}
        self.assertGreaterEqual(len(devices - {""}), towers)

    def test_is_one_call_unless_its_graph_is_asked_for(self):
        """Else a first step takes Python half as long again as the trace, for objects of nobody."""
        strategy, calls, found = strategy_of(3), {}, {}
        rate, total = tf.Variable(0.5), tf.Variable(0.0)

        def step(x):
            first, second = tf.unstack(tf.reshape(x, [-1, 2]), axis=1)  # outputs that are a list
            largest, places = tf.math.top_k(tf.stack([first, second], 1))  # several outputs
            total.assign_add(tf.reduce_sum(rate * first * second))
            return largest, places

        for keeps in (False, True):
            strategy.extended.keep_graphs = keeps

            def within(x, keeps=keeps):
                with strategy.extended.step():
                    result = strategy.run(step, (x,))
                calls[keeps] = tf.compat.v1.get_default_graph().get_operations()
                return result

            total.assign(0.0)
            result = tf.function(within, autograph=False)(strategy.split(X))
            found[keeps] = [*result, total.read_value()]
        for got, expected in zip(found[False], found[True]):
            np.testing.assert_array_equal(got, expected)
        self.assertLess(len(calls[False]), 15)
        self.assertGreater(len(calls[True]), 20)
        call = next(op for op in calls[False] if op.type == "StatefulPartitionedCall")
        read = [call.inputs[place] for place in call.get_attr("_read_only_resource_inputs")]
        captured = {inner.name: outer for outer, inner in call.graph.captures}
        self.assertEqual([captured[tensor.name] is rate.handle for tensor in read], [True])

    def test_gradients_of_what_was_traced_without_a_tape(self):
        """Else a tape finds no gradient of a step that was called before it was there."""
        strategy, weight = strategy_of(3), tf.Variable([2.0, 3.0])
        loss = strategy.function(lambda x: tf.reduce_mean(
            tf.reduce_sum(tf.unstack(tf.square(weight)), 0) * x))
        loss(strategy.split(X))
        with tf.GradientTape() as tape:
            value = loss(strategy.split(X))
        np.testing.assert_allclose(tape.gradient(value, weight), [18.0, 27.0], rtol=1e-6)

    def test_second_gradients_of_loops_in_functions(self):
        """Else a gradient penalty of tf_keras' LSTM, whose loop is in a function, is a KeyError."""
        looped = tf.function(lambda x, w: tf.while_loop(
            lambda number, _: number < 3, lambda number, h: (number + 1, tf.tanh(x + h * w)),
            [0, tf.zeros_like(x)])[1], autograph=False)

        def step(x):
            w = tf.constant(1.3)
            with tf.GradientTape() as outer:
                outer.watch(w)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = looped(x, w)
                penalty = tf.reduce_mean(inner.gradient(y, x) ** 2)
            return outer.gradient(penalty, w)

        strategy = strategy_of(3)
        np.testing.assert_allclose(
            strategy.function(step)(strategy.split(X)), tf.function(step)(X), rtol=1e-6)

    @parameterized.parameters(1, 3)
    def test_methods(self, towers):
        """Else it cannot be put where tf.function is, on a method."""
        strategy = strategy_of(towers)

        class Scaled(tf.Module):

            def __init__(self, scale):
                super().__init__()
                self.scale = tf.Variable(scale)

            @strategy.function(input_signature=[tf.TensorSpec([None])])
            def __call__(self, x):
                return self.scale * tf.reduce_max(x)

            @classmethod
            @strategy.function
            def of_class(cls, x):
                return tf.reduce_max(x) * len(cls.__name__)

        class Twice(Scaled):

            @strategy.function
            def __call__(self, x):
                return 2 * super().__call__(x)

        one, two, both = Scaled(2.0), Scaled(3.0), Twice(4.0)
        self.assertEqual([float(one(strategy.split(X))), float(two(strategy.split(X))),
                          float(one(strategy.split(X))), float(both(strategy.split(X)))],
                         [18, 27, 18, 72])
        self.assertEqual([float(each.of_class(strategy.split(X))) for each in (Scaled, Twice, one)],
                         [54, 45, 54])
        self.assertLen(one.variables, 1)
        self.assertEqual(one.__call__.get_concrete_function(strategy.split(X))(
            strategy.split(X)), 18)

    def test_methods_of_copies(self):
        """Else a copy of an object trains the original's weights."""
        strategy = strategy_of(2)

        class Scaled:
            def __init__(self):
                self.factor = 2.

            @strategy.function
            def __call__(self, x):
                return self.factor * tf.reduce_sum(x)

        first = Scaled()
        first(strategy.split(X))
        for copied in (copy.copy(first), copy.deepcopy(first)):
            copied.factor = 3.
            self.assertEqual(copied(strategy.split(X)), 3 * X.sum())

    def test_methods_let_go_of_their_objects(self):
        """Else each model that is made in a search stays in memory."""
        strategy = strategy_of(3)

        class Scaled(tf.Module):

            @strategy.function
            def __call__(self, x):
                return tf.reduce_max(x)

        scaled = Scaled()
        scaled(strategy.split(X))
        left = weakref.ref(scaled)
        del scaled
        gc.collect()
        self.assertIsNone(left())

    @parameterized.parameters(1, 3)
    def test_within_another(self, towers):
        """Else steps cannot be put together of smaller ones."""
        strategy = strategy_of(towers)
        inner = strategy.function(lambda x: x - tf.reduce_mean(x))
        outer = strategy.function(lambda x: tf.reduce_max(inner(x)))
        self.assertEqual(outer(strategy.split(X)), 4.5)

    @parameterized.parameters(1, 3)
    def test_makes_variables_once(self, towers):
        """Else a layer that is built when it is called cannot be in a step."""
        strategy, made = strategy_of(towers), []

        @strategy.function
        def step(x):
            if not made:
                made.append(tf.Variable(1.0))
            made[0].assign_add(tf.reduce_mean(x))
            return made[0].read_value()

        self.assertEqual([float(step(strategy.split(X))) for _ in range(2)], [5.5, 10])
        self.assertLen(made, 1)

    @parameterized.parameters(1, 3)
    def test_autograph(self, towers):
        """Else `if` of a tensor, or autograph=False, does not mean what it means in tf.function."""
        strategy = strategy_of(towers)

        def clipped(x):
            if tf.reduce_mean(x) > 4:
                x = x - 4
            return tf.reduce_sum(x)

        self.assertEqual(strategy.function(clipped)(strategy.split(X)), 5)
        with self.assertRaises(tf.errors.OperatorNotAllowedInGraphError):
            strategy.function(clipped, autograph=False)(strategy.split(X))

    @parameterized.parameters(1, 3)
    def test_a_tape_around_it(self, towers):
        """Else a loss that is a strategy.function cannot be differentiated by who calls it."""
        strategy, weight = strategy_of(towers), tf.Variable(2.0)
        loss_of = strategy.function(
            lambda x: tf.reduce_max(x * weight) + tf.reduce_mean(x * weight))
        with tf.GradientTape() as tape:
            loss = loss_of(strategy.split(X))
        self.assertEqual(tape.gradient(loss, weight), 13.5)

    @parameterized.parameters(1, 3)
    def test_the_step_sees_one_replica(self, towers):
        """Else code that reads the number of replicas scales what has all rows already."""
        strategy = strategy_of(towers)

        @strategy.function
        def step(x):
            context = tf.distribute.get_replica_context()
            return (strategy.num_replicas_in_sync, context.replica_id_in_sync_group,
                    context.all_reduce("SUM", tf.reduce_sum(x)))

        self.assertEqual([int(value) for value in step(strategy.split(X))], [1, 0, 45])


class RefusedTest(parameterized.TestCase):
    """Else what cannot be right is found out from a wrong result, or from TensorFlow's depths."""

    def assert_refused(self, error, message, call):
        with self.assertRaisesRegex(error, message):
            call()

    @parameterized.parameters(1, 3)
    def test_arguments_of_a_call(self, towers):
        """Iterators, scalars and other strategies' values are named."""
        strategy, other = strategy_of(towers), strategy_of(2)
        step = strategy.function(lambda x: tf.reduce_mean(x))
        dataset = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(X).batch(4))
        self.assert_refused(TypeError, "x is a distributed dataset, but", lambda: step(dataset))
        self.assert_refused(TypeError, "x is a distributed iterator, but",
                            lambda: step(iter(dataset)))
        self.assert_refused(ValueError, "x has a part for each of 2 towers",
                            lambda: step(other.split(X)))
        if towers > 1:
            means = strategy.run(tf.reduce_mean, (strategy.split(X),))
            self.assert_refused(ValueError, "x has a scalar for each tower", lambda: step(means))
        self.assert_refused(TypeError, "missing a required argument: 'x'", step)

    @parameterized.parameters(
        (TypeError, "func must be a function", {"func": 3}),
        (TypeError, "input_signature must be", {"func": len, "input_signature": 3}),
        (TypeError, "input_signature", {"func": len, "input_signature": [3]}))
    def test_options(self, error, message, options):
        """Wrong options are named where they are given."""
        self.assert_refused(error, message, lambda: strategy_of(2).function(**options))

    @parameterized.product(towers=(1, 3), autograph=(True, False))
    def test_a_dataset_within(self, towers, autograph):
        """Else an inner loop over data of its own, as over a support set, fails or is dealt."""
        strategy = strategy_of(towers)
        weight = tf.Variable([1.0, 2.0])

        def step(x, dataset):
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(x[:, None] * weight)
                twice = tf.reduce_mean(x[:, None] * weight ** 2)

            def inner(total, row):
                weight.assign_sub(0.01 * row * tape.gradient(loss, weight))
                return total + row * tf.reduce_sum(tape.gradient(twice, weight))

            if not autograph:
                return dataset.reduce(tf.constant([0.0, 0.0]), lambda total, row: total + row)
            total = tf.constant([0.0, 0.0])
            for row in dataset:
                total = inner(total, row)
            return total

        dataset = tf.data.Dataset.from_tensor_slices(tf.ones([5, 2]))
        expected = tf.function(step, autograph=autograph)(tf.constant(X), dataset).numpy()
        left = weight.numpy()
        weight.assign([1.0, 2.0])
        compiled = strategy.function(step, autograph=autograph, reduce_retracing=True)
        given = compiled(strategy.split(X), dataset)
        np.testing.assert_allclose(given, expected, rtol=1e-6)
        np.testing.assert_allclose(weight, left, rtol=1e-6)

    @parameterized.parameters(1, 3)
    def test_jit_compile(self, towers):
        """Else XLA, which a loop is written for, does nothing, or compiles for one device."""
        strategy = strategy_of(towers)
        x, y = tf.random.normal([23, 4], seed=1), tf.random.normal([23, 3], seed=2)
        weight = tf.Variable(tf.ones([4, 3]))

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.tanh(x @ weight) - y) ** 2)
            return loss, tape.gradient(loss, weight)

        compiled = strategy.function(step, jit_compile=True)
        parts = strategy.split((x, y))
        for one, other in zip(step(x, y), compiled(*parts)):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
        graph = compiled.get_concrete_function(*parts).graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function
                                for node in function.node_def)]
        scopes = {node.attr["_XlaScope"].s for node in nodes if "_XlaScope" in node.attr}
        self.assertLen(scopes, towers)

    def test_jit_compile_of_a_mean_of_chosen_rows(self):
        """Else XLA ends with an internal error where a tower has one row."""
        strategy = strategy_of(2)
        mean = strategy.function(
            lambda x, mask: tf.reduce_mean(tf.boolean_mask(x, mask)), jit_compile=True)
        x, mask = tf.reshape(tf.range(18.0), [3, 3, 2]), tf.constant([True, False, True])
        self.assertEqual(mean(*strategy.split((x, mask))), 8.5)

    def test_several_stages(self):
        """Towers of several devices are no towers of one step yet."""
        strategy = towerstrategy.TowerStrategy([DEVICES[:2], DEVICES[2:4]])
        self.assert_refused(NotImplementedError, "stages", lambda: strategy.function(len))

    @parameterized.parameters(1, 3)
    def test_places_of_a_call(self, towers):
        """In a replica, and in the scope of another strategy, it has no towers to run on."""
        strategy = strategy_of(towers)
        step = strategy.function(lambda x: tf.reduce_mean(x), autograph=False)
        self.assert_refused(RuntimeError, "outside of the function given to strategy.run",
                            lambda: strategy.run(step, (strategy.split(X),)))
        with strategy_of(2).scope():
            self.assert_refused(RuntimeError, "Mixing different", lambda: step(X))

    @wide.parameters(*((name, at % 2) for at, name in enumerate(TAPED)),
                     wide=[(name, 1 - at % 2) for at, name in enumerate(TAPED)])
    def test_a_tape_around_what_it_cannot_differentiate(self, program, in_graph):
        """Else a gradient is wrong, in silence: of rows that count as constants, of a gradient of
        one's own, of batch norm, of a loop."""
        strategy, weight = strategy_of(3), tf.Variable([[0.5, 0.2], [0.1, 0.3]])
        x = np.arange(14, dtype=np.float32).reshape([7, 2]) / 9

        def gradient(function, x):
            def taped(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(function(x) ** 2)
                return tape.gradient(loss, weight)

            return (tf.function(taped) if in_graph else taped)(x)

        def function(x):
            return TAPED[program](x @ weight)

        expected = gradient(tf.function(function), x)
        on_towers = strategy.function(function)
        on_towers(strategy.split(x))  # traced without a tape first
        np.testing.assert_allclose(gradient(on_towers, strategy.split(x)), expected, rtol=1e-4)

    def test_a_tape_that_comes_too_late(self):
        """Else the gradient is that of the operations, not the function's own; or a tape that is
        not asked for it ends in an error."""
        strategy, weight = strategy_of(3), tf.Variable(2.0)
        reversed_gradient = tf.custom_gradient(lambda x: (x * 1.0, lambda upstream: -upstream))
        inner = strategy.function(lambda x: tf.reduce_sum(reversed_gradient(x * weight)))
        outer = tf.function(lambda x: inner(x))
        outer(strategy.split(X))
        with tf.GradientTape() as tape:
            total = outer(strategy.split(X))
        self.assertEqual(total, 90)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Put the tape into it"):
            tape.gradient(total, weight)

    def test_one_row_counted_in_python(self):
        """Else it is taken for a size of one that broadcasts, which some operations do not."""
        strategy, weight = strategy_of(2), tf.Variable([1.0, 2.0])

        def step(x):
            with tf.GradientTape() as tape:
                systems = tf.linalg.diag(tf.nn.softplus(x * weight)) * x.shape[0]
                loss = tf.reduce_mean(tf.linalg.solve(systems, x[..., tf.newaxis]))
            return loss, tape.gradient(loss, weight)

        function, x = strategy.function(step), tf.constant([[3.0, 4.0], [5.0, 6.0]])
        for rows in (2, 1):
            for one, other in zip(step(x[:rows]), function(strategy.split(x[:rows]))):
                np.testing.assert_allclose(other, one, rtol=1e-5)

    @wide.product(lengths=[[2, 0, 3, 1], [3, 1], [0, 0, 0]], sparse=[False, True])
    def test_components_that_are_made_dense(self, lengths, sparse):
        """Else a model of ragged or sparse inputs trains on one device, from its first layer on."""
        strategy, weight = strategy_of(3), tf.Variable([[1.0, 2], [3, 4]])
        rows = tf.RaggedTensor.from_row_lengths(
            np.arange(2 * sum(lengths), dtype="f4").reshape(-1, 2), lengths)
        batch = tf.sparse.from_dense(rows.to_tensor(shape=[None, 3, 2])) if sparse else rows

        def step(x):
            with tf.GradientTape() as tape:
                dense = tf.sparse.to_dense(x) if sparse else x.to_tensor()
                y = tf.reduce_sum(tf.tanh(dense / 9) @ weight, 1)
                loss = tf.reduce_mean(y)
            return y, loss, tape.gradient(loss, weight)

        sharded = strategy.function(step)
        for one, other in zip(step(batch), sharded(strategy.split(batch))):
            np.testing.assert_allclose(other, one, rtol=1e-5)
        library = sharded.get_concrete_function(strategy.split(batch)).graph.as_graph_def().library
        products = [node.device for function in library.function for node in function.node_def
                    if node.op == "BatchMatMulV2"]
        self.assertLen({*products}, 3)

    def test_behind_a_product_of_rows_that_are_made_sparse(self):
        """Else a model trains on one device from its first sparse product on."""
        strategy, weight = strategy_of(3), tf.Variable([[1.0, 2], [3, 4]])

        def step(x):
            with tf.GradientTape() as tape:
                product = tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(x), weight)
                loss = tf.reduce_mean(tf.tanh(product / 9) @ weight)
            return product, loss, tape.gradient(loss, weight)

        x = tf.nn.relu(tf.constant(X.reshape(5, 2)) - 3)
        sharded = strategy.function(step)
        for one, other in zip(step(x), sharded(strategy.split(x))):
            np.testing.assert_allclose(other, one, rtol=1e-5)
        library = sharded.get_concrete_function(strategy.split(x)).graph.as_graph_def().library
        self.assertLen({node.device for function in library.function for node in function.node_def
                        if node.op == "MatMul"}, 3)

    def test_sub_batches_that_are_no_arguments(self):
        """Else the first tower's rows are taken for all."""
        strategy = strategy_of(3)
        parts = strategy.split(X)
        iterator = iter(strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(X).batch(4)))
        for value in (lambda: parts, lambda: next(iterator)):
            step = strategy.function(lambda: tf.reduce_mean(value()), autograph=False)  # noqa: B023
            self.assert_refused(RuntimeError, "takes sub-batches .* as its arguments", step)


if __name__ == "__main__":
    absltest.main()
