"""Loops over the rows: each tower runs the iterations of its own rows, with one device's result."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy
import wide

DEVICES = towerstrategy.split_cpu(8)
X = np.random.default_rng(0).normal(size=[9, 3])
LIMIT = tf.constant(1e6, tf.float64)
TABLE = tf.constant(np.random.default_rng(1).normal(size=[20, 3]))


def total(values):
    """The sum of values that weighs each row by its number."""
    return tf.reduce_sum(tf.cast(tf.range(tf.shape(values)[0]) + 1, values.dtype) * values)


def mapped(h, w, x):
    return total(tf.map_fn(lambda row: tf.reduce_sum(tf.tanh(tf.linalg.matvec(w, row)) ** 2), h))


def mapped_with_branches_and_loops(h, w, x):
    def inner(row, other):
        picked = tf.gather(row, tf.math.top_k(other, 2).indices)
        return tf.cond(row[0] > 0, lambda: tf.reduce_sum(picked), lambda: tf.reduce_max(row)) \
            + tf.reduce_sum(tf.map_fn(lambda entry: tf.sin(entry) * row[0], row))

    return total(tf.map_fn(lambda both: inner(*both), (h, x), fn_output_signature=h.dtype))


def numbered(h, w, x):
    """The number of a row is that among all rows, not among the tower's."""
    def inner(number, row):
        seed = tf.stack([number, 0])
        return tf.reduce_sum(row * tf.gather(TABLE, number)
                             + tf.random.stateless_uniform([3], seed, dtype=row.dtype))

    return total(tf.map_fn(lambda both: inner(*both), (tf.range(tf.shape(x)[0]), h),
                           fn_output_signature=h.dtype))


def statistics_of_all(h, w, x):
    mean, rows = tf.reduce_mean(h, 0), tf.cast(tf.shape(h)[0], h.dtype)
    return total(tf.map_fn(lambda row: tf.reduce_sum((row - mean) ** 2), h)) / rows


def each_row(h, w, x):
    """AutoGraph's loop, with totals that start at something."""
    added, count = tf.constant(1.5, h.dtype), 1
    for row in h:
        added += tf.reduce_sum(tf.linalg.matvec(w, row))
        count += 2
    return added * tf.cast(count, h.dtype)


def indexed(h, w, x):
    added = tf.constant(0., h.dtype)
    for i in tf.range(tf.shape(x)[0]):
        added += tf.tanh(h[i, 0]) * h[i, 1] + tf.reduce_sum(h[i:i + 1, 1:] ** 2) * x[i, 0]
    return added


def written(h, w, x):
    rows = tf.shape(x)[0]
    results = tf.TensorArray(h.dtype, size=0, dynamic_size=True, element_shape=[])
    numbers = tf.TensorArray(tf.int32, size=rows, element_shape=[])
    for i in tf.range(rows):
        results = results.write(i, tf.reduce_sum(h[i] ** 2))
        numbers = numbers.write(i, i)
    return total(results.stack() * tf.cast(numbers.stack(), h.dtype))


def indices_written(h, w, x):
    """Vectors of the row's number, which is that among all rows also where it was an index."""
    pairs = tf.TensorArray(tf.int32, size=tf.shape(x)[0], element_shape=[2])
    for i in tf.range(tf.shape(x)[0]):
        pairs = pairs.write(i, tf.stack([i, 2]))
    return total(tf.reduce_sum(tf.cast(pairs.stack(), h.dtype), 1) * h[:, 0])


def several_a_row(h, w, x):
    return total(tf.map_fn(lambda entry: tf.sin(entry) * entry, tf.reshape(h, [-1])))


def as_many_times(h, w, x):
    """A list as long as the batch, of which the entries are no rows."""
    times = tf.TensorArray(h.dtype, size=tf.shape(x)[0], element_shape=[None, 3])
    for i in tf.range(tf.shape(x)[0]):
        h = tf.tanh(h @ w)
        times = times.write(i, h)
    return total(tf.reduce_sum(times.stack(), [0, 2]))


def scanned(h, w, x):
    return total(tf.scan(lambda state, row: state / 2 + row, h, tf.zeros([3], h.dtype))[:, 0])


def decayed(h, w, x):
    added = tf.constant(0., h.dtype)
    for row in h:
        added = added * 0.9 + tf.reduce_sum(row)
    return added


def largest(h, w, x):
    most = tf.constant(-10., h.dtype)
    for row in h:
        most = tf.maximum(most, tf.reduce_sum(row))
    return most


def until(h, w, x):
    added = tf.constant(0., h.dtype)
    for row in h:
        added += tf.reduce_sum(row)
        if added > 1:
            break
    return added


def rows_before(h, w, x):
    added = tf.constant(0., h.dtype)
    for i in tf.range(1, tf.shape(x)[0]):
        added += tf.reduce_sum(h[i] * h[i - 1])
    return added


def other_rows(h, w, x):
    last = tf.shape(x)[0] - 1
    rows = tf.TensorArray(h.dtype, size=last + 1, element_shape=[3]).unstack(h)
    return total(tf.map_fn(lambda i: rows.read(last - i)[0], tf.range(last + 1),
                           fn_output_signature=h.dtype))


def changed_rows(h, w, x):
    rows = h
    for _ in tf.range(tf.shape(x)[0]):
        rows = rows * 0.9
    return tf.reduce_sum(rows)


def stepped(h, w, x):
    """What is the same for all rows, but not for all iterations."""
    rate = tf.constant(1., h.dtype)
    added = tf.constant(0., h.dtype)
    for row in h:
        added += rate * tf.reduce_sum(row)
        rate *= 0.5
    return added


def some_rows(h, w, x):
    added, i = tf.constant(0., h.dtype), 0
    while i < tf.shape(x)[0] and i < 2:
        added += tf.reduce_sum(h[i])
        i += 1
    return added


def swapped(h, w, x):
    """Without a gradient, whose loop would not run by rows either."""
    rows, one, other = tf.stop_gradient(h), tf.constant(0., h.dtype), tf.constant(1., h.dtype)
    for row in rows:
        one, other = other, one + tf.reduce_sum(row)
    return one + 10 * other


def swapped_lists(h, w, x):
    one, other = (tf.TensorArray(h.dtype, size=tf.shape(x)[0], element_shape=[]) for _ in "ab")
    for i in tf.range(tf.shape(x)[0]):
        one, other = other.write(i, tf.reduce_sum(h[i])), one.write(i, h[i, 0])
    return total(one.stack()) + 3 * total(other.stack())


def last_list(h, w, x):
    rows, size = tf.stop_gradient(h), tf.shape(x)[0]
    last = tf.TensorArray(h.dtype, size=size, element_shape=[])
    for i in tf.range(size):
        last = tf.TensorArray(h.dtype, size=size, element_shape=[]).write(i, rows[i, 0])
    return total(last.stack())


def sizes_of_a_list(h, w, x):
    """A list that grows has as many entries as there are rows before, of all towers."""
    rows, added = tf.stop_gradient(h), tf.constant(0., h.dtype)
    entries = tf.TensorArray(h.dtype, size=0, dynamic_size=True, element_shape=[])
    for i in tf.range(tf.shape(x)[0]):
        added += tf.cast(entries.size(), h.dtype) * rows[i, 0]
        entries = entries.write(i, rows[i, 1])
        added += tf.cast(entries.size(), h.dtype)
    return total(entries.stack()) + added


def pushed(h, loops=1, times=1):
    """A list, behind whose entries each iteration puts some."""
    entries = tf.raw_ops.EmptyTensorList(element_shape=tf.zeros([0], tf.int32),
                                         max_num_elements=-1, element_dtype=h.dtype)
    for loop in range(loops):
        for row in h:
            for time in range(times):
                entries = tf.raw_ops.TensorListPushBack(
                    input_handle=entries, tensor=row[loop + time])
    return entries


def stacked(entries, h):
    return total(tf.raw_ops.TensorListStack(
        input_handle=entries, element_shape=tf.zeros([0], tf.int32), element_dtype=h.dtype))


def pushed_twice(h, w, x):
    return stacked(pushed(h, times=2), h)


def pushed_in_two_loops(h, w, x):
    return stacked(pushed(h, loops=2), h)


def last_first(h, w, x):
    """What is taken out of a list is that of the last row first."""
    entries, added = pushed(h), tf.constant(0., h.dtype)
    for i in tf.range(tf.shape(x)[0]):
        entries, entry = tf.raw_ops.TensorListPopBack(
            input_handle=entries, element_shape=tf.zeros([0], tf.int32), element_dtype=h.dtype)
        added += entry * h[i, 0]
    return added


def popped(entries, h):
    """A list with the entries of another one, which is popped from its end."""
    kind = {"element_shape": tf.zeros([0], tf.int32), "element_dtype": h.dtype}
    others = tf.raw_ops.EmptyTensorList(max_num_elements=-1, **kind)
    for _ in tf.range(tf.shape(h)[0]):
        entries, entry = tf.raw_ops.TensorListPopBack(input_handle=entries, **kind)
        others = tf.raw_ops.TensorListPushBack(input_handle=others, tensor=entry)
    return others


def popped_last_first(h, w, x):
    return stacked(popped(pushed(tf.stop_gradient(h)), h), h)


def read_last_first(h, w, x):
    h = tf.stop_gradient(h)
    entries, added = popped(pushed(h), h), tf.constant(0., h.dtype)
    for i in tf.range(tf.shape(x)[0]):
        added += h[i, 1] * tf.raw_ops.TensorListGetItem(
            input_handle=entries, index=i, element_shape=tf.zeros([0], tf.int32),
            element_dtype=h.dtype)
    return added


def added_last_first(h, w, x):
    h = tf.stop_gradient(h)
    return stacked(tf.raw_ops.AddN(inputs=[popped(pushed(h), h), pushed(h)]), h)


def sizes_of_what_is_left(h, w, x):
    """What a list still has when entries are taken out of it."""
    entries, added = pushed(tf.stop_gradient(h)), tf.constant(0., h.dtype)
    for _ in tf.range(tf.shape(x)[0]):
        left = tf.raw_ops.TensorListLength(input_handle=entries)
        entries, entry = tf.raw_ops.TensorListPopBack(
            input_handle=entries, element_shape=tf.zeros([0], tf.int32), element_dtype=h.dtype)
        added += entry * tf.cast(left, h.dtype)
    return added


def last_of_each(h, w, x):
    """The last entry of a list that keeps all."""
    rows = tf.stop_gradient(h)
    entries, added = tf.TensorArray(h.dtype, tf.shape(x)[0]).unstack(rows[:, 0]).flow, rows[0, 1]
    for i in tf.range(tf.shape(x)[0]):
        _, entry = tf.raw_ops.TensorListPopBack(
            input_handle=entries, element_shape=tf.zeros([0], tf.int32), element_dtype=h.dtype)
        entries = tf.raw_ops.TensorListSetItem(input_handle=entries, index=i, item=rows[i, 1])
        added += entry
    return added


def read_in_branches(h, w, x):
    """One row of a list of all, in a branch that has what its list was made of."""
    rows = tf.TensorArray(h.dtype, tf.shape(x)[0], element_shape=[3], clear_after_read=False)
    rows = rows.unstack(h)
    return tf.cond(h[0, 0] > 0, lambda: tf.reduce_sum(rows.read(0)), lambda: rows.read(1)[0])


def lists_added(h, w, x):
    """All entries change in each iteration."""
    entries, others = (tf.TensorArray(h.dtype, tf.shape(x)[0]).unstack(h[:, column]).flow
                       for column in (0, 1))
    for _ in tf.range(tf.shape(x)[0]):
        entries = tf.raw_ops.AddN(inputs=[entries, others])
    return stacked(entries, h)


def texts_joined(h, w, x):
    text = tf.constant("a")
    for row in h:
        text += tf.strings.as_string(row[0] > 0)
    return tf.cast(tf.strings.to_hash_bucket_fast(text, 1000), h.dtype) + tf.reduce_sum(h)


def rows_of_lengths(h, w, x):
    rows = tf.map_fn(lambda row: row[:2], tf.stop_gradient(h),
                     fn_output_signature=tf.RaggedTensorSpec([None], h.dtype, ragged_rank=0))
    return tf.reduce_sum(rows)


def subtracted(h, w, x):
    left = tf.constant(1., h.dtype)
    for row in h:
        left -= tf.reduce_sum(row ** 2)
    return left


def continued(h, w, x):
    added = tf.constant(0., h.dtype)
    for i in tf.range(tf.shape(x)[0]):
        if x[i, 0] < 0:
            continue
        added += tf.reduce_sum(h[i] ** 2)
    return added


def in_branches(h, w, x):
    """Branches that need other things for their gradients, and one that changes nothing."""
    added, count = tf.constant(0., h.dtype), tf.constant(0., h.dtype)
    results = tf.TensorArray(h.dtype, tf.shape(x)[0], element_shape=[])
    for i in tf.range(tf.shape(x)[0]):
        if x[i, 0] > 0:
            added += tf.reduce_sum(h[i] ** 2 * tf.linalg.matvec(w, h[i]))
            count += 1.
        elif h[i, 1] > x[i, 2]:
            added -= h[i, 1]
        results = results.write(i, tf.cond(x[i, 1] > 0, lambda i=i: tf.reduce_sum(tf.sin(h[i])),
                                           lambda i=i: tf.cast(i, h.dtype) * h[i, 0]))
    return total(results.stack()) + added * count


def rows_in_branches(h, w, x):
    added = tf.constant(0., h.dtype)
    for row in h:
        if row[0] > 0:
            added += tf.reduce_sum(tf.tanh(tf.linalg.matvec(w, row)))
    return added


def constants_of_branches(h, w, x):
    """What is the same in all rows within a branch differs from row to row behind it."""
    h = tf.stop_gradient(h)
    results = tf.TensorArray(h.dtype, tf.shape(x)[0], element_shape=[])
    for i in tf.range(tf.shape(x)[0]):
        factor = tf.cond(x[i, 0] > 0, lambda: w[0, 0], lambda: tf.zeros([], w.dtype))
        results = results.write(i, factor * h[i, 0])
    return total(results.stack())


def checked(h, w, x):
    """Assertions of an iteration, with and without a branch around them."""
    def inner(number, row):
        tf.debugging.assert_less(tf.abs(row), LIMIT)
        tf.debugging.Assert(number < 100, ["too many rows"])
        return tf.reduce_sum(tf.sin(row))

    return total(tf.map_fn(lambda both: inner(*both), (tf.range(tf.shape(x)[0]), h),
                           fn_output_signature=h.dtype))


def pairs(h, w, x):
    """A loop over all rows for each row."""
    h, added = tf.stop_gradient(h), tf.constant(0., h.dtype)
    for i in tf.range(tf.shape(x)[0]):
        for j in tf.range(tf.shape(x)[0]):
            added += tf.abs(h[i, 0] - h[j, 0])
    return added


def pairs_in_a_list(h, w, x):
    """A list of each iteration, of which a loop over all rows sets the entry of one."""
    h, added = tf.stop_gradient(h), tf.constant(0., h.dtype)
    for i in tf.range(tf.shape(x)[0]):
        entries = tf.TensorArray(h.dtype, tf.shape(x)[0], element_shape=[], clear_after_read=False)
        for j in tf.range(tf.shape(x)[0]):
            entries = entries.write(i, h[j, 0])
        added += entries.read(i)
    return added


BY_ROW = [mapped, mapped_with_branches_and_loops, numbered, statistics_of_all, each_row, indexed,
          written, several_a_row, as_many_times, subtracted, continued, in_branches,
          rows_in_branches, constants_of_branches, checked]
NOT_BY_ROW = [indices_written, scanned, decayed, largest, until, rows_before, other_rows,
              changed_rows, stepped, some_rows, pairs]
ALONE = [swapped, swapped_lists, last_list, sizes_of_a_list, pushed_twice, pushed_in_two_loops,
         last_first, popped_last_first, read_last_first, added_last_first,
         sizes_of_what_is_left, last_of_each, read_in_branches, lists_added, texts_joined,
         rows_of_lengths, pairs_in_a_list]


def results(strategy, losses, rows):
    """All losses for each number of rows, with the gradients of their sum."""
    weights = tf.Variable(np.random.default_rng(2).normal(size=[3, 3]))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = [loss(x @ weights, weights, x) for loss in losses]
        return found, list(map(tf.convert_to_tensor, tape.gradient(
            found, [weights, x], unconnected_gradients="zero")))

    signature = [tf.TensorSpec([None, 3], tf.float64)]
    run = strategy.function(step, signature) if strategy else tf.function(step, signature)
    given = [run(strategy.split(X[:count]) if strategy else tf.constant(X[:count]))
             for count in rows]
    return [np.asarray(each) for each in tf.nest.flatten(given)]


class RowLoopsTest(parameterized.TestCase):

    def check(self, strategy, losses, rows=(7, 2)):
        expected, given = results(None, losses, rows), results(strategy, losses, rows)
        for one, other in zip(expected, given, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12)

    @wide.parameters(({}, BY_ROW[1::8]), wide=[
        ({}, BY_ROW), ({"micro_batches": 2}, BY_ROW[::3]), ({"shares": [3, 1, 2]}, BY_ROW[1::3]),
        ({"merge_device": "balanced"}, BY_ROW[2::3])])
    def test_each_tower_runs_its_rows(self, options, losses):
        """Else they run on one device, as slowly as without a strategy, or a row counts wrongly."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3], **options)
        self.check(strategy, losses)
        self.assertEmpty(strategy.extended.done_with_all_rows)

    def test_assertions_of_an_iteration(self):
        """Else what a program asserts of each of its rows goes unnoticed on some towers."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        for row in 0, 8:
            x = np.where(np.arange(9)[:, None] == row, 2e6, X)
            with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "assertion failed"):
                strategy.function(lambda x: checked(x, x, x))(strategy.split(x))

    @wide.parameters((NOT_BY_ROW[::4],), wide=[(NOT_BY_ROW,)])
    def test_iterations_that_depend_on_others_run_once(self, losses):
        """Else what an iteration takes from others is that of the tower's rows alone."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        self.check(strategy, losses)
        self.assertNotEmpty(strategy.extended.done_with_all_rows)

    @wide.some(3, *ALONE)
    def test_a_step_of_one_loop(self, loss):
        """Else variables or entries of other iterations are taken for the row's own."""
        self.check(towerstrategy.TowerStrategy(DEVICES[:3]), [loss])

    @pytest.mark.wide
    def test_one_that_runs_once_beside_one_that_does_not(self):
        """Else one loop makes another one slow, or its lists are taken for all rows'."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        self.check(strategy, [mapped, decayed, indexed], rows=[7])
        self.assertNotIn("TensorListFromTensor", strategy.extended.done_with_all_rows)

    @pytest.mark.wide
    def test_one_whose_list_must_be_whole_beside_one_that_need_not(self):
        """Else all loops run with all rows because of one."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        self.check(strategy, [mapped, read_last_first, indexed], rows=[7])
        self.assertNotIn("TensorListFromTensor", strategy.extended.done_with_all_rows)


if __name__ == "__main__":
    absltest.main()
