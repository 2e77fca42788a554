"""The workers of a small cluster on 127.0.0.1, and what they are asked to do.

    python machines_workers.py WORKERS TOWERS FOLDER CASE...

Goes in: how many workers and towers each (a number, or a list of the shares of each worker's
towers), and the names of :data:`CASES`.  Comes out: in FOLDER a
file a case and worker, ``CASE_WORKER.npz``, with what the case returned.  A case takes a strategy
and says what comes of it; given TensorFlow's default strategy it says what one device makes of the
same global batches.

Workers are forked from this process, which has imported everything and has not started TensorFlow.
"""

import collections
import contextlib
import functools
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
from benchmarks import on_gpus, traffic
from tests import dtypes
from tests.extras.clock import Clock
from towerstrategy.batch import iterators, prefetching
from towerstrategy.extras.report import epochs as epochs_lib, sample

SECONDS = int(os.environ.get("MACHINES_SECONDS", 300))  # then all workers are killed

# Parts are brought to the towers' devices ahead of the step, as they are by default on GPUs.
FETCHED = tf.distribute.InputOptions()


def data(rows, features=3):
    random_state = np.random.RandomState(rows)
    x = random_state.rand(rows, features).astype("f")
    weights = random_state.uniform(0.5, 2, [rows]).astype("f")
    return x, (x.sum(1, keepdims=True) - 1) ** 2, weights


def model_of(kit, *layers):
    kit.utils.set_random_seed(7)
    start = kit.layers.Input([3]) if kit is keras else kit.layers.InputLayer([3])
    return kit.Sequential([start, kit.layers.Dense(4, "tanh"), *layers,
                           kit.layers.Dense(1)])


def fit(strategy, kit, rows, batch, make=model_of, optimizer=None, **kwargs):
    """Trains, evaluates and predicts; returns all that a user sees of it."""
    x, y, weights = data(rows)
    with strategy.scope():
        model = make(kit)
        model.compile(optimizer() if optimizer else kit.optimizers.Adam(0.01, clipnorm=0.5),
                      "mse", metrics=["mae"])
    history = model.fit(x, y, sample_weight=weights, batch_size=batch, epochs=2, shuffle=False,
                        verbose=0, **kwargs)
    seen = {f"weight_{number}": value for number, value in enumerate(model.get_weights())}
    seen.update({f"log_{name}": values for name, values in history.history.items()})
    seen["evaluate"] = model.evaluate(x, y, batch_size=batch, verbose=0)
    seen["predict"] = model.predict(x, batch_size=batch, verbose=0)
    return seen


def uneven(strategy, kit):
    """The last batch has one row: three of four towers have none."""
    return fit(strategy, kit, 13, 6, validation_split=0.2)


def classified(strategy, kit):
    """Counts of sliced rows, which cross with gradients: a last slice has more operations."""
    x, y, _ = data(8)
    with strategy.scope():
        model = kit.Sequential([kit.Input([3]), kit.layers.Dense(1, "sigmoid", True, "ones")])
        model.compile("sgd", "binary_crossentropy", metrics=[kit.metrics.Precision(name="of")])
    history = model.fit(x, y > .2, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return {"kernel": model.get_weights()[0], **{
        f"log_{name}": values for name, values in history.history.items()}}


def one_row(strategy, kit):
    return fit(strategy, kit, 1, 4)


def in_float64(case):
    """The normalization of one row makes float32's rounding large."""
    def made(strategy, kit):
        with dtypes.policy(kit, "float64"):
            return case(strategy, kit)

    return functools.wraps(case)(made)


@in_float64
def whole(strategy, kit):
    """A loss of all rows, of all workers; the last batch has one row."""
    def loss(y_true, y_pred):
        spread = tf.reduce_mean(tf.square(y_pred[:, tf.newaxis] - y_pred / 2), [1, 2])
        return spread + tf.reduce_mean(tf.square(y_pred - y_true), -1)

    x, y, weights = data(13)
    with strategy.scope():
        model = model_of(kit, kit.layers.BatchNormalization(synchronized=True))
        model.compile(kit.optimizers.SGD(0.1), towerstrategy.losses.WholeBatch(loss))
    history = model.fit(x, y, sample_weight=weights, batch_size=6, epochs=2, shuffle=False,
                        verbose=0)
    return {"loss": history.history["loss"],
            **{f"weight_{number}": value for number, value in enumerate(model.get_weights())}}


class Pairs(keras.Model):
    """Each example is to be like itself with noise, and unlike all others of the batch."""

    def __init__(self):
        super().__init__()
        self.dense, self.dropout = keras.layers.Dense(4), keras.layers.Dropout(0.3, seed=3)
        self.dense.build([None, 3])

    def call(self, x, training=False):
        return tf.math.l2_normalize(self.dropout(self.dense(x), training=training), axis=1)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            one, other = self(x, training=True), self(x + 0.1, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.range(tf.shape(x)[0]), tf.matmul(one, other, transpose_b=True)))
            loss += tf.reduce_max(one) / 9 + tf.reduce_mean(tf.reduce_min(other, 0))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def in_batch(strategy, _):
    """A step of one's own with in-batch negatives; several steps an execution."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Pairs()
        model.compile(keras.optimizers.SGD(0.1), steps_per_execution=2)
    history = model.fit(data(13)[0], batch_size=6, epochs=2, shuffle=False, verbose=0)
    return {"loss": history.history["loss"],
            **{f"weight_{number}": value for number, value in enumerate(model.get_weights())}}


class Meeting(keras.layers.Layer):
    """A loop, and a branch in it, in which rows meet; in each iteration there are fewer of them."""

    def call(self, x):
        def turn(number, held):
            held -= tf.reduce_mean(held, 0, keepdims=True)
            held = tf.cond(tf.reduce_sum(held) > -1., lambda: tf.nn.softmax(held, axis=0) + x,
                           lambda: held * 2.)
            places = tf.cast(tf.argsort(held[:, 0])[:, tf.newaxis], tf.float32)
            least = tf.reduce_max(x[:, 0]) - 0.5 / tf.cast(number + 1, x.dtype)
            chosen = tf.sort(held[x[:, 0] >= least], axis=0)
            order = tf.cast(tf.range(tf.shape(chosen)[0]), x.dtype)[:, tf.newaxis]
            return number + 1, tf.tanh(held + places / 99 + tf.reduce_sum(chosen * order) / 99)

        return tf.while_loop(lambda number, _: number < 3, turn, (0, x))[1]


def looped(strategy, kit):
    return fit(strategy, kit, 13, 6, lambda kit: model_of(kit, Meeting()))


def function(strategy, _):
    """``strategy.function``: rows chosen, sorted, drawn, counted, doubled, named, in turn, made."""
    def step(x):
        chosen = tf.boolean_mask(x, x[:, 0] > 0.5)
        views = tf.concat([x, x * x], 0)
        places = tf.cast(tf.range(tf.shape(views)[0]), x.dtype)[:, tf.newaxis]
        rows = tf.range(tf.shape(x)[0])
        return (chosen * tf.reduce_sum(x), tf.range(tf.shape(chosen)[0]), tf.sort(x, axis=0),
                tf.random.stateless_normal([tf.shape(x)[0], 3], [1, 2]),
                tf.random.stateless_normal([tf.shape(chosen)[0], 3], [1, 2]),
                tf.reduce_all(x > 0.1, 0), tf.reduce_any(x > 0.9, 0), tf.strings.as_string(x), x,
                tf.cumsum(views * places), tf.reduce_sum(views * places, 0), tf.split(views, 2)[1],
                x[:9] + 0., x[0] + 0., tf.gather_nd(x, tf.stack([rows, rows % 2], 1)),
                tf.scatter_nd(tf.stack([rows, rows % 2], 1), x[:, 0], tf.shape(x)),
                tf.map_fn(lambda row: row[0] * tf.cast(row[1], x.dtype), (x, rows), x.dtype),
                tf.cumsum(tf.tanh(tf.random.stateless_normal([7, 3], [1, 2]) @ tf.ones([3, 3]))))

    x, _, _ = data(13)
    made = strategy.function(step) if hasattr(strategy, "function") else step
    split = getattr(strategy, "split", tf.identity)
    found = [*made(split(x)), *made(split(x[:1]))]
    return {f"output_{number}": value.numpy().astype("S") if value.dtype == tf.string else value
            for number, value in enumerate(found)}


def accumulated(strategy, kit):
    return fit(strategy, kit, 13, 4, optimizer=lambda: kit.optimizers.Adam(
        0.01, gradient_accumulation_steps=2))


def loss_scaled(strategy, kit):
    """The inputs overflow in some steps, on one worker."""
    optimizer = (kit.optimizers.LossScaleOptimizer if kit is keras
                 else kit.mixed_precision.LossScaleOptimizer)
    return fit(strategy, kit, 13, 4, optimizer=lambda: optimizer(kit.optimizers.SGD(0.01)))


def embedded(strategy, kit):
    """An embedding, whose gradients are sparse, and a mask; words differ between workers.

    Several steps in one loop, with gathers of different sizes.
    """
    words = np.random.RandomState(3).randint(0, 20, [11, 5])
    words[-2:] = 0
    y = words.sum(1, keepdims=True).astype("f") / 50
    with strategy.scope():
        kit.utils.set_random_seed(7)
        inputs = kit.Input([5], dtype="int32")
        hidden = kit.layers.Embedding(20, 4, mask_zero=True)(inputs)
        model = kit.Model(inputs, kit.layers.Dense(1)(kit.layers.GlobalAveragePooling1D()(hidden)))
        legacy = kit is tf_keras
        model.compile(kit.optimizers.legacy.Adam(0.05) if legacy else kit.optimizers.Adam(0.05),
                      "mse", steps_per_execution=3)
    history = model.fit(words, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return {"loss": history.history["loss"],
            "predict": model.predict(words, batch_size=4, verbose=0),
            **{f"weight_{number}": value for number, value in enumerate(model.get_weights())}}


def on_batch(strategy, kit):
    """Every worker gives the whole batch."""
    x, y, _ = data(7)
    with strategy.scope():
        model = model_of(kit)
        model.compile("sgd", "mse")
    return {"train": model.train_on_batch(x, y), "test": model.test_on_batch(x, y),
            "predict": model.predict_on_batch(x),
            **{f"weight_{number}": value for number, value in enumerate(model.get_weights())}}


def handed(strategy, kit):
    """Datasets that the user has distributed; with two workers the second's has more batches."""
    x, y, _ = data(24)

    def batches(context):
        size = context.get_per_replica_batch_size(8)
        if context.num_input_pipelines == 1:
            rows = [row for start in range(0, 16, 4) for row in (
                *range(start, min(start + 4, 8)), *range(8 + start, 12 + start))]
            sizes = [8, 8, 4, 4]
        else:
            rows = range(8) if context.input_pipeline_id == 0 else range(8, 24)
            sizes = [size] * (len(rows) // size)
        starts = np.cumsum([0, *sizes[:-1]])
        parts = [list(rows[start:start + count]) for start, count in zip(starts, sizes)]
        return tf.data.Dataset.from_generator(
            lambda: ((x[part], y[part]) for part in parts), output_signature=(
                tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32))
        ).apply(tf.data.experimental.assert_cardinality(len(parts)))

    with strategy.scope():
        model = model_of(kit)
        model.compile("sgd", "mse")
    made = strategy.distribute_datasets_from_function(batches)
    history = model.fit(made, validation_data=made, epochs=2, verbose=0)
    return {"loss": history.history["loss"], "val_loss": history.history["val_loss"],
            "predict": model.predict(made, verbose=0),
            **{f"weight_{number}": value for number, value in enumerate(model.get_weights())}}


def loop(strategy, kit):
    """A loop of one's own over a dataset whose last batch is smaller."""
    x, y, _ = data(11)
    with strategy.scope():
        model = model_of(kit)
        optimizer = kit.optimizers.SGD(0.1)
        seen = tf.Variable(0., aggregation=tf.VariableAggregation.SUM)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)

    def step(x, y):
        rows = tf.distribute.get_replica_context().all_reduce("SUM", tf.shape(x)[0])
        with tf.GradientTape() as tape:
            error = tf.reduce_sum(tf.square(model(x) - y))
            loss = error / tf.cast(rows, tf.float32)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables),
                                      model.trainable_variables))
        seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return error

    @tf.function
    def epoch(batches):
        total = tf.constant(0.)
        for x, y in batches:
            total += strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
        return total

    @tf.function
    def fetched_epoch(iterator):
        total = tf.constant(0.)
        element = iterator.get_next_as_optional()
        while element.has_value():
            x, y = element.get_value()
            total += strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
            element = iterator.get_next_as_optional()
        return total

    fetched = strategy.experimental_distribute_dataset(dataset, FETCHED)
    totals = [epoch(strategy.experimental_distribute_dataset(dataset)),
              fetched_epoch(iter(fetched)), epoch(fetched), epoch(iter(fetched))]
    rows = []
    for batch, _ in fetched:
        if hasattr(strategy, "split"):
            places = [part.device[-5:] for part in strategy.experimental_local_results(batch)]
            np.testing.assert_equal(places, [device[-5:] for device in
                                             strategy.extended.worker_devices])
        rows.append(strategy.gather(batch, axis=0))
    return {"totals": totals, "rows": np.concatenate(rows), "seen": seen,
            **{f"weight_{number}": value for number, value in enumerate(model.get_weights())}}


def verbs(strategy, _):
    """``reduce``, ``gather``, ``all_reduce``, ``all_gather`` and writes, eager and in functions."""
    seen = {}
    count = strategy.num_replicas_in_sync

    def work():
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group, tf.float32)
        large = tf.fill([2**20], number)  # it crosses by itself
        summed = context.all_reduce("SUM", [number, tf.stack([number, 1.]), large])
        rows = context.all_gather(tf.fill([1 + context.replica_id_in_sync_group], number), axis=0)
        total = tf.reduce_sum(summed[0]) + summed[1][1] + summed[2][-1] - summed[0]
        return number, total, tf.reduce_sum(rows)

    for name, run in (("eager", work), ("graph", tf.function(work))):
        number, summed, rows = strategy.run(run)
        seen[f"{name}_mean"] = strategy.reduce("MEAN", number, axis=None) * 2 + 1 - count
        seen[f"{name}_sum"] = strategy.reduce("SUM", summed, axis=None) / count
        seen[f"{name}_expected_sum"] = count * (count - 1) / 2 + count
        seen[f"{name}_rows"] = strategy.reduce("MEAN", rows, axis=None)
        seen[f"{name}_expected_rows"] = sum((1 + each) * each for each in range(count))
    seen["replicas"] = [count - len(strategy.experimental_local_results(number))]
    return seen


def random_start(strategy, kit):
    """Workers whose seeds differ start from worker 0's weights, and draw different numbers."""
    kit.utils.set_random_seed(1 + strategy.extended.first_replica)
    with strategy.scope():
        model = kit.Sequential([kit.layers.Dense(3)])
        model.build([None, 3])
        kept = tf.Variable(tf.random.normal([3]))
        drop = kit.layers.Dropout(0.5)

        @tf.function
        def masks():
            return strategy.run(lambda x: drop(x, training=True),
                                (strategy.split(tf.ones([8, 64])),))

        drawn = strategy.gather(masks(), axis=0)
    return {"kernel": model.get_weights()[0], "kept": kept, "masks": drawn}


def ends_early(strategy, _):
    """Worker i has i + 1 batches of 2 rows; all go on until the last has ended."""

    def dataset_fn(context):
        here = context.input_pipeline_id
        return tf.data.Dataset.range(2 * context.num_replicas_in_sync * (here + 1)).batch(2)

    @tf.function
    def total(dataset):
        steps, found = tf.constant(0), tf.constant(0, tf.int64)
        for batch in dataset:
            steps += 1
            found += strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)
        return steps, found

    steps, found = total(strategy.distribute_datasets_from_function(dataset_fn))
    seen = {"steps": steps, "found": found}
    extended = strategy.extended
    for name, options in (("", None), ("fetched_", FETCHED)):
        iterators.counting.follow = functools.partial(
            epochs_lib.followed, extended.workers.towers)
        iterator = iter(strategy.distribute_datasets_from_function(dataset_fn, options))
        seen[f"{name}eager_steps"] = sum(1 for _ in iterator)
        iterators.counting.follow = None
        seen[f"{name}rows"] = extended.workers.gather(tf.constant(iterator.row_count()))
    return seen


def counted(strategy, kit):
    """The collective operations of a training step, and what each carries."""
    x, y, _ = data(8)
    with strategy.scope():
        model = model_of(kit)
        model.compile(kit.optimizers.Adam(0.01), "mse", metrics=["mae"])
    model.train_on_batch(x, y)
    iterator = iter(strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(8)))

    @tf.function
    def step(iterator):
        return strategy.run(model.train_step, args=(next(iterator),))

    with strategy.extended.step():
        graph = step.get_concrete_function(iterator).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function
                            for node in function.node_def)]
    counts = collections.Counter(node.op for node in nodes if node.op.startswith("Collective"))
    return {"counts": [counts["CollectiveReduceV2"], sum(counts.values())],
            "in_loops": in_loops(strategy, model, tf.data.Dataset.from_tensors((x, y)))}


def in_loops(strategy, model, dataset):
    """The bytes of a prefetched batch that cross in a turn of loops that TensorFlow runs."""
    fetched = strategy.experimental_distribute_dataset(dataset, FETCHED)

    def loop(batches):
        for batch in batches:
            strategy.run(model.train_step, (batch,))

    found = []
    for batches in (fetched, iter(fetched)):
        with on_gpus.tracing(), mock.patch.object(prefetching, "threads", lambda: 99), \
                mock.patch.object(strategy.extended, "keep_graphs", True):
            function = tf.function(loop).get_concrete_function(batches)
        found.append(traffic.count(function, strategy.num_replicas_in_sync, unknown_dimension=2,
                                   arguments=None if batches is fetched else batches).batch)
    return found


def wide(strategy, kit):
    """A kernel of 4 MiB, which crosses by itself."""
    def make():
        kit.utils.set_random_seed(7)
        inputs = kit.Input([3])
        hidden = kit.layers.Dense(1024, "tanh")(inputs)
        hidden = kit.layers.Dense(1024, "tanh")(hidden)
        return kit.Model(inputs, kit.layers.Dense(1)(hidden))

    seen = {}
    for batch in (6, 300):
        x, y, _ = data(batch * 2 + 1)
        with strategy.scope():
            model = make()
            model.compile(kit.optimizers.SGD(0.01), "mse")
        history = model.fit(x, y, batch_size=batch, shuffle=False, verbose=0).history
        seen[f"loss_{batch}"] = history["loss"]
        seen.update({f"weight_{batch}_{number}": value
                     for number, value in enumerate(model.get_weights())})
    return seen


def unseeded(strategy, _):
    """The rows of a dataset that is shuffled with no seed given anywhere."""
    rows = np.arange(23)
    batches = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(rows).shuffle(23).batch(8))
    return {"rows": np.concatenate([strategy.gather(batch, axis=0) for batch in batches])}


def sharded(strategy, _):
    """The rows and steps of an epoch over four files, under each auto-shard policy."""
    folder = pathlib.Path(os.environ["MACHINES_FOLDER"])
    if strategy.extended.should_checkpoint:
        for number in range(4):
            lines = [f"{10 * number + row}\n" for row in range(5 + number)]
            (folder / f"{number}.txt").write_text("".join(lines))
    strategy.reduce("SUM", 0, axis=None)  # the files are there
    files = [str(folder / f"{number}.txt") for number in range(4)]
    seen = {}
    for policy in ("AUTO", "FILE", "DATA", "OFF", "HINT"):
        options = tf.data.Options()
        options.deterministic = False
        options.experimental_distribute.auto_shard_policy = getattr(
            tf.data.experimental.AutoShardPolicy, policy)
        lines = tf.data.TextLineDataset(files)
        if policy == "HINT":
            lines = tf.data.Dataset.from_tensor_slices(files).shard(
                tf.data.experimental.SHARD_HINT, 0).flat_map(tf.data.TextLineDataset)
        numbers = lines.map(lambda line: (None, tf.strings.to_number(line, tf.int32)),
                            num_parallel_calls=4)
        dataset = numbers.batch(8).with_options(options)
        steps = [strategy.gather(batch, axis=0).numpy()
                 for _, batch in strategy.experimental_distribute_dataset(dataset)]
        seen[f"{policy}_rows"] = np.concatenate(steps)
        seen[f"{policy}_steps"] = [len(step) for step in steps]
    return seen


def kinds(strategy, _):
    """Strings, ragged and sparse values of all towers, gathered along each axis."""
    words = tf.constant([[b"", b"a\0b\xff"], [b"c", b"dd"], [b"", b""], [b"eee", "\u00e9".encode()],
                      [b"f", b"\0"], [b"g", b"h"], [b"i", b"j" * 300]])
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(9), [2, 0, 3, 1, 0, 0, 3])
    nested = tf.ragged.constant([[[b"k"], []], [], [[b"l", b"m"]], [[]], [], [[b"n"]], [[b"o"]]])
    sparse = tf.sparse.from_dense(np.arange(42).reshape(7, 3, 2) % 4)
    parts = words, ragged, nested, sparse
    numbers = tf.stack([words[:, 1]] * 2)
    if not hasattr(strategy, "split"):
        gathered = [*parts, *parts]
        wide = [numbers[:, :2]] * 2
    else:
        split = strategy.split(parts)
        gathered = [strategy.gather(part, axis=0) for part in split]
        gathered += tf.function(lambda: [strategy.gather(part, axis=0) for part in split])()
        across = strategy.extended.workers
        # Of three columns worker 0 has the first, worker 1 the others; of two, one each.
        first, last = [(0, 1), (1, 3), (3, 3)][min(across.index, 2)]
        wide = [across.gather(numbers[:, first:min(last, 2)], 1)] * 2
        own = tf.sparse.slice(sparse, [0, first, 0], [7, last - first, 2])
        np.testing.assert_array_equal(tf.sparse.to_dense(across.gather(own, 1)),
                                      tf.sparse.to_dense(sparse))
        rows = [ragged[:2] + 10, ragged[:2], ragged[4:6]][min(across.index, 2)]
        np.testing.assert_equal(across.gather(rows, 1).to_list(), [[10, 11, 0, 1], []])

    def plain(value):
        if isinstance(value, tf.SparseTensor):
            return tf.sparse.to_dense(value)
        value = value.to_tensor() if isinstance(value, tf.RaggedTensor) else value
        array = np.asarray(value)
        # NumPy saves no objects, and takes zeros off the ends of its own kind of bytes.
        return np.vectorize(bytes.hex)(array) if array.dtype == object else array

    return {f"kind_{number}": plain(value) for number, value in enumerate([*gathered, *wide])}


def trained(model, history, x, inputs):
    """What a training with shares that may have changed led to, and these shares."""
    seen = {"loss": history.history["loss"], "predict": model.predict(x, verbose=0)}
    if inputs is not None:
        seen["units"] = inputs.units
    return {**seen, **{f"weight_{number}": value
                       for number, value in enumerate(model.get_weights())}}


def measured(strategy, kit):
    """Another strategy of the same workers, whose shares change after the first epoch."""
    inputs = None
    with contextlib.ExitStack() as stack:
        if hasattr(strategy, "split"):
            strategy = towerstrategy.TowerStrategy(
                [f"CPU:{tower + 1}" for tower in range(len(strategy.extended.worker_devices))],
                "CPU:0", shares="measured")
            inputs = strategy.extended.inputs
            first, here = strategy.extended.first_replica, len(strategy.extended.worker_devices)
            clock = Clock(*range(1 + first, 1 + first + here))  # tower i takes i + 1 seconds a row
            clock.shares = inputs.measuring.shares
            stack.enter_context(mock.patch.object(sample, "begin", clock))
        x, y, _ = data(100)
        with strategy.scope():
            model = model_of(kit)
            model.compile(kit.optimizers.Adam(0.01), "mse")
        history = model.fit(x, y, batch_size=12, epochs=3, verbose=0, shuffle=False)
        return trained(model, history, x, inputs)


def slowed(strategy, kit):
    """Shares by the profiler's times, on workers of which the first works more for each row."""
    turns, inputs = 1, None
    if hasattr(strategy, "split"):
        turns = 200 if strategy.extended.workers.index == 0 else 10
        strategy = towerstrategy.TowerStrategy(["CPU:1"], "CPU:0", shares="measured")
        inputs = strategy.extended.inputs

    class Repeating(kit.layers.Layer):
        """Works on each row, and changes nothing: what is added rounds off."""

        def call(self, x):
            _, made = tf.while_loop(
                lambda turn, _: turn < turns,
                lambda turn, made: (turn + 1, tf.tanh(made)),
                (0, tf.tile(tf.stop_gradient(x), [1, 16384])))
            return x + 1e-30 * made[:, :1]

    x, y, _ = data(100)
    with strategy.scope():
        model = model_of(kit, Repeating())
        model.compile(kit.optimizers.Adam(0.01), "mse")
    history = model.fit(x, y, batch_size=10, epochs=4, verbose=0, shuffle=False)
    return trained(model, history, x, inputs)


KITS = {"keras": keras, "tf_keras": tf_keras}
CASES = {f"{function.__name__}-{kit}": functools.partial(function, kit=KITS[kit])
         for function in (uneven, one_row, classified, whole, loss_scaled, embedded,
                          on_batch, loop, random_start, counted, wide) for kit in KITS}
CASES["accumulated-keras"] = functools.partial(accumulated, kit=keras)
CASES["measured-keras"] = functools.partial(measured, kit=keras)
CASES["slowed-keras"] = functools.partial(slowed, kit=keras)
CASES["looped-keras"] = functools.partial(looped, kit=keras)
CASES["handed-keras"] = functools.partial(handed, kit=keras)
CASES.update({function.__name__: functools.partial(function, _=None)
              for function in (in_batch, function, verbs, kinds, ends_early, sharded, unseeded)})


def ports(count):
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def environment(**more):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2", **more}


def run(workers, towers, folder, cases, seconds=SECONDS):
    """Runs a cluster in processes of its own; raises with the workers' output if one fails."""
    command = [sys.executable, __file__, str(workers), json.dumps(towers), str(folder), *cases]
    done = subprocess.run(
        command, env=environment(MACHINES_FOLDER=str(folder), MACHINES_SECONDS=str(seconds)),
        capture_output=True, text=True, timeout=seconds + 60)
    if done.returncode:
        raise AssertionError(f"the cluster failed:\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}")


def results(folder, case, worker):
    with np.load(pathlib.Path(folder) / f"{case}_{worker}.npz") as loaded:
        return dict(loaded)


def expected(case):
    """What one device makes of a case."""
    return {name: np.asarray(value) for name, value in CASES[case](
        tf.distribute.get_strategy()).items()}


class ClusterTestCase(parameterized.TestCase):
    """A cluster that ran its cases once, and what came of them.

    Attributes:
      towers: of each worker; or a list, for each worker the shares of its towers.
      workers: how many.
      cases: names of :data:`CASES`.
      seconds: then all workers are killed.
    """

    towers, workers, cases, seconds = 2, 2, (), SECONDS

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        if cls.cases:
            run(cls.workers, cls.towers, cls.folder, cls.cases, cls.seconds)

    def seen(self, case):
        """What each worker saw; fails where they saw different things."""
        first, *others = [results(self.folder, case, worker) for worker in range(self.workers)]
        for other in others:
            for name, value in first.items():
                np.testing.assert_array_equal(value, other[name], f"{case}: {name}")
        return first

    def assert_sharded(self):
        """What the case "sharded" saw, in which each row was dealt once, or once by each worker."""
        seen = self.seen("sharded")
        rows = [10 * number + row for number in range(4) for row in range(5 + number)]
        for policy in ("FILE", "HINT"):
            self.assertCountEqual(seen[f"{policy}_rows"], rows)
        for policy in ("AUTO", "DATA"):
            self.assertEqual(seen[f"{policy}_rows"].tolist(), rows)
        self.assertCountEqual(seen["OFF_rows"], rows * self.workers)
        self.assertEqual(seen["FILE_steps"][0], 8)
        return seen

    def assert_as_on_one_device(self, case):
        """Every worker saw what one device makes of a case; what tells of the cluster is left."""
        seen = self.seen(case)
        for name, value in expected(case).items():
            if value.dtype.kind in "USb":
                np.testing.assert_array_equal(seen[name], value, f"{case}: {name}")
            elif not name.startswith(("eager_", "graph_", "replicas")):
                np.testing.assert_allclose(seen[name], value, 1e-5, 1e-6, err_msg=f"{case}: {name}")


def work(worker, addresses, towers, folder, cases):
    random.seed()  # the workers are forks, which draw alike
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses},
                                          "task": {"type": "worker", "index": worker}})
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=SECONDS)
    shares = None if isinstance(towers, int) else towers[worker]
    towers = towers if shares is None else len(shares)
    strategy = towerstrategy.TowerStrategy(towerstrategy.split_cpu(towers + 1)[1:], "CPU:0",
                                           shares=shares, communication_options=options)
    np.savez(pathlib.Path(folder) / f"drawn_{worker}.npz", by_python=random.random())
    for case in cases:
        print(f"worker {worker}: {case}", flush=True)
        np.savez(pathlib.Path(folder) / f"{case}_{worker}.npz",
                 **{name: np.asarray(value) for name, value in CASES[case](strategy).items()})


def main(workers, towers, folder, *cases):
    addresses = [f"127.0.0.1:{port}" for port in ports(int(workers))]
    children = {}
    for worker in range(int(workers)):
        child = os.fork()
        if not child:
            try:
                work(worker, addresses, json.loads(towers), folder, cases)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children[child] = worker
    statuses = wait_for(children, SECONDS, after_failure=3)
    print(f"the workers' exit statuses: {statuses}", flush=True)
    sys.exit(any(status != 0 for status in statuses.values()))


def wait_for(children, seconds, after_failure=None, start_again=None):
    """The exit statuses by worker, of its last life: None for one that had to be killed.

    What is left is killed after ``seconds``, so many of them ``after_failure``, or when all have
    been stopped; ``start_again(worker, life)`` starts one anew that was killed.
    """
    statuses, end = dict.fromkeys(children.values()), time.monotonic() + seconds
    left = dict(children)
    while left and time.monotonic() < end and not all(map(stopped, left)):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            worker = left.pop(child)
            statuses[worker] = os.waitstatus_to_exitcode(status)
            if start_again and statuses[worker] == -signal.SIGKILL:
                left[start_again(worker, 2)] = worker
            elif statuses[worker] and after_failure is not None:
                end = min(end, time.monotonic() + after_failure)
        time.sleep(0.05)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return statuses


def stopped(child):
    return pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    main(*sys.argv[1:])
