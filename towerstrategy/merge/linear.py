"""Whether a tensor is a sum of multiples of gradients, so that the towers' add up.

Goes in: a tensor of the graph that is being traced, and the gradients behind it.  Comes out: of
what kinds these are; or that the tensor is another function of them, as a norm is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import tensorflow as tf

from towerstrategy.losses import provenance, row_axes

# What gives on elements, or adds them up; whatever else goes in says which.
_MOVED = row_axes.SAME | provenance.ADDED | frozenset(row_axes.REDUCED) | frozenset({
    "BroadcastTo", "ConcatV2", "Cumsum", "GatherNd", "GatherV2", "MatrixDiagPartV3",
    "MatrixDiagV3", "MirrorPad", "Pad", "PadV2", "ReverseV2", "Slice", "Split", "SplitV",
    "StopGradient", "StridedSlice", "Tile", "Transpose", "Unpack"})
# Linear in each of their inputs.
_PRODUCTS = frozenset({"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "Mul",
                       "MulNoNan"})
# What only says how many elements there are.
_SIZED = frozenset({*row_axes.SIZES, "OnesLike", "ZerosLike"})

# Of a sum of multiples of gradients of one kind.
ALONE = (frozenset({provenance.Kind.PART}), frozenset({provenance.Kind.MEAN}))

_MIXED = frozenset({provenance.Kind.MIXED})
_OTHER = frozenset({provenance.Kind.OTHER})


def kinds(value: tf.Tensor, gradients: Mapping[str, provenance.Kind], made_of: Collection[str],
          is_same: Callable[[tf.Tensor], bool]) -> provenance.Kinds | None:
    """The kinds of the gradients behind ``value``, see :meth:`remade.Noted.kinds`.

    Args:
      value: a traced tensor.
      gradients: the kind of each gradient, by its name.
      made_of: the names of the operations that something of the gradients goes into.
      is_same: whether a tensor is the same on all towers.
    """
    return _Search(gradients, made_of, is_same).kinds(value)


class _Search:
    """Goes back from a tensor to gradients, as long as nothing but multiples are between."""

    def __init__(self, gradients: Mapping[str, provenance.Kind], made_of: Collection[str],
                 is_same: Callable[[tf.Tensor], bool]) -> None:
        self._gradients, self._made_of, self._is_agreed = gradients, made_of, is_same
        self._walk = provenance.Walk()
        self._found: dict[str, provenance.Kinds | None] = {}

    def kinds(self, tensor: tf.Tensor) -> provenance.Kinds | None:
        while tensor.op.type == "IdentityN":  # what has a gradient of its own, as an all-reduce
            tensor = tensor.op.inputs[tensor.value_index]
        if tensor.name in self._gradients:
            return frozenset({self._gradients[tensor.name]})
        if tensor.op.name not in self._made_of or self._is_agreed(tensor):
            return None
        if tensor.name not in self._found:
            self._found[tensor.name] = None  # a loop's variable goes into itself
            self._found[tensor.name] = self._look(tensor.op)
        return self._found[tensor.name]

    def _look(self, operation: tf.Operation) -> provenance.Kinds | None:
        if operation.type in _SIZED:
            return None
        inputs = list(operation.inputs)
        found = [self.kinds(each) for each in inputs]
        made = [each for each in found if each is not None]
        if not made:
            return None
        every = frozenset[provenance.Kind]().union(*made)
        others = [each for each, its in zip(inputs, found) if its is None]
        if operation.type in _MOVED:
            terms = [each for each in others if each.dtype.is_floating]
            return every if all(map(self._is_constant, terms)) else every | _OTHER
        if operation.type in _PRODUCTS:
            return every if len(made) == 1 and all(map(self._is_same, others)) else _MIXED
        if operation.type in provenance.DIVIDED:
            return every if found[1] is None and self._is_same(inputs[1]) else _MIXED
        if operation.type == "SelectV2":
            return every if found[0] is None and self._is_same(inputs[0]) else _MIXED
        return _MIXED

    def _is_same(self, tensor: tf.Tensor) -> bool:
        return self._walk.is_steady(tensor) or self._is_agreed(tensor)

    def _is_constant(self, tensor: tf.Tensor) -> bool:
        return tensor.op.type == "Const"
