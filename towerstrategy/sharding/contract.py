"""How a tower's tensors in ``strategy.run`` relate to one device's tensors for the whole batch.

Goes in: the traced operations of a replica function for one tower, and the states of its inputs.
Comes out: the state of each tensor, by the rules that partition a step; the operations to pad on a
tower without rows; and, if the sum of a gradient over the towers is wrong, the reason, of which
``strategy.run`` warns.

``strategy.run`` redistributes nothing: an operation gets its tower's tensors.  So if a rule would
gather, sum or slice an input, the tower's result differs from one device's.  Numbers of rows are an
exception: a tower has its own number, one device the batch's.  A sum over rows that is divided by
the tower's number (a mean) and multiplied by the tower's share of the rows (``scale_loss``) is a
part of the batch's mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import joined, propagate
from towerstrategy.sharding.layout import BRANCHES, LOOPS, are_read, needed_in_order
from towerstrategy.sharding.rules import lists, registry, scaling
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import (
    REPLICATED,
    SUM,
    Axes,
    ListOf,
    Partial,
    Replicated,
    Sharded,
    Size,
    Sizes,
    Spec,
)


class State(NamedTuple):
    """How a tower's tensor relates to one device's tensor.

    Attributes:
      spec: the spec by which it is a part of one device's tensor.
      power: it is also multiplied by the tower's share of the rows to this power.
      known: whether it is a part of one device's tensor; if not, ``spec`` only says which dimension
        has the tower's rows.
      cause: the reason if it is known to be none; "" if that is unknown.
      divided: which values give the right sum if divided by the number of towers: "same", equal
        ones on all towers; "means", means over each tower's rows, if all have as many rows.
    """

    spec: Spec
    power: int = 0
    known: bool = True
    cause: str = ""
    divided: str = ""


SAME = State(REPLICATED)
ROWS = State(Sharded(0))
SHARE = State(REPLICATED, 1)
UNKNOWN = State(REPLICATED, known=False)
# Values that a tower knows of itself.  With any seed, draws have the same distribution; and a tower
# without rows does not count.
KNOWN = {"share": SHARE, "filled": SAME, "seed": SAME}


class Contract:
    """The states of a tower's tensors.

    Attributes:
      graph: the graph or function body; None if it is still being traced.
      padded: the names of operations that a tower without rows must pad -> their plans.
    """

    def __init__(self, kinds: frozenset[str], graph: Any = None, known: Any = None) -> None:
        self._kinds, self.graph = kinds, graph
        # A function body and its inputs' states -> its contract.
        self._known: dict[Any, Contract] = {} if known is None else known
        self.padded: dict[str, Plan] = {}
        self._states: dict[str, State] = {}
        self._bodies: dict[str, list[Contract]] = {}  # operation -> those of its function bodies
        self._zeros: set[str] = set()  # tensors that are zero, also only before a loop
        self._notes: dict[Any, Any] = {}  # notes of the rules

    def put(self, tensor: tf.Tensor, state: State) -> None:
        """Sets the state of a tensor that comes from outside of the tower's operations."""
        self._states[tensor.name] = state if state.known else _unknown(tensor)

    def look_at(self, operations: Iterable[tf.Operation]) -> None:
        """Finds the states of the outputs of ``operations``, which are in order of creation."""
        for operation in operations:
            # The last output, because a loop gets more outputs when its gradient is taken.
            if operation.outputs and operation.outputs[-1].name not in self._states:
                states = self._operation(operation)
                self._states.update(zip((tensor.name for tensor in operation.outputs), states))

    def bodies(self, operation: tf.Operation) -> list[Contract]:
        """The contracts of the function bodies of a call, a branch or a loop."""
        if operation.name not in self._bodies:  # it has no outputs, or only zeros
            self._operation(operation)
        return self._bodies[operation.name]

    def problem(self, gradient: tf.Tensor | tf.IndexedSlices | None, reads_count: bool,
                evenly: bool) -> str:
        """Why the towers' gradients do not add up to one device's; "" if they do.

        Args:
          gradient: the gradient that the tower gives to an optimizer.
          reads_count: whether the function reads the number of replicas; then it divides by it
            values that are the same on all towers, or means.
          evenly: whether all towers have, or may have, as many rows; then dividing means is right.
        """
        if gradient is None or tf.is_symbolic_tensor(gradient) and self._is_zero(gradient):
            return ""
        slices = gradient if isinstance(gradient, tf.IndexedSlices) else None
        state = self.of(gradient if slices is None else slices.values)
        adds_up = state in (State(SUM), SHARE)
        if slices is not None and self.of(slices.indices) != SAME:
            adds_up = state.known and isinstance(state.spec, Sharded) and state.power == 0
        if adds_up or not state.known:
            right = state.divided == "same" or state.divided == "means" and evenly
            return "" if reads_count and right else state.cause
        if isinstance(state.spec, Replicated) and state.power == 0:
            return "" if reads_count else (
                "a gradient is the same on all towers, such as that of a penalty on the weights "
                "or one that is summed already, and is added once per tower")
        if reads_count and evenly and isinstance(state.spec, (Partial, Sharded)):
            return ""
        return "the loss is a mean over the tower's rows, which nothing has scaled"

    def of(self, tensor: tf.Tensor) -> State:
        """The state of a tensor; tensors from outside are the same on all towers."""
        return self._states.get(tensor.name, SAME) if tf.is_symbolic_tensor(tensor) else SAME

    def _operation(self, operation: tf.Operation) -> Sequence[State]:
        states = [self.of(tensor) for tensor in operation.inputs]
        count, adds = len(operation.outputs), operation.type in scaling.ADDITIVE
        zeros = [self._is_zero(tensor) for tensor in operation.inputs] if adds else []
        if count == 1 and (scaling.is_zero(operation.outputs[0]) or any(
                tensor.name in self._zeros and scaling.zero_stays(operation, index)
                for index, tensor in enumerate(operation.inputs)) or adds and zeros == [
                scaling.is_number(tensor) for tensor in operation.inputs] and any(zeros)):
            self._zeros.add(operation.outputs[0].name)
            spec = self._outputs_of(operation, states)[0].spec
            return [State(spec) if isinstance(spec, Sharded) else SAME]
        if adds:
            states = _zeros_as_others(operation, states, zeros)
        if _tf.is_call(operation.type):
            return self._call(operation, [_tf.called_body(operation, self._kinds)], states)[0]
        if operation.type in LOOPS:
            return self._loop(operation, states)
        if operation.type in BRANCHES:
            return self._branches(operation, states)
        if all(state == SAME for state in states):
            draws = _tf.is_stateful(operation.type) and not Op(operation).handles
            return [UNKNOWN if draws else SAME] * count
        found, wrong = self._outputs_of(operation, states), _unknown_one(states)
        if wrong is not None and not scaling.is_linear_in(
                operation, [at for at, state in enumerate(states) if state != SAME]):
            wrong = wrong._replace(divided="")
        return found if wrong is None else [wrong._replace(
            spec=_unknown(tensor).spec if state.spec == REPLICATED else state.spec)
            for tensor, state in zip(operation.outputs, found)]

    def _call(self, operation: tf.Operation, bodies: Iterable[Any], *states: Sequence[State],
              zeros: Sequence[bool] | None = None) -> list[list[State]]:
        """The states of the bodies' outputs, for those of their inputs; ``zeros``: which are 0."""
        if zeros is None:
            zeros = [*map(self._is_zero, operation.inputs)][-len(states[0]):]
        contracts = self._bodies[operation.name] = []
        for body, inputs in zip(bodies, states):
            key = body, len(body.outputs), *inputs, *zeros
            if key not in self._known:  # a loop in a loop is looked at in each round of both
                inner = self._known[key] = Contract(self._kinds, body, self._known)
                inner._states.update(zip((tensor.name for tensor in body.inputs), inputs))
                inner._zeros = {tensor.name for tensor, zero in zip(body.inputs, zeros) if zero}
                inner.look_at(op.operation for op in needed_in_order(body))
            contracts.append(self._known[key])
        return [[inner.of(tensor) for tensor in inner.graph.outputs] for inner in contracts]

    def _loop(self, operation: tf.Operation, states: list[State]) -> list[State]:
        """The states of a loop's variables: a fixpoint; all towers must iterate as often."""
        functions = _tf.functions_of(operation)
        zeros = known = [self._is_zero(tensor) for tensor in operation.inputs]
        read = are_read(*functions)
        lists.note_constants(functions[1], operation.inputs, is_loop=True)
        for iteration in range(propagate.ROUNDS):
            tested, outputs = self._call(operation, functions, states, states, zeros=known)
            body, before = self._bodies[operation.name][1], known
            known = [zero and body._is_zero(tensor) for zero, tensor in zip(
                known, functions[1].outputs)]  # after each iteration
            after = [_loop_variable(*each) for each in zip(
                states, outputs, operation.inputs, functions[1].outputs, read, zeros)]
            if iteration and (after, known) == (states, before):
                if tested == [SAME]:
                    self._zeros.update(itertools.compress(
                        (tensor.name for tensor in operation.outputs), known))
                    return states
                break
            states = after
        return [_unknown(tensor) for tensor in operation.outputs[:len(states)]]

    def _branches(self, operation: tf.Operation, states: Sequence[State]) -> list[State]:
        """The states of a branch's outputs; all towers must take the same branch."""
        condition, bodies = operation.inputs[0].ref(), _tf.functions_of(operation)
        found = self._call(operation, bodies, *([state._replace(spec=joined.branch_input(
            condition, number, state.spec)) for state in states[1:]]
            for number in range(len(bodies))))
        by_branch = [[None if scaling.is_number(tensor) and inner._is_zero(tensor)
                      else (tensor, state) for tensor, state in zip(inner.graph.outputs, outputs)]
                     for inner, outputs in zip(self._bodies[operation.name], found)]
        return [_branch_output(condition, states[0], tensor, [
            each for each in outputs if each is not None])
            for tensor, outputs in zip(operation.outputs, zip(*by_branch))]

    def _outputs_of(self, operation: tf.Operation, states: Sequence[State]) -> list[State]:
        """The states of an operation's outputs, by its rule, as if all states were known."""
        outputs, specs = operation.outputs, [state.spec for state in states]
        if all(spec == REPLICATED or isinstance(spec, (Partial, Size)) for spec in specs):
            scalars = _arithmetic(operation, states)
            if scalars is not None:
                return [scalars] * len(outputs)
        plan = registry.plan_of(Op(operation, self._notes), specs)
        if plan is None or not (plan.once and plan.alone == 0) and not all(  # right for its rows
                map(_is_taken_as_is, specs, plan.takes, operation.inputs)):
            wrong = _not_taken(operation, states)
            return [wrong._replace(spec=_unknown(tensor).spec) for tensor in outputs]
        if plan.padded and plan.make is None and list(plan.takes) == specs:
            self.padded[operation.name] = plan
        power = _power(operation, states)
        # A dimension has the size of the tower's rows where one device has the batch's.
        of_tower_size = any(isinstance(spec, Size) and spec != wanted for spec, wanted in zip(
            specs, plan.takes)) and not all(out.shape.is_fully_defined() for out in outputs)
        if power is None and operation.type in scaling.ADDITIVE:
            problem = _unscaled(operation)
        elif power is None or of_tower_size:
            problem = UNKNOWN
        elif plan.make is not None and plan.alone is None:
            problem = _needs_other_towers(operation, states)
        else:
            problem = None
        if problem is not None:
            return [problem._replace(spec=spec) for spec in plan.gives]
        assert power is not None
        if self.graph is None and all(state.known for state in states):
            registry.set_static_shape(outputs[0], plan)
        power += 0 if plan.make is None else plan.alone or 0
        return [State(spec, 0 if isinstance(spec, (Size, Axes)) else power,
                      known=not isinstance(spec, Sizes))  # each tower has its own sizes
                for spec in plan.gives]

    def _is_zero(self, tensor: tf.Tensor) -> bool:
        return (scaling.is_number(tensor) or tensor.dtype == tf.variant) and (
            tensor.name in self._zeros or scaling.is_zero(tensor))


def _unknown(tensor: tf.Tensor) -> State:
    """The state of a tensor of which is known only its shape.

    A first dimension of unknown size is taken for the rows.  If it is another, padding is right,
    too: only tensors without entries are padded.
    """
    has_rows = tensor.shape.rank and tensor.shape[0] is None
    return State(Sharded(0) if has_rows else REPLICATED, known=False)


def _unknown_one(states: Iterable[State]) -> State | None:
    """The first of the states that is not known, one with a cause if there is one."""
    unknown = [state for state in states if not state.known]
    return next((state for state in unknown if state.cause), next(iter(unknown), None))


def _branch_output(condition: Any, taken: State, output: tf.Tensor,
                   outputs: Sequence[tuple[tf.Tensor, State]]) -> State:
    """The state of a branch's output; ``outputs`` has the tensors that are not zero."""
    specs = [state.spec for _, state in outputs]
    unknown = UNKNOWN if taken != SAME else _unknown_one(state for _, state in outputs)
    powers = {state.power for _, state in outputs if not isinstance(state.spec, Replicated)}
    if unknown is None and all(state == SAME for _, state in outputs):
        return SAME
    spec = joined.branch_output(condition, [tensor for tensor, _ in outputs], specs,
                                lists.is_empty) if specs else REPLICATED
    unlike = spec == SUM and specs.count(SUM) < len(specs)  # the other is the same on all towers
    if unknown is None and not (len(powers) > 1 or unlike or isinstance(spec, Replicated)):
        return State(spec, powers.pop())
    return (unknown or UNKNOWN)._replace(
        spec=spec if isinstance(spec, (Sharded, ListOf)) else _unknown(output).spec)


def _loop_variable(before: State, after: State, tensor: tf.Tensor, result: tf.Tensor,
                   is_read: bool, zero: bool) -> State:
    """The state of a loop variable that starts an iteration as ``before`` and ends as ``after``."""
    if before == after or after.cause:
        return after
    spec = joined.loop_variable(before.spec, after.spec, tensor, result, is_read)
    if not before.known or not after.known or before.power != after.power and not zero \
            or isinstance(spec, Partial) and not zero or isinstance(spec, Replicated):
        return _unknown(tensor) if isinstance(spec, Replicated) else State(spec, known=False)
    return State(spec, after.power)


def _zeros_as_others(operation: tf.Operation, states: list[State],
                     zeros: Sequence[bool]) -> list[State]:
    """``states``, in which a zero has the state of the values that are added to it."""
    others = [state for tensor, state, is_zero in zip(operation.inputs, states, zeros)
              if scaling.is_number(tensor) and not is_zero]
    if not others:
        return states
    rows = all(isinstance(state.spec, Sharded) for state in others)
    return [state if not is_zero else state._replace(power=others[0].power) if rows else others[0]
            for state, is_zero in zip(states, zeros)]


def _is_taken_as_is(spec: Spec, wanted: Spec, tensor: tf.Tensor) -> bool:
    """Whether the rule takes a tower's tensor without redistribution."""
    if isinstance(spec, Size) and isinstance(wanted, Replicated):
        return spec.times == 0 or not tensor.shape.rank
    return spec == wanted or isinstance(spec, Replicated) and isinstance(
        wanted, (Replicated, Sharded, Size, ListOf))


def _arithmetic(operation: tf.Operation, states: Sequence[State]) -> State | None:
    """The state of arithmetic on numbers of rows, shares, sums and equal values, if it is that."""
    if all(isinstance(state.spec, Replicated) and state.power == 0 for state in states):
        return SAME
    numbers = [State(REPLICATED, 1) if isinstance(state.spec, Size)
               and operation.outputs[0].dtype.is_floating else state for state in states]
    if any(isinstance(state.spec, Size) for state in numbers):
        return None
    parts = [state for state in numbers if isinstance(state.spec, Partial)]
    if any(state.spec != SUM for state in parts):
        return None
    if operation.type in scaling.ADDITIVE:
        added = [state for tensor, state in zip(operation.inputs, numbers)
                 if scaling.is_number(tensor)]
        if {state.power - isinstance(state.spec, Replicated) for state in added} == {0}:
            return State(SUM)  # each term is a part of a sum
        same = set(added)
        return same.pop() if len(same) == 1 else None
    if len(parts) > 1:
        return None
    power = _power(operation, numbers)
    if power is None or parts and any(
            state is parts[0] and not scaling.is_linear(operation, index)
            for index, state in enumerate(numbers)):
        return None
    return State(SUM if parts else REPLICATED, power)


def _power(operation: tf.Operation, states: Sequence[State]) -> int | None:
    """The power of the tower's share by which the output is multiplied; None if there is none."""
    powers = [state.power for state in states]
    if not any(powers):
        return 0
    if operation.type in scaling.ADDITIVE:
        floats = {state.power for tensor, state in zip(operation.inputs, states)
                  if scaling.is_number(tensor)}
        return floats.pop() if len(floats) == 1 else None
    degrees = [power and scaling.degree(operation, index) for index, power in enumerate(powers)]
    return None if None in degrees else sum(
        power * (degree or 0) for power, degree in zip(powers, degrees))


def _not_taken(operation: tf.Operation, states: Sequence[State]) -> State:
    """The state of an output if the rule does not take the towers' tensors as they are."""
    # What only moves rows may take all of them in turn, as in micro-batches; so may a loop's lists.
    may_move = not registry.computes(operation.type) or any(
        isinstance(state.spec, ListOf) for state in states) or any(
        tensor.dtype == tf.variant for tensor in operation.outputs[:1])
    return UNKNOWN if may_move else _needs_other_towers(operation, states)


def _needs_other_towers(operation: tf.Operation, states: Sequence[State]) -> State:
    """The state of an output that needs data of other towers."""
    specs = [state.spec for state in states]
    if not any(spec == SUM or isinstance(spec, Sharded) for spec in specs) or not any(
            map(scaling.is_number, operation.outputs)):
        return UNKNOWN  # a maximum, such as the width of padding, or positions
    if operation.type in scaling.ADDITIVE and not any(
            isinstance(spec, Sharded) for spec in specs):
        return _unscaled(operation) if any(state.power for state in states) else _wrong(
            operation, "adds a value that is the same on all towers to a sum over each tower's "
            "rows", "same")
    return _wrong(operation, "combines rows of the whole batch")


def _unscaled(operation: tf.Operation) -> State:
    return _wrong(operation, "adds terms that are not all scaled by the tower's share of the rows",
                  "means")


def _wrong(operation: tf.Operation, reason: str, divided: str = "") -> State:
    """The state of a wrong output; ``reason`` says what the operation does to it ("adds ...")."""
    line = _tf.line_of(operation)
    named = f"{operation.type} ({operation.name}{', ' + line if line else ''})"
    return UNKNOWN._replace(cause=f"{named} {reason}", divided=divided)
