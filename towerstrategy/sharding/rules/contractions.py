"""Matrix products, einsums, convolutions and pooling, and their gradients.

Goes in: an operation.  Comes out: its plan.  Where rows are contracted each tower has a part of a
sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from towerstrategy.sharding.rules.elementwise import is_plain
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Sharded, Size, Spec


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul(op: Op, specs: Sequence[Spec]) -> Plan | None:
    ranks: list[Any] = [op.rank(0), op.rank(1)]
    if None in ranks:
        return None
    flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    rank = max(ranks)
    # Labels of each operand's dimensions: batch dimensions by place, then rows, contracted,
    # columns.
    names: list[list[Any]] = []
    for number, labels in enumerate((["m", "k"], ["k", "n"])):
        if op.attr(flags[number]):
            labels.reverse()
        own = ranks[number] - 2
        names.append([*range(rank - 2 - own, rank - 2), *labels])
    plan = _contracted(op, specs, names, [*range(rank - 2), "m", "n"])
    if plan is not None and op.type == "MatMul" and op.attr("transpose_b"):
        plan.whole = _swapped
    return plan


def _swapped(m: Any) -> list[Any]:
    """``a bᵀ`` as ``(b aᵀ)ᵀ``: on CPUs a product copies the second operand to transpose it."""
    import tensorflow as tf

    product = m.make("MatMul", [m.whole(1), m.whole(0)], None,
                     transpose_b=not m.op.attr("transpose_a"))
    return [m.make("Transpose", [product, m.constant([1, 0], tf.int32, None)], None)]


@rule("Einsum")
def einsum(op: Op, specs: Sequence[Spec]) -> Plan | None:
    left, out = op.attr("equation").replace(" ", "").split("->")
    if "." in left or "." in out:
        return None
    return _contracted(op, specs, [list(term) for term in left.split(",")], list(out))


def _contracted(op: Op, specs: Sequence[Spec], names: Sequence[Sequence[Any]],
                out: Sequence[Any]) -> Plan | None:
    """A contraction, by labels of the dimensions."""
    sharded = [(index, spec) for index, spec in enumerate(specs) if isinstance(spec, Sharded)]
    if not sharded or any(len(set(term)) < len(term) for term in (*names, out)):
        return None  # nothing to gain, or a diagonal
    # Rows against rows, as all examples beside all: one operand stays sharded, the other is
    # gathered.
    index, first = sharded[0]
    label = names[index][first.dim]
    takes: list[Spec] = []
    for index, (spec, term) in enumerate(zip(specs, names)):
        dim = term.index(label) if label in term else None
        if isinstance(spec, Sharded) and spec.dim == dim and spec.goes_with(first):
            takes.append(spec)
        elif dim is None or isinstance(label, int) and op.inputs[index].shape[dim] == 1:
            takes.append(REPLICATED)
        else:
            takes.append(Sharded(dim, first.times, first.group, broadcast=isinstance(label, int)))
    return Plan(takes, [first.at(out.index(label)) if label in out else SUM])


def rows_first(op: Op, specs: Sequence[Spec], data: Sequence[int],
                outputs: Sequence[bool] | None = None) -> Plan | None:
    """Operations on images: those of ``data`` have the rows first, all else is the same for all.

    Args:
      op: the operation.
      specs: the specs of its inputs.
      data: the inputs that have rows.
      outputs: whether each output has rows, or is a sum over them; all have if None.
    """
    found = {spec for index, spec in enumerate(specs)
             if index in data and isinstance(spec, Sharded)}
    if len(found) != 1:
        return None
    (spec,) = found
    if spec.dim or not all(is_plain(s) or index in data for index, s in enumerate(specs)):
        return None
    rank = op.rank(data[0])  # a row of padding needs it
    if rank is None or any(op.out_rank(at) is None for at in range(len(op.outputs))):
        return None
    takes: list[Spec] = [spec if index in data else REPLICATED for index in range(len(specs))]
    has_rows = outputs or [True] * len(op.outputs)
    return Plan(takes, [spec if rows else SUM for rows in has_rows], padded=True)


@rule("Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D",
      "Dilation2D", "LRN", "ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea",
      "AdjustContrastv2", "AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV", "SpaceToDepth",
      "DepthToSpace", "ExtractImagePatches", "ExtractVolumePatches", "MaxPoolV2")
def image(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if op.out_rank() != op.rank(0):
        return None  # of patches of unknown volumes TensorFlow says a wrong rank
    return rows_first(op, specs, [0])


@rule("BiasAdd")
def bias_add(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, rank = specs[0], op.rank(0)
    if not isinstance(spec, Sharded) or rank is None or not is_plain(specs[1]):
        return None
    channel = 1 if op.attr("data_format") == "NCHW" else rank - 1
    return None if spec.dim == channel else Plan([spec, REPLICATED], [spec])


@rule("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "MaxPool3DGradGrad", "LRNGrad")
def pooling_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return rows_first(op, specs, [0, 1, 2])


@rule("ResizeBilinearGrad", "ResizeBicubicGrad")
def resize_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return rows_first(op, specs, [0, 1])


@rule("ResizeNearestNeighborGrad")
def nearest_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return rows_first(op, specs, [0])


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput",
      "AvgPoolGrad", "AvgPool3DGrad")
def input_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The first input is the shape of the result: the tower's, or with the tower's rows put in."""
    gradient = specs[-1]
    if not isinstance(gradient, Sharded) or gradient.dim or op.rank(-1) is None \
            or op.out_rank() != op.rank(-1):
        return None
    middle: list[Spec] = [REPLICATED] * (len(specs) - 2)
    if isinstance(specs[0], Size) and specs[0].at == 0 and specs[0].shards(0) == gradient \
            and op.inputs[0].shape.is_fully_defined():
        return Plan([specs[0], *middle, gradient], [gradient], padded=True)
    return Plan([REPLICATED, *middle, gradient], [gradient], make=_with_own_rows, alone=0,
                padded=True)


def _with_own_rows(m: Any) -> list[list[Any]]:
    last = len(m.op.inputs) - 1
    dtype = m.op.inputs[0].dtype

    def one(tower: int) -> Any:
        own = m.make("Shape", [m.part(last, tower)], tower, out_type=dtype)
        first, rest = (m.constant([place], dtype, tower) for place in (0, 1))
        rows = m.make("Slice", [own, first, rest], tower)
        size = m.make("Slice", [m.part(0, tower), rest, m.constant([-1], dtype, tower)], tower)
        import tensorflow as tf

        shape = m.make("ConcatV2", [rows, size, m.constant(0, tf.int32, tower)], tower)
        middle = [m.part(index, tower) for index in range(1, last)]
        return m.copy([shape, *middle, m.part(last, tower)], tower)[0]

    return [m.each(one)]


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
def filter_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return rows_first(op, specs, [0, 2], [False])
