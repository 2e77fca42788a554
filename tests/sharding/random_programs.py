"""Random programs of TensorFlow operations, on towers beside one device.

Goes in: a seed.  Comes out: a :class:`Program`, and how its results on towers differ from one
device's.  Operations mix rows and other dimensions at will, in float64; a program ends with a
gradient.  ``slow/random_programs_test.py`` runs hundreds of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

MOST_ENTRIES, MOST_DIMENSIONS = 4000, 4
FLOAT, INT, BOOL = tf.float64, tf.int64, tf.bool


def _axis(n: random.Random, x: tf.Tensor) -> int:
    return n.choice([0, n.randrange(x.shape.rank)])


def _at(n: random.Random, x: tf.Tensor, entries: Any) -> tf.Tensor:
    return x[(slice(None),) * n.randrange(min(x.shape.rank, 3)) + (entries,)]


def _wrapped(i: tf.Tensor, x: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Indices into a dimension of ``x``."""
    return tf.math.floormod(i, tf.shape(x, INT)[axis])


def _gram(x: tf.Tensor) -> tf.Tensor:
    gram = tf.matmul(x, x, transpose_a=True)
    return gram + 2. * tf.eye(tf.shape(gram)[-1], dtype=FLOAT)


def _reshaped(n: random.Random, x: tf.Tensor) -> tf.Tensor:
    s = tf.shape(x)
    return tf.reshape(x, n.choice([
        lambda: [-1], lambda: [-1, 1], lambda: [s[0], -1], lambda: [-1, s[-1]],
        lambda: tf.concat([[s[0] * s[1]], s[2:]], 0),
        lambda: tf.concat([s[:-1], [s[-1] // 2, 2]], 0)])())


def _loop(n: random.Random, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    step = n.choice([lambda i, t: t + tf.cast(i, FLOAT) * b, lambda i, t: tf.tanh(t * b),
                     lambda i, t: t - tf.reduce_mean(t, 0) + tf.reduce_sum(b),
                     lambda i, t: tf.roll(t, 1, 0) + b, lambda i, t: tf.tanh(tf.matmul(t, b))])
    rows = n.choice([tf.constant(3), tf.minimum(tf.shape(a)[0], 4)])
    return tf.while_loop(lambda i, t: i < rows, lambda i, t: (i + 1, step(i, t)), [0, a])[1]


def _of_branches(n: random.Random, c: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    first = n.choice([lambda: a * 2., lambda: tf.reduce_sum(a, 0) + b, lambda: tf.sort(a, 0)])
    other = n.choice([lambda: b, lambda: a + b, lambda: a - tf.reduce_mean(a)])
    return tf.cond(tf.reduce_sum(c) > .5, first, other)


def _gradient(n: random.Random, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(a)
        y = tf.reduce_sum(tf.tanh(a) * b, n.choice([None, 0]))
    return tape.gradient(y, a)


_ELEMENTWISE = (tf.abs, tf.exp, tf.sin, tf.tanh, tf.sigmoid, tf.square, tf.nn.relu, tf.nn.softplus,
                tf.sign, tf.stop_gradient, tf.nn.l2_loss, tf.zeros_like, tf.negative)
_OF_TWO = (tf.add, tf.subtract, tf.multiply, tf.maximum, tf.math.squared_difference,
           lambda a, b: a / (tf.abs(b) + 1.), lambda a, b: tf.expand_dims(a, 0) - b[:, None])
_SUMS = (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.math.reduce_std,
         tf.reduce_logsumexp)
_SLICES = (slice(1, None), slice(None, -1), slice(None, None, 2), slice(None, None, -1), 0, -1,
           slice(0, 2), slice(-1, None))
_PRODUCTS = ("ab,cb->ac", "ab,ac->bc", "ab,ab->a", "abc,ac->ab", "abc,abd->acd", "abc,dc->bad",
             "a,ab->b", "ab,bc->ca", "abc,adc->bd")
# The dtype of the result, those of the arguments, and the function; the first argument draws.
OPERATIONS: tuple[tuple[tf.DType, tuple[tf.DType, ...], Callable[..., Any]], ...] = (
    (FLOAT, (FLOAT,), lambda n, x: n.choice(_ELEMENTWISE)(tf.clip_by_value(x, -3., 3.))),
    (FLOAT, (FLOAT,) * 2, lambda n, a, b: n.choice(_OF_TWO)(a, b)),
    (FLOAT, (FLOAT,), lambda n, x: n.choice(_SUMS)(
        x, n.choice([None, 0, -1]), n.random() < .5)),
    (FLOAT, (FLOAT,), lambda n, x: n.choice([tf.cumsum, tf.math.cumprod])(
        tf.tanh(x), _axis(n, x), n.random() < .5, n.random() < .5)),
    (FLOAT, (FLOAT,), lambda n, x: n.choice([tf.sort, tf.nn.softmax, tf.math.l2_normalize])(
        x, _axis(n, x))),
    (FLOAT, (FLOAT,), lambda n, x: tf.roll(tf.reverse(x, [_axis(n, x)]), 2, _axis(n, x))),
    (FLOAT, (FLOAT,), lambda n, x: tf.transpose(
        x, n.sample(range(x.shape.rank), x.shape.rank))),
    (FLOAT, (FLOAT,), _reshaped),
    (FLOAT, (FLOAT,), lambda n, x: tf.expand_dims(x, n.randint(0, x.shape.rank))),
    (FLOAT, (FLOAT,), lambda n, x: _at(n, x, n.choice(_SLICES))),
    (FLOAT, (FLOAT,), lambda n, x: tf.repeat(x, 2, _axis(n, x))),
    (FLOAT, (FLOAT,), lambda n, x: tf.tile(x, [2] + [1] * (x.shape.rank - 1))),
    (FLOAT, (FLOAT,), lambda n, x: tf.pad(x, [[n.randint(0, 1), n.randint(0, 2)]
                                              for _ in range(x.shape.rank)])),
    (FLOAT, (FLOAT,) * 2, lambda n, a, b: tf.concat([a, b], _axis(n, a))),
    (FLOAT, (FLOAT,) * 2, lambda n, a, b: tf.stack([a, b], n.randint(0, a.shape.rank))),
    (FLOAT, (FLOAT,) * 2, lambda n, a, b: tf.matmul(
        a, b, transpose_a=n.random() < .5, transpose_b=n.random() < .5)),
    (FLOAT, (FLOAT,) * 2, lambda n, a, b: tf.einsum(n.choice(_PRODUCTS), a, b)),
    (FLOAT, (FLOAT,), lambda n, x: n.choice([tf.linalg.inv, tf.linalg.cholesky, tf.linalg.logdet,
                                             tf.linalg.diag_part])(_gram(x))),
    (FLOAT, (FLOAT, INT), lambda n, x, i: tf.gather(
        x, _wrapped(i, x, axis := _axis(n, x)), axis=axis)),
    (FLOAT, (FLOAT, INT), lambda n, x, i: tf.gather(x, _wrapped(i, x, 1), axis=1, batch_dims=1)),
    (FLOAT, (FLOAT, BOOL), lambda n, x, m: tf.boolean_mask(x, m)),
    (FLOAT, (BOOL, FLOAT, FLOAT), lambda n, m, a, b: tf.where(m, a, b)),
    (FLOAT, (INT, FLOAT), lambda n, i, x: tf.math.unsorted_segment_mean(
        x, tf.math.floormod(i, 3), n.choice([3, tf.shape(x)[0] + 3]))),
    (FLOAT, (INT, FLOAT), lambda n, i, x: tf.tensor_scatter_nd_add(
        tf.zeros_like(x), _wrapped(i, x)[:, None], x)),
    (FLOAT, (INT,), lambda n, i: tf.one_hot(tf.math.floormod(i, 4), 4, dtype=FLOAT)),
    (FLOAT, (FLOAT,), lambda n, x: tf.map_fn(n.choice([tf.cumsum, tf.reduce_sum, tf.norm]), x)),
    (FLOAT, (FLOAT,), lambda n, x: tf.scan(lambda s, r: tf.tanh(s * .5 + r), x)),
    (FLOAT, (FLOAT,) * 2, _loop),
    (FLOAT, (FLOAT,) * 3, _of_branches),
    (FLOAT, (FLOAT,) * 2, _gradient),
    (FLOAT, (FLOAT,), lambda n, x: x * tf.random.stateless_uniform(
        tf.shape(x), [n.randint(0, 99), 1], dtype=FLOAT)),
    (FLOAT, (FLOAT,), lambda n, x: x / tf.cast(tf.shape(x)[_axis(n, x)], FLOAT)),
    (INT, (FLOAT,), lambda n, x: n.choice([tf.argmax, tf.argmin])(x, _axis(n, x))),
    (INT, (FLOAT,), lambda n, x: tf.range(tf.shape(x, INT)[_axis(n, x)])),
    (INT, (INT,) * 2, lambda n, i, j: n.choice([tf.add, tf.maximum, tf.multiply])(i, j)),
    (BOOL, (FLOAT,) * 2, lambda n, a, b: n.choice([tf.less, tf.greater_equal])(a, b)),
)


class Call(NamedTuple):
    """One operation: its place in the list, the seed of what it draws, and its arguments."""

    operation: int
    seed: int
    arguments: list[int]


class Program(NamedTuple):
    """Calls; each takes components of the batch, the weights, and results of calls before it."""

    calls: list[Call]

    def __call__(self, batch: dict[str, tf.Tensor], weights: tf.Tensor) -> Any:
        """The last results, and the gradients of a loss of them."""
        with tf.GradientTape() as tape:
            tape.watch([weights, batch["x"]])
            values = [*batch.values(), tf.convert_to_tensor(weights)]
            for call in self.calls:
                values.append(result(call, values))
            last = [tf.sin(value) for value in values[-3:] if value.dtype == FLOAT]
            loss = tf.add_n([tf.reduce_mean(last[0]), *map(tf.reduce_sum, last[1:])])
        gradients = tape.gradient(loss, [weights, batch["x"]],
                                  unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return loss, [tf.convert_to_tensor(each) for each in gradients], values[-3:]


def result(call: Call, values: list[tf.Tensor]) -> tf.Tensor:
    """The result of a call."""
    function = OPERATIONS[call.operation][2]
    return function(random.Random(call.seed), *(values[index] for index in call.arguments))


def batch_of(rows: int, noise: float = 0.) -> dict[str, tf.Tensor]:
    """A batch; ``noise`` is relative."""
    drawn = np.random.RandomState(rows)
    floats = {name: drawn.randn(rows, *shape) for name, shape in
              {"x": [4], "y": [3], "z": [], "s": [3, 4]}.items()}
    floats = {name: value * (1 + noise * drawn.randn(*value.shape))
              for name, value in floats.items()}
    return {**{name: tf.constant(value) for name, value in floats.items()},
            "i": tf.constant(drawn.randint(0, 5, rows)), "m": tf.constant(drawn.rand(rows) < .6)}


def drawn(seed: int) -> Program:
    """A program that one device can run."""
    chance, calls = random.Random(seed), list[Call]()
    values = [*batch_of(9).values(), tf.eye(4, dtype=FLOAT)]
    length, first = chance.choice([3, 5, 8, 12]), len(values)
    while len(calls) < length:
        operation = chance.randrange(len(OPERATIONS))
        dtype, wanted, _ = OPERATIONS[operation]
        fitting = [[index for index, value in enumerate(values) if value.dtype == each]
                   for each in wanted]
        newest = [[index for index in each if index >= first][-3:] for each in fitting]
        call = Call(operation, chance.randrange(1000), [
            chance.choice(new if new and chance.random() < .6 else every)
            for new, every in zip(newest, fitting)])
        try:
            made = result(call, values)
        except Exception:  # arguments of other shapes than it takes
            continue
        if made.dtype == dtype and made.shape.rank <= MOST_DIMENSIONS and np.all(np.isfinite(
                tf.cast(made, FLOAT))) and made.shape.num_elements() <= MOST_ENTRIES:
            calls.append(call)
            values.append(made)
    return Program(calls)


def differences(program: Program, strategy: Any, sizes: tuple[int, ...]) -> Iterator[str]:
    """What is not one device's result; not where that itself depends on rounding."""
    weights = tf.constant(np.random.RandomState(0).randn(4, 4))
    signature = {name: tf.TensorSpec([None, *value.shape[1:]], value.dtype)
                 for name, value in batch_of(2).items()}
    one = tf.function(lambda batch: program(batch, weights), input_signature=[signature])
    towers = strategy.function(lambda batch: program(batch, weights))
    for rows in sizes:
        try:
            wanted = tf.nest.flatten(one(batch_of(rows)))
            rounded = tf.nest.flatten(one(batch_of(rows, 1e-13)))
        except Exception:  # such as an index without rows, or a rank that only eager code knows
            continue
        got = tf.nest.flatten(towers(strategy.split(batch_of(rows))))
        for value, other, found in zip(wanted, rounded, got):
            if _equal(value, other) and not _equal(value, found):
                yield f"{rows} rows: {found} for {value}"


def _equal(one: tf.Tensor, other: tf.Tensor) -> bool:
    if one.shape != other.shape or not one.dtype.is_floating:
        return np.array_equal(one, other)
    scale = np.max(np.abs(np.nan_to_num(one)), initial=1e-3)
    return np.allclose(one, other, rtol=1e-8, atol=1e-8 * scale, equal_nan=True)
