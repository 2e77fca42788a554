"""The arguments and the signature of the ``tf.function`` in a ``strategy.function``.

Goes in: arguments with sub-batches among them, and an ``input_signature`` for one device.  Comes
out: arguments whose sub-batches are traced for any number of rows, and the towers' signature.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, refused
from towerstrategy.batch import rows as rows_lib, sub_batches
from towerstrategy.merge import merging


def sharded_arguments(bound: Mapping[str, Any], any_rows: bool) -> dict[str, Any]:
    """The arguments, traced for any number of rows if ``any_rows``, else for their number.

    Only the rows of one batch are sharded.  Sub-batches whose numbers of rows differ from the first
    one's are another batch: they are concatenated and replicated.
    """
    sharded = [leaf for leaf in tf.nest.flatten(bound) if isinstance(leaf, sub_batches.SubBatches)]
    if not sharded:
        return dict(bound)
    return {name: tf.nest.map_structure(functools.partial(_argument, sharded[0], any_rows), value)
            for name, value in bound.items()}


def _argument(first: sub_batches.SubBatches, any_rows: bool, leaf: Any) -> Any:
    if not isinstance(leaf, sub_batches.SubBatches):
        return leaf
    if leaf.batch == first.batch and not _has_rows_of(leaf, first):
        return merging.concat(leaf.values, 0)
    if not any_rows or leaf.open_rows:
        return leaf
    return sub_batches.with_open_rows(copy.copy(leaf))


def _has_rows_of(leaf: sub_batches.SubBatches, first: sub_batches.SubBatches) -> bool:
    """Whether each tower has as many rows of both; asserted in the step if not known before."""
    if leaf is first or leaf.rows is not None:
        return True
    for one, other in zip(leaf.values, first.values):
        rows = rows_lib.rows_in(one), rows_lib.rows_in(other)
        if all(isinstance(count, int) for count in rows):
            if rows[0] != rows[1]:
                return False
        else:
            tf.debugging.assert_equal(
                *(tf.cast(count, tf.int64) for count in rows), "the arguments of a function made "
                "by strategy.function must be of one batch, but have different numbers of rows. "
                "Call it in eager code to give it batches of different sizes.")
    return True


def towers_signature(signature: Sequence[Any], bound: Mapping[str, Any]) -> tuple[Any, ...]:
    """``signature``, with the specs of the towers' parts for sharded arguments.

    Raises:
      ValueError: an argument does not match the signature.
    """
    if len(bound) < len(signature):
        raise ValueError(f"input_signature has {len(signature)} entries, but the function takes "
                         f"{len(bound)} arguments: {', '.join(bound)}.")
    return tuple(_signature_of(name, spec, bound[name]) for name, spec in zip(bound, signature))


def _signature_of(name: str, spec: Any, value: Any) -> Any:
    try:
        tf.nest.assert_same_structure(spec, value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must have the structure that input_signature says, {spec!r}, but "
                         f"got {refused.shown(value)}.") from None
    return tf.nest.map_structure(lambda leaf, part: _spec_of_leaf(name, leaf, part), spec, value)


def _spec_of_leaf(name: str, spec: Any, value: Any) -> Any:
    if not isinstance(value, _tf.PerReplica):
        return spec
    parts = [tf.type_spec_from_value(part) for part in value.values]
    wanted = sub_batches.with_any_rows(spec)
    for part in parts:
        if not sub_batches.with_any_rows(part).is_subtype_of(wanted):
            raise ValueError(f"{name} must be as input_signature says, {spec!r}, but the towers' "
                             f"parts of it are {parts!r}.")
    rows = [part.shape[0] for part in parts]
    if spec.shape[0] is not None and None not in rows and sum(rows) != spec.shape[0]:
        raise ValueError(f"{name} must have the {spec.shape[0]} rows that input_signature says, "
                         f"{spec!r}, but the towers have {rows}.")
    specs = [wanted] * len(parts)
    if not isinstance(value, sub_batches.SubBatches):
        return _tf.PerReplicaSpec(*specs)
    if value.rows is not None:
        specs.append(tf.TensorSpec(value.rows.shape, tf.int64))
    return sub_batches.SubBatchesSpec(*specs, batch=value.batch, counted=value.rows is not None)
