"""Tests of what each tensor of a traced step is: loops, branches and lists among it."""

import collections

import tensorflow as tf
from absl.testing import absltest

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import rules  # noqa: F401  fills the table
from towerstrategy.sharding.propagate import propagate
from towerstrategy.sharding.spec import MEAN, REPLICATED, SUM, Partial, Sharded


def _layout(function, *inputs):
    """The layout of ``function`` of inputs, pairs of a shape and a spec."""
    graph = _tf.trace(tf.function(function).python_function,
                      [tf.TensorSpec(shape, tf.float32) for shape, _ in inputs], "step")
    return propagate(graph, [*(spec for _, spec in inputs),
                             *[REPLICATED] * (len(graph.inputs) - len(inputs))])


def _outputs(function, *inputs):
    """The specs of what it returns."""
    return _layout(function, *inputs).outputs


ROWS = ([None, 4], Sharded(0))
WHOLE = ([4], REPLICATED)


class PropagateTest(absltest.TestCase):

    def test_rows_stay_where_they_are(self):
        """Each layer would gather the batch."""
        self.assertEqual(_outputs(lambda x, w: [tf.nn.relu(x * w), tf.transpose(x)], ROWS, WHOLE),
                         [Sharded(0), Sharded(1)])

    def test_a_sum_over_rows_is_a_part_on_each_tower(self):
        """A loss would be gathered in place of added up."""
        self.assertEqual(_outputs(lambda x: [tf.reduce_sum(x), tf.reduce_max(x, 0)], ROWS),
                         [SUM, Partial("max")])

    def test_what_has_no_rows_is_made_once(self):
        """Each tower would keep an optimizer of its own."""
        self.assertEqual(_outputs(lambda x, w: w * 2, ROWS, WHOLE), [REPLICATED])

    def test_a_call_by_each_tower_gives_what_it_says(self):
        """Batch norm of each tower's rows would be of all rows, or of one tower's for all."""
        def normalized(x, w):
            rows, mean = _tf.call_by_each_tower(
                lambda x, w: (x - tf.reduce_mean(x, 0) * w, tf.reduce_mean(x, 0)),
                ("rows", "once"), ("rows", "own"), (x, w))
            return [rows, mean, mean * 2]

        self.assertEqual(_outputs(normalized, ROWS, WHOLE), [Sharded(0), MEAN, REPLICATED])
        self.assertEqual(_outputs(normalized, WHOLE, WHOLE), [REPLICATED] * 3)

    def test_what_has_no_rule_is_made_with_all_rows(self):
        """A value of some rows would pass for that of all."""
        self.assertEqual(_outputs(lambda x: tf.linalg.svd(x, compute_uv=False), ROWS), [REPLICATED])

    def test_what_is_made_of_all_rows_is_cut_where_it_has_them(self):
        """One device would run the network behind a shuffle or a sort."""
        def made(x, w):
            shuffled = tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0])))
            return [tf.sort(x, 0) * w, tf.reverse(tf.cumsum(x, 0), [0]) * w, shuffled * w,
                    tf.cumsum(x[:, 0])]

        self.assertEqual(_outputs(made, ROWS, WHOLE), [*[Sharded(0)] * 3, REPLICATED])

    def test_rows_that_were_drawn_once_are_split(self):
        """All that a GAN makes of its noise would be made by one device."""
        def made(x, w):
            rows = tf.shape(x)[0]
            return [tf.random.normal([rows, 4]) * w, tf.random.uniform([rows, 2], 1, 3),
                    tf.random.uniform([rows], 0, 3, tf.int64),
                    tf.random.truncated_normal([3, rows])]

        self.assertEqual(_outputs(made, ROWS, WHOLE),
                         [Sharded(0), Sharded(0), Sharded(0), Sharded(1)])

    def test_what_gives_its_input_is_left_out(self):
        """Of a transformer's step each tower would do a third more, all of it nothing."""
        def gradient(x, w):
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                y = tf.transpose(tf.identity(tf.tanh(x) * w + tf.stop_gradient(x)), [0, 1])
                loss = tf.reduce_sum(tf.reshape(y, tf.shape(x)) ** 2)
            return tape.gradient(loss, [x, w])

        layout = _layout(gradient, ROWS, WHOLE)
        self.assertEqual(layout.outputs, [Sharded(0), SUM])
        counts = collections.Counter(operation.type for operation in layout.order)
        self.assertEqual([counts[type] for type in ("StopGradient", "Transpose")], [0, 0])
        self.assertEqual(counts["Identity"], 2)  # what is returned
        self.assertEqual(counts["Sum"], 1)  # of w's gradient

    def test_a_shape_that_is_known_but_for_the_rows_is_a_constant(self):
        """Each tower would count its rows for each reshape, on GPUs all of it on the host."""
        def reshaped(x, w):
            return tf.reshape(x * w, tf.stack([tf.shape(x)[0], 2, 2]))

        layout = _layout(reshaped, ROWS, WHOLE)
        plan = next(plan for name, plan in layout.plans.items() if name.startswith("Reshape"))
        self.assertEqual(plan.sizes, [-1, 2, 2])

    def test_what_waits_for_what_is_left_out_waits_for_what_that_waits_for(self):
        """It would begin before what it has to wait for."""
        def waits(x, w):
            before = tf.tanh(x)
            with tf.control_dependencies([tf.identity(tf.stop_gradient(before))]):
                return x * w

        layout = _layout(waits, ROWS, WHOLE)
        self.assertEqual({operation.type: operation.controls for operation in layout.order
                          if operation.type not in ("Placeholder", "Identity")},
                         {"Tanh": [], "Mul": ["Tanh"]})

    def test_a_constant_waits_for_nothing(self):
        """Constants of gradients wait for what they are multiplied with, and XLA would compile what
        is in front of each apart from what is behind it, as of each normalization."""
        layout = _layout(lambda x, w: tf.gradients(tf.math.squared_difference(x, w), x)[0],
                         ROWS, WHOLE)
        constants = [one for one in layout.order if one.type == "Const"]
        self.assertTrue(any(one.operation.control_inputs for one in constants))
        self.assertEqual({tuple(one.controls) for one in constants}, {()})

    def test_gradients_of_matrices_keep_rows(self):
        """A Gaussian's Cholesky factors would be gathered, as of the zeros that TensorFlow puts
        in their diagonals' places the rank is unknown."""
        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                matrix = tf.linalg.set_diag(x, tf.ones_like(x[:, 0])) ** 2
            return tape.gradient(matrix, x)

        self.assertEqual(_outputs(gradient, ([None, 3, 3], Sharded(0))), [Sharded(0)])

    def test_reshapes_of_unknown_sizes_keep_rows(self):
        """A soft minimum of several losses, or numbers put into bins, would be gathered."""
        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_logsumexp(tf.stack([x[:, 0], x[:, 1]]), 0)
            return [tape.gradient(loss, x), tf.searchsorted([.1, .2], tf.reshape(x, [-1]))]

        self.assertEqual(_outputs(gradient, ROWS), [Sharded(0), Sharded(0, 4)])

    def test_gradients_of_rows_that_were_made_flat_keep_rows(self):
        """All in front of a `reshape(x, [rows, -1])` would be done with all rows in the backward
        pass, as TensorFlow does not know how long a row is behind it."""
        def gradient(x, w):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                flat = tf.reshape(x, [tf.shape(x)[0], -1])
                losses = [tf.reshape(flat, [-1, 4]) * w, tf.reduce_mean(flat, 1)]
            return [flat, *(tape.gradient(loss, x) for loss in losses)]

        self.assertEqual(_outputs(gradient, ([None, 2, 6], Sharded(0)), ([1, 4], REPLICATED)),
                         [Sharded(0)] * 3)

    def test_gradients_of_patches_keep_rows(self):
        """Keras Hub's ViT would be done with all rows in front of its class token in the backward
        pass, ESM and RoFormer in front of each attention's output: TensorFlow forgets how many
        patches there are behind `reshape(x, [rows, -1, size])`, a concatenation and a transpose."""
        def patches(x, token):
            with tf.GradientTape() as tape:
                tape.watch(x)
                flat = tf.reshape(x, [tf.shape(x)[0], -1, 3])
                tokens = tf.tile(token, [tf.shape(x)[0], 1, 1])
                loss = tf.reduce_sum(tf.sin(tf.concat([tokens, flat], 1)))
            return tape.gradient(loss, x)

        def heads(x, kernel):
            with tf.GradientTape() as tape:
                tape.watch(x)
                flat = tf.reshape(x, [tf.shape(x)[0], 4, -1])
                loss = tf.reduce_sum(tf.sin(tf.tensordot(flat, kernel, 1)))
            return tape.gradient(loss, x)

        self.assertEqual(_outputs(patches, ([None, 4, 2, 3], Sharded(0)), ([1, 1, 3], REPLICATED)),
                         [Sharded(0)])
        self.assertEqual(_outputs(heads, ([None, 4, 2, 3], Sharded(0)), ([6, 5], REPLICATED)),
                         [Sharded(0)])

    def test_gradients_of_heads_that_an_einsum_compares_keep_rows(self):
        """All in front of T5's attentions would be done with all rows in the backward pass."""
        def gradient(x, bias):
            def heads(x):
                return tf.transpose(tf.reshape(tf.sin(x), [tf.shape(x)[0], -1, 2, 3]), [0, 2, 1, 3])

            with tf.GradientTape() as tape:
                tape.watch(x)
                scores = tf.einsum("bnqd,bnkd->bnqk", heads(x), heads(-x)) + bias
                loss = tf.reduce_sum(tf.nn.softmax(scores) ** 2)
            return tape.gradient(loss, x)

        layout = _layout(gradient, ([None, 4, 6], Sharded(0)), ([None, 2, 4, 4], Sharded(0)))
        self.assertEmpty(layout.fallbacks)

    def test_gradients_of_some_and_of_repeated_columns_keep_rows(self):
        """Detectors that leave out boxes, and decision trees that repeat a node's probability for
        its children, would be done with all rows in front of that in the backward pass."""
        def gradient_of(change):
            def gradient(x):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    flat = tf.reshape(x, [tf.shape(x)[0], -1, 3])
                    loss = tf.reduce_sum(tf.sin(change(flat)))
                return tape.gradient(loss, x)
            return gradient

        for change in (lambda flat: flat[:, :5], lambda flat: tf.tile(flat, [1, 2, 1]),
                       lambda flat: tf.repeat(tf.tile(flat, [1, 1, 2])[:, 1:], 2, 1),
                       lambda flat: tf.concat([flat[:, 2:], flat[:, :5]], 1),
                       lambda flat: tf.reverse(tf.cumsum(tf.roll(flat, 1, 1), 1), [1])):
            self.assertEqual(_outputs(gradient_of(change), ([None, 4, 2, 3], Sharded(0))),
                             [Sharded(0)])

    def test_gradients_of_what_each_example_repeats_keep_rows(self):
        """DeBERTa v2 would take the gradient of its positions, which each example repeats, with all
        rows, and send the repeated ones to the towers."""
        def gradient(x, positions):
            with tf.GradientTape() as tape:
                tape.watch(positions)
                heads = tf.reshape(x, [-1, 3, 4])
                tiled = tf.tile(positions, [tf.shape(heads)[0] // 2, 1, 1])
                loss = tf.reduce_sum(tf.matmul(heads, tiled) ** 2)
            return [tiled, tape.gradient(loss, positions)]

        self.assertEqual(_outputs(gradient, ([None, 2, 3, 4], Sharded(0)), ([2, 4, 5], REPLICATED)),
                         [Sharded(0, 2), SUM])

    def test_channels_in_another_order_keep_rows(self):
        """The pixel shuffle of DeiT and Swin would be done with all rows, and all behind it."""
        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                order = tf.tile(tf.constant([[2, 0, 1]]), [tf.shape(x)[0], 1])
                loss = tf.reduce_sum(tf.gather(x, order, batch_dims=-1) ** 3)
            return tape.gradient(loss, x)

        self.assertEmpty(_layout(gradient, ([None, 2, 2, 3], Sharded(0))).fallbacks)

    def test_branches_that_put_rows_into_two_dimensions_are_reported(self):
        """All behind such a branch is done with all rows, and `describe()` would not say so."""
        layout = _layout(lambda x: tf.cond(tf.size(x) > 9, lambda: tf.transpose(x), lambda: -x),
                         ([None, 4], Sharded(0)))
        self.assertEqual(layout.outputs, [REPLICATED])
        self.assertEqual([each.type for each in layout.fallbacks], ["StatelessIf"])

    def test_a_rolled_permutation_in_a_branch_keeps_rows(self):
        """DeBERTa's gather along any axis would transpose all rows."""
        def transposed(x):
            shift = tf.rank(x) - 2  # which the branch is given
            return tf.cond(tf.size(x) > 9, lambda: tf.transpose(x, tf.roll(tf.range(3), shift, 0)),
                           lambda: tf.transpose(-x, [2, 0, 1]))

        self.assertEqual(_outputs(transposed, ([None, 2, 3], Sharded(0))), [Sharded(1)])

    def test_chosen_rows_stay_on_the_towers(self):
        """A loss of `tf.boolean_mask(logits, mask)` and `tf.boolean_mask(labels, mask)` would be
        made with all rows, and all that is in front of it in the backward pass."""
        def loss(x, y):
            with tf.GradientTape() as tape:
                tape.watch(x)
                mask = y > 0
                apart = tf.boolean_mask(x, mask) - tf.boolean_mask(y, mask)
                loss = tf.reduce_sum(apart ** 2)
            return [loss, tape.gradient(loss, x)]

        self.assertEqual(_outputs(loss, ROWS, ROWS), [SUM, Sharded(0)])

    def test_choices_are_told_apart(self):
        """Rows of one mask would meet those of another: of a function that is called twice, of a
        loop's turn before, of a branch."""
        chosen = tf.function(lambda x, mask: tf.boolean_mask(x, mask))

        def twice(x):
            return chosen(x, x[:, 0] > 0) * chosen(x, x[:, 0] < 0)

        def turns(x):
            return tf.while_loop(
                lambda i, rows: i < 2, lambda i, rows: (i + 1, tf.boolean_mask(
                    x, x[:, 0] > tf.cast(i, x.dtype))), [0, x],
                [tf.TensorShape([]), tf.TensorShape([None, 4])])[1]

        def branches(x):
            return tf.cond(tf.size(x) > 9, lambda: tf.boolean_mask(x, x[:, 0] > 0),
                           lambda: tf.boolean_mask(x, x[:, 0] < 0))

        for function in (twice, turns, branches):
            self.assertEqual(_outputs(function, ROWS), [REPLICATED])

    def test_gradients_of_rows_of_another_tensors_number_keep_rows(self):
        """All in front of what attention layers split into heads, by the number of rows of their
        queries, would be done with all rows in the backward pass."""
        def gradient(x, queries):
            with tf.GradientTape() as tape:
                tape.watch(x)
                flat = tf.reshape(x, [tf.shape(queries)[0], -1])
                loss = tf.reduce_mean(flat, 1)
            return tape.gradient(loss, x)

        self.assertEqual(_outputs(gradient, ([None, 2, 6], Sharded(0)), ([None, 3], Sharded(0))),
                         [Sharded(0)])

    def test_gradients_of_labels_of_steps_keep_rows(self):
        """All that a recurrent layer does would be done with all rows where each step has a label,
        as TensorFlow forgets how many classes there are."""
        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    tf.zeros_like(x[:, :, 0], tf.int32), x)
            return tape.gradient(loss, x)

        self.assertEqual(_outputs(gradient, ([None, 2, 3], Sharded(0))), [Sharded(0)])

    def test_a_loop_that_adds_rows_to_a_constant_shards_it(self):
        """A recurrent layer's state would be gathered at each of its steps."""
        def loop(x, w):
            return tf.while_loop(lambda n, state: n < 3, lambda n, state: (n + 1, state + x),
                                 (0, tf.zeros([6, 4])))

        self.assertEqual(_outputs(loop, ([6, 4], Sharded(0)), WHOLE), [REPLICATED, Sharded(0)])

    def test_a_loop_that_adds_up_parts_keeps_them(self):
        """The gradient of a recurrent layer's kernel would cross at each of its steps."""
        def loop(x, w):
            return tf.while_loop(lambda n, total: n < 3,
                                 lambda n, total: (n + 1, total + tf.reduce_sum(x, 0)), (0, w * 2))

        self.assertEqual(_outputs(loop, ROWS, WHOLE), [REPLICATED, SUM])

    def test_a_loop_that_begins_with_the_largest_of_all_rows(self):
        """What is whole behind a turn would be beside zeros, which are larger than what is less."""
        def loop(x, w):
            return tf.while_loop(lambda n, *_: n < 3, lambda n, most, all_: (
                n + 1, most + w, tf.logical_or(all_, w > 0)),
                (0, tf.reduce_max(x, 0), tf.reduce_all(x > 0, 0)))[1:]

        self.assertEqual(_outputs(loop, ROWS, WHOLE), [REPLICATED, REPLICATED])

    def test_variables_of_a_loop_depend_on_each_other(self):
        """One turn around the body would say too little of what a variable becomes in the third."""
        def loop(x, w):
            return tf.while_loop(
                lambda n, *_: n < 5, lambda n, a, b, c: (n + 1, b + 1.0, c + 1.0, x),
                (0, tf.zeros([6, 4]), tf.zeros([6, 4]), tf.zeros([6, 4])))[1:]

        self.assertEqual(_outputs(loop, ([6, 4], Sharded(0)), WHOLE), [Sharded(0)] * 3)

    def test_branches_that_agree_keep_rows(self):
        """A batch would be gathered at each ``tf.cond``."""
        def branch(x, w):
            return tf.cond(tf.reduce_sum(w) > 0, lambda: x * 2, lambda: tf.nn.relu(x))

        self.assertEqual(_outputs(branch, ROWS, WHOLE), [Sharded(0)])

    def test_branches_that_differ_give_what_both_can(self):
        """The rows of one branch would be taken for the sum of the other."""
        def branch(x, w):
            return tf.cond(tf.reduce_sum(w) > 0, lambda: tf.reduce_sum(x, 0),
                           lambda: tf.reduce_max(x, 0))

        self.assertEqual(_outputs(branch, ROWS, WHOLE), [REPLICATED])

    def test_branches_of_which_one_is_the_same_for_all(self):
        """A constant beside the largest of all rows ended in an error."""
        def branch(x, w):
            return tf.cond(tf.reduce_sum(w) > 0, lambda: (tf.reduce_max(x, 0), tf.reduce_sum(x, 0)),
                           lambda: (w, w))

        self.assertEqual(_outputs(branch, ROWS, WHOLE), [REPLICATED, SUM])

    def test_gradients_of_branches_keep_rows(self):
        """A branch's gradient would be made with all rows, as all that is kept for it."""
        def branch(x, w):
            return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x) * tf.reduce_sum(tf.sin(x), 0),
                           lambda: tf.exp(x * w) + tf.cos(x))

        for function in (branch, tf.function(branch)):
            def gradient(x, w, function=function):
                with tf.GradientTape() as tape:
                    tape.watch([x, w])
                    loss = tf.reduce_sum(function(x, w) ** 2)
                return tape.gradient(loss, [x, w])

            layout = _layout(gradient, ROWS, WHOLE)
            self.assertEqual(layout.outputs, [Sharded(0), SUM])
            self.assertEmpty([each.fallbacks for each in layout.with_bodies() if each.fallbacks])

    def test_gradients_in_branches_keep_rows(self):
        """In a step that trains an actor every other time, the branch gets axes from outside."""
        def gradient(x, w):
            with tf.GradientTape() as tape:
                tape.watch(w)
                loss = tf.reduce_sum(tf.tanh(tf.concat([x, x * w], -1)))
            return tf.cond(tf.reduce_sum(w) > 0, lambda: tape.gradient(loss, w),
                           lambda: tf.reduce_sum(x, 0))

        layout = _layout(gradient, ROWS, WHOLE)
        self.assertEqual(layout.outputs, [SUM])
        self.assertEmpty([each.fallbacks for each in layout.with_bodies() if each.fallbacks])

    def test_what_branches_of_one_condition_keep_is_not_anothers(self):
        """One branch's rows would be read as the other's sum."""
        def kept(x, w):
            def of(value):
                return tf.raw_ops.OptionalFromValue(components=[value])

            made = tf.cond(tf.reduce_sum(w) > 0, lambda: of(x), lambda: of(tf.reduce_sum(x, 0)))
            read = [lambda: tf.reduce_sum(tf.raw_ops.OptionalGetValue(
                optional=made, output_types=[tf.float32], output_shapes=[None])[0])] * 2
            return tf.cond(tf.reduce_sum(w) > 1, *read)

        def kept_for_a_loop(x, w):
            """Of which the condition is another one from its second turn on."""
            def of(value):
                return tf.raw_ops.OptionalFromValue(components=[value])

            first = tf.reduce_sum(w) > 0
            made = tf.cond(first, lambda: of(x), lambda: of(tf.reduce_sum(x, 0)))
            read = [lambda: tf.reduce_sum(tf.raw_ops.OptionalGetValue(
                optional=made, output_types=[tf.float32], output_shapes=[None])[0])] * 2
            return tf.while_loop(
                lambda _, total: total < 9., lambda now, total: (
                    tf.logical_not(now), total + tf.cond(now, *read)), (first, 0.))[1]

        for function in (kept, kept_for_a_loop):
            layout = _layout(function, ROWS, WHOLE)
            self.assertEqual(layout.outputs, [REPLICATED])
            self.assertNotEmpty([each.fallbacks for each in layout.with_bodies() if each.fallbacks])

    def test_differences_and_quotients_of_numbers_of_rows(self):
        """The second gradient of a concatenation would gather the rows, and so would all tokens."""
        def penalty(x, w):
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = tf.reduce_sum(tf.tanh(tf.concat([x, tf.sin(x[:, :1])], 1) * w[0]) ** 2)
            return tape.gradient(total, x) ** 2

        def second_gradient(x, w):
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                loss = tf.reduce_sum(penalty(x, w))
            return tape.gradient(loss, [x, w])

        def rows_of_tokens(x, w):
            tokens = tf.shape(tf.reshape(x, [-1]))[0]
            return tf.slice(x, [0, 1], [tokens // x.shape[1], 2]) * w[:2]

        for function in (second_gradient, rows_of_tokens):
            layout = _layout(function, ROWS, WHOLE)
            self.assertEqual(layout.outputs[0], Sharded(0))
            self.assertEmpty([each.fallbacks for each in layout.with_bodies() if each.fallbacks])

    def test_lists_hold_each_towers_entries(self):
        """A recurrent layer would gather each of its outputs."""
        def loop(x, w):
            def body(n, entries):
                return n + 1, entries.write(n, x * tf.cast(n, tf.float32))

            entries = tf.TensorArray(tf.float32, 3, element_shape=[None, 4])
            return tf.while_loop(lambda n, _: n < 3, body, (0, entries))[1].stack()

        self.assertEqual(_outputs(loop, ROWS, WHOLE), [Sharded(1)])

    def test_a_list_with_something_in_it_is_not_each_towers(self):
        """An entry that all towers have would be taken for the rows of each of them."""
        def steps(x, w):
            entries = tf.TensorArray(tf.float32, 2, element_shape=[6, 4]).write(0, tf.zeros([6, 4]))
            return entries.write(1, x).stack()

        self.assertEqual(_outputs(steps, ([6, 4], Sharded(0)), WHOLE), [REPLICATED])

    def test_a_list_that_then_gets_something_whole_is_not_each_towers(self):
        """Rows of another number than the batch's would be cut as if they were the batch's."""
        def steps(x, w):
            entries = tf.TensorArray(tf.float32, 2, infer_shape=False, element_shape=[None, 4])
            return entries.write(0, x).write(1, x[::2]).read(1)

        self.assertEqual(_outputs(steps, ROWS, WHOLE), [REPLICATED])

    def test_a_list_of_what_grows_in_a_loop_is_not_each_towers(self):
        """What a variable of the loop was taken for at first would be said of it in the list."""
        def loop(x, w):
            def body(n, rows, entries):
                return n + 1, tf.concat([rows, x], 0), entries.write(n, rows)

            entries = tf.TensorArray(tf.float32, 3, infer_shape=False, element_shape=[None, 4])
            return tf.while_loop(lambda n, *_: n < 3, body, (0, x, entries), (
                tf.TensorShape([]), tf.TensorShape([None, 4]), tf.TensorShape(None)))[2].read(1)

        self.assertEqual(_outputs(loop, ROWS, WHOLE), [REPLICATED])

    def test_a_list_filled_in_a_branch_or_before_it_is_not_each_towers(self):
        """What all towers have would be taken for the rows of each of them."""
        def pushed(rows, *entries):
            held = entries[0] if entries else tf.raw_ops.EmptyTensorList(
                element_shape=-1, max_num_elements=3, element_dtype=tf.float32)
            return tf.raw_ops.TensorListPushBack(input_handle=held, tensor=rows)

        def first(held):
            return tf.raw_ops.TensorListGetItem(
                input_handle=held, index=0, element_shape=[-1, 4], element_dtype=tf.float32)

        def one_branch(x, w):
            return first(tf.cond(tf.reduce_sum(w) > 0, lambda: pushed(x),
                                 lambda: pushed(x[::2])))

        def before(x, w):
            held = pushed(x[::2])
            return first(tf.cond(tf.reduce_sum(w) > 0, lambda: pushed(x, held),
                                 lambda: pushed(-x, held)))

        def called(x, w):
            return first(tf.function(pushed)(x, pushed(x[::2])))

        for steps in (one_branch, before, called):
            self.assertEqual(_outputs(steps, ROWS, WHOLE), [REPLICATED])

    def test_a_list_whose_entries_have_all_rows_is_not_each_towers(self):
        """A tower's rows are refused by a list that was made for the batch's, and the other way."""
        def through(rows, shape):
            entries = tf.raw_ops.TensorListReserve(
                element_shape=shape, num_elements=1, element_dtype=tf.float32)
            entries = tf.raw_ops.TensorListSetItem(input_handle=entries, index=0, item=rows)
            return tf.raw_ops.TensorListGetItem(
                input_handle=entries, index=0, element_shape=[-1, 4], element_dtype=tf.float32)

        for steps in (lambda x, w: through(x, tf.shape(x[::2])),
                      lambda x, w: through(x[::2], tf.shape(x))):
            self.assertEqual(_outputs(steps, ROWS, WHOLE), [REPLICATED])
        self.assertEqual(_outputs(lambda x, w: through(x, tf.shape(x)), ROWS, WHOLE), [Sharded(0)])


if __name__ == "__main__":
    absltest.main()
