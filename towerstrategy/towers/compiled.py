"""XLA for what the towers do between their meetings.

Goes in: a graph in which towers and meetings are traced, and which operations are a tower's.  Comes
out: the same graph, in which functions that XLA compiles do the towers' work.

XLA compiles for one device and works on values, so what has to do with variables, and what is done
where the towers meet, stays outside.  An operation's level is how often its inputs have been
outside on the way to it; a tower's operations of one level become one function, which has no way
from its results back to its arguments.  A step without a meeting but the gradients' is one function
a tower; each all-reduce or read of what was just written begins another.  All towers call the same.

What stays outside besides (see :mod:`compilable`): random numbers, lookups in an embedding (so that
its table does not cross), loops and branches that write variables, and small numbers that nothing
large comes of (a seed's next state, a metric's quotient).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.towers import compilable, contexts

# Elements. What is known to be so small, and leads to the outside, is not worth a call.
SMALL = 8

# tower 0's operation -> every tower's
Counterparts = Callable[[tf.Operation], Sequence[tf.Operation]]


def compile_stretches(graph: tf.Graph, operations: Iterable[tf.Operation],
                      counterparts: Counterparts, devices: Sequence[str],
                      handed: Any) -> Any:
    """Puts functions that XLA compiles in the place of the towers' operations.

    Args:
      graph: the graph that is being traced.
      operations: tower 0's.
      counterparts: every tower's, for one of ``operations``.
      devices: the towers' devices.
      handed: a nest with the tensors that ``graph`` is going to return.

    Returns:
      ``handed``, with the functions' results.

    Raises:
      ValueError: an operation, named with its layer, that XLA cannot compile.
    """
    return _Stretches(graph, operations, counterparts, devices, handed).compiled()


_LEFT_OUT = (
    "The model was compiled with jit_compile=True, and XLA could not compile what a tower does. No "
    "trained weight has been changed by this step. The operation's name says in which layer it is: "
    "give what grows a fixed size (maximum_iterations of a loop), or leave jit_compile out.")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Within, errors of XLA's say how to do without it."""
    try:
        yield
    except tf.errors.OpError as error:
        if "tf2xla" in error.message or "XLA compilation" in error.message:
            _tf.add_note(error, _LEFT_OUT, traced=False)
        raise


class _Stretches:
    """The towers' operations, told by the names of tower 0's."""

    def __init__(self, graph: tf.Graph, operations: Iterable[tf.Operation],
                 counterparts: Counterparts, devices: Sequence[str], handed: Any) -> None:
        self._graph = graph
        self._devices = [tf.DeviceSpec.from_string(device).to_string() for device in devices]
        self._handed = handed
        # Tower 0's operation -> every tower's. Where tower 0 repeats one, the others have it once.
        self._of: dict[str, list[tf.Operation]] = {}
        self._repeats: dict[str, list[tf.Operation]] = {}
        # What stands for an operation: itself, or the first of tower 0 that it is a copy of.
        self._first: dict[str, str] = {}
        for operation in operations:
            self._note(operation, list(counterparts(operation)))
        self._all = {operation.name: operation for operation in graph.get_operations()}
        self._returned = {tensor.name: tensor for tensor in _tensors(handed)}
        self._before = self._what_comes_before()
        self._order = self._in_order()
        self._inside: set[str] = set()
        self._levels: dict[str, int] = {}
        self._can = compilable.Compilable(graph, self._devices[0])
        self._now: dict[str, tf.Tensor] = {}  # a tensor's name -> the function's result
        self._calls: dict[str, tf.Operation] = {}  # an operation's name -> the function's call

    def _note(self, operation: tf.Operation, others: list[tf.Operation]) -> None:
        first = self._first.get(others[-1].name)
        if first is None:
            self._of[operation.name] = others
            self._first.update((other.name, operation.name) for other in others)
        else:
            self._repeats.setdefault(first, []).append(operation)
            self._first[operation.name] = first

    def compiled(self) -> Any:
        self._choose()
        self._check()
        members: dict[int, list[str]] = {}
        for name in self._order:
            if name in self._inside:
                members.setdefault(self._levels[name], []).append(name)
        for level in sorted(members):
            self._call(members[level])
        self._rewire()
        return tf.nest.map_structure(self._current, self._handed, expand_composites=True)

    # What comes before what.

    def _what_comes_before(self) -> dict[str, set[str]]:
        """For each operation what it waits for, by data, control or as it uses the same resource.
        """
        before: dict[str, set[str]] = {}
        reads: dict[str, list[str]] = {}
        written: dict[str, str] = {}
        for name, operation in self._all.items():
            mine = before.setdefault(self._stands_for(name), set())
            mine.update(self._stands_for(tensor.op.name) for tensor in operation.inputs)
            mine.update(self._stands_for(control.name) for control in operation.control_inputs)
            resources = {tensor.name for tensor in operation.inputs if tensor.dtype == tf.resource}
            if not resources:
                continue
            writes = {tensor.name for tensor in _tf.written_resources(operation)}
            for handle in resources:
                if handle in written:
                    mine.add(self._stands_for(written[handle]))
                if handle in writes:
                    mine.update(self._stands_for(read) for read in reads.pop(handle, ()))
                    written[handle] = name
                else:
                    reads.setdefault(handle, []).append(name)
        for name, mine in before.items():
            mine.discard(name)
        return before

    def _stands_for(self, name: str) -> str:
        return self._first.get(name, name)

    def _in_order(self) -> list[str]:
        """All that has an effect or is returned, and what it needs, each after what it needs."""
        order: list[str] = []
        seen: set[str] = set()
        ends = [name for name, operation in self._all.items() if operation.op_def.is_stateful]
        ends += [tensor.op.name for tensor in self._returned.values()]
        for end in ends:
            waiting = [(self._stands_for(end), False)]
            while waiting:
                name, done = waiting.pop()
                if done:
                    order.append(name)
                elif name not in seen:
                    seen.add(name)
                    waiting.append((name, True))
                    waiting += [(other, False) for other in self._before[name]]
        return order

    # What is compiled.

    def _choose(self) -> None:
        """Which operations go into functions, and the level of each."""
        self._inside = {name for name in self._order if name in self._of
                        and self._can.compile(self._all[name])}
        self._inside -= self._steering()
        while True:
            self._set_levels()
            left = self._cut_lists() | self._small_levels()
            if not left:
                return
            self._inside -= left

    def _steering(self) -> set[str]:
        """Small values that come of nothing compiled and that something outside waits for."""
        light: set[str] = set()
        for name in self._order:
            if name in self._inside and _is_small(self._all[name]) \
                    and self._before[name] & self._inside <= light:
                light.add(name)
        steering: set[str] = set()
        returned = {self._stands_for(tensor.op.name) for tensor in self._returned.values()}
        wanted = returned.copy()
        for name in reversed(self._order):
            if name in self._inside and not (name in light and name in wanted):
                continue
            if name in light:
                steering.add(name)
            wanted |= self._before[name]
        return steering

    def _set_levels(self) -> None:
        self._levels = {}
        for name in self._order:
            inside = name in self._inside
            self._levels[name] = max(
                (self._levels.get(other, 0) + (not inside and other in self._inside)
                 for other in self._before[name]
                 if not self._is_constant(other)), default=0)

    def _small_levels(self) -> set[str]:
        """The operations of levels that have small values alone."""
        members: dict[int, set[str]] = {}
        for name in self._inside:
            members.setdefault(self._levels[name], set()).add(name)
        return {name for names in members.values() for name in names
                if all(_is_small(self._all[name]) for name in names)}

    def _is_constant(self, name: str) -> bool:
        """Whether every function has its own copy, so that XLA knows the value."""
        operation = self._all[name]
        return operation.type == "Const" and not operation.control_inputs

    def _cut_lists(self) -> set[str]:
        """Operations between which a list of tensors passes, which no function can be given."""
        cut = set()
        for name in self._order:
            for tensor in self._all[name].inputs:
                if tensor.dtype == tf.variant:
                    other = self._stands_for(tensor.op.name)
                    ends = {name, other} & self._inside
                    if ends and (len(ends) < 2 or self._levels[name] != self._levels[other]):
                        cut |= ends
        return cut

    # What cannot be.

    def _check(self) -> None:
        """Complains of what leads to compiled operations and should be compiled as well."""
        leads_inside: set[str] = set()
        for name in reversed(self._order):
            if name in self._inside or name in leads_inside:
                leads_inside.update(self._stands_for(tensor.op.name)
                                    for tensor in self._all[name].inputs)
        for name in self._order:
            operation = self._all[name]
            if name in self._of and name in leads_inside and name not in self._inside \
                    and not self._can.leave(operation):
                self._can.refuse(operation)

    # The functions.

    def _call(self, names: Sequence[str]) -> None:
        """One function for these operations of tower 0's, which every tower calls."""
        members = set(names)
        nodes = [self._all[name] for name in names if not self._is_constant(name)]
        if not nodes:
            return
        inputs, constants, controls = self._inputs(nodes, members)
        outputs = self._outputs(nodes, members)
        if not outputs:
            return
        function = _function(self._graph, [*constants, *nodes], inputs, outputs, self._stands_for)
        for tower, device in enumerate(self._devices):
            given = [self._current(self._of[user][tower].inputs[index])
                     for user, index in inputs.values()]
            waits = [self._of[control][tower] if control in self._of else self._all[control]
                     for control in controls]
            with self._graph.as_default(), tf.control_dependencies(None), \
                    tf.control_dependencies(waits), _tf.not_recorded(), \
                    tf.device(None), tf.device(device):
                results = function(*given)
            for (name, index), result in zip(outputs, results):
                self._now.update((own.outputs[index].name, result)
                                 for own in self._owned_by(tower, name))
            self._calls.update((own.name, results[0].op) for node in nodes
                               for own in self._owned_by(tower, node.name))

    def _owned_by(self, tower: int, name: str) -> list[tf.Operation]:
        """The operations of ``tower`` for which tower 0's of that name stands."""
        repeats = self._repeats.get(name, []) if tower == 0 else []
        return [self._of[name][tower], *repeats]

    def _inputs(self, nodes: Sequence[tf.Operation], members: set[str]) -> tuple[Any, ...]:
        """What a function is given (tensor -> an operation and its input), constants, controls."""
        inputs: dict[str, tuple[str, int]] = {}
        constants: dict[str, tf.Operation] = {}
        controls: dict[str, None] = {}
        for node in nodes:
            for index, tensor in enumerate(node.inputs):
                name = self._stands_for(tensor.op.name)
                if self._is_constant(name):
                    constants[name] = self._all[name]
                elif name not in members:
                    inputs.setdefault(tensor.name, (node.name, index))
            controls.update((control.name, None) for control in node.control_inputs
                            if self._stands_for(control.name) not in self._inside)
        return inputs, constants.values(), controls

    def _outputs(self, nodes: Sequence[tf.Operation],
                 members: set[str]) -> list[tuple[str, int]]:
        """Results that something else of any tower's needs: an operation's name and the number."""
        users = set(self._order) - members
        outputs = []
        for node in nodes:
            for index in range(len(node.outputs)):
                tensors = [own.outputs[index] for tower in range(len(self._devices))
                           for own in self._owned_by(tower, node.name)]
                if any(tensor.name in self._returned or any(
                        self._stands_for(user.name) in users
                        for user in tensor.consumers()) for tensor in tensors):
                    outputs.append((node.name, index))
        return outputs

    def _current(self, value: Any) -> Any:
        if isinstance(value, tf.Tensor) and not _tf.is_eager(value):
            return self._now.get(value.name, value)
        return value

    def _rewire(self) -> None:
        """Gives what is outside the functions' results."""
        for name, operation in self._all.items():
            if self._stands_for(name) in self._inside:
                continue
            for index, tensor in enumerate(operation.inputs):
                if tensor.name in self._now:
                    _tf.set_input(operation, index, self._now[tensor.name])
            controls = operation.control_inputs
            if any(control.name in self._calls for control in controls):
                _tf.set_control_inputs(operation, dict.fromkeys(
                    self._calls.get(control.name, control) for control in controls))


def _function(graph: tf.Graph, nodes: Sequence[tf.Operation], inputs: Iterable[str],
              outputs: Sequence[tuple[str, int]],
              stands_for: Callable[[str], str]) -> Callable[..., Any]:
    """``nodes`` as a function that XLA compiles."""
    names = _own_names(nodes)
    given = {name: f"argument_{number}" for number, name in enumerate(inputs)}
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype)
             for tensor in map(graph.get_tensor_by_name, given)]
    graph_def = tf.compat.v1.GraphDef()
    graph_def.versions.producer = graph.graph_def_versions.producer
    called: set[str] = set()
    for node in nodes:
        copied = graph_def.node.add()
        copied.CopyFrom(node.node_def)
        copied.name = names[node.name]
        copied.device = ""
        copied.attr.pop("_class", None)
        called.update(_tf.functions_in_attributes(copied))
        del copied.input[:]
        for tensor in node.inputs:
            name = stands_for(tensor.op.name)
            copied.input.append(given.get(tensor.name) or f"{names[name]}:{tensor.value_index}")
        copied.input.extend(f"^{names[control.name]}" for control in node.control_inputs
                            if control.name in names)

    @tf.function(jit_compile=True, autograph=False, input_signature=specs)
    def tower_stretch(*arguments: tf.Tensor) -> list[tf.Tensor]:
        _tf.hand_on_functions(graph, tf.compat.v1.get_default_graph(), called)
        return tf.graph_util.import_graph_def(
            graph_def, input_map=dict(zip(given.values(), arguments)), name="",
            return_elements=[f"{names[name]}:{index}" for name, index in outputs])

    return tower_stretch.get_concrete_function()


def _own_names(nodes: Sequence[tf.Operation]) -> dict[str, str]:
    """What operations are called in a function that all towers call."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for node in nodes:
        plain = contexts.plain_name(node.name) or node.type
        names[node.name] = node.name if plain in taken else plain
        taken.add(names[node.name])
    return names


def _tensors(nest: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True)
            if isinstance(leaf, tf.Tensor) and not _tf.is_eager(leaf)]


def _is_small(operation: tf.Operation) -> bool:
    return bool(operation.outputs) and all(
        tensor.shape.is_fully_defined() and tensor.shape.num_elements() <= SMALL
        for tensor in operation.outputs)
