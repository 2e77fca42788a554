"""Random draws: of what one device would draw for the whole batch, a tower draws its rows.

Goes in: a random operation that is made in a tower.  Comes out: the numbers that are this tower's,
bit for bit those of one device, for the price of as many numbers as it needs.

TensorFlow's generator, Philox, is counter based: each counter gives four numbers, whoever asks.  So
a tower whose rows begin at row 37 of a ``[103, 13]`` draw moves the counter on by ``37 * 13 // 4``
and draws its own (three numbers at most in vain).  Distributions that take a varying number of
numbers have a counter reserved for each value or group of values, or are drawn for the whole batch.

A draw is of the batch's rows where its first dimension is as long as the tower has rows, or, where
that length is not known while tracing, a multiple of it.  Where the tower's rows are not known
while tracing, a length that is known is a constant and no number of rows.  Every other draw (noise
on weights, one number a step) is the same on every tower, as one device draws once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.towers import contexts, one_replica, whole

PER_ROW, PER_TOWER = "per row", "per tower"

# How many counters there are for each number of a distribution that takes a varying number of them.
_TRUNCATED, _GAMMA = _tf.RESERVED // 4, _tf.RESERVED

# What draws once for all rows of a batch.
_ONE_A_BATCH = (
    "uniform_candidate_sampler", "log_uniform_candidate_sampler",
    "fixed_unigram_candidate_sampler", "all_candidate_sampler", "sample_distorted_bounding_box_v2",
    "fractional_max_pool", "fractional_avg_pool")


def check(draws: Any) -> None:
    """Refuses what is no choice of draws."""
    if not isinstance(draws, str):
        raise TypeError(f"draws must be {PER_ROW!r} or {PER_TOWER!r}, but got {draws!r} of type "
                        f"{type(draws).__name__}.")
    if draws not in (PER_ROW, PER_TOWER):
        raise ValueError(f"draws must be {PER_ROW!r} or {PER_TOWER!r}, but got {draws!r}.")


def install() -> None:
    """Wraps TensorFlow's random operations, once; outside of towers they stay what they are."""
    rules: dict[str, Callable[..., Any]] = {
        "stateless_random_uniform_v2": _by_counter,
        "stateless_random_normal_v2": _by_counter,
        "stateless_random_uniform_int_v2": _by_counter,
        "stateless_truncated_normal_v2": functools.partial(_by_counter, reserved=_TRUNCATED),
        "stateless_random_uniform_full_int_v2": functools.partial(_by_counter, seeds=True),
        "stateless_random_gamma_v3": _gamma,
        "stateless_random_poisson": functools.partial(_whole, rows_of=("lam",)),
        "stateless_random_binomial": functools.partial(_whole, rows_of=("counts", "probs")),
        "stateless_multinomial": functools.partial(_whole, rows_of=("logits",)),
        "stateless_parameterized_truncated_normal": functools.partial(
            _whole, rows_of=("means", "stddevs", "minvals", "maxvals")),
        "random_uniform": functools.partial(_seeded, "stateless_random_uniform_v2"),
        "random_standard_normal": functools.partial(_seeded, "stateless_random_normal_v2"),
        "truncated_normal": functools.partial(_seeded, "stateless_truncated_normal_v2"),
        "random_uniform_int": functools.partial(_seeded, "stateless_random_uniform_int_v2"),
        "random_gamma": functools.partial(_with_state, parameter="alpha"),
        "random_poisson_v2": functools.partial(_with_state, parameter="rate"),
        "multinomial": functools.partial(_with_state, parameter="logits"),
        "stateful_random_binomial": _generators_binomial,
        "stateless_shuffle": _shuffled,
        "random_shuffle": _shuffled,
        **dict.fromkeys(_ONE_A_BATCH, _alike),
    }
    _tf.wrap_draws({name: functools.partial(_in_towers, rule) for name, rule in rules.items()},
                   _generators_counter, _generators_skip)


class Part(NamedTuple):
    """A tower's part of a draw for the whole batch, counted in the draw's first dimension.

    Attributes:
      start: how much of it comes before, an int or an int64 scalar.
      total: how long it is for the whole batch.
    """

    start: Any
    total: Any


def _drawing_tower() -> contexts.TowerContext | None:
    tower = contexts.splitting_tower()
    drawing = tower is not None and tower.draws_rows and not tower.draws_alike
    return tower if drawing else None


def _in_towers(rule: Callable[..., Any], original: Callable[..., Any],
               arguments: dict[str, Any]) -> Any:
    tower = _drawing_tower()
    if tower is None or not _tf.is_philox(arguments):
        return original(**arguments)
    return rule(tower, original, arguments)


def part_of(tower: contexts.TowerContext, shape: tf.Tensor, seeds: bool = False) -> Part | None:
    """Which part of the batch's a draw of ``shape`` is; None where it is known not to be of rows.

    Args:
      tower: the tower that draws.
      shape: an integer vector.
      seeds: whether a number of them that is known is no number of rows, as in
        ``tf.random.split(seed, 2)``.
    """
    known = _tf.known_shape(shape)
    if known.rank == 0 or not (tower.is_nested or tower.shares.counted):
        return None
    length = known[0] if known.rank is not None else None
    if length is not None and (seeds or not tower.is_nested):
        is_rows = not seeds and length == tower.given_rows
        return Part(tower.first_row, tower.batch_rows) if is_rows else None
    first = tf.cast(tf.reduce_prod(shape[:1]), tf.int64)
    rows = tf.cast(tower.rows, tf.int64)
    times = first // tf.maximum(rows, 1)
    if length is not None:  # in a nested function, which may be called for other batches
        times = tf.minimum(times, 1)
    are_rows = (rows > 0) & (times * rows == first)
    start = tf.cast(tower.first_row, tf.int64) * times
    total = tf.cast(tower.batch_rows, tf.int64) * times
    return Part(tf.where(are_rows, start, 0), tf.where(are_rows, total, first))


def _by_counter(tower: contexts.TowerContext, original: Callable[..., Any],
                arguments: dict[str, Any], reserved: int | None = None,
                group: int | None = None, seeds: bool = False) -> Any:
    """Draws a tower's rows by moving the counter on.

    Args:
      tower: the tower that draws.
      original: makes the operation.
      arguments: its arguments, by name.
      reserved: how many counters there are for each number; None for one a group.
      group: how many numbers a counter gives; None for four, or two of 64 bits.
      seeds: as in :func:`part_of`.
    """
    group = group or (2 if _dtype_of(arguments).size == 8 else 4)
    shape = arguments["shape"] = tf.convert_to_tensor(arguments["shape"])
    with _on_host(tower):
        part = part_of(tower, shape, seeds)
        if part is not None:
            groups, extra = _groups_before(part, _count(shape[1:]), group)
            counters = groups if reserved is None else groups * (reserved * group)
    if part is None:
        return original(**arguments)
    arguments["counter"] = moved_on(arguments["counter"], counters)
    if isinstance(extra, int) and extra == 0:
        return original(**arguments)
    with _on_host(tower):
        count = tf.reshape(tf.cast(_count(shape), tf.int32), [1])
        extra = tf.reshape(tf.cast(extra, tf.int32), [1])
        arguments["shape"] = count + (group - 1)
    return tf.reshape(tf.slice(original(**arguments), extra, count), shape)


def _groups_before(part: Part, width: Any, group: int) -> tuple[Any, Any]:
    """How many groups of numbers come before a part's, and how many more numbers."""
    if isinstance(width, int) and width % group == 0:
        return part.start * (width // group), 0
    before = part.start * width
    return before // group, before % group


def moved_on(counter: tf.Tensor, by: Any) -> tf.Tensor:
    """Philox' counter, two words of 64 bits of which the first is the low one, moved on."""
    if isinstance(by, int):
        return counter + np.array([by, 0], np.uint64) if by else counter
    return counter + tf.cast(tf.stack([by, tf.zeros_like(by)]), tf.uint64)


def _gamma(tower: contexts.TowerContext, original: Callable[..., Any],
           arguments: dict[str, Any]) -> Any:
    """Each number has its counters, in the order of the numbers if each has an alpha or all one."""
    shape, alpha = tf.convert_to_tensor(arguments["shape"]), arguments["alpha"].shape
    in_order = alpha.rank is not None and (alpha.rank == shape.shape[0]
                                           or alpha.num_elements() == 1)
    if not in_order:
        return _whole(tower, original, arguments, rows_of=("alpha",))
    return _by_counter(tower, original, arguments, reserved=_GAMMA, group=1)


def _whole(tower: contexts.TowerContext, original: Callable[..., Any],
           arguments: dict[str, Any], rows_of: Sequence[str]) -> Any:
    """Draws for the whole batch and takes the tower's rows.

    Args:
      tower: the tower that draws.
      original: makes the operation.
      arguments: its arguments, by name.
      rows_of: those of them that may have a row for each of the tower's; what the other towers have
        there does not change what this one draws.
    """
    shape = tf.convert_to_tensor(arguments["shape"] if "shape" in arguments
                                 else tf.shape(arguments[rows_of[0]]))
    part = part_of(tower, shape)
    if part is None:
        return original(**arguments)
    length = tf.cast(shape[0], tf.int64)
    for name in rows_of:
        value = tf.convert_to_tensor(arguments[name])
        broadcast = value.shape.rank and value.shape[0] == 1 != tower.given_rows
        if value.shape.rank == shape.shape[0] and not broadcast:
            arguments[name] = _padded(value, part.start, part.total - part.start - length)
    if "shape" in arguments:
        arguments["shape"] = _whole_shape(shape, part)
    drawn = original(**arguments)
    own = drawn[part.start:part.start + length]
    own.set_shape(_tf.known_shape(shape)[:1].concatenate(drawn.shape[1:]))
    return own


def _padded(value: tf.Tensor, before: Any, after: Any) -> tf.Tensor:
    """``value`` with rows of ones before and after it."""
    ends = tf.stack([tf.cast(before, tf.int64), tf.cast(after, tf.int64)])
    rows = tf.pad(tf.reshape(ends, [1, 2]), [[0, value.shape.rank - 1], [0, 0]])
    return tf.pad(value, rows, constant_values=tf.ones([], value.dtype))


def _seeded(stateless: str, tower: contexts.TowerContext, original: Callable[..., Any],
            arguments: dict[str, Any]) -> Any:
    """An operation with a state of its own (``tf.random.uniform``), if its seeds are set.

    Its kernel has a Philox generator, made of the two seeds, which each draw moves on.  On towers
    the first one's seeds count, and a variable of each tower's counts what the whole batch has
    drawn; eager code draws for the whole batch once, as a kernel may be an earlier operation's.
    """
    seed, seed2 = arguments.pop("seed"), arguments.pop("seed2")
    if not (seed or seed2) or tower.is_nested:
        return original(**arguments, seed=seed, seed2=seed2)
    shape = arguments["shape"] = tf.convert_to_tensor(arguments["shape"])
    part = part_of(tower, shape)
    if tf.executing_eagerly():
        drawn = tower.for_all(stateless, lambda: original(
            **{**arguments, "shape": _whole_shape(shape, part)}, seed=seed, seed2=seed2))
        return drawn if part is None else drawn[part.start:part.start + shape[0]]
    seed, seed2 = tower.for_all(stateless, lambda: (
        _tf.seed_of_first(seed, tower.strategy.extended.first_replica), seed2))
    with _on_host(tower):  # where the count is
        before = _tf.count_up(tower.own(_tf.counts(_count_devices(tower))),
                              _count(_whole_shape(shape, part)))
    with _on_host(tower):
        counter = moved_on(np.array([0, seed2], np.uint64), before * _tf.RESERVED)
    return _tf.draw_by_counter(stateless, **arguments, key=np.array([seed], np.uint64),
                               counter=counter)


def _has_rows(tower: contexts.TowerContext, value: tf.Tensor) -> bool:
    return bool(value.shape.rank) and value.shape[0] in (None, tower.given_rows)


def _with_state(tower: contexts.TowerContext, original: Callable[..., Any],
                arguments: dict[str, Any], parameter: str) -> Any:
    """An operation with a state, which no stateless operation can stand for.

    Where ``parameter`` has the rows, they meet and all is drawn once.  Else each tower draws the
    whole batch's numbers, with a state that moves on as one device's does.
    """
    seeded = arguments["seed"] or arguments["seed2"]
    if not seeded or tower.is_nested:
        return original(**arguments)
    if not tower.shares.counted:
        return _alike(tower, original, arguments)
    arguments[parameter] = value = tf.convert_to_tensor(arguments[parameter])
    shape = arguments.get("shape")
    if shape is not None:
        shape = arguments["shape"] = tf.convert_to_tensor(shape)
    if _has_rows(tower, value) and (shape is None or _tf.known_shape(shape).rank == 0):
        if not tower.can_merge:
            return original(**arguments)
        _take_seeds_of_first(tower, original, arguments)
        return whole.computed_once(
            tower, lambda rows: original(**{**arguments, parameter: rows}), (value,))
    part = None if shape is None else part_of(tower, shape)
    if shape is None or part is None:
        return _alike(tower, original, arguments)
    arguments["shape"] = _whole_shape(shape, part)
    drawn = _alike(tower, original, arguments)
    own = drawn[part.start:part.start + tf.cast(shape[0], tf.int64)]
    own.set_shape(_tf.known_shape(shape)[:1].concatenate(drawn.shape[1:]))
    return own


def _alike(tower: contexts.TowerContext, original: Callable[..., Any],
           arguments: dict[str, Any]) -> Any:
    """Draws the same on every tower, each of which has a kernel, with a state, of its own."""
    if not (arguments["seed"] or arguments["seed2"]) or tower.is_nested:
        return original(**arguments)
    _take_seeds_of_first(tower, original, arguments)
    with tower.seeded_alike():
        return original(**arguments)


def _take_seeds_of_first(tower: contexts.TowerContext, key: Any, arguments: dict[str, Any]) -> None:
    """Sets the seeds of an operation with a state to those that it has on one device."""
    seed, seed2 = arguments["seed"], arguments["seed2"]
    arguments["seed"], arguments["seed2"] = tower.for_all(key, lambda: (
        _tf.seed_of_first(seed, tower.strategy.extended.first_replica), seed2))


def _generators_binomial(tower: contexts.TowerContext, original: Callable[..., Any],
                         arguments: dict[str, Any]) -> Any:
    """A ``tf.random.Generator`` draws once for all towers: the operation itself moves it on."""
    if not tower.can_merge:
        return original(**arguments)
    shape = arguments["shape"] = tf.convert_to_tensor(arguments["shape"])
    parameters = [tf.convert_to_tensor(arguments[name]) for name in ("counts", "probs")]
    part = part_of(tower, shape)
    if part is not None and any(value.shape.rank == shape.shape[0] and _has_rows(tower, value)
                                for value in parameters):
        parameters = [tf.broadcast_to(value, shape) for value in parameters]
        return whole.computed_once(tower, lambda counts, probs: original(**{
            **arguments, "shape": tf.shape(counts), "counts": counts, "probs": probs}), parameters)
    drawn = tower.for_all("binomial", lambda: original(
        **{**arguments, "shape": _whole_shape(shape, part)}))
    return drawn if part is None else drawn[part.start:part.start + tf.cast(shape[0], tf.int64)]


def shuffling_tower(value: tf.Tensor) -> contexts.TowerContext | None:
    """The tower that shuffles the rows of ``value``, if that is to be a shuffle of all rows.

    Numbers without further dimensions are indices of the tower's rows, and stay these.
    """
    tower = _drawing_tower()
    if tower is None or not tower.can_merge or not tower.shares.counted or not value.shape.rank:
        return None
    if value.shape.rank == 1 and value.dtype.is_integer:
        return None
    return tower if _has_rows(tower, value) else None


def _shuffled(tower: contexts.TowerContext, original: Callable[..., Any],
              arguments: dict[str, Any]) -> Any:
    """Shuffles all rows, once: an operation with a state may only run as often as on one device."""
    value = arguments["value"] = tf.convert_to_tensor(arguments["value"])
    if shuffling_tower(value) is None:
        return original(**arguments)
    if "seed2" in arguments:
        _take_seeds_of_first(tower, "random_shuffle", arguments)
    return whole.computed_once(
        tower, lambda rows: original(**{**arguments, "value": rows}), (value,))


def _count_devices(tower: contexts.TowerContext) -> Sequence[str]:
    extended = tower.strategy.extended
    return extended.worker_devices if _are_cpus(extended) \
        else [extended.host_device] * tower.count


def _generators_counter(skip: Callable[..., Any]) -> Callable[..., Any]:
    """What a ``tf.random.Generator`` draws by in a tower, in place of its own rule.

    Args:
      skip: moves a generator on and returns where it was.
    """

    def key_and_counter(generator: Any, shape: Any, seeds: bool) -> tuple[Any, Any] | None:
        # TensorFlow folds in the number of the only replica, too.
        if one_replica.has_all_rows():
            return _tf.key_and_counter(skip(generator, _count(tf.convert_to_tensor(shape))))
        tower = contexts.current_tower()
        if tower is None or not tower.strategy.extended.draws_rows:
            return None
        shape = tf.convert_to_tensor(shape)
        if not tower.several:
            return _tf.key_and_counter(skip(generator, _count(shape)))
        part = None if tower.draws_alike else part_of(tower, shape, seeds)
        before = _moved_once(skip, tower, generator,
                             lambda: _count(_whole_shape(shape, part)))
        return None if before is None else _tf.key_and_counter(before)

    return key_and_counter


def _generators_skip(skip: Callable[..., Any]) -> Callable[..., Any]:
    """What a caller's own ``Generator.skip`` does in a tower: all towers' is one.

    Args:
      skip: moves a generator on and returns where it was.
    """
    def moved(generator: Any, delta: Any) -> Any | None:
        tower = contexts.current_tower()
        if tower is None or not (tower.several and tower.strategy.extended.draws_rows):
            return None
        return _moved_once(skip, tower, generator, lambda: delta)

    return moved


def _moved_once(skip: Callable[..., Any], tower: contexts.TowerContext, generator: Any,
                count: Callable[[], Any]) -> Any | None:
    """Moves a generator on for all towers; returns where it was, or None to leave it alone."""
    extended, state = tower.strategy.extended, generator.state
    alone = any(other is state for other in extended.written_alone())
    if tower.can_merge and not alone:
        return tower.for_all(id(generator), lambda: skip(generator, count()))
    if not extended.variable_created_in_scope(state):
        return None
    # In a loop, a branch or a nested function each tower moves a stand-in on, all alike.
    tower.writes_alone(state)
    with _on_host(tower):
        found = count()
    return skip(generator, found)


def _whole_shape(shape: tf.Tensor, part: Part | None) -> tf.Tensor:
    """The shape of the draw for the whole batch."""
    if part is None:
        return shape
    return tf.concat([tf.reshape(tf.cast(part.total, shape.dtype), [1]), shape[1:]], 0)


def _count(shape: tf.Tensor) -> Any:
    """How many numbers ``shape`` has: an int where that is known, else an int64 scalar."""
    known = _tf.known_shape(shape)
    if known.is_fully_defined():
        return known.num_elements()
    return tf.reduce_prod(tf.cast(shape, tf.int64))


def _dtype_of(arguments: dict[str, Any]) -> tf.DType:
    if "dtype" in arguments:
        return tf.as_dtype(arguments["dtype"])
    return tf.convert_to_tensor(arguments["minval"]).dtype


def _on_host(tower: contexts.TowerContext) -> contextlib.AbstractContextManager[None]:
    """Within, numbers that say what a tower draws are made on the CPU that feeds GPU towers.

    Where a slice begins is asked for there, and a GPU would have to be waited for.
    """
    extended = tower.strategy.extended
    return contextlib.nullcontext() if _are_cpus(extended) else tower.at(extended.host_device)


def _are_cpus(extended: Any) -> bool:
    return tf.DeviceSpec.from_string(extended.worker_devices[0]).device_type == "CPU"
