"""Where merged gradients and weights are worked on: beside them.

Goes in: operations that are made behind the merge, such as an optimizer's.  Comes out: for each the
device of the largest tensor that goes into it, unless somebody has said where it is.

Both Kerases clip, average and constrain on the device around them, which is the merge device.
Where weights have homes of their own, gradients and weights would cross to it, and back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf

# They take what functions and branches need, and work on none of it.
_CALLS = frozenset({"If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase",
                    "PartitionedCall", "StatefulPartitionedCall"})
# They make a tensor of next to nothing.
_SOURCES = frozenset({"Const", "Fill"})


def placed(homes: Collection[str], merge_device: str) -> contextlib.AbstractContextManager[Any]:
    """Within, operations on merged gradients and on variables are where these are.

    Args:
      homes: the devices of the variables.
      merge_device: where all else is done.
    """
    if tf.executing_eagerly() or set(homes) <= {merge_device}:
        return contextlib.nullcontext()
    # Branches take over devices that are chosen by a function, and tf.device knows none.
    return tf.compat.v1.device(_Beside(merge_device).device_of)


class _Beside:
    """Chooses the devices of operations as they are made, in a graph and in its branches."""

    def __init__(self, merge_device: str) -> None:
        self._merge_device = merge_device
        # For each graph what its placeholders stand for, by their names.
        self._outer: weakref.WeakKeyDictionary[tf.Graph, dict[str, Any]] = (
            weakref.WeakKeyDictionary())

    def device_of(self, operation: tf.Operation) -> str:
        """Where ``operation``, which has just been made, is to be; "" where that is all the same.
        """
        if operation.device or operation.type in _CALLS:
            return str(operation.device)
        held = [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]
        data = [tensor for tensor in operation.inputs
                if tensor.dtype != tf.resource and _elements(tensor) > 1]
        if held:
            home = self._place(held[0])
            for tensor in data if home else ():
                if tensor.op.type in _SOURCES and tensor.op.device == self._merge_device:
                    _tf.set_device(tensor.op, home)
            return home
        return self._place(max(data, key=_elements)) if data else ""

    def _place(self, tensor: tf.Tensor) -> str:
        """The device of ``tensor``; "" where it is not known."""
        operation = tensor.op
        if operation.type == "Placeholder":
            outer = self._outside(tensor)
            if outer is None:
                return ""
            return str(outer.device) if _tf.is_eager(outer) else self._place(outer)
        if operation.type == "ReadVariableOp":
            return self._place(operation.inputs[0])
        return str(operation.device)

    def _outside(self, placeholder: tf.Tensor) -> Any:
        """What ``placeholder`` stands for in its graph; None of an argument."""
        known = self._outer.setdefault(placeholder.graph, {})
        if placeholder.name not in known:
            known.update((inner.name, outer)
                         for outer, inner in _tf.captures_of(placeholder.graph))
        return known.setdefault(placeholder.name, None)


def _elements(tensor: tf.Tensor) -> float:
    count = tensor.shape.num_elements() if tensor.shape.rank is not None else None
    return float("inf") if count is None else count
