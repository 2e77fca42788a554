"""Proves the table of rules: runs operations on one device and sharded unevenly, for all specs.

Goes in: a :class:`Sample`, an operation with arrays as inputs.  Comes out: an :class:`Outcome`: the
number of claims, and the claims that are wrong.  A claim is a combination of specs of the inputs
for which the rule gives a plan.

An input can be sharded along each dimension whose size is a multiple of :data:`BATCH`.  Each
combination of specs is propagated, partitioned over four towers, one of them without rows, and run.
The towers' tensors must be parts of one device's tensor, as their spec says.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import emulated
import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.builder import Builder
from towerstrategy.sharding.layout import Layout
from towerstrategy.sharding.partition import Partition
from towerstrategy.sharding.propagate import propagate
from towerstrategy.sharding.spec import (
    REPLICATED,
    Axes,
    Concatenated,
    ListOf,
    Partial,
    Replicated,
    Sharded,
    Size,
    Spec,
    can_be_cut,
    positions,
)
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.values import Value

BATCH = 6
ROWS = (3, 0, 2, 1)  # of each tower
NONE_EMPTY = (2, 1, 1, 2)
CHOSEN = {ROWS: (2, 1, 0, 3), NONE_EMPTY: (1, 3, 1, 1)}  # the rows of a group of chosen examples
TWICE = Concatenated((("", 1), ("", 1)))
JOINED = Concatenated((("", 1), ("chosen", 1)))
KINDS_OF_SHAPES = 5  # see _shapes
MAX_COMBINATIONS = 60  # with more, groups of chosen examples and unknown ``times`` are not tried
BOUNDS = {tf.float64: 1e-12, tf.complex128: 1e-12, tf.float16: 1e-2, tf.bfloat16: 3e-2}
_REDUCERS = {"sum": np.sum, "max": np.max, "min": np.min, "and": np.all, "or": np.any}


@dataclasses.dataclass(frozen=True)
class Sample:
    """An operation and its inputs.

    Attributes:
      type: the type of the operation whose rule is proved.
      call: makes the operation from placeholders; operations around it are part of the proof.
      arrays: the values of the placeholders.
      title: distinguishes the sample from others of the type.
    """

    type: str
    call: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    title: str = ""


@dataclasses.dataclass
class Outcome:
    """The result of a sample.

    Attributes:
      claims: the number of combinations of specs for which the rule gave a plan.
      wrong: a message for each wrong claim.
      needs_rows: whether a claim failed to run only because a tower has no rows.
    """

    claims: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    needs_rows: bool = False


def prove(sample: Sample, most: int | None = None, kinds: int = KINDS_OF_SHAPES) -> Outcome:
    """Runs all claims for a sample, or ``most`` claims, drawn at random.

    ``kinds`` is the number of kinds of static shapes: known shapes, and others drawn at random.
    """
    outcome = Outcome()
    claims = list(itertools.islice(_claims(sample, kinds), most))
    outcome.claims = len(claims)
    for claim, problem, raised in _run_claims(sample, claims, ROWS):
        if raised:
            ((_, problem_with_rows, _),) = _run_claims(sample, [claim], NONE_EMPTY)
            if not problem_with_rows:
                outcome.needs_rows = True
                continue
        if problem:
            outcome.wrong.append(
                f"{sample.type}({sample.title}) of {_claim_text(sample, claim)}: {problem}"
            )
    return outcome


def _claim_text(sample: Sample, claim: Layout) -> str:
    inputs = [
        f"{tensor.shape} {format_specs(claim.specs[tensor.name])}"
        for tensor in claim.graph.inputs
    ]
    plans = [
        f"{format_specs(*plan.takes)} -> {format_specs(*plan.gives)}"
        for operation in claim.order
        if operation.type == sample.type
        for plan in [claim.plans.get(operation.name)]
        if plan is not None
    ]
    return f"{'; '.join(inputs)} by {' | '.join(dict.fromkeys(plans))}"


def format_specs(*specs: Spec) -> str:
    """The specs as a short text."""
    texts = [", ".join(map(str, _changed_fields(spec))) for spec in specs]
    return ", ".join(f"{type(spec).__name__}({text})" for spec, text in zip(specs, texts))


def _changed_fields(spec: Spec) -> list[Any]:
    """The values of the fields of a spec that differ from their defaults."""
    return [
        getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if getattr(spec, field.name) != field.default
    ]


# The combinations of specs and of static shapes.


def _claims(sample: Sample, kinds: int) -> Iterator[Layout]:
    """The layouts of a sample in which the rule gives a plan for its operation."""
    choices = [_specs_of(array) for array in sample.arrays]
    if np.prod([len(choice) for choice in choices]) > MAX_COMBINATIONS:
        choices = [
            [
                spec
                for spec in choice
                if not getattr(spec, "group", "") and getattr(spec, "times", 1)
            ]
            for choice in choices
        ]
    traced = functools.cache(lambda shapes: _traced(sample, shapes))
    draws = random.Random(sample.title)
    chosen_kinds = [0, *draws.sample(range(1, KINDS_OF_SHAPES), kinds - 1)]
    cases = [
        (specs, shapes)
        for specs in itertools.product(*choices)
        if specs != (REPLICATED,) * len(specs)
        for by_kind in [list(_shapes(sample.arrays, specs))]
        for shapes in dict.fromkeys(by_kind[kind] for kind in chosen_kinds)
    ]
    draws.shuffle(cases)
    for specs, shapes in cases:
        graph = traced(shapes)
        if graph is None:
            continue
        layout = propagate(graph, specs)
        if any(
            plan is None  # an identity, which the partition omits
            or not plan.once
            or not all(isinstance(spec, Replicated) for spec in plan.gives)
            for operation in graph.get_operations()
            if operation.type == sample.type
            for plan in [layout.plans.get(operation.name)]
        ):
            yield layout


def _specs_of(array: np.ndarray) -> list[Spec]:
    """The specs that an input with these values can have."""
    specs: list[Spec] = [REPLICATED]
    for dim, size in enumerate(array.shape):
        if size and size % BATCH == 0:
            times = size // BATCH
            specs += [Sharded(dim, times), Sharded(dim, times, "chosen")]
            specs += [Sharded(dim, None)] if times > 1 else []
            if times % 2 == 0:
                specs += [Sharded(dim, times // 2, group) for group in (TWICE, JOINED)]
    if array.dtype == bool:
        specs += [Partial("and"), Partial("or")]
    elif array.dtype.kind in "iufc":
        specs.append(Partial("sum"))
        if array.dtype.kind != "c":
            specs += [Partial("max"), Partial("min")]
    if array.dtype.kind == "i" and array.ndim < 2:
        for at, entry in enumerate(np.ravel(array)):
            if entry > 0 and entry % BATCH == 0:
                specs += [
                    Size(at, int(entry) // BATCH),
                    Size(at, int(entry) // BATCH, "chosen"),
                    Size(at, None),
                ]
                if entry % (2 * BATCH) == 0:
                    specs += [Size(at, int(entry) // BATCH // 2, group)
                              for group in (TWICE, JOINED)]
    return specs


def _shapes(arrays: Sequence[np.ndarray], specs: Sequence[Spec]) -> Iterator[tuple[Any, ...]]:
    """The static shapes of each kind.

    Known; unknown in sharded dimensions; unknown in dimensions that could be rows, or of size 1;
    only the rank known; no rank.
    """
    yield tuple(array.shape for array in arrays)
    yield tuple(
        tuple(
            None if isinstance(spec, Sharded) and dim == spec.dim else size
            for dim, size in enumerate(array.shape)
        )
        for array, spec in zip(arrays, specs)
    )
    yield tuple(
        tuple(None if size == 1 or size % BATCH == 0 else size for size in array.shape)
        for array in arrays
    )
    yield tuple(tuple(None for _ in array.shape) for array in arrays)
    yield tuple(None for _ in arrays)


def _traced(sample: Sample, shapes: Sequence[Any]) -> Any:
    """The graph of the operation; None if it cannot be traced with these unknown shapes."""
    types = [tf.TensorSpec(shape, _dtype(array)) for shape, array in zip(shapes, sample.arrays)]
    try:
        return _tf.trace(sample.call, types, sample.type)
    except (ValueError, TypeError):
        if None in shapes or any(None in shape for shape in shapes):
            return None
        raise


def _dtype(array: np.ndarray) -> tf.DType:
    return tf.string if array.dtype.kind in "OSU" else tf.as_dtype(array.dtype)


# On one device and sharded.


def _run_claims(
    sample: Sample, claims: Sequence[Layout], rows: tuple[int, ...]
) -> list[tuple[Layout, str, bool]]:
    """Runs claims; returns each with its problem ("" if none) and whether TensorFlow failed."""
    if not claims:
        return []
    try:
        with tf.Graph().as_default() as graph:
            emitter = _Emitter(sample, rows)
            emitted = [emitter.emit(claim) for claim in claims]
            emitter.finish()
            expected = _on_one_device(sample)
    except Exception as error:  # any error of a rule or of the partition makes the claim wrong
        if len(claims) == 1:
            return [(claims[0], f"raised {type(error).__name__}: {str(error)[:300]}", False)]
        return [result for claim in claims for result in _run_claims(sample, [claim], rows)]
    with tf.compat.v1.Session(graph=emulated.with_kernels(graph), config=_config()) as session:
        wanted = _run(session, expected)
        try:
            got = _run(session, [one.fetches for one in emitted])
        except tf.errors.OpError:
            got = [_run_or_error(session, one) for one in emitted]
    return [
        (claim, f"failed: {str(result)[:200]}", True)
        if isinstance(result, Exception)
        else (claim, one.problem(result, wanted), False)
        for claim, one, result in zip(claims, emitted, got)
    ]


def _run(session: Any, tensors: Any) -> Any:
    return session.run(tf.nest.map_structure(lambda tensor: tensor.name, tensors))


def _run_or_error(session: Any, emitted: _Emitted) -> Any:
    try:
        return _run(session, emitted.fetches)
    except tf.errors.OpError as error:
        return error


def _config() -> Any:
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
    )
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    return config


def _on_one_device(sample: Sample) -> list[tf.Tensor]:
    """The outputs of the operation on one device."""
    results = sample.call(*[tf.constant(array, _dtype(array)) for array in sample.arrays])
    return [
        result
        for result in tf.nest.flatten(results, expand_composites=True)
        if isinstance(result, tf.Tensor) and _can_be_fetched(result)
    ]


def _can_be_fetched(tensor: tf.Tensor) -> bool:
    return tensor.dtype not in (tf.variant, tf.resource)


class _Emitter:
    """Makes the towers' operations of claims in the default graph, with one import."""

    def __init__(self, sample: Sample, rows: tuple[int, ...]) -> None:
        self._sample, self._rows = sample, rows
        builder = self._builder = Builder(tf.compat.v1.get_default_graph())
        counts = {batch: [builder.constant(count, tf.int64, "") for count in each]
                  for batch in ("", "chosen") for each in [_rows_of(batch, rows)]}
        self._towers = Towers(
            builder,
            stage_devices=[[""]] * len(rows),
            merge="",
            host="",
            scopes=[f"tower_{at}/" for at in range(len(rows))],
            counts=lambda tower, _, batch: counts[batch][tower],
        )
        self._refs: dict[Any, list[Any]] = {}  # the constants for each input and spec
        self._emitted: list[_Emitted] = []

    def emit(self, claim: Layout) -> _Emitted:
        """Adds the nodes of a claim."""
        inputs = [
            self._input(index, claim.specs[tensor.name], tensor.shape)
            for index, tensor in enumerate(claim.graph.inputs)
        ]
        values = Partition(self._towers).run(_with_all_parts(claim), inputs)
        outputs = [
            (value, claim.specs[tensor.name])
            for value, tensor in zip(values, claim.graph.outputs)
            if _can_be_fetched(tensor)
        ]
        self._emitted.append(_Emitted(outputs, self._rows))
        return self._emitted[-1]

    def finish(self) -> None:
        """Imports all nodes and finds their tensors."""
        self._builder.finish()
        for emitted in self._emitted:
            emitted.fetches = [
                (self._builder.tensor(whole), list(map(self._builder.tensor, parts)))
                for whole, parts in emitted.refs
            ]

    def _input(self, index: int, spec: Spec, shape: tf.TensorShape) -> Value:
        """An input with its parts on the towers."""
        (whole,) = self._constants(index, None, lambda array: [array])
        if isinstance(spec, Replicated):
            return Value(self._towers, spec, shape, lambda: whole)
        parts = self._constants(index, spec, lambda array: _pieces(array, spec, self._rows))
        return Value(
            self._towers,
            spec,
            shape,
            (lambda: whole) if isinstance(spec, Size) else None,
            parts.__getitem__,
        )

    def _constants(
        self, index: int, spec: Spec | None, split: Callable[[np.ndarray], list[np.ndarray]]
    ) -> list[Any]:
        if (index, spec) not in self._refs:
            array = self._sample.arrays[index]
            self._refs[index, spec] = [
                self._builder.take(tf.constant(part, _dtype(array))) for part in split(array)
            ]
        return self._refs[index, spec]


class _Emitted:
    """The outputs of an emitted claim, whole and as the towers' parts.

    ``refs`` has their nodes, ``fetches`` their tensors, after :meth:`_Emitter.finish`.
    """

    def __init__(self, outputs: Sequence[tuple[Value, Spec]], rows: tuple[int, ...]) -> None:
        self._rows = rows
        self.specs = [spec for _, spec in outputs]
        self.refs = [
            (
                value.whole() if not isinstance(value.spec, ListOf) else value.part(0),
                [] if isinstance(spec, Axes) else value.parts(),
            )
            for value, spec in outputs
        ]
        self.fetches: list[Any] = []

    def problem(self, got: Any, expected: Sequence[np.ndarray]) -> str:
        """What is wrong with the results ``got``; "" if nothing is."""
        for number, ((whole, parts), spec, wanted) in enumerate(zip(got, self.specs, expected)):
            problem = _difference(whole, wanted) or _parts_problem(parts, spec, wanted, self._rows)
            if problem:
                return f"output {number}, {format_specs(spec)}: {problem}"
        return ""


def _with_all_parts(claim: Layout) -> Layout:
    """``claim``, with each tower's copy of a replicated output as an output of its own."""
    names = {tensor.op.name for tensor in claim.graph.outputs}
    used = {tensor.name for operation in claim.order for tensor in operation.inputs}
    plans = dict(claim.plans)
    for operation in claim.order:
        plan = claim.plans.get(operation.name)
        if (
            operation.name not in names
            or plan is None
            or plan.once
            or plan.whole is not None
            or any(tensor.name in used for tensor in operation.outputs)
        ):
            continue
        if any(isinstance(spec, (Size, Axes)) for spec in plan.gives):
            continue
        plans[operation.name] = dataclasses.replace(
            plan, gives=[ListOf() if isinstance(spec, Replicated) else spec for spec in plan.gives]
        )
    result = copy.copy(claim)
    result.plans = plans
    return result


def _counts(spec: Sharded | Size, rows: tuple[int, ...], size: int) -> list[int]:
    """The number of positions, of ``size``, that each tower has."""
    numbers = positions([Sharded(0, 1, spec.group)])
    times = size // (BATCH * sum(numbers.values()))
    return [
        times * sum(number * _rows_of(batch, rows)[tower] for batch, number in numbers.items())
        for tower in range(len(rows))
    ]


def _rows_of(batch: Any, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Each tower's number of rows of a batch."""
    return CHOSEN[rows] if batch else rows


def _pieces(array: np.ndarray, spec: Spec, rows: tuple[int, ...]) -> list[np.ndarray]:
    """The part of an input on each tower."""
    if isinstance(spec, Sharded):
        each = dataclasses.replace(spec, times=1).pieces
        times = array.shape[spec.dim] // (BATCH * sum(piece.times or 0 for piece in each))
        counts = [
            count * times * (piece.times or 0)
            for piece in each
            for count in _rows_of(piece.group, rows)
        ]
        cut = np.split(array, np.cumsum(counts)[:-1], axis=spec.dim)
        return [np.concatenate(cut[at::len(rows)], axis=spec.dim) for at in range(len(rows))]
    if isinstance(spec, Size):
        pieces = []
        for count in _counts(spec, rows, int(np.ravel(array)[spec.at])):
            piece = array.copy()
            piece[(spec.at,) if array.ndim else ()] = count
            pieces.append(piece)
        return pieces
    assert isinstance(spec, Partial), spec
    return _parts(array, spec.reduction)


def _parts(array: np.ndarray, reduction: str) -> list[np.ndarray]:
    """Random arrays, one per tower, whose reduction by ``reduction`` is ``array``."""
    draws = np.random.default_rng(array.size)
    if reduction == "sum":
        if array.dtype.kind in "iu":  # a sum of integers is their sum modulo 2 ** bits
            limits = np.iinfo(array.dtype)
            others = [draws.integers(limits.min, limits.max, array.shape, array.dtype, True)
                      for _ in ROWS[1:]]
        else:
            others = [
                (draws.integers(-4, 5, array.shape) / 4).astype(array.dtype) for _ in ROWS[1:]
            ]
            if array.real.dtype.itemsize >= 8:  # which a narrower type would round
                others[0], others[-1] = others[0] + 4096, others[-1] - 4096
        return [(array - sum(others)).astype(array.dtype), *others]
    owner = draws.integers(0, len(ROWS), array.shape)
    if reduction in ("and", "or"):
        return [
            np.where(owner == at, array, np.bool_(reduction == "and")) for at in range(len(ROWS))
        ]
    sign = -1 if reduction == "max" else 1
    return [
        np.where(
            owner == at,
            array,
            array
            + np.asarray(sign, array.dtype) * draws.integers(1, 3, array.shape).astype(array.dtype),
        ).astype(array.dtype)
        for at in range(len(ROWS))
    ]


# Comparison.


def _parts_problem(
    parts: Sequence[np.ndarray], spec: Spec, wanted: np.ndarray, rows: tuple[int, ...]
) -> str:
    """What is wrong with the towers' parts of ``wanted``; "" if nothing is."""
    if isinstance(spec, (Sharded, Size)) and not can_be_cut(spec):
        size = wanted.shape[spec.dim] if isinstance(spec, Sharded) else np.ravel(wanted)[spec.at]
        have = [part.shape[spec.dim] if isinstance(spec, Sharded) else int(np.ravel(part)[spec.at])
                for part in parts]  # each tower has as many as it has chosen
        return "" if sum(have) == size or set(have) == {size} == {-1} \
            else f"towers have {have} positions of {size}"
    if isinstance(spec, Sharded):
        if wanted.shape[spec.dim] % BATCH and not spec.group:
            return f"{wanted.shape} along {spec.dim} is not the batch's"
        times = spec.times and sum(positions([spec]).values())
        if times is not None and wanted.shape[spec.dim] != BATCH * times:
            return f"{wanted.shape} along {spec.dim} is not {spec.times} a row"
        counts = _counts(spec, rows, wanted.shape[spec.dim])
        have = [part.shape[spec.dim] for part in parts]
        return "" if have == counts else f"towers have {have} positions in place of {counts}"
    if isinstance(spec, Partial):
        shapes = collections.Counter(part.shape for part in parts)
        if list(shapes) != [wanted.shape]:
            return f"parts of shapes {list(shapes)} of {wanted.shape}"
        reduced = _REDUCERS[spec.reduction](parts, axis=0)
        return _difference(reduced.astype(parts[0].dtype), wanted)  # numpy sums in more bits
    if isinstance(spec, Size):
        flat = [np.ravel(part) for part in parts]
        for at, entry in enumerate(np.ravel(wanted)):
            have = [int(part[at]) for part in flat]
            counts = _counts(spec, rows, int(entry)) if at == spec.at else [entry] * len(have)
            if have != counts and (entry != -1 or set(have) != {-1}):  # -1: unknown, in a shape
                return f"towers have {have} in place of {counts} in entry {at}"
        times = spec.times and sum(positions([spec]).values())
        if times is not None and np.ravel(wanted)[spec.at] not in (BATCH * times, -1):
            return f"{wanted} is not {spec.times} a row"
        return ""
    for tower, part in enumerate(parts):
        problem = _difference(part, wanted)
        if problem:
            return f"tower {tower}: {problem}"
    return ""


def _difference(got: np.ndarray, wanted: np.ndarray) -> str:
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape:
        return f"shape {got.shape} in place of {wanted.shape}"
    if wanted.dtype.kind in "OSUb":
        return "" if np.array_equal(got, wanted) else f"{got} in place of {wanted}"
    bound = BOUNDS.get(tf.as_dtype(wanted.dtype), 1e-5)
    exact = np.complex128 if wanted.dtype.kind == "c" else np.float64
    got, wanted = got.astype(exact), wanted.astype(exact)
    finite = wanted[np.isfinite(wanted)]
    scale = max(1.0, float(np.max(np.abs(finite)))) if finite.size else 1.0
    same = np.isclose(got, wanted, rtol=0, atol=bound * scale, equal_nan=True)
    if same.all():
        return ""
    at = tuple(np.argwhere(~same)[0])
    return f"{got[at]} in place of {wanted[at]} at {[int(place) for place in at]}"
