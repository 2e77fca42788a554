"""Rules for elementwise ops, which broadcast, and which may be linear in a partial sum.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  Sharded inputs make a sharded
output.  A partial sum stays partial if the op is linear in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.dimensions import DIMS, by_equation, by_names, is_plain
from towerstrategy.sharding.rules.families import AS_IT_IS, BINARY, UNARY, names
from towerstrategy.sharding.rules.lists import entry_by_entry
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    SUM,
    Axes,
    ListOf,
    Replicated,
    Sharded,
    Size,
    Spec,
)

LINEAR = ("Cast", "Neg", "Real", "Imag", "Conj", "AddN", "AddV2", "Add", "Sub")
OF_ONE_SHAPE = names("""
    AddN ApproximateEqual EluGrad FakeQuantWithMinMaxArgsGradient InvGrad LeakyReluGrad
    ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad Select SeluGrad SigmoidGrad SoftplusGrad
    SoftsignGrad SqrtGrad TanhGrad""")
_UNARY, _OF_ONE_SHAPE = frozenset(UNARY), frozenset(OF_ONE_SHAPE)


@rule(*UNARY, *BINARY, light=True)
def elementwise(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if op.type in AS_IT_IS and not isinstance(specs[0], Replicated):
        return Plan(specs, specs, passes=True)
    if any(isinstance(spec, ListOf) for spec in specs):
        return entry_by_entry(op, specs)
    if any(isinstance(spec, Sharded) for spec in specs):
        return _sharded(op, specs)
    if any(isinstance(spec, Size) for spec in specs):
        if op.type != "Cast":
            return shapes.computed_sizes(op, specs)
        return Plan(specs, specs) if op.outputs[0].dtype in (tf.int32, tf.int64) else None
    if all(spec == SUM for spec in specs) and _is_linear(op):
        return Plan(specs, [specs[0]])
    return _moved_axes(op, specs) if len(specs) == 2 else None


def _moved_axes(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan where axes move behind so many dimensions, as by einsum, or are counted modulo."""
    at = 0 if isinstance(specs[1], Axes) else 1  # the number's input
    axes = specs[1 - at]
    number = op.value(at) if isinstance(axes, Axes) else None
    if not isinstance(axes, Axes) or number is None or number.size != 1:
        return None
    reduced, number = axes.reduced, int(number)
    if op.type == "AddV2":
        reduced = (*[False] * number, *reduced)
    elif op.type == "FloorMod" and at == 1 and number > 0:
        by_rest = [{*reduced[rest::number]} for rest in range(number)]
        reduced = tuple(True if True in those else None if None in those else False
                        for those in by_rest)
    else:
        return None
    return Plan([REPLICATED] * 2, [Axes(reduced)])


def _sharded(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan where an input is sharded."""
    if op.type in _UNARY:  # further inputs are the same for all towers
        return by_names(op, specs, [DIMS], [DIMS])
    if op.type in _OF_ONE_SHAPE:
        return by_names(op, specs, [DIMS] * len(specs), [DIMS], gathers=True)
    return by_equation(op, specs, f"{','.join(['...'] * len(specs))}->...", gathers=True)


def _is_linear(op: Op) -> bool:
    """Whether the op, applied to the parts of a sum, makes the parts of its output."""
    if op.type != "Cast":
        return op.type in LINEAR
    # Casts to fewer digits round each part; parts that are integers may overflow where their sum
    # does not; half precision has too few digits for parts.
    before, after = op.inputs[0].dtype, op.outputs[0].dtype
    return (before.is_complex or before.is_floating) and (after.is_complex or after.is_floating) \
        and after.real_dtype.size >= max(before.real_dtype.size, 4)


@rule("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel",
      "FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient")
def fake_quantize(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """There is one range, or one for each channel; the ranges' gradients are partial sums."""
    ranks = op.rank(0), op.rank(-1)
    names = "" if None in ranks else DIMS[:ranks[0] - ranks[1]]
    return by_names(op, specs, [names] * (len(specs) - 2), [names, "", ""][:len(op.outputs)], SUM)


@rule("Select", light=True)
def select(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The condition has one entry, an entry for each row, or an entry for each entry."""
    rank, condition = op.out_rank(), op.rank(0)
    if rank is None or condition not in (0, 1, rank):
        return None
    return by_names(op, specs, [DIMS[:condition], DIMS, DIMS], [DIMS], gathers=True)


@rule("EnsureShape")
def ensure_shape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Sharded unless it checks the number of rows."""
    spec, shape = specs[0], tf.TensorShape(op.attr("shape"))
    if not isinstance(spec, Sharded) or shape.rank is not None and shape[spec.dim] is not None:
        return None
    return Plan(specs, [spec])


@rule("Assert")
def check(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """All towers check the same condition, so all fail together; each prints its own rows."""
    if not is_plain(specs[0]) or not any(isinstance(spec, Sharded) for spec in specs):
        return None
    return Plan([spec if isinstance(spec, Sharded) else REPLICATED for spec in specs], [])


@rule("IdentityN")
def identity_n(op: Op, specs: Sequence[Spec]) -> Plan:
    return Plan(specs, specs, passes=True)
