"""Whether the dimensions that have the batch's rows are found behind what has moved them."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from towerstrategy.losses import row_places

WEIGHTS = np.ones([3, 5], "float32")

# Of x with 2 x 3 values a row: what moves the rows, and where they are then.
MOVED = {
    "as they are": (lambda x: tf.nn.relu(2. * x + 1.), {0}),
    "transposed": (lambda x: tf.transpose(x, [1, 0, 2]), {1}),
    "reduced": (lambda x: tf.reduce_sum(tf.transpose(x, [1, 0, 2]), 0), {0}),
    "reduced, kept": (lambda x: tf.reduce_sum(tf.transpose(x, [1, 0, 2]), 0, True), {1}),
    "flat": (lambda x: tf.reshape(x, [-1, 6]), {0}),
    "apart": (lambda x: tf.reshape(tf.reshape(x, [-1, 6]), [-1, 2, 3, 1]), {0}),
    "with time": (lambda x: tf.reshape(x, [-1, 3]), {0}),
    "with time, apart": (lambda x: tf.reshape(tf.reshape(x, [1, -1, 3, 1]), [-1, 2, 3]), {0}),
    "in groups": (lambda x: tf.reshape(x, [2, -1, 2, 3]), {0, 1}),
    "behind a dimension": (lambda x: x[None], {1}),
    "one of a row": (lambda x: x[:, 1], {0}),
    "the last": (lambda x: tf.transpose(x)[..., ::2], {2}),
    "expanded": (lambda x: tf.expand_dims(tf.transpose(x, [1, 0, 2]), 1), {2}),
    "squeezed": (lambda x: tf.squeeze(tf.transpose(x, [1, 0, 2])[:, :, None], 2), {1}),
    "stacked": (lambda x: tf.stack([x, x]), {1}),
    "unstacked": (lambda x: tf.unstack(x, axis=1)[0], {0}),
    "beside": (lambda x: tf.concat([x, tf.zeros_like(x)], 1), {0}),
    "split": (lambda x: tf.split(x, 3, axis=2)[1], {0}),
    "multiplied": (lambda x: tf.matmul(x, WEIGHTS), {0}),
    "with themselves, each": (lambda x: tf.matmul(x, x, transpose_b=True), {0}),
    "by subscripts": (lambda x: tf.einsum("ntf,fk->tkn", x, WEIGHTS), {2}),
    "by an ellipsis": (lambda x: tf.einsum("...f,fk->...k", x, WEIGHTS), {0}),
    "in a table": (lambda x: tf.gather(WEIGHTS, tf.cast(x[:, 0], tf.int32), axis=1), {1}),
    "pairs": (lambda x: x[:, None, 0] - x[None, :, 0], {0, 1}),
    "broadcast": (lambda x: tf.zeros([4, 1, 2, 3]) + x, {1}),
    "one hot": (lambda x: tf.one_hot(tf.argmax(x, -1), 3), {0}),
    "padded": (lambda x: tf.pad(x, [[0, 0], [1, 0], [0, 0]]), {0}),
}

TOGETHER = {
    "a mean": (lambda x: tf.reduce_mean(x, [0, 1]), None),
    "of groups": (lambda x: tf.reduce_mean(tf.reshape(x, [2, -1, 2, 3]), 0), {0}),
    "with time": (lambda x: tf.reduce_max(tf.reshape(x, [-1, 3]), 0), None),
    "of time-major rows": (lambda x: tf.norm(tf.transpose(x, [1, 0, 2]), axis=1), None),
    "a softmax": (lambda x: tf.nn.softmax(tf.transpose(x)), {2}),
    "a covariance": (lambda x: tf.matmul(x[:, 0], x[:, 1], transpose_a=True), None),
    "by subscripts": (lambda x: tf.einsum("ntf,ntg->fg", x, x), None),
}

NOWHERE = {
    "some of them": lambda x: tf.boolean_mask(x, x[:, 0, 0] > 0),
    "a loop": lambda x: tf.while_loop(lambda x: True, lambda x: [x + 1], [x],
                                     maximum_iterations=3)[0],
    "sorted": lambda x: tf.sort(x, axis=0),
}


def _found(function, rows):
    """Where the rows are in what ``function`` returns, and whether any have been put together."""
    found = []

    @tf.function(autograph=False)
    def traced(x):
        result = function(x)
        places, together = {x.ref(): row_places.FIRST}, [False]
        alone = {x.ref(): True}
        for operation in x.graph.get_operations():
            given = list(operation.inputs)
            if operation.type in ("Shape", "Placeholder", "ZerosLike"):
                continue
            made = row_places.made(operation, given, [places.get(each.ref()) for each in given],
                                   all(alone.get(each.ref(), True) for each in given))
            together.append(made.together)
            places.update((each.ref(), made.places) for each in operation.outputs)
            alone.update((each.ref(), made.alone) for each in operation.outputs)
        found.append((places[result.ref()], any(together)))

    traced.get_concrete_function(tf.TensorSpec([rows, 2, 3]))
    return found[0]


class RowPlacesTest(parameterized.TestCase):

    @parameterized.product(name=list(MOVED), rows=[None, 4, 6])
    def test_moved(self, name, rows):
        """Else a mean over time is taken for one over rows, or one over rows is not seen."""
        function, wanted = MOVED[name]
        self.assertEqual(_found(function, rows), (frozenset(wanted), False))

    @parameterized.product(name=list(TOGETHER), rows=[None, 4, 6])
    def test_put_together(self, name, rows):
        """Else a statistic over rows is not known for one."""
        function, wanted = TOGETHER[name]
        self.assertEqual(_found(function, rows), (wanted and frozenset(wanted), True))

    @parameterized.product(name=list(NOWHERE), rows=[None, 4, 6])
    def test_lost(self, name, rows):
        """Else a dimension that may be anything counts for the rows'."""
        places, together = _found(NOWHERE[name], rows)
        self.assertIn(places, (frozenset(), frozenset({0})))
        self.assertFalse(together)

    @parameterized.parameters("with time", "with time, apart", "flat", "apart")
    def test_a_single_row(self, name):
        """Else any dimension of size 1 is taken for the row's."""
        self.assertFalse(_found(lambda x: tf.reduce_sum(MOVED[name][0](x), -1), 1)[1])

    def test_by_shape(self):
        """Else of what a loop returns nobody knows where its rows are."""
        value = tf.zeros([3, 5, 4])
        self.assertEqual(row_places.by_shape(value, 5), frozenset({1}))
        self.assertIsNone(row_places.by_shape(value, 6))
        self.assertEqual(row_places.by_shape(tf.zeros([5, 5]), 5), row_places.SOMEWHERE)
        self.assertEqual(row_places.by_shape(value, 1), row_places.SOMEWHERE)


if __name__ == "__main__":
    absltest.main()
