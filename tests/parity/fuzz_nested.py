"""Properties of replica functions with functions, branches and loops inside, against NumPy models.

Goes in: what hypothesis draws: towers, the sizes of the batches of a loop, what a tower reads
(its share, its id, a Keras loss object's value, ...) or writes, and what that is wrapped in: nested
``tf.function``s whose traces are used again, decorated methods, ``tf.cond``, ``tf.while_loop``.
Comes out: an ``AssertionError`` where a tower reads or writes something else than the model.

Each is tried in eager code, traced once for all towers, and traced for each tower.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import assume, strategies as st

import towerstrategy
from tests.parity.fuzz import (
    Aggregation,
    check_close,
    merged_write,
    sizes_of,
    strategy_of,
)

MOST_TOWERS = 4
context = tf.distribute.get_replica_context
# A function of rows that gives a scalar.
Reading = Callable[[tf.Tensor], tf.Tensor]


# What a reading is wrapped in: each takes a reading and gives one, and says what it makes of the
# values that the reading has for all the rows and for all but the first of them.


def plain(inner: Reading) -> Reading:
    """As it is."""
    return inner


def function(inner: Reading) -> Reading:
    """In a ``tf.function``, a trace a number of rows."""
    return tf.function(inner)


def relaxed(inner: Reading) -> Reading:
    """In a ``tf.function`` with one trace for any number of rows."""
    return tf.function(inner, input_signature=[tf.TensorSpec([None, 2])])


def method(inner: Reading) -> Reading:
    """In a method that is decorated with ``tf.function``."""
    class Helper:
        @tf.function(reduce_retracing=True)
        def read(self, x: tf.Tensor) -> tf.Tensor:
            return inner(x)

    return Helper().read


def branch(inner: Reading) -> Reading:
    """In a branch that is taken, by a condition that is not known while tracing."""
    return lambda x: tf.cond(tf.shape(x)[0] >= 0, lambda: inner(x), lambda: tf.constant(-1.0))


def loop(inner: Reading) -> Reading:
    """In the body of a loop that runs twice: the sum of both."""
    return lambda x: tf.while_loop(lambda step, _: step < 2,
                                   lambda step, total: (step + 1, total + inner(x)),
                                   (0, 0.0))[1]


def twice(inner: Reading) -> Reading:
    """With all rows, then with all but the first."""
    return lambda x: inner(x) + inner(x[1:])


WRAPS = {wrap.__name__: wrap for wrap in (plain, function, relaxed, method, branch, loop, twice)}
NESTING = {"function", "relaxed", "method", "branch", "loop"}
MODES = ("eager", "traced", "traced by shape", "a trace a tower")


@dataclasses.dataclass(frozen=True)
class Read:
    """A reading: a name of :data:`READINGS`, and its wraps from the inside out."""

    what: str
    wraps: tuple[str, ...]

    def reading(self, variable: tf.Variable) -> Reading:
        return functools.reduce(lambda inner, name: WRAPS[name](inner), self.wraps,
                                functools.partial(READINGS[self.what], variable))

    def wanted(self, rows: np.ndarray, tower: "Tower", wraps: tuple[str, ...] | None = None
               ) -> float:
        """What it should be for these rows of a tower's."""
        wraps = self.wraps if wraps is None else wraps
        if not wraps:
            return tower.read(self.what, rows)
        *inner, last = wraps
        value = self.wanted(rows, tower, tuple(inner))
        if last == "twice":
            return value + self.wanted(rows[1:], tower, tuple(inner))
        return 2 * value if last == "loop" else value


def reads(readings: Any) -> st.SearchStrategy[Read]:
    """Readings in up to three wraps."""
    return st.builds(Read, st.sampled_from(sorted(readings)),
                     st.lists(st.sampled_from(sorted(WRAPS)), max_size=3).map(tuple))


@dataclasses.dataclass(frozen=True)
class Tower:
    """The model of a tower: its number, its part of the rows of the batch, the variable's value."""

    number: int
    share: float
    variable: float

    def read(self, what: str, rows: np.ndarray) -> float:
        errors = np.square(rows[:, 0] - rows[:, 1]).mean() if len(rows) else 0.0
        return {"share": self.share, "replica id": self.number, "rows": len(rows),
                "sum": rows.sum(), "loss": self.share * errors, "own loss": self.share * errors,
                "variable": self.variable}[what]


class OwnLoss(keras.losses.Loss):
    """A user's own."""

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(y_true - y_pred), -1)


LOSS, OWN_LOSS = keras.losses.MeanSquaredError(), OwnLoss()
READINGS = {
    "share": lambda variable, x: tf.cast(context().share, tf.float32),
    "replica id": lambda variable, x: tf.cast(context().replica_id_in_sync_group, tf.float32),
    "rows": lambda variable, x: tf.cast(tf.shape(x)[0], tf.float32),
    "sum": lambda variable, x: tf.reduce_sum(x),
    "loss": lambda variable, x: LOSS(x[:, :1], x[:, 1:]),
    "own loss": lambda variable, x: OWN_LOSS(x[:, :1], x[:, 1:]),
    "variable": lambda variable, x: tf.identity(variable)}


def runner(strategy: towerstrategy.TowerStrategy, replica: Any, mode: str) -> Any:
    """A function of a batch that runs ``replica``; a function of the user's, traced if it is."""
    def run(batch: Any) -> Any:
        return strategy.run(replica, (strategy.split(batch),))

    if mode == "eager":
        return run
    shape = None if mode == "traced by shape" else [tf.TensorSpec([None, 2])]
    traced = tf.function(run, input_signature=shape)
    if mode != "a trace a tower":
        return traced

    def by_tower(batch: Any) -> Any:
        strategy.extended.trace_once = False
        try:
            return traced(batch)
        finally:
            strategy.extended.trace_once = True

    return by_tower


def batches(sizes: list[int]) -> Iterator[np.ndarray]:
    """Batches of these sizes, two small whole numbers a row."""
    for number, size in enumerate(sizes):
        yield np.random.RandomState(number).randint(-4, 5, (size, 2)).astype(np.float32)


def parts_of(batch: np.ndarray, towers: int, variable: float = 0.0
             ) -> list[tuple[np.ndarray, Tower]]:
    """The towers' rows, and their models."""
    return [(rows, Tower(number, len(rows) / len(batch), variable))
            for number, rows in enumerate(np.array_split(batch, towers))]


def loses_shape(mode: str, whats: Any, towers: int, fewest: int) -> bool:
    """Whether Keras gives a loss of the shape [0]: of no rows, where that is known beforehand."""
    return (mode in ("eager", "traced by shape") and fewest < towers
            and not {"loss", "own loss"}.isdisjoint(whats))


LOOP = {"towers": st.integers(1, MOST_TOWERS), "mode": st.sampled_from(MODES),
        "sizes": st.lists(st.integers(1, 7), min_size=1, max_size=4)}


READS = {**LOOP, "drawn": st.lists(reads(READINGS), min_size=1, max_size=3),
         "used_before": st.booleans()}


def check_reads(towers, mode, sizes, drawn, used_before):
    """Each tower reads what is its own, whatever it reads it in and however often.

    The functions may have been used before, outside of the towers, on a tower's device.
    """
    left_out = max(read.wraps.count("twice") for read in drawn)  # rows of a tower's
    assume(not loses_shape(mode, [read.what for read in drawn], towers,
                           min(sizes) - left_out * towers))
    strategy = strategy_of(towers)
    with strategy.scope():
        variable = tf.Variable(2.0, trainable=False)
    readings = [read.reading(variable) for read in drawn]
    if used_before:
        with tf.device("CPU:1"):
            for read, reading in zip(drawn, readings):
                if read.what != "share":  # there is none
                    for size in sizes:
                        reading(tf.zeros([size, 2]))
    run = runner(strategy, lambda x: tf.stack([reading(x) for reading in readings]), mode)
    for number, batch in enumerate(batches(sizes)):
        variable.assign(2.0 + number)
        found = strategy.experimental_local_results(run(tf.constant(batch)))
        wanted = [[read.wanted(rows, tower) for read in drawn]
                  for rows, tower in parts_of(batch, towers, 2.0 + number)]
        np.testing.assert_allclose(np.stack(found), wanted, rtol=1e-5, atol=1e-6)


# README's loop: losses by Keras loss objects, in functions, train as on one device.


TRAINS = {**LOOP, "read": reads(["loss", "own loss"]),
          "tape_inside": st.booleans()}


class Trained:
    """Two weights, a step of gradient descent, and a loss of what they predict."""

    def __init__(self, read: Read, tape_inside: bool) -> None:
        self.weights = tf.Variable([0.5, -0.25])
        self.optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        self.optimizer.build([self.weights])
        reading = read.reading(tf.constant(0.0))
        self._loss = lambda x: reading(x * self.weights)
        self._gradient = tf.function(self._with_gradient) if tape_inside else self._with_gradient

    def _with_gradient(self, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss(x)
        return loss, tf.convert_to_tensor(tape.gradient(loss, self.weights))

    def step(self, x: tf.Tensor) -> tf.Tensor:
        loss, gradient = self._gradient(x)
        self.optimizer.apply_gradients([(gradient, self.weights)])
        return loss


def check_trains(towers, mode, sizes, read, tape_inside):
    """Losses and weights of a loop are one device's."""
    assume(not loses_shape(mode, [read.what], towers, min(sizes)))
    without = read.wraps.count("twice")  # each leaves out a row a tower
    if without and (towers > 1 or min(sizes) <= without):
        return  # of no rows Keras' losses are no number in eager code, and 0 in a graph
    alone, strategy = Trained(read, tape_inside), strategy_of(towers)
    with strategy.scope():
        together = Trained(read, tape_inside)
    run = runner(strategy, together.step, mode)
    for batch in batches(sizes):
        wanted = alone.step(tf.constant(batch))
        found = strategy.reduce("SUM", run(tf.constant(batch)), axis=None)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    check_close(together.weights, alone.weights.numpy(), tf.float32)


# Writes.

def written(method: str, before: Any, value: Any) -> Any:
    """What a method makes of a variable that was ``before``; a float or a tensor."""
    if method == "assign_add":
        return before + value
    return 0.75 * before + 0.25 * value if method == "moving average" else value


WRITES = {**LOOP, "wraps": st.lists(st.sampled_from(sorted(NESTING | {"plain"})), max_size=2),
          "aggregation": st.sampled_from(list(Aggregation)),
          "method": st.sampled_from(["assign", "assign_add", "moving average"]),
          "what": st.sampled_from(["share", "replica id", "sum", "loss"])}


def check_writes(towers, mode, sizes, wraps, aggregation, method, what):
    """A write moves the one copy as it does outside of functions, branches and loops.

    In something nested a tower reads its own writes until the towers meet; a sum says that they
    cannot meet there.
    """
    # Where the towers' averages are added up, each term counts as what it is: by_rows_test.
    assume(not (aggregation is Aggregation.SUM and method == "moving average"))
    assume(not loses_shape(mode, [what], towers, min(sizes)))
    strategy = strategy_of(towers)
    with strategy.scope():
        variable = tf.Variable(1.0, trainable=False, aggregation=aggregation)

    def write(x):
        before = tf.identity(variable)
        value = READINGS[what](variable, x)
        if method == "assign_add":
            variable.assign_add(value)
        else:
            variable.assign(written(method, before, value))
        return 100 * before + tf.identity(variable)

    reading = functools.reduce(lambda inner, name: WRAPS[name](inner), wraps, write)
    # A function's signature would be for all the rows where it is given to `run` itself.
    run = runner(strategy, lambda x: reading(x), mode)
    now = 1.0
    for batch in batches(sizes):
        for _ in range(2 ** wraps.count("loop")):
            before = now
            parts = parts_of(batch, towers)
            steps = np.array([tower.read(what, rows) for rows, tower in parts])
            counts = np.array(sizes_of(len(batch), towers))
            if method == "assign_add":
                now = before + merged_write(aggregation, steps, counts, True)
            else:
                now = merged_write(aggregation, written(method, before, steps), counts, True)
        try:
            run(tf.constant(batch))
        except RuntimeError as error:
            if towers > 1 and NESTING & set(wraps) and "merge_call" in str(error):
                return
            raise
        np.testing.assert_allclose(variable, now, rtol=1e-4, atol=1e-5)


PROPERTIES = {
    "nested_reads": (READS, check_reads), "nested_trains": (TRAINS, check_trains),
    "nested_writes": (WRITES, check_writes)}
