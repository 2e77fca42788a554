"""Operations that work entry by entry, with broadcasting, and those that are linear in a partial.

Goes in: an operation.  Comes out: its plan.  Examples stay where they are; a sum of parts stays one
where that is so for any parts, and where nothing larger has to cross for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, ListOf, Partial, Sharded, Size, Spec

LINEAR = ("Identity", "Cast", "Neg", "StopGradient", "PreventGradient", "Snapshot", "Real", "Imag",
          "Conj")
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


def is_plain(spec: Spec) -> bool:
    """Whether a tensor of this spec can be had whole without anything being gathered."""
    return not isinstance(spec, (Sharded, ListOf))


def one_sharded(specs: Sequence[Spec]) -> Sharded | None:
    """The spec of all those that are sharded; None where there are none, or several."""
    found = {spec for spec in specs if isinstance(spec, Sharded)}
    return found.pop() if len(found) == 1 else None


def aligned(op: Op, specs: Sequence[Spec], out: int | None) -> tuple[list[Spec], Sharded] | None:
    """What inputs that are broadcast against each other take, and what comes out of rank ``out``.

    None where the sharded ones do not go together, or ranks are unknown.
    """
    if any(isinstance(spec, ListOf) for spec in specs):
        return None
    places = [_place(op, index, spec, out) for index, spec in enumerate(specs)]
    known = [place for place in places if place is not None]
    if not known or any(place is None and isinstance(spec, Sharded)
                        for place, spec in zip(places, specs)):
        return None
    # Of rows against rows one side stays sharded, the one with more dimensions; the other is
    # gathered.
    found = max(known, key=lambda place: (_size_at(op, places.index(place)), place.times or 0))
    takes: list[Spec] = []
    for index, (spec, place) in enumerate(zip(specs, places)):
        if place is not None and place.dim == found.dim and place.goes_with(found):
            takes.append(spec)
            continue
        beside = _beside(op, index, found, out)
        if beside is None:
            return None
        takes.append(beside)
    return takes, found


def _place(op: Op, index: int, spec: Spec, out: int | None) -> Sharded | None:
    """Where an input's rows are in the shape that all inputs are broadcast to."""
    rank = op.rank(index)
    if not isinstance(spec, Sharded):
        return None
    if rank is None or out is None:
        return spec if op.type in OF_ONE_SHAPE else None
    return spec.at(spec.dim + out - rank)


def _size_at(op: Op, index: int) -> int:
    """How many entries an example of an input has, so far as that is known."""
    return int(np.prod([size or 1 for size in op.inputs[index].shape.as_list()], dtype=np.int64)) \
        if op.rank(index) is not None else 0


def _beside(op: Op, index: int, sharded: Sharded, out: int | None) -> Spec | None:
    """What a whole tensor beside a sharded one is to be."""
    rank = op.rank(index)
    if rank is None or out is None:
        return None
    dim = sharded.dim - (out - rank)
    if op.type in OF_ONE_SHAPE and rank == out:
        return dataclasses.replace(sharded, dim=dim)
    if dim < 0 or op.inputs[index].shape[dim] == 1:
        return REPLICATED
    return dataclasses.replace(sharded, dim=dim, broadcast=True)


def _on_lists(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if all(isinstance(spec, ListOf) for spec in specs):
        return Plan(specs, [specs[0]] * len(op.outputs))
    return None


def _of_size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A number of rows times, or over, what is no number of rows; a cast or a copy of it."""
    size = next(spec for spec in specs if isinstance(spec, Size))
    if len(specs) == 1 and op.type in ("Identity", "Cast", "StopGradient", "Snapshot") \
            and op.outputs[0].dtype.is_integer:
        return Plan(specs, specs)
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


@rule(*UNARY, light=True)
def unary(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = specs[0]
    if isinstance(spec, ListOf):
        return _on_lists(op, specs)
    if isinstance(spec, Size):
        return _of_size(op, specs)
    if isinstance(spec, Partial):
        if spec == SUM and _is_linear(op) or op.type in ("Identity", "StopGradient"):
            return Plan(specs, [spec])
        return None
    if isinstance(spec, Sharded) and all(is_plain(other) for other in specs[1:]):
        return Plan([spec, *[REPLICATED] * (len(specs) - 1)], [spec] * len(op.outputs))
    return None


@rule("QuantizeAndDequantizeV3", "QuantizeAndDequantizeV4")
def quantize(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Unless the range is that of all rows, or there is one a row."""
    spec = specs[0]
    if not isinstance(spec, Sharded) or not op.attr("range_given") or op.attr("axis") == spec.dim \
            or not all(is_plain(other) for other in specs[1:]):
        return None
    return Plan([spec, *[REPLICATED] * (len(specs) - 1)], [spec])


@rule("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel",
      "FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient")
def fake_quantize(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Within one range, or one for each place in the last dimension, whose gradient is a sum."""
    *data, low, high = specs
    spec = one_sharded(data)
    ranks = op.rank(0), op.rank(-1)
    if spec is None or not is_plain(low) or not is_plain(high) or None in ranks:
        return None
    if spec.dim == ranks[0] - ranks[1]:
        return None
    return Plan([*[spec] * len(data), REPLICATED, REPLICATED],
                [spec, *[SUM] * (len(op.outputs) - 1)])


@rule(*BINARY, light=True)
def binary(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if any(isinstance(spec, ListOf) for spec in specs):
        return _on_lists(op, specs)
    if any(isinstance(spec, Sharded) for spec in specs):
        found = aligned(op, specs, op.out_rank())
        return None if found is None else Plan(found[0], [found[1]])
    if op.type in ("AddN", "AddV2", "Add", "Sub") and all(spec == SUM for spec in specs):
        # A sum over sums of parts; broadcasting does not change that.
        return Plan(specs, [SUM])
    if any(isinstance(spec, Size) for spec in specs):
        return _of_size(op, specs)
    return None


@rule("Select", light=True)
def select(op: Op, specs: Sequence[Spec]) -> Plan | None:
    rank, condition = op.out_rank(), op.rank(0)
    if rank is None or condition not in (0, 1, rank) or any(
            isinstance(spec, ListOf) for spec in specs):
        return None
    if condition == rank:
        return binary(op, specs)
    found = aligned(op, [REPLICATED, *specs[1:]], rank)
    if found is None:
        return None
    takes, gives = found
    if condition == 0:
        return Plan([REPLICATED, *takes[1:]], [gives]) if is_plain(specs[0]) else None
    mask = gives if gives.dim == 0 else REPLICATED  # chooses along the first dimension
    return Plan([mask, *takes[1:]], [gives])


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
    return Plan(specs, specs)
