"""Operations that work entry by entry, with broadcasting, and those that are linear in a partial.

Goes in: an operation.  Comes out: its plan.  Rows stay where they are.  What is partial stays so
where the operation is linear in it, unless something larger would have to cross then.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import DIMS, MIXED, by_names, is_plain
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

AS_IT_IS = ("Identity", "StopGradient", "PreventGradient", "Snapshot")
LINEAR = ("Cast", "Neg", "Real", "Imag", "Conj", "AddN", "AddV2", "Add", "Sub")


def _names(text: str) -> list[str]:
    return text.split()


UNARY = _names("""
    Abs Acos Acosh Angle Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0
    BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Bitcast Cast Ceil
    CheckNumerics CheckNumericsV2 ComplexAbs Conj Cos Cosh Dawsn Digamma Elu Erf Erfc Erfinv Exp
    Expint Expm1 Floor FresnelCos FresnelSin Identity Imag Inv Invert IsFinite IsInf IsNan
    LeakyRelu Lgamma Log Log1p LogicalNot Ndtri Neg OnesLike PopulationCount PreventGradient Real
    Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign
    Spence Sqrt Square StopGradient Tan Tanh ZerosLike FakeQuantWithMinMaxArgs AsString
    DecodeBase64 EncodeBase64 StringLength StringLower StringUpper StringStrip
    StringToHashBucketFast StringToHashBucketStrong StringToHashBucket StringToNumber
    RegexFullMatch StaticRegexFullMatch StaticRegexReplace RegexReplace Bucketize
    DebugIdentityV2""")
BINARY = _names("""
    Add AddN AddV2 ApproximateEqual Atan2 Betainc BitwiseAnd BitwiseOr BitwiseXor ClipByValue
    Complex Div DivNoNan EluGrad Equal FakeQuantWithMinMaxArgsGradient FloorDiv FloorMod Greater
    GreaterEqual Igamma IgammaGradA Igammac InvGrad LeakyReluGrad LeftShift Less LessEqual
    LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NextAfter NotEqual Polygamma Pow RealDiv
    ReciprocalGrad Relu6Grad ReluGrad RightShift RsqrtGrad SelectV2 SeluGrad SigmoidGrad
    SoftplusGrad SoftsignGrad SqrtGrad SquaredDifference Sub Substr TanhGrad TruncateDiv
    TruncateMod Xdivy Xlog1py Xlogy Zeta""")
OF_ONE_SHAPE = _names("""
    AddN ApproximateEqual EluGrad FakeQuantWithMinMaxArgsGradient InvGrad LeakyReluGrad
    ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad Select SeluGrad SigmoidGrad SoftplusGrad
    SoftsignGrad SqrtGrad TanhGrad""")
_UNARY, _OF_ONE_SHAPE = frozenset(UNARY), frozenset(OF_ONE_SHAPE)


@rule(*UNARY, *BINARY, light=True)
def entry_by_entry(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if op.type in AS_IT_IS and not isinstance(specs[0], Replicated):
        return Plan(specs, specs, passes=True)
    if any(isinstance(spec, ListOf) for spec in specs):
        alike = all(isinstance(spec, ListOf) for spec in specs)
        return Plan(specs, [specs[0]] * len(op.outputs)) if alike else None
    if any(isinstance(spec, Sharded) for spec in specs):
        return _of_rows(op, specs)
    if any(isinstance(spec, Size) for spec in specs):
        return _of_size(op, specs)
    if all(spec == SUM for spec in specs) and _is_linear(op):
        return Plan(specs, [specs[0]])
    if op.type == "AddV2" and isinstance(specs[1], Axes) and op.value(0) is not None:
        before = (False,) * int(op.value(0))  # dimensions in front, as of an einsum's "a...b"
        return Plan([REPLICATED] * 2, [Axes((*before, *specs[1].reduced))])
    return None


def _of_rows(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if op.type in _UNARY:  # further inputs are the same for all towers
        return by_names(op, specs, [DIMS], [DIMS])
    if op.type in _OF_ONE_SHAPE:
        return by_names(op, specs, [DIMS] * len(specs), [DIMS], gathers=True)
    ranks, rank = [op.rank(index) for index in range(len(specs))], op.out_rank()
    if None in ranks or rank is None:
        return None
    return by_names(op, specs, [range(rank - own, rank) for own in ranks], [range(rank)],
                    gathers=True)


def _of_size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A number of rows times, or over, what is none; a cast of it; the larger of two alike."""
    size = next(spec for spec in specs if isinstance(spec, Size))
    if op.type == "Cast" and op.outputs[0].dtype.is_integer:
        return Plan(specs, specs)
    if op.type in ("Maximum", "Minimum") and specs[0] == specs[1] and op.rank(0) == op.rank(1) == 0:
        return Plan(specs, specs[:1])
    if op.type == "Mul" and op.out_rank() == 0 and sum(isinstance(s, Size) for s in specs) == 1:
        factor = op.value(0 if specs[1] is size else 1)
        times = None if factor is None or size.times is None else size.times * int(factor)
        return Plan([spec if spec is size else REPLICATED for spec in specs],
                    [Size(0, times, size.group)])
    over = op.value(1) if op.type == "FloorDiv" and op.out_rank() == 0 else None
    if over is not None and specs[0] is size and int(over) > 0 \
            and size.blocks % int(over) == 0:  # so many rows a view
        return Plan([size, REPLICATED], [Size(0, size.times, size.some(size.blocks // int(over)))])
    return None


def _is_linear(op: Op) -> bool:
    """Whether a sum of parts is what the operation makes of them added up."""
    if op.type != "Cast":
        return op.type in LINEAR
    # Integers are cut off; a half has too few digits for parts, and may be infinite where they
    # are not.
    of, to = op.inputs[0].dtype, op.outputs[0].dtype
    return (to.is_complex or to.is_floating and to.size >= 4) and of != tf.bool


@rule("QuantizeAndDequantizeV3", "QuantizeAndDequantizeV4")
def quantize(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Unless the range is that of all rows, or there is one a row."""
    axis = op.attr("axis")
    names = DIMS if axis < 0 else f"{DIMS[:axis]}{MIXED}{DIMS[axis:]}"
    return by_names(op, specs, [names], [names]) if op.attr("range_given") else None


@rule("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel",
      "FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient")
def fake_quantize(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Within one range, or one for each place in the last dimension, whose gradient is a sum."""
    ranks = op.rank(0), op.rank(-1)
    names = "" if None in ranks else DIMS[:ranks[0] - ranks[1]]
    return by_names(op, specs, [names] * (len(specs) - 2), [names, "", ""][:len(op.outputs)], SUM)


@rule("Select", light=True)
def select(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A condition of one entry, one for each row, or one for each entry."""
    rank, condition = op.out_rank(), op.rank(0)
    if rank is None or condition not in (0, 1, rank):
        return None
    return by_names(op, specs, [DIMS[:condition], DIMS, DIMS], [DIMS], gathers=True)


@rule("EnsureShape")
def ensure_shape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Where nothing is said of how many rows there are."""
    spec, shape = specs[0], tf.TensorShape(op.attr("shape"))
    if not isinstance(spec, Sharded) or shape.rank is not None and shape[spec.dim] is not None:
        return None
    return Plan(specs, [spec])


@rule("Assert")
def check(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """All towers, and all machines, know whether it fails; each shows rows of its own."""
    if not is_plain(specs[0]) or not any(isinstance(spec, Sharded) for spec in specs):
        return None
    return Plan([spec if isinstance(spec, Sharded) else REPLICATED for spec in specs], [])


@rule("IdentityN")
def identity_n(op: Op, specs: Sequence[Spec]) -> Plan:
    return Plan(specs, specs, passes=True)
