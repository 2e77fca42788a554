"""Runs a function written for one device on the towers, inside a ``tf.function``.

Goes in: the function, such as a step of Keras, and its arguments, with sub-batches among them.
Comes out: one device's results.

The function is traced once, with an unknown number of rows, in a replica context of one replica
that has all rows.  The graph is then partitioned: see :mod:`propagate` and :mod:`partition`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.batch import rows as rows_lib
from towerstrategy.merge import merging
from towerstrategy.placement import scopes as scopes_lib
from towerstrategy.sharding import propagate, traffic
from towerstrategy.sharding.across import Across
from towerstrategy.sharding.builder import Builder, Ref
from towerstrategy.sharding.layout import BRANCHES, LOOPS, Layout
from towerstrategy.sharding.partition import Partition
from towerstrategy.sharding.rules.families import STOP_GRADIENTS
from towerstrategy.sharding.spec import REPLICATED, Sharded, Spec
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.values import Value, captured

_log = logging.getLogger("towerstrategy")
_NO_GRADIENT = (
    "cannot be taken by a tape that was not there when it was traced, as it has loops, branches, "
    "calls, tf.stop_gradient or tf.custom_gradient. Put the tape into it.")


def run(strategy: Any, fn: Callable[..., Any], args: Any, kwargs: Any,
        any_rows: bool = True) -> Any:
    """What one device would return for ``fn(*args, **kwargs)`` with all rows.

    One device runs it if one is enough, and in eager code: this is for debugging, so the function
    should print everything once.

    Args:
      strategy: the strategy whose towers run it.
      fn: the function, written for one device.
      args: its arguments; per-replica values with rows are sharded, all others are replicated.
      kwargs: its keyword arguments, likewise.
      any_rows: whether it may be traced for any number of rows.

    Raises:
      ValueError: components of the batch have different numbers of rows.
    """
    devices, extended = strategy.extended.worker_devices, strategy.extended
    alone = len(devices) == 1 and extended.workers is None
    if tf.executing_eagerly() or alone and not (extended.placement.rows or extended.modes.compiles):
        return _on_one_device(strategy, fn, args, kwargs)
    with no_garbage():
        return _on_towers(strategy, fn, args, kwargs, any_rows)


def _on_one_device(strategy: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    devices = strategy.extended.worker_devices
    device = devices[0] if len(devices) == 1 else strategy.extended.merge_device
    with tf.device(device):
        args, kwargs = tf.nest.map_structure(lambda leaf: whole(strategy, leaf), (args, kwargs))
    if not tf.executing_eagerly():
        fn = _tf.autograph_convert(fn)
    with contexts.OneReplicaContext(strategy), tf.device(device):
        return fn(*args, **kwargs)


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Switches Python's garbage collector off during a trace, whose objects stay in use.

    It would go over all of them each time: a tenth of a first step.  Afterwards it goes over them
    once: what the trace no longer needs is freed before TensorFlow prepares the step.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.collect(0)  # the objects made since the switch
            gc.enable()


def _on_towers(strategy: Any, fn: Callable[..., Any], args: Any, kwargs: Any, any_rows: bool
               ) -> Any:
    graph = tf.compat.v1.get_default_graph()
    with tf.device(strategy.extended.host_device):
        inputs = _Inputs(strategy, (args, kwargs))
    inputs.check_rows()
    traced = _traced(strategy, fn, inputs, any_rows)
    if traced is None:
        return _on_one_device(strategy, fn, args, kwargs)
    layout = propagate.propagate(traced, [
        *inputs.specs, *[REPLICATED] * (len(traced.inputs) - len(inputs.specs))],
        traffic.of_strategy(strategy, inputs.known_rows))
    name, other = getattr(fn, "__name__", "step"), has_other_gradients(layout)
    if other and _tf.may_be_recorded():
        _log.warning("%s runs on one device, with all rows, as a tape around it records. Put the "
                     "tape into it, so that the towers run it.", name)
        return _on_one_device(strategy, fn, args, kwargs)
    _report(strategy, layout)
    _tf.hand_on_functions(traced, graph)
    towers = towers_of(strategy, graph, lambda tower, _, batch: inputs.count(
        towers, tower, batch, layout.made))
    values, partition = inputs.values(towers, traced), Partition(towers)
    devices = [strategy.extended.merge_device if isinstance(layout.specs[tensor.name], Sharded)
               else "" for tensor in traced.outputs]  # returned rows, such as predictions
    outputs = [value.whole() for value in partition.run(layout, values, output_devices=devices)]
    strategy.extended.crossings = dict(towers.crossings)
    tensors, _ = finished(strategy, partition, zip(outputs, traced.outputs), name, other)
    return _filled(traced.structured_outputs, tensors, expand_composites=True)


def has_other_gradients(layout: Layout) -> bool:
    """Whether a tape cannot differentiate the towers' operations like those that were traced."""
    return any(operation.is_call or operation.type in (*BRANCHES, *LOOPS)
               for each in layout.with_bodies() for operation in each.order
               if not getattr(each.plans[operation.name], "inlined", False)) or any(
        operation.type in STOP_GRADIENTS or _tf.has_own_gradient(operation.operation)
        for each in layout.with_bodies() for operation in each.passed)


def finished(strategy: Any, partition: Partition, outputs: Iterable[tuple[Ref, tf.Tensor]],
             name: str, other_gradients: bool = False
             ) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Makes a function of the collected nodes and calls it, or imports them into the graph.

    Args:
      strategy: the strategy.
      partition: has made the nodes.
      outputs: the outputs, each with its tensor in the traced graph.
      name: the function's name.
      other_gradients: see :func:`has_other_gradients`.

    Returns:
      A tensor for each output, and the operations that must run, on which these tensors depend.
    """
    towers, extended, outputs = partition.towers, strategy.extended, list(outputs)
    builder, effects = towers.builder, list(dict.fromkeys(partition.effects))
    towers.across.finish()
    towers.rewire()
    if extended.keep_graphs or extended.modes.keeps_graph or extended.modes.compiles \
            or extended.workers or extended.placement.micro_batches > 1 or _tf.may_be_recorded():
        builder.finish()
    else:  # nothing needs the operations in Python
        builder.call_all(_tf.new_name(name), dict(outputs), [*effects, *partition.reads],
                         f"the gradient of {name} {_NO_GRADIENT}" if other_gradients else "")
    if extended.modes.compiles:
        extended.xla.mark(builder.graph, builder.operations.values())
    if extended.placement.micro_batches > 1:
        extended.stages.put_in_order(builder.graph, builder.names_by_scope(towers.scopes),
                                     [builder.tensor(ref) for ref, _ in outputs])
    must_run = list(map(builder.operations.__getitem__, effects))
    with tf.control_dependencies(must_run):
        return [_returned(builder, ref, traced, extended.merge_device)
                for ref, traced in outputs], must_run


def _returned(builder: Builder, ref: Ref, traced: tf.Tensor, default: str) -> tf.Tensor:
    """The tensor returned for an output, on its device; only its consumers wait for the step."""
    tensor = builder.tensor(ref)
    tensor.set_shape(traced.shape)
    _tf.copy_handle_data(traced, tensor)
    with tf.device(builder.device(ref) or tensor.device or default):
        return tf.identity(tensor)


def whole(strategy: Any, leaf: Any) -> Any:
    """All rows of a component of the batch; any other argument as it is."""
    if not isinstance(leaf, _tf.PerReplica):
        return leaf
    parts = list(leaf.values)
    if any(isinstance(part, tf.Tensor) and part.shape.rank == 0 for part in parts):
        raise ValueError(
            f"each tower was given a number, {parts[0].dtype.name}, where its rows of a batch were "
            "expected: a dataset's elements must be batches, see tf.data.Dataset.batch.")
    rows = parts[0] if len(parts) == 1 else merging.concat(parts, 0)
    workers = strategy.extended.workers
    return rows if workers is None else workers.gather(rows)


class _Inputs:
    """The arguments of the function: which tensors hold rows, and each tower's part of them."""

    def __init__(self, strategy: Any, arguments: Any) -> None:
        self._strategy = strategy
        # A lone tower gets plain tensors; those with as many rows as the first one are the batch.
        alone = len(strategy.extended.worker_devices) == 1 and strategy.extended.workers is None
        self._lone_rows = [leaf.shape[0] for leaf in tf.nest.flatten(arguments)
                           if alone and isinstance(leaf, tf.Tensor) and leaf.shape.rank]
        self.structure = tf.nest.map_structure(self._as_argument, arguments)
        self.tensors = [leaf for leaf in tf.nest.flatten(self.structure)
                        if isinstance(leaf, (tf.Tensor, _Component))]
        self.specs: list[Spec] = [
            Sharded(0, group=leaf.group) if isinstance(leaf, _Component) else REPLICATED
            for leaf in self.tensors]
        self._first = {leaf.group: leaf for leaf in reversed(self.tensors)  # of each batch
                       if isinstance(leaf, _Component)}

    def _as_argument(self, leaf: Any) -> Any:
        """A component of the batch as :class:`_Component`; any other argument as it is."""
        if self._lone_rows and isinstance(leaf, tf.Tensor) and leaf.shape.rank \
                and leaf.shape[0] == self._lone_rows[0]:
            return _Component([leaf], None, None)
        if not isinstance(leaf, _tf.PerReplica):
            return leaf
        parts = list(leaf.values)
        if all(isinstance(part, tf.Tensor) and part.shape.rank for part in parts):
            return _Component(parts, getattr(leaf, "rows", None), self._strategy.extended.workers,
                              getattr(leaf, "batch", 0))
        known, kind = self._strategy.extended.done_with_all_rows, type(parts[0]).__name__
        if len(parts) > 1 and kind not in known:
            known[kind] = "a component of the batch", 0, ""
            _log.info("Operations on a %s of the batch run once, with the rows of all towers.",
                      kind)
        rows = whole(self._strategy, leaf)
        is_rebuilt = isinstance(rows, tf.SparseTensor) and rows.shape.rank \
            or isinstance(rows, tf.RaggedTensor) and rows.uniform_row_length is None
        return _Whole(parts, rows, getattr(leaf, "batch", 0)) \
            if is_rebuilt and self._strategy.extended.workers is None else rows

    def check_rows(self) -> None:
        """Raises if components of the batch have different numbers of rows on a tower."""
        rows = [leaf for leaf in self.tensors if isinstance(leaf, _Component) and not leaf.group]
        for other in rows[1:]:
            for tower, (first, part) in enumerate(zip(rows[0].parts, other.parts)):
                sizes = first.shape[0], part.shape[0]
                if None not in sizes and sizes[0] != sizes[1]:
                    raise ValueError(
                        "all components of a batch must have the same number of rows, but tower "
                        f"{tower} got {sizes[0]} of {first.shape} and {sizes[1]} of {part.shape}.")

    def type_specs(self, known_rows: bool) -> list[tf.TensorSpec]:
        """The signature to trace the function with: an unknown number of rows, or the batch's."""
        return [tf.TensorSpec(leaf.with_known_rows if known_rows and isinstance(leaf, _Component)
                              else leaf.shape, leaf.dtype) for leaf in self.tensors]

    @property
    def known_rows(self) -> int | None:
        """The batch's number of rows; None if it is not known while tracing."""
        return self._first[""].with_known_rows[0] if "" in self._first else None

    def values(self, towers: Towers, traced: Any) -> list[Value]:
        """The value of each input of the traced graph."""
        take = towers.builder.take
        args = [Value(towers, spec, leaf.shape, None, list(map(take, leaf.parts)).__getitem__)
                if isinstance(leaf, _Component) else Value(towers, spec, leaf.shape, take(leaf))
                for leaf, spec in zip(self.tensors, self.specs)]
        return [*args, *(captured(towers, outer, inner.shape) for outer, inner in traced.captures)]

    def count(self, towers: Towers, tower: Any, batch: str, made: Mapping[str, int]) -> Ref | None:
        """A tower's number of rows; for "each" the numbers of all workers' towers, if known.

        ``made``: the numbers of rows of batches that the function makes itself.
        """
        if batch not in self._first:
            sizes = rows_lib.split_rows(
                made[batch], towers.replicas, self._strategy.extended.inputs.units)
            return towers.number(sizes if tower == "each" else sizes[towers.first + tower])
        builder, first = towers.builder, self._first[batch]
        if tower == "each":
            return None if first.counts is None else builder.take(first.counts)
        part = first.parts[tower]
        if part.shape[0] is not None:
            return towers.number(part.shape[0])
        # On the tower, so that rows in a GPU's memory need not cross for their shape.
        shape = builder.make("Shape", [builder.take(part)], towers.stage_devices[tower][0],
                             f"{towers.scopes[tower]}Shape", out_type=tf.int64)
        return towers.entry(shape, 0)


class _Component:
    """One component of the batch: the towers' rows, and all workers' numbers of rows if known.

    ``group`` names the batch, of a step that has several.  ``shape`` and ``with_known_rows`` are
    the shapes of all rows: for any number of rows, and for their number if it is known.
    """

    def __init__(self, parts: Sequence[tf.Tensor], counts: tf.Tensor | None,
                 workers: Any, batch: int = 0) -> None:
        self.parts, self.counts, self.dtype = list(parts), counts, parts[0].dtype
        self.group = f"batch {batch}" if batch else ""
        shape = parts[0].shape
        for part in parts[1:]:
            shape = shape.most_specific_compatible_shape(part.shape)
        sizes = [part.shape[0] for part in self.parts]
        if workers is not None:
            static = None if counts is None else tf.get_static_value(counts)
            sizes = [None] if static is None else static.tolist()
        total = None if None in sizes else sum(sizes)
        self.shape, self.with_known_rows = (
            tf.TensorShape([size]).concatenate(shape[1:]) for size in (None, total))


class _Whole(_Component):
    """A sparse or ragged component: its values are all towers', the parts only count their rows.

    In the traced function its first dimension is the batch's: what is made dense is sharded.
    """

    def __init__(self, parts: Sequence[Any], rows: tf.RaggedTensor | tf.SparseTensor,
                 batch: int) -> None:
        super().__init__([tf.zeros([rows_lib.rows_in(part)]) for part in parts], None, None, batch)
        self._rows = rows

    def filled(self, counted: tf.Tensor) -> tf.RaggedTensor | tf.SparseTensor:
        """The component in the traced function; ``counted`` has an entry for each row."""
        rows, count = self._rows, tf.shape(counted, tf.int64)[0]
        if isinstance(rows, tf.RaggedTensor):
            numbers = rows.value_rowids()
            return tf.RaggedTensor.from_value_rowids(
                rows.values, numbers, tf.cast(count, numbers.dtype), validate=False)
        sizes = [size if size is not None else rows.dense_shape[dim]
                 for dim, size in enumerate(rows.shape[1:], 1)]
        return tf.SparseTensor(rows.indices, rows.values, tf.stack([count, *sizes]))


def towers_of(strategy: Any, graph: tf.Graph,
              counts: Callable[[int | str, tf.DType, str], Any]) -> Towers:
    """The strategy's towers, for nodes of ``graph``; ``counts`` as for :class:`Towers`."""
    placement, builder = strategy.extended.placement, Builder(graph)
    stage_devices = [[_full(device) for device in placement.row(tower)]
                     for tower in range(len(placement.towers))]
    scopes = [f"{scopes_lib.of_tower(tower, device)}/"
              for tower, device in enumerate(strategy.extended.worker_devices)]
    spare = strategy.extended.homes.least if placement.balanced and not placement.on_cpu else ""
    across = Across(strategy.extended.workers, graph, builder, builder.take)
    return Towers(builder, stage_devices, _full(strategy.extended.merge_device),
                  _full(strategy.extended.host_device), scopes, counts, placement.on_cpu,
                  strategy.extended.draws_rows, across, spare)


def _full(device: str) -> str:
    return tf.DeviceSpec.from_string(device).to_string()


def _filled(structure: Any, tensors: Iterable[tf.Tensor], **options: Any) -> Any:
    """``structure`` with these tensors in place of those in it, in their order."""
    left = iter(tensors)

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, _Whole):
            return leaf.filled(next(left))
        return next(left) if isinstance(leaf, (tf.Tensor, _Component)) else leaf

    return tf.nest.map_structure(filled, structure, **options)


def _traced(strategy: Any, fn: Callable[..., Any], inputs: _Inputs, any_rows: bool) -> Any:
    """The traced graph of ``fn``; None for one row whose number is used in Python.

    Of a static size of one it would not be known whether it counts the row.
    """
    converted = _tf.autograph_convert(fn)

    def one_device(*tensors: tf.Tensor) -> Any:
        args, kwargs = _filled(inputs.structure, tensors)
        return converted(*args, **kwargs)

    def trace(known_rows: bool) -> Any:
        # TensorFlow shares nested functions by their devices, not by their replica context: the
        # empty device keeps those of a step apart from those that strategy.run has traced.
        with contexts.OneReplicaContext(strategy), tf.device(None), tf.device(""):
            return _tf.trace(one_device, inputs.type_specs(known_rows),
                             getattr(fn, "__name__", "step"))

    try:
        if any_rows or inputs.known_rows is None:
            return trace(known_rows=False)
    except Exception:
        if inputs.known_rows is None:
            raise
    # The function may use the number of rows in Python.
    return None if inputs.known_rows == 1 else trace(known_rows=True)


def _report(strategy: Any, layout: Layout) -> None:
    """Notes the operations that run once, with all rows, for lack of a rule; logs new types."""
    known = strategy.extended.done_with_all_rows
    for containing, operation in ((each, operation) for each in layout.with_bodies()
                                  for operation in each.fallbacks):
        if operation.type not in known:
            known[operation.type] = operation.name, sum(traffic.rows_before(
                containing, operation).values()), _tf.line_of(operation.operation)
            _log.info("%s (%s) runs once, with the rows of all towers, as no rule shards it: "
                      "%d bytes per example are gathered. %s Its inputs: %s", operation.type,
                      *known[operation.type], ", ".join(
                          f"{each.shape} {spec}" for each, spec
                          in zip(operation.inputs, containing.inputs_of(operation))))
