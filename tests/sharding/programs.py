"""Steps as people write them for one device, in which rows meet.

Goes in: nothing.  Comes out: ``PROGRAMS``, each of which makes a step of ``(x, y)`` and the
variables that it writes, or a function that gives these once the step has run.
"""

import keras
import numpy as np
import program_features as features
import tensorflow as tf

# Of the batches, one after another: towers have as many rows, more or fewer, and most have none.
ROWS = (9, 5, 1)
PROGRAMS = {}
TAKE_FOUR = {"worst_k"}  # programs that fail on one device with fewer rows
D = tf.float64
SIGNATURE = [tf.TensorSpec([None, 4], D), tf.TensorSpec([None], tf.int64)]


def program(make):
    """Registers a function that makes a step of (x, y), and the variables that it writes."""
    PROGRAMS[make.__name__] = make
    return make


def batches(name):
    draw = np.random.default_rng(7)
    return [(draw.normal(size=[rows, 4]), draw.integers(0, 3, size=[rows]))
            for rows in (max(rows, 4 if name in TAKE_FOUR else 1) for rows in ROWS)]


def weights(*shape, seed=0):
    return tf.Variable(np.random.default_rng(seed).normal(size=shape) / 2)


def descend(loss_of, *variables, rate=0.1):
    """A step of gradient descent, in which `loss_of(x, y)` is the loss."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(rate * tf.convert_to_tensor(gradient))
        return loss

    return step, list(variables)


@program
def for_kinds_of_devices():
    """TensorFlow Probability's draws have other numbers on CPUs, by a function of their own."""

    def implementation(fn, **attributes):
        return tf.function(fn, autograph=False, experimental_attributes={
            "api_implements": "draws", **attributes})

    of_all = implementation(lambda x: x + 1)
    of_cpus = implementation(lambda x: x * 3, api_preferred_device="CPU")
    w = weights(4)

    @tf.function(autograph=False)
    def drawn(x):
        of_cpus.get_concrete_function(x).add_to_graph()
        return of_all(x)

    return descend(lambda x, y: tf.reduce_mean((drawn(x) * w) ** 2), w)


@program
def filters():
    """As of a Kalman filter: a matrix that a loop keeps for its gradient has no static shape."""
    w = tf.Variable(tf.cast(weights(2, 2), tf.float32))

    def loss_of(x, y):
        made, = tf.while_loop(lambda made: tf.reduce_sum(made ** 2) < 1e4, lambda made: (
            tf.matmul(tf.linalg.set_diag(made, tf.linalg.diag_part(made) * 2), made @ w) + made,),
            [w + tf.eye(2)], maximum_iterations=2)
        return tf.reduce_mean((tf.cast(x[:, :2], tf.float32) @ made) ** 2)

    return descend(loss_of, w, rate=1e-3)


@program
def convolutions():
    """Kernels that CPUs fuse with what is beside them: no rows get a wrong shape, or they fail."""
    filters = [tf.Variable(tf.cast(weights(*shape), tf.float32))
               for shape in ((3, 3, 1, 3), (3,), (2, 2, 3, 4), (4,))]

    def loss_of(x, y):
        images = tf.pad(tf.reshape(tf.cast(x, tf.float32), [-1, 2, 2, 1]),
                        [[0, 0], [2, 2], [2, 2], [0, 0]])
        hidden = tf.nn.conv2d(images, filters[0], 2, "VALID")
        hidden = tf.nn.relu(tf.nn.bias_add(hidden, filters[1]))
        hidden = tf.nn.bias_add(tf.nn.conv2d(hidden, filters[2], 1, "SAME"), filters[3])
        return tf.reduce_mean(hidden ** 2)

    return descend(loss_of, *filters)


@program
def branches_that_are_known():
    """Conditions that TensorFlow knows: the branch that is taken writes, draws and has shapes."""
    w, count = weights(4, 4), tf.Variable(0, trainable=False)

    def counted(h):
        count.assign_add(1)
        return tf.nn.dropout(h, 0.5, seed=3)

    def loss_of(x, y):
        two = tf.constant(2)
        h = tf.tanh(x @ w)
        h = tf.cond(tf.equal(tf.rank(h), 2), lambda: tf.reshape(h, [-1, two, 2]),
                    lambda: tf.transpose(h))
        width = tf.cond(tf.reduce_min([4, 9]) <= 5, lambda: 4 // two, lambda: tf.constant(7))
        h = tf.reshape(h, [-1, width, 2])
        h = tf.cond(tf.constant(False), lambda: tf.transpose(h), lambda: counted(h))
        h = tf.switch_case(tf.constant(9), [lambda: h, lambda: h * tf.reduce_sum(h, 0)])
        return tf.reduce_mean(h ** 2)

    step, state = descend(loss_of, w)
    return step, [*state, count]


@program
def traces_in_a_loop():
    """Of Jacobians, as in a continuous flow."""
    w = weights(4, 9)

    def loss_of(x, y):
        total = tf.zeros(tf.shape(x)[:1], D)
        for _ in tf.range(3):
            total += tf.linalg.trace(tf.reshape(tf.tanh(x @ w), [-1, 3, 3]))
        return tf.reduce_mean(total ** 2)

    return descend(tf.autograph.to_graph(loss_of), w)


@program
def ctc():
    """Loops whose bodies are functions that are called by their names."""
    w = tf.Variable(tf.cast(weights(4, 18), tf.float32))

    def loss_of(x, y):
        count = tf.shape(x)[0]
        labels = tf.stack([y % 2 + 1, y % 3 + 1], 1)
        return tf.reduce_mean(tf.nn.ctc_loss(
            tf.cast(labels, tf.int32), tf.reshape(tf.cast(x, tf.float32) @ w, [-1, 3, 6]),
            tf.fill([count], 1), tf.fill([count], 3), logits_time_major=False, blank_index=0))

    return descend(loss_of, w)


def feature_program(name, *names):
    """A program whose layers make some features of their activations; a loss for each."""

    def make():
        w, v = weights(4, 5), weights(5, 3, seed=1)

        def loss_of(x, y):
            hidden = tf.tanh(x @ w)
            return tf.stack([
                tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                    y, features.FEATURES[each](hidden) @ v)) for each in names])

        return descend(loss_of, w, v)

    PROGRAMS[name] = make
    if not {"top_k", "knn", "scatter_rows", "asserted"}.isdisjoint(names):
        TAKE_FOUR.add(name)


def cross_entropy(y, logits):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


for _name in features.FEATURES:
    feature_program(_name, _name)
GROUPS = {f"features_{at}": [*features.FEATURES][at::9] for at in range(9)}
for _name, _names in GROUPS.items():
    feature_program(_name, *_names)


@program
def a_state_that_is_broadcast_without_iterations():
    w, turns = weights(4, 4), tf.Variable(0)

    def loss_of(x, y):
        shapes = tf.TensorShape([]), tf.TensorShape([None, 4])
        state = tf.while_loop(lambda number, _: number < turns, lambda number, _: (
            number + 1, tf.tanh(x @ w)), (0, w[:1]), shapes)[1]
        turns.assign_add(1)
        return tf.reduce_mean((state + x) ** 2)

    return descend(loss_of, w)


@program
def penalty_on_gradients_of_attention():
    """Shapes in the second gradient of a product are known by rules, not by TensorFlow."""
    w = weights(4, 6)

    def loss_of(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = tf.reshape(x @ w, [-1, 3, 2])
            attended = tf.nn.softmax(tf.matmul(rows, rows, transpose_b=True)) @ rows
            total = tf.reduce_sum(attended ** 2) + tf.reduce_sum(tf.tanh(tf.matmul(rows, w[:2])))
        return tf.reduce_mean(tape.gradient(total, x) ** 2)

    return descend(loss_of, w)


@program
def attention_in_a_loop():
    """The gradient of a softmax over the second of three axes takes a constant out of a list."""
    w, v = weights(4, 6), weights(2, 2, seed=1)

    def loss_of(x, y):
        rows = tf.reshape(x @ w, [-1, 3, 2])
        query = tf.while_loop(lambda turn, _: turn < 3, lambda turn, query: (
            turn + 1, tf.tanh(tf.reduce_sum(tf.nn.softmax(
                rows * (query @ v)[:, tf.newaxis], 1) * rows, 1))), (0, rows[:, 0]))[1]
        return tf.reduce_mean(query ** 2)

    return descend(loss_of, w, v)


@program
def first_set_in_a_loop():
    """AutoGraph starts such a variable with no rows."""
    w, v = weights(4, 5), weights(5, 3, seed=1)

    def loss_of(x, y):
        for turn in tf.range(3):
            hidden = tf.tanh(x @ w) * tf.cast(turn, D)
        return cross_entropy(y, hidden @ v)

    return descend(loss_of, w, v)


@program
def loops_that_start_with_other_rows():
    """What is read in the first iteration has 12 rows, or 2."""
    w, table = weights(4, 4), weights(12, 4, seed=1)

    def loss_of(x, y):
        def turn(number, rows, total, count):
            return (number + 1, tf.tanh(x @ w), total + tf.reduce_sum(rows ** 2),
                    count + tf.shape(rows)[0])

        shapes = tuple(tf.TensorShape(size) for size in ([], [None, 4], [], []))
        loss = 0.0
        for start in (table + 0.0, table[:2]):
            _, rows, total, count = tf.while_loop(
                lambda number, *_: number < 2, turn, (0, start, tf.zeros([], D), 0), shapes)
            loss += tf.reduce_mean(rows) + total / tf.cast(count, D)
        return loss

    return descend(loss_of, w, table)


# Losses.

def loss_program(loss_of_logits):
    """A program whose loss is made of the labels and of all rows' outputs."""

    def make():
        w, v = weights(4, 5), weights(5, 3, seed=1)
        return descend(lambda x, y: loss_of_logits(y, tf.tanh(x @ w) @ v), w, v)

    PROGRAMS[loss_of_logits.__name__] = make


def normalized(z):
    return tf.math.l2_normalize(z, 1)


@loss_program
def plain_mean(y, z):
    return cross_entropy(y, z)


@loss_program
def plain_sum(y, z):
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))


@loss_program
def in_batch_negatives(y, z):
    similar = normalized(z) @ tf.transpose(normalized(tf.roll(z, 1, 1)))
    return cross_entropy(tf.range(tf.shape(z)[0]), similar * 5)


@loss_program
def retrieval(y, z):
    similar = normalized(z) @ tf.transpose(normalized(tf.roll(z, 1, 1))) * 5
    return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(
        tf.eye(tf.shape(z)[0], dtype=D), similar))


@loss_program
def diagonals(y, z):
    """Of similarities of two views: what is alike, what is not, and each pair once."""
    both = tf.concat([normalized(z), normalized(z ** 2)], 0)
    similar, count = both @ tf.transpose(both), tf.shape(both)[0]
    others = tf.linalg.set_diag(similar, tf.zeros(count, D)) * (2 - tf.eye(count, dtype=D))
    return tf.reduce_sum(tf.linalg.diag_part(similar + others) ** 2) + tf.reduce_mean(
        tf.linalg.band_part(tf.transpose(others), 0, -1) ** 3) + tf.linalg.trace(others) \
        + tf.reduce_sum(tf.sin(others * tf.linalg.diag(tf.reduce_sum(both, 1))))


@loss_program
def nt_xent(y, z):
    both = tf.concat([normalized(z), normalized(z ** 2)], 0)
    count = tf.shape(z)[0]
    similar = both @ tf.transpose(both) - 1e9 * tf.eye(2 * count, dtype=D)
    return cross_entropy(tf.roll(tf.range(2 * count), count, 0), similar)


@loss_program
def views_in_a_dimension(y, z):
    both = tf.tanh(tf.reshape(tf.stack([z, z ** 2]), [-1, 3]))
    one, other = tf.unstack(tf.reshape(both, [2, -1, 3]))
    return cross_entropy(tf.range(tf.shape(y)[0]), one @ tf.transpose(other))


@loss_program
def views_of_open_width(y, z):
    """How many entries an example has shows at run time only."""
    z = z[:, :tf.reduce_max(y) + 1]
    both = tf.reshape(tf.concat([z, z ** 2], 0), [-1])
    return tf.reduce_sum(both * tf.sort(both)) + tf.reduce_sum(both * tf.sort(both)[:y[0] * 0 + 1])


@loss_program
def supervised_contrastive(y, z):
    same = tf.cast(y[:, None] == y[None], D)
    logs = tf.nn.log_softmax(normalized(z) @ tf.transpose(normalized(z)))
    return -tf.reduce_mean(tf.reduce_sum(same * logs, 1) / tf.reduce_sum(same, 1))


@loss_program
def triplet_hard(y, z):
    distance = tf.reduce_sum((z[:, None] - z[None]) ** 2, -1)
    same = tf.cast(y[:, None] == y[None], D)
    far = tf.reduce_max(distance * same, 1)
    near = tf.reduce_min(distance + 1e6 * same, 1)
    return tf.reduce_mean(tf.nn.relu(far - near + 1))


@loss_program
def barlow_twins(y, z):
    a, b = [(t - tf.reduce_mean(t, 0)) / (tf.math.reduce_std(t, 0) + 0.1) for t in (z, z ** 2)]
    c = tf.transpose(a) @ b / tf.cast(tf.shape(z)[0], D)
    return tf.reduce_sum((c - tf.eye(3, dtype=D)) ** 2)


@loss_program
def chosen_rows(y, z):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, z)
    return tf.reduce_mean(tf.boolean_mask(losses, y > 0))


@loss_program
def worst_k(y, z):
    return tf.reduce_mean(
        tf.math.top_k(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z), 3).values)


@loss_program
def above_the_mean(y, z):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, z)
    return tf.reduce_mean(tf.where(losses > tf.reduce_mean(losses), losses, 0.1 * losses))


@loss_program
def masked_mean(y, z):
    mask = tf.cast(y != 1, D)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, z)
    return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


@loss_program
def class_balanced(y, z):
    counts = tf.cast(tf.math.bincount(tf.cast(y, tf.int32), minlength=3, maxlength=3), D)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, z)
    return tf.reduce_sum(losses / tf.gather(counts, y))


@loss_program
def dice(y, z):
    t, p = tf.one_hot(y, 3, dtype=D), tf.nn.softmax(z)
    return 1 - 2 * tf.reduce_sum(t * p) / tf.reduce_sum(t + p)


@loss_program
def cox(y, z):
    order = tf.argsort(z[:, 0], direction="DESCENDING")
    risk, event = tf.gather(z[:, 1], order), tf.gather(tf.cast(y > 0, D), order)
    return -tf.reduce_mean(event * (risk - tf.math.log(tf.cumsum(tf.exp(risk)))))


@loss_program
def pairwise_rank(y, z):
    higher = tf.cast(y[:, None] > y[None], D)
    return tf.reduce_sum(higher * tf.nn.softplus(z[None, :, 0] - z[:, None, 0])) / (
        1 + tf.reduce_sum(higher))


@loss_program
def mmd(y, z):
    def kernel(a, b):
        return tf.reduce_mean(tf.exp(-tf.reduce_sum((a[:, None] - b[None]) ** 2, -1)))

    other = tf.random.stateless_normal(tf.shape(z), [1, 2], dtype=D)
    return kernel(z, z) + kernel(other, other) - 2 * kernel(z, other)


@loss_program
def chosen_by_row_and_label(y, z):
    at = tf.stack([tf.range(tf.shape(y, tf.int64)[0]), y], 1)
    margins = z - tf.tensor_scatter_nd_update(z, at, tf.gather_nd(z, at) + 0.3)
    return cross_entropy(y, 4 * z + tf.scatter_nd(at, margins[:, 0] + 1, tf.shape(z, tf.int64)))


@loss_program
def mmd_of_quarters(y, z):
    both, rows = tf.concat([z, tf.stop_gradient(z) ** 2], 0), tf.shape(z)[0]
    kernel = tf.exp(-tf.reduce_sum((both[:, None] - both[None]) ** 2, -1))
    return tf.reduce_mean(kernel[:rows, :rows]) + tf.reduce_mean(kernel[rows:, rows:]) \
        - 2 * tf.reduce_mean(kernel[:rows, rows:])


@loss_program
def gaussian_process(y, z):
    kernel = tf.exp(-tf.reduce_sum((z[:, None] - z[None]) ** 2, -1))
    lower = tf.linalg.cholesky(kernel + 0.1 * tf.eye(tf.shape(z)[0], dtype=D))
    solved = tf.linalg.triangular_solve(lower, tf.cast(y, D)[:, None])
    return tf.reduce_sum(solved ** 2) + tf.reduce_sum(tf.math.log(tf.linalg.diag_part(lower)))


@loss_program
def sinkhorn(y, z):
    cost = tf.reduce_sum((z[:, None] - tf.stop_gradient(z)[None]) ** 2, -1)
    plan = tf.exp(-cost)
    for _ in range(3):
        plan = plan / tf.reduce_sum(plan, 0)
        plan = plan / tf.reduce_sum(plan, 1, keepdims=True)
    return tf.reduce_sum(plan * cost)


@loss_program
def log_of_mean(y, z):
    return tf.math.log(tf.reduce_mean(tf.exp(z)))


@loss_program
def per_row_or_mean(y, z):
    loss = cross_entropy(y, z)
    if loss > 1.0:
        loss = loss ** 2
    return loss


@loss_program
def loop_until_small(y, z):
    scale = tf.constant(1.0, D)
    while tf.reduce_mean((scale * z) ** 2) > 0.01:
        scale = scale * 0.7
    return cross_entropy(y, z * scale) * scale


@loss_program
def loop_over_rows(y, z):
    total = tf.constant(0.0, D)
    for index in tf.range(tf.shape(z)[0]):
        total += tf.reduce_sum(z[index]) * tf.cast(y[index], D) * (1 + 0.1 * tf.tanh(total))
    return total


@loss_program
def iterated_rows(y, z):
    total = tf.constant(0.0, D)
    for row in z:
        total = 0.5 * total + tf.reduce_sum(row ** 2)
    return total


@loss_program
def nested_functions(y, z):
    @tf.function
    def inner(t):
        return t - tf.reduce_mean(t, 0)

    @tf.function
    def outer(t):
        return inner(t) * tf.reduce_max(inner(t))

    return cross_entropy(y, outer(z))


@loss_program
def switch_by_batch(y, z):
    return tf.switch_case(tf.cast(tf.reduce_sum(y) % 3, tf.int32), [
        lambda: tf.reduce_mean(z ** 2), lambda: cross_entropy(y, z), lambda: tf.reduce_max(z)])


@loss_program
def branches_in_branches(y, z):
    """Of which each keeps something else for its gradient: rows, sums, lists of a loop."""
    def turned():
        return tf.while_loop(lambda held, number: number < 3, lambda held, number: (
            tf.tanh(held * 1.5) + tf.reduce_mean(held, 0), number + 1), (z, 0))[0]

    return cross_entropy(y, tf.cond(
        tf.reduce_mean(z) > 0, lambda: tf.exp(z) * tf.reduce_sum(tf.sin(z), 0),
        lambda: tf.cond(tf.reduce_max(z) > .5, turned, lambda: tf.tanh(z) * z)))


@loss_program
def recomputed(y, z):
    return cross_entropy(y, tf.recompute_grad(lambda t: tf.tanh(t - tf.reduce_mean(t, 0)))(z))


# Gradients.

@program
def gradient_norms():
    w = weights(4, 3)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, x @ w)
        gradient = tape.gradient(loss, w)
        clipped, norm = tf.clip_by_global_norm([gradient], 0.1)
        w.assign_sub(clipped[0] / tf.norm(gradient) * tf.reduce_max(tf.abs(gradient)))
        return loss, norm

    return step, [w]


@program
def sharpness_aware():
    w = weights(4, 3)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, tf.tanh(x @ w))
        gradient = tape.gradient(loss, w)
        shift = 0.05 * gradient / tf.norm(gradient)
        w.assign_add(shift)
        with tf.GradientTape() as tape:
            second = cross_entropy(y, tf.tanh(x @ w))
        gradient = tape.gradient(second, w)
        w.assign_sub(shift)
        w.assign_sub(0.1 * gradient)
        return loss, second

    return step, [w]


@program
def gradient_penalty():
    w, v = weights(4, 5), weights(5, 1, seed=1)

    def loss_of(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            scores = tf.tanh(x @ w) @ v
        norms = tf.norm(tape.gradient(scores, x), axis=1)
        return tf.reduce_mean(scores) + 10 * tf.reduce_mean((norms - 1) ** 2)

    return descend(loss_of, w, v)


@program
def hessian_vector_product():
    w = weights(4, 3)

    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = cross_entropy(y, tf.tanh(x @ w))
            gradient = tape.gradient(loss, w)
        product = outer.gradient(gradient, w, output_gradients=tf.ones_like(w))
        w.assign_sub(0.1 * gradient / (1 + tf.abs(product)))
        return loss, product

    return step, [w]


@program
def jacobian_of_rows():
    w = weights(4, 3)

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.tanh(x @ w))
        rows = tape.jacobian(losses, w)
        w.assign_sub(0.1 * tf.reduce_mean(tf.clip_by_norm(rows, 0.5, axes=[1, 2]), 0))
        return tf.math.reduce_variance(rows, 0)

    return step, [w]


@program
def batch_jacobian():
    w = weights(4, 3)

    def loss_of(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = tf.tanh(x @ w)
        return tf.reduce_mean(tape.batch_jacobian(out, x) ** 2)

    return descend(loss_of, w)


@program
def forward_mode():
    w = weights(4, 3)

    def step(x, y):
        with tf.autodiff.ForwardAccumulator(w, tf.ones_like(w)) as forward:
            loss = cross_entropy(y, tf.tanh(x @ w))
        w.assign_sub(0.1 * forward.jvp(loss) * tf.ones_like(w))
        return loss

    return step, [w]


@program
def gauss_newton():
    w = weights(4, 1)

    def step(x, y):
        error = x @ w - tf.cast(y, D)[:, None]
        w.assign_sub(tf.linalg.solve(
            tf.transpose(x) @ x + tf.eye(4, dtype=D), tf.transpose(x) @ error))
        return tf.reduce_mean(error ** 2)

    return step, [w]


@program
def line_search():
    w = weights(4, 3)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, tf.tanh(x @ w))
        gradient, rate = tape.gradient(loss, w), tf.constant(64.0, D)
        while cross_entropy(y, tf.tanh(x @ (w - rate * gradient))) > loss and rate > 1e-6:
            rate = rate / 2
        w.assign_sub(rate * gradient)
        return loss, rate

    return step, [w]


@program
def gradient_accumulation():
    w, sums, count = weights(4, 3), tf.Variable(tf.zeros([4, 3], D)), tf.Variable(0)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, x @ w)
        sums.assign_add(tape.gradient(loss, w))
        count.assign_add(1)
        if count % 2 == 0:
            w.assign_sub(0.1 * sums / 2)
            sums.assign(tf.zeros_like(sums))
        return loss

    return step, [w, sums, count]


@program
def micro_batches_by_hand():
    w = weights(4, 3)

    def step(x, y):
        total = tf.zeros_like(w)
        for part, labels in ((x[:3], y[:3]), (x[3:], y[3:])):
            with tf.GradientTape() as tape:
                loss = cross_entropy(labels, part @ w)
            total += tape.gradient(loss, w)
        w.assign_sub(0.1 * total)
        return total

    return step, [w]


# State.

@program
def codebook():
    book, counts, sums = weights(6, 4), tf.Variable(tf.ones([6], D)), weights(6, 4)

    def step(x, y):
        near = tf.argmin(tf.reduce_sum((x[:, None] - book[None]) ** 2, -1), 1)
        hot = tf.one_hot(near, 6, dtype=D)
        counts.assign(0.9 * counts + 0.1 * tf.reduce_sum(hot, 0))
        sums.assign(0.9 * sums + 0.1 * tf.matmul(hot, x, transpose_a=True))
        book.assign(sums / (counts[:, None] + 1e-5))
        return near, tf.gather(book, near)

    return step, [book, counts, sums]


@program
def moco_queue():
    w, slow = weights(4, 3), weights(4, 3)
    queue, place = tf.Variable(tf.ones([16, 3], D)), tf.Variable(0)

    def step(x, y):
        keys = normalized(x @ slow)
        with tf.GradientTape() as tape:
            queries = normalized(x @ w)
            logits = tf.concat([tf.reduce_sum(queries * keys, 1, keepdims=True),
                                queries @ tf.transpose(queue)], 1)
            loss = cross_entropy(tf.zeros_like(y), logits * 5)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        slow.assign(0.9 * slow + 0.1 * w)
        at = (place + tf.range(tf.shape(x)[0])) % 16
        queue.scatter_nd_update(at[:, None], keys)
        place.assign((place + tf.shape(x)[0]) % 16)
        return loss

    return step, [w, slow, queue, place]


@program
def queue_by_concat():
    queue = tf.Variable(tf.ones([8, 4], D))

    def step(x, y):
        queue.assign(tf.concat([x, queue], 0)[:8])
        return tf.reduce_mean(queue)

    return step, [queue]


@program
def memory_of_classes():
    centers = weights(3, 4)

    def step(x, y):
        loss = tf.reduce_mean((x - tf.gather(centers, y)) ** 2)
        centers.scatter_sub(tf.IndexedSlices(0.1 * (tf.gather(centers, y) - x), y))
        return loss

    return step, [centers]


@program
def embedding_gradients():
    table, w = weights(3, 4), weights(4, 3)
    return descend(lambda x, y: tf.reduce_mean(
        (tf.nn.embedding_lookup(table, y) @ w - x[:, :3]) ** 2), table, w)


@program
def running_extremes():
    low, high, mean = tf.Variable(tf.zeros([4], D)), tf.Variable(tf.zeros([4], D)), weights(4)

    def step(x, y):
        low.assign(tf.minimum(low, tf.reduce_min(x, 0)))
        high.assign(tf.maximum(high, tf.reduce_max(x, 0)))
        mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(x, 0))
        return (x - low) / (high - low) - mean

    return step, [low, high, mean]


@program
def welford():
    count, mean, squares = tf.Variable(0.0, dtype=D), weights(4), tf.Variable(tf.zeros([4], D))

    def step(x, y):
        new = tf.cast(tf.shape(x)[0], D)
        delta = tf.reduce_mean(x, 0) - mean
        squares.assign_add(tf.reduce_sum((x - tf.reduce_mean(x, 0)) ** 2, 0)
                           + delta ** 2 * count * new / (count + new))
        mean.assign_add(delta * new / (count + new))
        count.assign_add(new)
        return squares / count

    return step, [count, mean, squares]


@program
def read_write_read():
    w = weights(4)

    def step(x, y):
        before = x * w
        w.assign_add(tf.reduce_mean(before, 0))
        after = x * w
        w.assign(tf.reduce_max(after, 0))
        return before, after, x * w

    return step, [w]


@program
def table_of_labels():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)

    def step(x, y):
        found = table.lookup(y)
        table.insert(y, tf.range(tf.shape(y, tf.int64)[0]))
        return found, table.size()

    return step, []


@program
def drawn_noise():
    generator, w = tf.random.Generator.from_seed(5), weights(4, 3)

    def loss_of(x, y):
        noisy = x + generator.normal(tf.shape(x), dtype=D)
        return cross_entropy(y, noisy @ w) * generator.uniform([], dtype=D)

    return descend(loss_of, w)


# Keras.

def keras_step(model, optimizer, loss_of=cross_entropy):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return step


def values_of(*things):
    return lambda: [v.value for thing in things for v in thing.variables]


@program
def gan():
    maker = keras.Sequential([keras.Input([2], dtype="float64"),
                              keras.layers.Dense(4, dtype="float64")])
    judge = keras.Sequential([
        keras.Input([4], dtype="float64"), keras.layers.Dense(5, "tanh", dtype="float64"),
        keras.layers.BatchNormalization(dtype="float64"), keras.layers.Dense(1, dtype="float64")])
    first, second = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True, dtype="float64")

    def step(x, y):
        count = tf.shape(x)[0]
        noise = tf.random.stateless_normal([count, 2], [3, 4], dtype=D)
        labels = tf.concat([tf.ones([count, 1]), tf.zeros([count, 1])], 0)
        with tf.GradientTape() as tape:
            out = judge(tf.concat([x, maker(noise)], 0), training=True)
            loss = loss_of(labels, out)
        judge_variables = judge.trainable_variables
        first.apply_gradients(zip(tape.gradient(loss, judge_variables), judge_variables))
        with tf.GradientTape() as tape:
            fooled = loss_of(tf.ones([count, 1]), judge(maker(noise), training=True))
        second.apply_gradients(zip(tape.gradient(fooled, maker.trainable_variables),
                                   maker.trainable_variables))
        return loss, fooled

    return step, values_of(maker, judge, first, second)


@program
def lstm():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.Input([4, 1], dtype="float64"), keras.layers.LSTM(5, dtype="float64"),
        keras.layers.Dense(3, dtype="float64")])
    optimizer = keras.optimizers.Adam(0.01)
    inner = keras_step(model, optimizer)
    return lambda x, y: inner(x[:, :, None], y), values_of(model, optimizer)


@program
def unbuilt_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(5, "tanh", dtype="float64"),
                              keras.layers.Dense(3, dtype="float64")])
    optimizer = keras.optimizers.Adam(0.01)
    return keras_step(model, optimizer), values_of(model, optimizer)


@program
def stateful_rnn():
    w, u, state = weights(4, 5), weights(5, 5, seed=1), tf.Variable(tf.zeros([9, 5], D))

    def loss_of(x, y):
        count = tf.shape(x)[0]
        after = tf.tanh(x @ w + state[:count] @ u)
        state.assign(tf.concat([after, state[count:]], 0))
        return tf.reduce_mean(after ** 2)

    step, variables = descend(loss_of, w, u)
    return step, [*variables, state]
