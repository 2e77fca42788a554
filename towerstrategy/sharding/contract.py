"""Whether the towers' gradients add up to one device's: what ``strategy.run`` warns of.

Goes in: the traced operations of a replica function for one tower, and the states of its inputs.
Comes out: how each tensor of a tower relates to one device's tensor for the whole batch, by the
rules that partition a step; and, if the sum of a gradient over the towers is wrong, the reason.

``strategy.run`` redistributes nothing: an operation gets its tower's tensors.  So if a rule would
gather, sum or slice an input, the tower's result differs from one device's.  Numbers of rows are an
exception: a tower has its own number, one device the batch's.  A sum over rows that is divided by
the tower's number (a mean) and multiplied by the tower's share of the rows (``scale_loss``) is a
part of the batch's mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import graphs, joined, propagate
from towerstrategy.sharding.rules import lists, registry, scaling
from towerstrategy.sharding.rules.registry import Op
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
      spec: the spec by which it is a part of one device's tensor; None if it is none, or unknown.
      power: it is also multiplied by the tower's share of the rows to this power.
      cause: the reason if ``spec`` is None; "" if unknown.
      divided: which values give the right sum if divided by the number of towers: "same", equal
        ones on all towers; "means", means over each tower's rows, if all have as many rows.
    """

    spec: Spec | None
    power: int = 0
    cause: str = ""
    divided: str = ""


SAME = State(REPLICATED)
ROWS = State(Sharded(0))
SHARE = State(REPLICATED, 1)
UNKNOWN = State(None)
# Values that a tower knows of itself.  With any seed, draws have the same distribution; and a tower
# without rows does not count.
KNOWN = {"share": SHARE, "filled": SAME, "seed": SAME}


class Contract:
    """The states of a tower's tensors."""

    def __init__(self, nested: bool = False) -> None:
        self._nested = nested  # in a function body, which has other callers, too
        self._states: dict[str, State] = {}
        self._zeros: set[str] = set()  # loop variables that start as zero
        self._notes: dict[Any, Any] = {}  # notes of the rules

    def put(self, tensor: tf.Tensor, state: State) -> None:
        """Sets the state of a tensor that comes from outside of the tower's operations."""
        self._states[tensor.name] = state

    def look_at(self, operations: Iterable[tf.Operation]) -> None:
        """Finds the states of the outputs of ``operations``, which are in order of creation."""
        for operation in operations:
            # The last output, because a loop gets more outputs when its gradient is taken.
            if operation.outputs and operation.outputs[-1].name not in self._states:
                states = self._operation(operation)
                self._states.update(zip((tensor.name for tensor in operation.outputs), states))

    def problem(self, gradient: tf.Tensor | tf.IndexedSlices | None, reads_count: bool,
                evenly: bool) -> str:
        """Why the towers' gradients do not add up to one device's; "" if they do.

        Args:
          gradient: the gradient that the tower gives to an optimizer.
          reads_count: whether the function reads the number of replicas; then it divides by it
            values that are the same on all towers, or means.
          evenly: whether all towers have, or may have, as many rows; then dividing means is right.
        """
        if gradient is None:
            return ""
        if isinstance(gradient, tf.IndexedSlices):
            state = self.of(gradient.values)
            adds_up = isinstance(state.spec, Sharded) and state.power == 0
        else:
            state = self.of(gradient)
            adds_up = _is_part_of_sum(state)
        if adds_up or state.spec is None:
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
        return SAME if _tf.is_eager(tensor) else self._states.get(tensor.name, SAME)

    def _operation(self, operation: tf.Operation) -> Sequence[State]:
        states = [self.of(tensor) for tensor in operation.inputs]
        count = len(operation.outputs)
        if count == 1 and scaling.is_zero(operation.outputs[0]):
            known = all(state.spec is not None for state in states)
            state = _outputs_of(operation, states, self._nested, self._notes)[0] if known else SAME
            return [state if isinstance(state.spec, Sharded) else SAME]
        if operation.type in scaling.ADDITIVE:
            states = _zeros_as_others(operation, states, [
                self._is_zero(tensor) for tensor in operation.inputs])
        if all(state == SAME for state in states):
            return [SAME] * count
        if operation.type in propagate.CALLS:
            return self._function_outputs(_tf.called_body(operation), states)
        if operation.type in propagate.LOOPS:
            return self._loop(operation, states)
        wrong = next((state for state in states if state.spec is None and state.cause), None)
        if wrong is not None:
            return [wrong] * count
        if any(state.spec is None for state in states):
            return [UNKNOWN] * count
        if operation.type in propagate.BRANCHES:
            return self._branches(operation, states)
        return _outputs_of(operation, states, self._nested, self._notes)

    def _function_outputs(self, body: Any, states: Sequence[State], zeros: Sequence[bool] = ()
                ) -> list[State]:
        """The states of a function's outputs; ``zeros`` says which inputs are zero."""
        inner = Contract(nested=True)
        for tensor, state in zip(body.inputs, states):
            inner.put(tensor, state)
        inner._zeros = {tensor.name for tensor, zero in zip(body.inputs, zeros) if zero}
        inner.look_at(op.operation for op in graphs.needed_in_order(body)
                      if op.type != "Placeholder")
        return [inner.of(tensor) for tensor in body.outputs]

    def _loop(self, operation: tf.Operation, states: list[State]) -> list[State]:
        """The states of a loop's variables: a fixpoint; all towers must iterate as often."""
        condition, body = (graphs.function_of(Op(operation), name) for name in ("cond", "body"))
        zeros = [self._is_zero(tensor) for tensor in operation.inputs]
        for iteration in range(propagate.ROUNDS):
            after = [_loop_variable(*each) for each in zip(states, self._function_outputs(
                body, states, () if iteration else zeros), operation.inputs, zeros)]
            if iteration and after == states:
                if self._function_outputs(condition, states) != [SAME]:
                    break
                return states
            states = after
        return [UNKNOWN] * len(states)

    def _branches(self, operation: tf.Operation, states: Sequence[State]) -> list[State]:
        """The states of a branch's outputs; all towers must take the same branch."""
        if states[0] != SAME:
            return [UNKNOWN] * len(operation.outputs)
        condition, by_branch = operation.inputs[0].ref(), []
        for number, body in enumerate(graphs.branches_of(Op(operation))):
            found = self._function_outputs(body, [
                state._replace(spec=state.spec and joined.branch_input(
                    condition, number, state.spec)) for state in states[1:]])
            by_branch.append([None if self._is_zero(tensor) else (tensor, state)
                              for tensor, state in zip(body.outputs, found)])
        return [_branch_output(condition, [each for each in outputs if each is not None])
                for outputs in zip(*by_branch)]

    def _is_zero(self, tensor: tf.Tensor) -> bool:
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
        return scaling.is_number(tensor) and (
            tensor.name in self._zeros or scaling.is_zero(tensor))


def _branch_output(condition: Any, outputs: Sequence[tuple[tf.Tensor, State]]) -> State:
    """The state of a branch's output; ``outputs`` has the tensors that are not zero."""
    specs = [state.spec for _, state in outputs if state.spec is not None]
    powers = {state.power for _, state in outputs if not isinstance(state.spec, Replicated)}
    if len(specs) < len(outputs) or len(powers) > 1:
        return next((state for _, state in outputs if state.cause), UNKNOWN)
    if all(state == SAME for _, state in outputs):
        return SAME
    spec = joined.branch_output(condition, specs, lambda number, element: lists.is_empty(
        outputs[number][0], element))
    unlike = spec == SUM and specs.count(SUM) < len(specs)  # the other is the same on all towers
    return UNKNOWN if unlike or isinstance(spec, Replicated) else State(spec, powers.pop())


def _loop_variable(before: State, after: State, tensor: tf.Tensor, zero: bool) -> State:
    """The state of a loop variable that starts an iteration as ``before`` and ends as ``after``."""
    if before == after or after.cause:
        return after
    if before.spec is None or after.spec is None or before.power != after.power and not zero:
        return UNKNOWN
    spec = joined.loop_variable(before.spec, after.spec, tensor)
    if isinstance(spec, Partial) and not zero or isinstance(spec, Replicated):
        return UNKNOWN
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


def _is_part_of_sum(state: State) -> bool:
    """Whether the towers' values add up to one device's."""
    return state in (State(SUM), SHARE)


def _outputs_of(operation: tf.Operation, states: Sequence[State], nested: bool,
                notes: dict[Any, Any]) -> list[State]:
    """The states of an operation's outputs for known states of its inputs."""
    count = len(operation.outputs)
    if all(isinstance(state.spec, (Replicated, Partial, Size)) for state in states):
        scalars = _arithmetic(operation, states)
        if scalars is not None:
            return [scalars] * count
    specs = [state.spec if state.spec is not None else REPLICATED for state in states]
    plan = registry.plan_of(Op(operation, notes), specs)
    if plan is None or not (plan.once and plan.alone == 0) and not all(  # right for a tower's rows
            map(_is_taken_as_is, specs, plan.takes, operation.inputs)):
        is_list = operation.outputs and operation.outputs[0].dtype == tf.variant  # of a loop
        crosses = any(isinstance(spec, (Sharded, Partial)) for spec in specs) and not any(
            isinstance(spec, ListOf) for spec in specs) and not is_list and registry.has_rule(
                operation.type)
        return [_needs_other_towers(operation, states) if crosses else UNKNOWN] * count
    power = _power(operation, states)
    # A dimension has the size of the tower's rows where one device has the batch's.
    of_tower_size = any(isinstance(spec, Size) and spec != wanted for spec, wanted in zip(
        specs, plan.takes)) and not all(out.shape.is_fully_defined() for out in operation.outputs)
    if power is None and operation.type in scaling.ADDITIVE:
        return [_unscaled(operation)] * count
    if power is None or of_tower_size:
        return [UNKNOWN] * count
    if not nested:
        registry.set_static_shape(operation.outputs[0], plan)
    if plan.make is not None:
        if plan.alone is None:
            return [_needs_other_towers(operation, states)] * count
        power += plan.alone
    return [UNKNOWN if isinstance(spec, Sizes) else  # each tower has its own sizes
            State(spec, 0 if isinstance(spec, (Size, Axes)) else power) for spec in plan.gives]


def _is_taken_as_is(spec: Spec, wanted: Spec, tensor: tf.Tensor) -> bool:
    """Whether the rule takes a tower's tensor without redistribution."""
    if spec == wanted or isinstance(spec, Replicated) and isinstance(wanted, (
            Replicated, Sharded, ListOf)):
        return True
    return isinstance(spec, Size) and isinstance(wanted, Replicated) and not tensor.shape.rank


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
    total = 0
    for index, power in enumerate(powers):
        if power:
            degree = scaling.degree(operation, index)
            if degree is None:
                return None
            total += power * degree
    return total


def _needs_other_towers(operation: tf.Operation, states: Sequence[State]) -> State:
    """The state of an output that needs data of other towers."""
    specs = [state.spec for state in states]
    if not any(spec == SUM or isinstance(spec, Sharded) for spec in specs):
        return UNKNOWN  # a maximum, such as the width of padding
    if operation.type in scaling.ADDITIVE and not any(
            isinstance(spec, Sharded) for spec in specs):
        if any(state.power for state in states):
            return _unscaled(operation)
        return _wrong(operation, "adds a value that is the same on all towers to a sum over each "
                      "tower's rows", "same")
    return _wrong(operation, "combines rows of the whole batch")


def _unscaled(operation: tf.Operation) -> State:
    return _wrong(operation, "adds terms that are not all scaled by the tower's share of the rows",
                  "means")


def _wrong(operation: tf.Operation, reason: str, divided: str = "") -> State:
    """The state of a wrong output; ``reason`` says what the operation does to it ("adds ...")."""
    line = _tf.line_of(operation)
    named = f"{operation.type} ({operation.name}{', ' + line if line else ''})"
    return State(None, 0, f"{named} {reason}", divided)
