"""Properties of split, merge, reduce, gather and variables, against NumPy models of what they mean.

Goes in: what hypothesis draws: nests, kinds, dtypes, row counts, numbers of towers, aggregation
modes.  Comes out: an ``AssertionError`` where TowerStrategy does something else than the model.
``fuzz_test.py`` tries each property a few times, ``slow/fuzz_test.py`` hundreds of times.

Values are small whole numbers, so that sums are exact in every dtype and only means are rounded.
"""

import collections
import dataclasses
import functools
from typing import Any

import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import assume, strategies as st

import towerstrategy
from towerstrategy.batch import splitting, sub_batches
from towerstrategy.merge import merging, shares as shares_lib

MOST_TOWERS = 5
NUMBERS = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)
FLOATS = NUMBERS[:4]
OTHERS = (tf.bool, tf.string, tf.uint8, tf.complex64)
Aggregation = tf.VariableAggregation
ReduceOp = tf.distribute.ReduceOp

Pair = collections.namedtuple("Pair", ["left", "right"])


# Strategies and values.


@functools.cache
def strategy_of(towers: int) -> towerstrategy.TowerStrategy:
    """One strategy a number of towers; making many would be slow."""
    return towerstrategy.TowerStrategy([f"CPU:{tower + 1}" for tower in range(towers)], "CPU:0")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a component of a batch is, but for its rows: ``kind``, dtype, inner shape, seed."""

    kind: str
    dtype: tf.DType
    inner: tuple[int, ...]
    seed: int


LEAVES = st.one_of(
    st.builds(Leaf, st.sampled_from(["dense", "numpy"]), st.sampled_from((*NUMBERS, *OTHERS)),
              st.lists(st.integers(0, 3), max_size=2).map(tuple), st.integers(0, 99)),
    st.builds(Leaf, st.sampled_from(["ragged", "ragged_of_vectors"]),
              st.sampled_from((tf.float32, tf.int64, tf.string)), st.just(()), st.integers(0, 99)),
    st.builds(Leaf, st.just("sparse"), st.sampled_from((tf.float32, tf.int32)),
              st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple), st.integers(0, 99)))
NONE = Leaf("none", tf.float32, (), 0)


def nests(leaves: st.SearchStrategy, lists: bool = True) -> st.SearchStrategy:
    """Nests of ``leaves``; tf.data takes a list for a tensor, so there are none for it."""
    def around(inner: st.SearchStrategy) -> st.SearchStrategy:
        options = [st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
                   st.lists(inner, min_size=1, max_size=3).map(tuple),
                   st.builds(Pair, inner, inner)]
        return st.one_of(*options, *([st.lists(inner, min_size=1, max_size=3)] if lists else []))

    return st.recursive(leaves, around, max_leaves=4)


def array_of(leaf: Leaf, rows: int) -> np.ndarray:
    """Small whole numbers, or what stands for them in dtypes that have none."""
    numbers = np.random.RandomState(leaf.seed).randint(0, 10, (rows, *leaf.inner))
    if leaf.dtype == tf.string:
        return numbers.astype("S").astype(object)
    if leaf.dtype == tf.bool:
        return numbers % 2 == 0
    return numbers.astype(leaf.dtype.as_numpy_dtype)


def component(leaf: Leaf, rows: int) -> Any:
    """A component with ``rows`` rows."""
    if leaf.kind == "none":
        return None
    if leaf.kind == "numpy":
        return array_of(leaf, rows)
    if leaf.kind in ("dense", "sparse"):
        dense = tf.constant(array_of(leaf, rows), leaf.dtype)
        return dense if leaf.kind == "dense" else tf.sparse.from_dense(dense)
    lengths = np.random.RandomState(leaf.seed).randint(0, 4, [rows])
    inner = (2,) if leaf.kind == "ragged_of_vectors" else ()
    flat = array_of(dataclasses.replace(leaf, inner=inner), int(lengths.sum()))
    return tf.RaggedTensor.from_row_lengths(tf.constant(flat, leaf.dtype), lengths)


def rows_of(value: Any) -> list[Any]:
    """The model of a component: a list of its rows, each as Python values."""
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value)
    return np.asarray(value).tolist()


def kind_of(value: Any) -> tuple[type, Any]:
    """The class and dtype that a part must have as well."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return type(value), value.dtype
    return tf.Tensor, tf.convert_to_tensor(value).dtype


def leaves_of(nest: Any) -> list[Any]:
    return tf.nest.flatten(nest, expand_composites=False)


def sizes_of(rows: int, towers: int) -> list[int]:
    """Rows dealt in order, as evenly as they go: NumPy's array_split."""
    return [len(part) for part in np.array_split(np.arange(rows), towers)]


def check_dealt(dealt: Any, batch: Any, towers: int) -> None:
    """``dealt`` is ``batch``, its rows dealt to ``towers``."""
    tf.nest.assert_same_structure(tf.nest.map_structure(lambda _: 0, batch),
                                  tf.nest.map_structure(lambda _: 0, dealt))
    for whole, leaf in zip(leaves_of(batch), leaves_of(dealt)):
        if whole is None:
            assert leaf is None, leaf
            continue
        rows = rows_of(whole)
        sizes = sizes_of(len(rows), towers)
        if towers == 1:
            assert (kind_of(leaf), rows_of(leaf)) == (kind_of(whole), rows)
            continue
        counts = [int(count) for count in sub_batches.row_counts(leaf)]
        assert counts == sizes, (counts, sizes)
        start = 0
        for part, size in zip(leaf.values, sizes):
            assert kind_of(part) == kind_of(whole), (part, whole)
            found = rows_of(part)
            assert found == rows[start:start + size], (found, rows, start, size)
            start += size


# split


@st.composite
def batches(draw, lists: bool = True, most: int = 11) -> tuple[Any, int, int]:
    """A batch, its rows and a number of towers."""
    nest = draw(nests(LEAVES | st.just(NONE), lists))
    assume(any(leaf.kind != "none" for leaf in leaves_of(nest)))
    rows = draw(st.integers(0, most))
    batch = tf.nest.map_structure(lambda leaf: component(leaf, rows), nest)
    return batch, rows, draw(st.integers(1, MOST_TOWERS))


SPLIT = {"drawn": batches()}


def check_split(drawn):
    """A batch split in eager code."""
    batch, _, towers = drawn
    check_dealt(strategy_of(towers).split(batch), batch, towers)


def with_unknown_rows(value: Any) -> tf.TypeSpec:
    """The spec of a component whose row count is not known."""
    spec = tf.type_spec_from_value(value)
    if isinstance(spec, tf.TensorSpec):
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    return tf.RaggedTensorSpec([None, *spec.shape[1:]], spec.dtype, spec.ragged_rank)


SPLIT_TRACED = {"drawn": batches(), "known": st.booleans()}


def check_split_traced(drawn, known):
    """A batch split in a function, row count known or not: as in eager code."""
    batch, _, towers = drawn
    present = [leaf for leaf in leaves_of(batch) if leaf is not None]
    present = [leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf) for leaf in present]

    def dealt(*tensors):
        left = iter(tensors)
        nest = tf.nest.map_structure(lambda leaf: None if leaf is None else next(left), batch)
        parts = splitting.split_batch(nest, towers)
        return tuple(leaf for leaf in leaves_of(parts) if leaf is not None)

    signature = [tf.type_spec_from_value(leaf) if known else with_unknown_rows(leaf)
                 for leaf in present]
    check_dealt(tf.function(dealt, input_signature=signature)(*present), tuple(present), towers)


DATASET = {"drawn": batches(lists=False), "batch_size": st.integers(1, 6),
           "drop": st.booleans()}


def check_dataset(drawn, batch_size, drop):
    """A dataset of batches, the last one smaller, split in the pipeline."""
    batch, rows, towers = drawn
    assume(rows > 0)
    batch = tf.nest.map_structure(
        lambda leaf: tf.zeros([rows]) if leaf is None else leaf, batch)
    dataset = tf.data.Dataset.from_tensor_slices(batch)
    dataset = (dataset.ragged_batch if any(isinstance(leaf, tf.RaggedTensor)
                                           for leaf in leaves_of(batch))
               else dataset.batch)(batch_size, drop_remainder=drop)
    distributed = strategy_of(towers).experimental_distribute_dataset(dataset)
    elements, wanted = list(distributed), list(dataset)
    assert len(elements) == len(wanted) == len(distributed), (len(elements), len(wanted))
    for element, whole in zip(elements, wanted):
        check_dealt(element, whole, towers)


# merge


def rounding(dtype: tf.DType) -> float:
    """The relative error that a mean may have."""
    return 8 * float({tf.float64: 2e-16, tf.float32: 1.2e-7, tf.float16: 1e-3,
                      tf.bfloat16: 8e-3}.get(dtype, 1.2e-7))


def check_close(found: Any, wanted: Any, dtype: tf.DType = tf.float64) -> None:
    np.testing.assert_allclose(tf.cast(found, tf.float64).numpy(), wanted, rtol=rounding(dtype),
                               atol=10 * rounding(dtype))


@st.composite
def tower_values(draw, dtypes=NUMBERS, most_rank: int = 2) -> tuple[list[np.ndarray], tf.DType]:
    """One array a tower, alike in shape and dtype."""
    towers, dtype = draw(st.integers(1, MOST_TOWERS)), draw(st.sampled_from(dtypes))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=most_rank)))
    seed = draw(st.integers(0, 99))
    return [array_of(Leaf("dense", dtype, shape, seed + tower), 1)[0]
            for tower in range(towers)], dtype


@st.composite
def sliced_values(draw) -> tuple[list[tuple[np.ndarray, np.ndarray]], tf.DType, int]:
    """Slices of a table, a tower's own number of them; rows repeat."""
    towers, dtype = draw(st.integers(1, MOST_TOWERS)), draw(st.sampled_from(FLOATS))
    table, width = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    seed = draw(st.integers(0, 99))
    parts = []
    for tower in range(towers):
        count = draw(st.integers(0, 3))
        values = array_of(Leaf("dense", dtype, (width,), seed + tower), count)
        indices = np.random.RandomState(seed + tower).randint(0, table, [count])
        parts.append((values, indices))
    return parts, dtype, table


def dense_of(values: np.ndarray, indices: np.ndarray, table: int) -> np.ndarray:
    """A table that holds the sums of slices."""
    dense = np.zeros([table, *values.shape[1:]])
    np.add.at(dense, indices, values.astype(np.float64))
    return dense


MERGE = {"drawn": tower_values(), "rows": st.lists(st.integers(0, 3), min_size=MOST_TOWERS,
                                                  max_size=MOST_TOWERS),
         "known": st.booleans()}


def check_merge(drawn, rows, known):
    """Sums and means over the towers, each counted by its rows, empty ones for nothing."""
    arrays, dtype = drawn
    rows = rows[:len(arrays)]
    values = [tf.constant(array, dtype) for array in arrays]
    doubles = np.stack([array.astype(np.float64) for array in arrays])
    check_close(merging.total(values), doubles.sum(0))
    assert merging.total(values).dtype == dtype
    check_close(merging.divided(merging.total(values), len(values)), doubles.mean(0), dtype)
    shares = shares_lib.Shares([count if known else tf.constant(count, tf.int64) for count in rows])
    check_close([shares.each[tower] for tower in range(len(rows))],
                np.array(rows) / max(sum(rows), 1))
    if not dtype.is_floating:
        return
    # What a tower without rows has computed must not matter.
    values = [value if count else value * float("nan") for value, count in zip(values, rows)]
    weights = np.array(rows, float).reshape([-1] + [1] * (doubles.ndim - 1))
    check_close(merging.mean(values, shares),
                (doubles * weights).sum(0) / max(sum(rows), 1),
                dtype)
    check_close(merging.total(merging.without_empty(values, shares)),
                (doubles * (weights > 0)).sum(0))


MERGE_SLICES = {"drawn": sliced_values(), "dense_tower": st.integers(-1, MOST_TOWERS - 1),
                "rows": MERGE["rows"], "traced": st.booleans()}


def check_merge_slices(drawn, dense_tower, rows, traced):
    """Sparse gradients, one of them dense perhaps, sum to what their dense forms sum to."""
    parts, dtype, table = drawn
    rows = rows[:len(parts)]
    width = parts[0][0].shape[1]
    denses = [dense_of(values, indices, table) for values, indices in parts]
    filled = np.array([count > 0 for count in rows])
    shares = np.array(rows) / max(sum(rows), 1)

    def merged():
        values = [tf.constant(denses[tower], dtype) if tower == dense_tower else tf.IndexedSlices(
            tf.constant(array, dtype, [len(array), width]), tf.constant(indices),
            tf.constant([table, width])) for tower, (array, indices) in enumerate(parts)]
        by_rows = shares_lib.Shares(rows)
        gradient, = merging.gradients([values], ["CPU:0"], by_rows, ["sum"])
        total = merging.total(values)
        results = [total, gradient, merging.divided(total, len(values)),
                   merging.mean(values, by_rows)]
        return [tf.convert_to_tensor(result) for result in results]

    found = (tf.function(merged) if traced else merged)()
    check_close(found[0], sum(denses))
    check_close(found[1], sum(dense * keep for dense, keep in zip(denses, filled)))
    check_close(found[2], sum(denses) / len(denses), dtype)
    check_close(found[3], sum(dense * share for dense, share in zip(denses, shares)), dtype)


# reduce and gather


@st.composite
def uneven_values(draw, dtypes=NUMBERS) -> tuple[list[np.ndarray], tf.DType, int]:
    """One array a tower, of sizes of their own along an axis, and the axis."""
    towers, dtype = draw(st.integers(1, MOST_TOWERS)), draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    seed = draw(st.integers(0, 99))
    arrays = []
    for tower in range(towers):
        shape[axis] = draw(st.integers(0, 3))
        leaf = Leaf("dense", dtype, tuple(shape), seed + tower)
        arrays.append(array_of(leaf, 1)[0])
    return arrays, dtype, axis


def per_replica(strategy: tf.distribute.Strategy, arrays: list[np.ndarray],
                dtype: tf.DType) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(arrays[context.replica_id_in_sync_group], dtype))


def wrapped(traced: bool, function: Any) -> Any:
    return (tf.function(function) if traced else function)()


REDUCE = {"drawn": tower_values(), "op": st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN]),
          "traced": st.booleans(), "inside": st.booleans()}


def check_reduce(drawn, op, traced, inside):
    """``strategy.reduce`` over replicas, and ``all_reduce`` inside of them."""
    arrays, dtype = drawn
    strategy = strategy_of(len(arrays))
    values = per_replica(strategy, arrays, dtype)
    doubles = np.stack([array.astype(np.float64) for array in arrays])
    wanted = doubles.sum(0) if op is ReduceOp.SUM else doubles.mean(0)
    if not inside:
        found = wrapped(traced, lambda: strategy.reduce(op, {"a": values}, axis=None))["a"]
        check_close(found, wanted, dtype)
        return

    def replica(value):
        return tf.distribute.get_replica_context().all_reduce(op, [value])[0]

    found = wrapped(traced, lambda: strategy.run(replica, (values,)))
    for part in strategy.experimental_local_results(found):
        check_close(part, wanted, dtype)


REDUCE_AXIS = {"drawn": uneven_values(), "op": REDUCE["op"], "traced": st.booleans()}


def check_reduce_axis(drawn, op, traced):
    """``strategy.reduce`` along an axis: every entry of every replica counts the same."""
    arrays, dtype, axis = drawn
    assume(sum(array.shape[axis] for array in arrays) > 0 or op is ReduceOp.SUM)
    strategy = strategy_of(len(arrays))
    values = per_replica(strategy, arrays, dtype)
    found = wrapped(traced, lambda: strategy.reduce(op, values, axis=axis))
    joined = np.concatenate(arrays, axis).astype(np.float64)
    check_close(found, joined.sum(axis) if op is ReduceOp.SUM else joined.mean(axis), dtype)


GATHER = {"drawn": uneven_values((*NUMBERS, tf.string, tf.bool)), "traced": st.booleans(),
          "inside": st.booleans(), "negative": st.booleans()}


def check_gather(drawn, traced, inside, negative):
    """``strategy.gather``, and ``all_gather`` in the replicas, put values behind one another."""
    arrays, dtype, axis = drawn
    given = axis - arrays[0].ndim if negative and not inside else axis
    strategy = strategy_of(len(arrays))
    values = per_replica(strategy, arrays, dtype)
    if inside:
        found = wrapped(traced, lambda: strategy.run(
            lambda value: tf.distribute.get_replica_context().all_gather(value, given), (values,)))
        found = strategy.experimental_local_results(found)
    else:
        found = [wrapped(traced, lambda: strategy.gather(values, given))]
    for part in found:
        assert part.dtype == dtype
        assert np.asarray(part).tolist() == np.concatenate(arrays, axis).tolist()


# variables

WRITES = st.lists(st.tuples(st.sampled_from(["assign", "assign_add", "assign_sub"]),
                            st.integers(-3, 3)), min_size=1, max_size=3)
VARIABLE = {"towers": st.integers(1, MOST_TOWERS), "rows": st.integers(1, 7),
            "dtype": st.sampled_from((tf.float32, tf.float64, tf.int32, tf.int64)),
            "aggregation": st.sampled_from(list(Aggregation)), "writes": WRITES,
            "traced": st.booleans(), "seed": st.integers(0, 99)}


def merged_write(aggregation: Aggregation, values: np.ndarray, rows: np.ndarray,
                 floating: bool) -> np.ndarray:
    """The table of ``variables.written``: what is written, from one value a tower."""
    if aggregation is Aggregation.SUM and len(rows) > 1:
        return values[rows > 0].sum(0)
    if aggregation is Aggregation.ONLY_FIRST_REPLICA or not floating or len(rows) == 1:
        return values[0]
    return np.tensordot(rows / rows.sum(), values, 1)


def check_variable(towers, rows, dtype, aggregation, writes, traced, seed):
    """A sequence of writes in the towers to the one copy."""
    assume(aggregation is not Aggregation.MEAN or dtype.is_floating)
    strategy = strategy_of(towers)
    batch = array_of(Leaf("dense", dtype, (2,), seed), rows)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([2], dtype), trainable=False, aggregation=aggregation)

    def replica(x):
        for method, factor in writes:
            getattr(variable, method)(tf.reduce_sum(x, 0) * tf.cast(factor, dtype))
        return tf.identity(variable)

    parts = strategy.split(tf.constant(batch, dtype))
    seen = wrapped(traced, lambda: strategy.run(replica, (parts,)))
    sums = np.stack([part.astype(np.float64).sum(0) for part in np.array_split(batch, towers)])
    counts = np.array(sizes_of(rows, towers))
    wanted = np.zeros([2])
    for method, factor in writes:
        step = merged_write(aggregation, sums * factor, counts, dtype.is_floating)
        wanted = {"assign": step, "assign_add": wanted + step, "assign_sub": wanted - step}[method]
    check_close(variable, wanted, dtype)
    for part in strategy.experimental_local_results(seen):
        check_close(part, wanted, dtype)
    assert variable.device.endswith("CPU:0"), variable.device


LOCAL = {**VARIABLE, "outside": st.integers(-3, 3)}


def check_tower_local(towers, rows, dtype, aggregation, writes, traced, seed, outside):
    """Writes in the towers, then from outside, to a variable with a part on every tower."""
    assume(aggregation is not Aggregation.MEAN or dtype.is_floating)
    assume(aggregation is not Aggregation.NONE)  # has no value outside of the towers
    strategy = strategy_of(towers)
    batch = array_of(Leaf("dense", dtype, (2,), seed), rows)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([2], dtype), trainable=False, aggregation=aggregation,
                               synchronization=tf.VariableSynchronization.ON_READ)

    def replica(x):
        for method, factor in writes:
            getattr(variable, method)(tf.reduce_sum(x, 0) * tf.cast(factor, dtype))

    wrapped(traced, lambda: strategy.run(replica, (strategy.split(tf.constant(batch, dtype)),)))
    parts = np.zeros([towers, 2])
    for tower, part in enumerate(np.array_split(batch, towers)):
        for method, factor in writes:
            if len(part) or towers == 1:
                step = part.astype(np.float64).sum(0) * factor
                before = parts[tower]
                parts[tower] = {"assign": step, "assign_add": before + step,
                                "assign_sub": before - step}[method]
    wanted = {Aggregation.SUM: parts.sum(0), Aggregation.MEAN: parts.mean(0),
              Aggregation.ONLY_FIRST_REPLICA: parts[0]}[aggregation]
    check_close(variable.read_value(), wanted, dtype)
    variable.assign(tf.fill([2], tf.cast(outside, dtype)))
    check_close(variable.read_value(), np.full([2], outside), dtype)


SCATTER = {"towers": st.integers(1, MOST_TOWERS), "rows": st.integers(1, 7),
           "aggregation": st.sampled_from(list(Aggregation)),
           "method": st.sampled_from(["scatter_add", "scatter_sub", "scatter_update",
                                      "scatter_max", "scatter_min"]),
           "traced": st.booleans(), "seed": st.integers(0, 99)}


def check_scatter(towers, rows, aggregation, method, traced, seed):
    """Slices written in the towers to the one copy: as one device would write them all."""
    strategy = strategy_of(towers)
    random = np.random.RandomState(seed)
    values = random.randint(-5, 5, [rows, 2]).astype(np.float32)
    # Rows of a table are written once each where the order would matter.
    indices = random.permutation(8)[:rows]
    with strategy.scope():
        variable = tf.Variable(tf.ones([8, 2]), trainable=False, aggregation=aggregation)

    def replica(batch):
        slices = tf.IndexedSlices(batch["values"], batch["indices"])
        getattr(variable, method)(slices)

    steps = method in ("scatter_add", "scatter_sub")
    parts = strategy.split({"values": values, "indices": indices})
    try:
        wrapped(traced, lambda: strategy.run(replica, (parts,)))
    except NotImplementedError:
        assert not steps and aggregation in (Aggregation.SUM, Aggregation.MEAN)
        return
    counts = np.array(sizes_of(rows, towers))
    if aggregation is Aggregation.ONLY_FIRST_REPLICA and towers > 1:
        values, indices = values[:counts[0]], indices[:counts[0]]
    elif steps and aggregation is not Aggregation.SUM and towers > 1:
        values = values * np.repeat(counts / rows, counts)[:, np.newaxis]
    wanted = np.ones([8, 2])
    operation = {"scatter_add": np.add, "scatter_sub": np.subtract, "scatter_max": np.maximum,
                 "scatter_min": np.minimum}.get(method, lambda _, new: new)
    wanted[indices] = operation(wanted[indices], values)
    check_close(variable, wanted, tf.float32)


PROPERTIES = {
    "split": (SPLIT, check_split),
    "split_traced": (SPLIT_TRACED, check_split_traced),
    "dataset": (DATASET, check_dataset),
    "merge": (MERGE, check_merge),
    "merge_slices": (MERGE_SLICES, check_merge_slices),
    "reduce": (REDUCE, check_reduce),
    "reduce_axis": (REDUCE_AXIS, check_reduce_axis),
    "gather": (GATHER, check_gather),
    "variable": (VARIABLE, check_variable),
    "tower_local": (LOCAL, check_tower_local),
    "scatter": (SCATTER, check_scatter),
}


def try_out(name: str, examples: int, derandomize: bool) -> None:
    """Tries a property with ``examples`` draws; the same ones every time if ``derandomize``."""
    drawn, check = PROPERTIES[name]
    settings = hypothesis.settings(
        max_examples=examples, derandomize=derandomize, database=None, deadline=None,
        print_blob=True, suppress_health_check=list(hypothesis.HealthCheck))
    settings(hypothesis.given(**drawn)(check))()
