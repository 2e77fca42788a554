"""Loops: each tower runs its own, on its device, and reads variables once, before it."""

import collections
import functools

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from benchmarks import on_gpus
from towerstrategy import _tensorflow as _tf

DEVICES = towerstrategy.split_cpu(8)
TOWERS = 3
STEPS = 4
ROWS = (9, 2)  # of the second batch a tower has none


def weights(*shape):
    return tf.Variable(np.random.RandomState(len(shape)).normal(size=shape) / 2)


def made(strategy):
    """The loss of a recurrent layer whose steps read weights, one of them by index; its weights.

    The steps normalize a weight, as cells do.
    """
    with strategy.scope() if strategy else tf.device(None):
        kernel, bias, table = weights(3, 3), weights(3), weights(STEPS, 3)

    def normalized():  # each operation of its gradient is linear in the part of a tower
        scale = tf.nn.sigmoid(bias) / tf.norm(kernel, axis=0)
        return tf.where(kernel > -1, kernel * scale, 0) + tf.linalg.band_part(kernel, -1, 0)

    def loss_of(x):
        def step(at, state):
            inner = tf.while_loop(lambda count, _: count < 2, lambda count, state: (
                count + 1, tf.tanh(state @ normalized() + bias)), (0, state))[1]
            return at + 1, inner + tf.gather(table, at)

        return tf.reduce_sum(tf.while_loop(lambda at, _: at < STEPS, step, (0, x))[1] ** 2, 1)

    return loss_of, [kernel, bias, table]


def trained(strategy, in_run):
    """The weights after steps on some batches, and the graph of the last step."""
    loss_of, variables = made(strategy)

    def replica_step(x, count):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(x)) / count
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
        if in_run:
            gradients = tf.distribute.get_replica_context().all_reduce("sum", list(gradients))
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(gradient / 10)

    if in_run:
        step = tf.function(lambda x, count: strategy.run(replica_step, (x, count)))
    else:
        step = (strategy.function if strategy else tf.function)(replica_step)
    if strategy:
        strategy.extended.keep_graphs = True
    for rows in ROWS:
        x = tf.constant(np.random.RandomState(rows).normal(size=[rows, 3]))
        x = strategy.split(x) if strategy else x
        args = x, tf.constant(rows, tf.float64)
        step(*args)
    function = step.get_concrete_function(*args) if strategy else None
    return [variable.numpy() for variable in variables], function and function.graph


class LoopsTest(parameterized.TestCase):

    @wide.product(0, 2, in_run=[False, True], merge=["balanced", "cpu"])
    def test_each_tower_runs_its_own(self, in_run, merge):
        """Else one GPU, or the CPU, runs the loops of all, or one tower's waits for another's; or
        weights cross in every iteration."""
        wanted, _ = trained(None, False)
        strategy = towerstrategy.TowerStrategy(on_gpus.towers(TOWERS), merge)
        found, graph = trained(strategy, in_run)
        for one, other in zip(wanted, found):
            np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12)
        loops = [operation for operation in graph.get_operations() if "While" in operation.type]
        self.assertEqual(collections.Counter(on_gpus.name(each.device) for each in loops), {
            f"GPU:{tower}": 2 for tower in range(TOWERS)})
        for loop in loops:
            body = _tf.body_of(graph, loop.get_attr("body").name)
            self.assertNotIn("ReadVariableOp", {each.type for each in body.get_operations()})
            self.assertEmpty({*loop.control_inputs} & {*loops})
            self.assertEqual({each.device for each in loop.inputs if each.dtype.is_floating},
                             {loop.device})  # TensorFlow keeps it there from turn to turn


BODIES = {  # of loops and branches; what they compute of the number of rows, or of rows before
    "mean": lambda at, rows, total: (rows, total + tf.reduce_mean(rows ** 2)),
    "penalty": lambda at, rows, total: (
        rows, total + tf.reduce_mean(rows) + tf.cast(at, rows.dtype)),
    "count": lambda at, rows, total: (
        rows / tf.cast(tf.shape(rows)[0], rows.dtype), total + tf.reduce_sum(rows)),
    "drawn": lambda at, rows, total: (rows * tf.random.stateless_uniform(
        tf.shape(rows), [at, 1], dtype=rows.dtype), total),
    "numbers": lambda at, rows, total: (
        rows * tf.cast(tf.range(tf.shape(rows)[0]), rows.dtype)[:, None], total),
    "of_labels": lambda at, rows, total: (
        rows, total + tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.cast(rows[:, 0] > 0, tf.int32), rows)))}


class RowsTest(parameterized.TestCase):

    @wide.product(name=list(BODIES), in_loop=[False, True])
    def test_of_the_batch(self, name, in_loop):
        """Else a mean in a branch, or the loss of each step of a decoder, makes towers wait for
        each other; or a tower takes its rows for the batch's."""
        def body(at, rows, total):
            return at + 1, *BODIES[name](at, tf.tanh(rows), total)

        def given(x):
            return tf.constant(0), x, tf.zeros([], x.dtype)

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                _, rows, total = tf.while_loop(lambda at, *_: at < 3, body, given(x)) if in_loop \
                    else tf.cond(x[0, 0] > -99, lambda: body(*given(x)), lambda: given(x))
                loss = total + tf.reduce_sum(rows ** 2)
            return rows, total, tape.gradient(loss, x)

        strategy = towerstrategy.TowerStrategy(on_gpus.towers(TOWERS))
        strategy.extended.keep_graphs = True
        one, towers = tf.function(step), strategy.function(step)
        for rows in ROWS:
            x = tf.constant(np.random.RandomState(rows).normal(size=[rows, 3]))
            for got, wanted in zip(towers(strategy.split(x)), one(x)):
                np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)
        graph = towers.get_concrete_function(strategy.split(x)).graph
        bodies = [operation for operation in graph.get_operations() if operation.type in (
            "If", "StatelessIf", "While", "StatelessWhile")]
        self.assertEqual(collections.Counter(on_gpus.name(each.device) for each in bodies), {
            f"GPU:{tower}": 2 for tower in range(TOWERS)})


class TogetherTest(parameterized.TestCase):

    @wide.some(2, "found", "second", "branches", "filled", "sum_of_lists", "infinite",
               "no_iteration")
    def test_as_one_device(self, name):
        """Else `fit` ends with an error: a loop that ends when a sum is small, a penalty on the
        gradients of a recurrent layer; or parts are taken for those of a sum that they are not."""
        def step(x, kernel):
            def steps(state):
                return tf.while_loop(lambda at, _: at < 3, lambda at, state: (
                    at + 1, tf.tanh(x @ kernel) + state / 2), (0, state))[1]

            if name == "found":
                return tf.while_loop(lambda total, done: not done, lambda total, done: (
                    total + 9, tf.reduce_sum(x ** 2) < total), (tf.zeros([], x.dtype), False))
            if name == "no_iteration":  # then a variable has the rows that it starts with
                rows = tf.while_loop(lambda at, _: at < x[0, 0] - 99, lambda at, _: (at + 1, x), (
                    tf.zeros([], x.dtype), tf.ones([4, 3], x.dtype)), (
                    tf.TensorShape([]), tf.TensorShape([None, 3])))[1]
                return tf.shape(rows), tf.reduce_mean(rows)
            if name == "filled":
                return tf.cond(x[0, 0] > -9, lambda: tf.image.crop_and_resize(
                    tf.cast(tf.reduce_sum(x, 0), tf.float32)[None, :, None, None],
                    [[-1., 0., 3., 1.]], [0], [4, 2], extrapolation_value=2.), lambda: tf.ones(
                        [1, 4, 2, 1]))
            if name == "infinite":  # a tower without rows has a part of zero, which makes NaN
                return tf.while_loop(lambda at, _: at < 2, lambda at, total: (
                    at + 1, total + tf.clip_by_value(tf.reduce_sum(x ** 2, 0) / (
                        kernel[0] * 0), -1, 1)), (0, tf.zeros([3], x.dtype)))[1]
            with tf.GradientTape() as outer:
                outer.watch(kernel)
                if name == "sum_of_lists":
                    made = tf.TensorArray(x.dtype, 3)
                    for at in range(3):
                        made = made.write(at, kernel * (at + 1))
                    loss = tf.reduce_sum(steps(x) ** 2) + tf.reduce_sum(tf.while_loop(
                        lambda at, _: at < 3, lambda at, state: (
                            at + 1, state @ made.read(at)), (0, x))[1] ** 2) / 9
                else:
                    with tf.GradientTape() as tape:
                        tape.watch(kernel)
                        loss = tf.reduce_sum((
                            x @ kernel if name == "branches" else steps(x)) ** 2)
                        if name == "branches":  # TensorFlow makes it in a function of its own
                            loss = tf.cond(loss > 0, lambda: 2 * loss, lambda: loss)
                    loss = tf.reduce_sum(tape.gradient(loss, kernel) ** 2)
            return outer.gradient(loss, kernel)

        strategy = towerstrategy.TowerStrategy(DEVICES[:TOWERS])
        value = np.random.RandomState(1).normal(size=[3, 3]) / 2
        with strategy.scope():
            kernels = tf.Variable(value), tf.Variable(value)
        one, towers = (function(functools.partial(step, kernel=kernel)) for function, kernel in zip(
            (tf.function, strategy.function), kernels))
        bound = 1e-6 if name == "filled" else 1e-12
        for rows in ROWS:
            x = tf.constant(np.random.RandomState(rows).normal(size=[rows, 3]))
            tf.nest.map_structure(functools.partial(np.testing.assert_allclose, rtol=bound),
                                  towers(strategy.split(x)), one(x))


def standardized(x, kernel):
    """The sum of what a loop makes that subtracts a mean over all rows, and its gradient."""
    def step(at, state, kept):
        state = tf.tanh(state @ kernel)
        state -= tf.reduce_mean(state, 0)
        return at + 1, state / (1 + tf.reduce_sum(state ** 2)), kept.write(at, state)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.while_loop(lambda at, *_: at < STEPS, step, (
            0, x, tf.TensorArray(x.dtype, STEPS)))[2].stack() ** 2)
    return loss, tape.gradient(loss, kernel)


def dropped(x, kernel):
    """The gradient of a loop with dropout, of which only the draws are of all towers."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.while_loop(lambda at, _: at < STEPS, lambda at, state: (
            at + 1, tf.tanh(state @ kernel) * tf.random.uniform(tf.shape(x), dtype=x.dtype)),
            (0, x))[1] ** 2)
    return tape.gradient(loss, kernel)


class CrossingsTest(parameterized.TestCase):

    @wide.product(program=[standardized, dropped], merge=["balanced", "cpu"])
    def test_of_iterations(self, program, merge):
        """Else weights, rows or whole lists cross in each iteration of a loop."""
        strategy = towerstrategy.TowerStrategy(on_gpus.towers(TOWERS), merge)
        strategy.extended.keep_graphs = True
        with strategy.scope():
            kernel = weights(3, 3)
        with on_gpus.tracing():
            step = strategy.function(functools.partial(program, kernel=kernel))
            one = tf.function(functools.partial(program, kernel=tf.Variable(kernel)))
            for rows in ROWS:
                x = tf.constant(np.random.RandomState(rows).normal(size=[rows, 3]))
                if program is standardized:
                    for got, wanted in zip(step(strategy.split(x)), one(x)):
                        np.testing.assert_allclose(got, wanted, rtol=1e-12)
            graph = step.get_concrete_function(strategy.split(x)).graph
        loops = [each for each in graph.get_operations() if "While" in each.type]
        self.assertLen(loops, 2 if program is standardized else 1 + TOWERS)
        for loop in loops:
            body = _tf.body_of(graph, loop.get_attr("body").name)
            made_here = [each for each in loops if each.device == loop.device]  # and stays there
            self.assertEmpty([user.name for outer, inner in zip(loop.inputs, body.inputs)
                              if inner.dtype.is_floating or inner.dtype == tf.variant
                              for user in inner.consumers()
                              if user.device not in ("", outer.device)
                              and outer.op not in made_here])


class WritesTest(parameterized.TestCase):

    @parameterized.parameters("loops", "branch", "rows")
    def test_between_reads(self, name):
        """Else a second loop, or a loop or branch that is used late, computes with other weights:
        a sharpness-aware step trains wrongly without a word."""
        def step(x, weight):
            scaled, rows = tf.function(lambda state: state * weight), tf.shape(x)[0]
            if name == "loops":
                first = tf.while_loop(lambda at, _: at < 3, lambda at, state: (
                    at + 1, scaled(state)), (0, x))[1]
                weight.assign_add(1.)
                return first, tf.while_loop(lambda at, _: at < 3, lambda at, state: (
                    at + 1, scaled(state)), (0, x))[1]
            if name == "branch":
                made = tf.cond(rows > 3, lambda: weight * 9., lambda: weight * 1)
            else:
                made = tf.while_loop(lambda at, _: at < rows, lambda at, state: (
                    at + 1, state * .9 + weight), (0, tf.zeros([], x.dtype)))[1]
            weight.assign_add(1.)
            return weight.read_value() + made

        strategy = towerstrategy.TowerStrategy(on_gpus.towers(TOWERS))
        with strategy.scope():
            weight = tf.Variable(2., dtype=tf.float64)
        with on_gpus.tracing():
            towers = strategy.function(functools.partial(step, weight=weight))
            one = tf.function(functools.partial(step, weight=tf.Variable(weight)))
            for rows in ROWS:
                x = tf.constant(np.random.RandomState(rows).normal(size=[rows, 3]))
                tf.nest.map_structure(functools.partial(np.testing.assert_allclose, rtol=1e-12),
                                      towers(strategy.split(x)), one(x))


if __name__ == "__main__":
    absltest.main()
