"""Copies of what tower 0 has traced, for the other towers.

Goes in: tower 0's operations.  Comes out: what :mod:`threads` would have made by tracing every
tower, for the price of one trace.

Between two sync points (``merge_call``) of the towers, tower 0's operations form a stretch of the
graph. At the next one the stretch is copied for each other tower: the same operations, on that
tower's device, with that tower's inputs, tower-local variables, share and random seeds put in.  The
tensor that another tower has in place of one of tower 0's is looked up in a table; a tensor that
stands in no table is the same for all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import results
from towerstrategy.sharding import graphs
from towerstrategy.sharding.builder import Builder, Ref
from towerstrategy.sharding.rules.registry import Op
from towerstrategy.variables import tower_local


class NeedsOwnTrace(BaseException):
    """The function must be traced for each tower; the message says why.

    Not an ``Exception``, so that the traced code's own handlers do not take it for one of theirs.
    """


class Copier:
    """Copies stretches of ``graph`` from tower 0 to the other towers, in their name ``scopes``."""

    def __init__(self, strategy: tf.distribute.Strategy, graph: tf.Graph,
                 scopes: Sequence[str]) -> None:
        self._tensors: dict[str, list[tf.Tensor]] = {}  # of towers 1.., by the name of tower 0's
        self._operations: dict[str, list[tf.Operation]] = {}
        self._graph, self._scopes = graph, scopes
        self._variables: Callable[[], list[Any]] = strategy.extended.variables
        placement = strategy.extended.placement
        self._rows = [[tf.DeviceSpec.from_string(device).to_string() for device in
                       placement.row(tower)] for tower in range(len(scopes))]
        # In the order of their work: stateful operations wait for those that were made before.
        self._turns = sorted(range(1, len(scopes)),
                             key=lambda tower: (tower % placement.micro_batches, tower))
        self._firsts: list[str] = []
        self._done = 0
        self._waiting: list[Op] = []
        self._kept: set[str] = set()
        self._stages: dict[str, int | None] = {}  # device as written -> its stage in tower 0
        self._safe_functions: set[str] = set()
        self._shared: set[str] = set()  # one of which serves all towers

    def skip(self) -> None:
        """Leaves out of the copies what has been added to the graph up to here."""
        self._done = len(self._graph.get_operations())

    def copy(self, handed: Any = ()) -> None:
        """Copies tower 0's operations since the last :meth:`copy` or :meth:`skip`.

        Operations without effect that nothing needs yet wait for a later call.

        Args:
          handed: what tower 0 hands to the others: a nest of tensors, operations and other values.
        """
        self._firsts += [operation.name for operation in self.added()]
        known = {operation.name: operation
                 for operation in [*self._waiting, *map(Op, self.added())]}
        leaves = tf.nest.flatten(handed, expand_composites=True)
        roots = [name for name, operation in known.items() if operation.is_stateful]
        roots += [leaf.name if isinstance(leaf, tf.Operation) else leaf.op.name for leaf in leaves
                  if isinstance(leaf, tf.Operation) or tf.is_symbolic_tensor(leaf)]
        # What writes to the temporary copy of a variable was made before that.
        stretch = graphs.in_order(roots, known)
        needed = {operation.name for operation in stretch}
        self._waiting = [operation for name, operation in known.items() if name not in needed]
        if stretch:
            for operation in stretch:
                for function in _tf.functions_of(operation.operation):
                    self._check_function(function)
            self._shared.update(_shared_reads(stretch, self._tensors))
            self._shared.update(list(self._shared_casts(stretch)))
            self._import([each for each in stretch if each.name not in self._shared])
        self.skip()

    def added(self) -> list[tf.Operation]:
        """Tower 0's operations since the last :meth:`copy` or :meth:`skip`."""
        return [operation for operation in self._graph.get_operations()[self._done:]
                if operation.type != "Placeholder" and operation.name not in self._kept]

    def keep(self, since: int) -> None:
        """Leaves out of the copies the operations since operation number ``since``."""
        self._kept.update(operation.name for operation in self._graph.get_operations()[since:])

    def _check_function(self, name: str) -> None:
        """A function draws the same numbers wherever it is called, so it must draw none."""
        if name in self._safe_functions:
            return
        self._safe_functions.add(name)
        if _tf.asserts(self._graph, name):
            raise NeedsOwnTrace("an assertion in it would name tower 0 whichever tower fails")
        definition = _tf.function_definition(self._graph, name)
        for node in definition.node_def if definition is not None else ():
            if "seed2" in node.attr:
                raise NeedsOwnTrace(f"{node.op} inside a nested function would draw the same "
                                    "numbers on every tower")
            for called in _tf.functions_in_attributes(node):
                self._check_function(called)

    def put_local_variables(self) -> Iterator[tf.Tensor]:
        """Puts other towers' tower-local variables in place of tower 0's; gives new ones' handles.
        """
        captured = {id(outer): inner for outer, inner in self._graph.captures}
        for variable in self._variables():
            if isinstance(variable, tower_local.TowerLocalVariable):
                own, *others = variable._values
                first = captured.get(id(own.handle))
                if first is not None and first.name not in self._tensors:
                    self.put(first, [self._graph.capture(part.handle) for part in others])
                    yield first

    def _shared_casts(self, stretch: Sequence[Op]) -> Iterator[str]:
        """The names of casts of weights to halves, which are now with the weight.

        Not where somebody takes the weight itself, which crosses in any case.
        """
        homes = {inner.name: getattr(outer, "device", "") for outer, inner in self._graph.captures}
        for operation in filter(_tf.makes_half, (each.operation for each in stretch)):
            read = operation.inputs[0].op
            home = homes.get(read.inputs[0].name) if read.name in self._shared else None
            if home and all(map(_tf.makes_half, read.outputs[0].consumers())):
                _tf.set_device(operation, home)
                yield operation.name

    def _import(self, nodes: Sequence[Op]) -> None:
        builder = Builder(self._graph)
        copies: dict[int, dict[str, str]] = {}  # by tower: an operation -> its node
        outside: list[tuple[str, tf.Operation]] = []  # what nodes wait for besides
        for tower in self._turns:
            own, refs = copies.setdefault(tower, {}), dict[str, Ref]()
            for operation in nodes:
                inputs = [refs[tensor.name] if tensor.name in refs
                          else builder.take(self.tensor(tensor, tower))
                          for tensor in operation.inputs]
                before = operation.operation.control_inputs
                controls = [own[each.name] for each in before if each.name in own]
                made, name = builder.copy(
                    operation, inputs, self._device(operation.operation.device, tower),
                    self._scopes[tower], controls, self._name(operation.name, tower),
                    _with_seed_of(operation, tower))
                own[operation.name] = name
                refs.update(zip(operation.output_names, made))
                outside += [(name, self.operation(each, tower))
                            for each in before if each.name not in own]
        with tf.control_dependencies(None):
            builder.finish()
        for name, before in outside:
            _tf.add_control_input(builder.operation(name), before)
        for operation in nodes:
            self.put_operation(operation.operation, [
                builder.operation(copies[tower][operation.name]) for tower in sorted(copies)])

    def _name(self, name: str, tower: int) -> str:
        if self._scopes[0] in name:
            return name.replace(self._scopes[0], self._scopes[tower], 1)
        return f"{name}_{self._scopes[tower]}"

    def _device(self, device: str, tower: int) -> str:
        """The device of ``tower``'s copy of an operation on ``device``."""
        if device not in self._stages:
            name = tf.DeviceSpec.from_string(device).to_string()
            self._stages[device] = self._rows[0].index(name) if name in self._rows[0] else None
        stage = self._stages[device]
        return device if stage is None else self._rows[tower][stage]

    # What the other towers have in place of tower 0's tensors and operations.

    def put(self, first: tf.Tensor, others: Sequence[tf.Tensor]) -> None:
        """Says what towers 1.. have in place of ``first``."""
        self._tensors[first.name] = list(others)

    def put_operation(self, first: tf.Operation, others: Sequence[tf.Operation]) -> None:
        """The same for an operation and its outputs."""
        self._operations[first.name] = list(others)
        for index, output in enumerate(first.outputs):
            self.put(output, [other.outputs[index] for other in others])

    def tensor(self, first: tf.Tensor, tower: int) -> tf.Tensor:
        """``tower``'s counterpart of tower 0's ``first``."""
        others = self._tensors.get(first.name)
        if others is None and first.op.name in self._operations:
            raise NeedsOwnTrace(f"operation {first.op.name!r} got outputs after it was copied, as "
                                "a loop or branch does when its gradient is taken")
        if others is None or tower == 0:
            return first
        other = others[tower - 1]
        other.set_shape(first.shape)
        return other

    def operation(self, first: tf.Operation, tower: int) -> tf.Operation:
        others = self._operations.get(first.name)
        return first if others is None or tower == 0 else others[tower - 1]

    def operations(self) -> list[set[str]]:
        """The names of the operations that each tower has."""
        return [set(self._firsts), *({others[tower].name for others in self._operations.values()}
                                     for tower in range(len(self._rows) - 1))]

    def values(self, first: Any) -> tuple[Any, ...]:
        """What each tower has in place of any value of tower 0's, whose tensors are looked up."""
        for leaf in tf.nest.flatten(first):
            if _may_hold_tensors(leaf):
                raise NeedsOwnTrace(f"it hands on a {type(leaf).__name__}, in which tensors cannot "
                                    "be looked up")

        def of(tower: int) -> Callable[[Any], Any]:
            return lambda leaf: self.operation(leaf, tower) if isinstance(leaf, tf.Operation) \
                else leaf if _tf.is_eager(leaf) else self.tensor(leaf, tower)

        others = range(1, len(self._rows))
        return first, *(results.map_tensors(of(tower), first) for tower in others)


def _shared_reads(stretch: Sequence[Op], differing: Container[str]) -> Iterator[str]:
    """The names of the reads that give every tower the same: of the one copy of a variable.

    Args:
      stretch: operations of tower 0.
      differing: the names of the tensors that differ between the towers: a tower-local variable has
        its handle here.
    """
    written = {operation.input_names[place] for operation in stretch if operation.has_effect
               for place in operation.handles}
    for operation in stretch:
        if operation.type == "ReadVariableOp" and not operation.controls \
                and operation.input_names[0] not in written \
                and operation.input_names[0] not in differing:
            yield operation.name


def _with_seed_of(operation: Op, tower: int) -> bytes:
    """Its attributes; of a stateful random operation with other numbers than tower 0's."""
    node = tf.compat.v1.NodeDef.FromString(operation.definition.attributes)
    if "seed2" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i):
        node.attr["seed2"].i = (node.attr["seed2"].i + tower * _tf.SEED_STEP) % 2**31
    return node.SerializeToString(deterministic=True)


# What has attributes, and no tensors in them that differ between towers.
_PLAIN = (tf.Tensor, tf.Operation, _tf.CompositeTensor, tf.Variable, _tf.DistributedVariable,
          tf.DType, tf.TensorShape, tf.TypeSpec, enum.Enum, type)


def _may_hold_tensors(value: Any) -> bool:
    """Whether an object or a function may hold tensors, in attributes or in its closure."""
    return _tf.is_unread_variable(value) or (
        hasattr(value, "__dict__") and not isinstance(value, _PLAIN))
