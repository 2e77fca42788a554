"""Statistics over the batch's rows that a model, or a step, gives back to each row.

Goes in: what a replica function differentiates.  Comes out: a warning, once for an operation, where
a mean, sum or extreme over a tower's rows shows to go into tensors that still have rows, as where
features are normalized by the batch's mean: each tower does it by its own rows, and its rows come
out otherwise than on one device.

Numbers that end in the loss alone are told, or made of all rows, elsewhere (:mod:`provenance`,
:mod:`totals`, :mod:`one_number`).  Batch norm is of a tower's rows by nature, and nobody is told.
When in doubt where the rows are, nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import marks, parts, provenance, row_axes, row_places
from towerstrategy.towers import contexts

_REDUCING = frozenset({"EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum"})
_SOFTMAX = frozenset({"LogSoftmax", "Softmax"})
_EXTREMES = frozenset({"Max", "Min"})
_PRODUCTS = frozenset({"BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"})
# Behind which rows are others than those that a statistic has gone into.
_LAYERS = _PRODUCTS | {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
_TOGETHER = _REDUCING | _SOFTMAX | _PRODUCTS
_SOURCES = frozenset({"Const", "ReadVariableOp", "VarHandleOp", "OnesLike", "ZerosLike",
                      *row_axes.SIZES})
_BODIES = provenance.CALLS | provenance.BRANCHES
# Of gradients, which have sums over rows of their own.
_GRADIENTS = "gradient"
_MERGED = "merge/"


class _Holds(NamedTuple):
    """What a tensor holds.

    Attributes:
      places: where the rows are in it, see :mod:`row_places`.
      root: the statistic that it is, or of rows, the one that has gone into them.
      alone: whether those dimensions have nothing but the rows.
      cancels: whether it is an extreme that nothing is differentiated by, as that which is taken
        off before exponentials and cancels behind them.
    """

    places: row_places.Places = None
    root: Any = None
    alone: bool = True
    cancels: bool = False


_NOTHING = _Holds()


def check(tower: contexts.TowerContext, target: Any) -> None:
    """Warns of the statistics behind ``target``, a nest of what is differentiated."""
    if not _has_others(tower):
        return
    search = _Search(tower)
    search.look([each for each in tf.nest.flatten(target)
                 if isinstance(each, tf.Tensor) and not _tf.is_eager(each)])
    told, looked_at = _behind_told(tower) if search.found else set(), set[int]()
    for statistic in search.found:
        rows = id(statistic.op.inputs[0])  # whose mean and deviation are told together
        if id(statistic) not in told and rows not in looked_at:
            looked_at.add(rows)
            tower.warn_of(
                statistic,
                "towerstrategy: {name} is computed of each tower's rows, and goes back into each "
                "of them, so that they come out otherwise than on one device, where it is "
                "computed of all rows of the batch. Compute it of towerstrategy.whole_batch(rows); "
                "a batch norm layer is one device's as BatchNormalization(synchronized=True), or "
                "with TowerStrategy(..., synchronize_batch_norm=True).")


def _has_others(tower: contexts.TowerContext) -> bool:
    """Whether rows of the batch are elsewhere, and this tower speaks for all."""
    extended = tower.strategy.extended
    return (tower.static_rows is not None and (tower.count > 1 or extended.workers is not None)
            and (tower.is_copied or tower.tower == 0))


def _behind_told(tower: contexts.TowerContext) -> set[int]:
    """The ids of what is close behind numbers of which somebody was told already."""
    return {id(tensor) for value in tower.told_values for tensor in row_axes.near(value)}


class _Search:
    """Goes back from tensors to the batch, then forward to what is made of it.

    Args:
      tower: where they were made.

    Attributes:
      found: the statistics that go back into rows.
    """

    def __init__(self, tower: contexts.TowerContext) -> None:
        self._tower = tower
        self._walk = parts.walk(tower)
        self._holds: dict[int, _Holds] = tower.places  # of a former search, too
        self._inner: dict[int, list[tuple[_Search, Sequence[tf.Tensor]]]] = {}
        self.found: list[tf.Tensor] = []

    def look(self, values: Iterable[tf.Tensor]) -> None:
        """Finds out what is behind ``values``."""
        waiting = [(value, False) for value in values]
        entered: dict[int, Sequence[tf.Tensor]] = {}
        while waiting:
            tensor, is_known = waiting.pop()
            if id(tensor) in self._holds:
                continue
            operation = tensor.op
            if is_known:
                self._put(operation, tensor, entered[id(tensor)])
            elif id(tensor) not in entered:  # else a loop of TensorFlow's first kind
                entered[id(tensor)] = sources = self._sources(tensor, operation)
                waiting.append((tensor, True))
                waiting.extend((source, False) for source in sources
                               if id(source) not in self._holds)

    def _sources(self, tensor: tf.Tensor, operation: tf.Operation) -> Sequence[tf.Tensor]:
        """What has to be known before ``tensor``."""
        kind = operation.type
        if kind in _SOURCES or kind == "Placeholder" and tensor.dtype == tf.resource:
            return ()
        if self._tower.is_agreed(tensor):  # what has its gradient is given the rows, too
            return ()
        answered = marks.made_of(tensor)
        if answered is not None:
            return answered
        if kind.startswith("Placeholder"):
            outer = self._walk.origin(tensor)
            return () if outer is tensor or _tf.is_eager(outer) else (outer,)
        inputs = operation.inputs
        if _MERGED not in operation.name:
            return inputs
        return [value for value in inputs if not self._is_others(value)]

    def _is_others(self, value: tf.Tensor) -> bool:
        scope = contexts.TOWER_SCOPE.search(value.op.name)
        return scope is not None and scope[1] != "0"

    def _put(self, operation: tf.Operation, tensor: tf.Tensor,
             sources: Sequence[tf.Tensor]) -> None:
        if tensor.op.type in _SOURCES or marks.made_of(tensor) is not None:
            self._holds[id(tensor)] = _NOTHING
        elif self._is_given(tensor):
            self._holds[id(tensor)] = _Holds(row_places.FIRST)
        elif operation.type.startswith("Placeholder"):
            self._holds[id(tensor)] = (self._of(sources[0]) if sources else _NOTHING)
        elif operation.type == "IdentityN":  # what has a gradient of its own, and all it is given
            for value, output in zip(operation.inputs, operation.outputs):
                self._holds[id(output)] = self._outside(output) or self._of(value)
        elif operation.type in _BODIES:
            self._put_called(operation, tensor)
        else:
            self._put_outputs(operation)

    def _put_outputs(self, operation: tf.Operation) -> None:
        given = operation.inputs
        held = [self._of(value) for value in given]
        holds = _NOTHING
        if any(each is not _NOTHING for each in held):
            holds = self._made(operation, given, held)
        loops = operation.type in provenance.LOOPS or operation.type == "TensorListStack"
        for output in operation.outputs:
            own = holds
            if loops and holds.places is not None:
                own = _Holds(row_places.by_shape(output, self._tower.static_rows))
            if output.value_index and operation.type.startswith("FusedBatchNorm"):
                own = _NOTHING
            self._holds[id(output)] = self._outside(output) or own

    def _of(self, value: tf.Tensor) -> _Holds:
        return self._holds.get(id(value), _NOTHING)

    def _outside(self, value: tf.Tensor) -> _Holds | None:
        """Nothing, of what is the same on all towers; else None."""
        return _NOTHING if self._tower.is_whole(value) or self._tower.is_agreed(value) else None

    def _is_given(self, tensor: tf.Tensor) -> bool:
        """Whether this is the tower's part of the batch."""
        if id(tensor) in self._tower.parts:
            return bool(tensor.shape.rank)
        if tensor.op.type == "Placeholder":
            outer = self._walk.origin(tensor)
            return bool(tensor.shape.rank) and id(outer) in self._tower.given
        return bool(tensor.op.type == "PlaceholderWithDefault" and tensor.shape.rank
                    and tensor.shape[0] in (None, self._tower.static_rows)
                    and not self._tower.is_agreed(tensor))

    def _made(self, operation: tf.Operation, given: Sequence[tf.Tensor],
              held: Sequence[_Holds]) -> _Holds:
        """What ``operation`` makes of what is ``given`` to it."""
        kind, dtype = operation.type, operation.outputs[0].dtype
        made = row_places.made(operation, given, [each.places for each in held],
                               all(each.alone for each in held))
        is_number = dtype.is_floating or dtype.is_complex or dtype == tf.bool
        of_rows = [each.root for each in held if each.places is not None and each.root is not None]
        root = of_rows[0] if of_rows and kind not in _LAYERS else None
        if (made.together and kind in _TOGETHER and is_number
                and _GRADIENTS not in operation.name):
            statistic = operation.outputs[0] if root is None else root
            if made.places is not None:
                self.found.append(statistic)
            return _Holds(made.places, statistic, made.alone)
        statistics = [each for each in held if each.places is None and each.root is not None]
        if made.places is None:
            return self._of_statistics(operation, statistics) if is_number else _NOTHING
        if statistics and is_number and made.places and not (
                kind == "Sub" and held[1].cancels):
            root = statistics[0].root
            self.found.append(root)
        return _Holds(made.places, None if kind in _LAYERS else root, made.alone)

    def _of_statistics(self, operation: tf.Operation, statistics: Sequence[_Holds]) -> _Holds:
        """What is made of statistics alone."""
        if not statistics:
            return _NOTHING
        root = statistics[0].root
        cancels = all(each.cancels for each in statistics) or (
            operation.type == "StopGradient" and root.op.type in _EXTREMES)
        return _Holds(None, root, cancels=cancels)

    def _put_called(self, operation: tf.Operation, tensor: tf.Tensor) -> None:
        """Looks into a nested function, or the branches of a condition, for ``tensor`` alone.

        What a function hands on for its gradients it may have made where nobody is to look.
        """
        holds = _NOTHING
        for search, outputs in self._bodies(operation):
            result = outputs[tensor.value_index]
            search.look([result])
            self.found += search.found
            holds = search._of(result) if holds is _NOTHING else holds
        self._holds[id(tensor)] = holds

    def _bodies(self, operation: tf.Operation) -> list[tuple[_Search, Sequence[tf.Tensor]]]:
        """Searches in what ``operation`` calls, and what that returns."""
        if id(operation) not in self._inner:
            given = [self._of(value) for value in operation.inputs]
            first = int(operation.type in provenance.BRANCHES)  # behind a branch's condition
            graphs = [_tf.graph_of_call(operation, name) for name in _tf.functions_of(operation)]
            made = self._inner[id(operation)] = [
                (_Search(self._tower), graph.outputs) for graph in graphs if graph is not None]
            for (search, _), graph in zip(made, filter(None, graphs)):
                search._holds = {id(argument): holds for argument, holds in zip(
                    graph.inputs, given[first:])}
        return self._inner[id(operation)]
