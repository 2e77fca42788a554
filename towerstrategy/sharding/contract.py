"""Whether the towers' gradients add up to one device's: what ``strategy.run`` warns of.

Goes in: the operations of a replica function as one tower has traced them, and what its inputs are.
Comes out: how each tensor of a tower relates to one device's for the whole batch, by the rules by
which a step is partitioned; and why a gradient's sum over the towers is not one device's, if so.

In ``strategy.run`` nothing is redistributed: a tower's operation gets what the tower has.  So where
the rules would gather, add up or cut an input, the tower's result is another than one device's.
With one exception, numbers of rows: a tower has its own where one device has the batch's, and what
is divided by one (a mean) and multiplied by the other's share of it (``scale_loss``) is a part of
the batch's mean.
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
    """What a tower's value is beside one device's.

    Attributes:
      spec: its spec; None where it is no part of one device's, or where that is not known.
      power: by which power of the tower's share of the rows it is multiplied besides.
      cause: where ``spec`` is None, why; "" where that is not known.
      divided: what makes it right if it was divided by the number of towers: "same", what is the
        same on all of them; "means", those over a tower's rows, where all have as many.
    """

    spec: Spec | None
    power: int = 0
    cause: str = ""
    divided: str = ""


SAME = State(REPLICATED)
ROWS = State(Sharded(0))
SHARE = State(REPLICATED, 1)
UNKNOWN = State(None)
# Of what a tower knows of itself.  Whatever the seed, a draw is one of the same distribution; and
# a tower without rows counts for nothing.
KNOWN = {"share": SHARE, "filled": SAME, "seed": SAME}


class Contract:
    """The states of a tower's tensors, found out as they are asked for."""

    def __init__(self, nested: bool = False) -> None:
        self._nested = nested  # in a function, which others call, too
        self._states: dict[str, State] = {}
        self._zeros: set[str] = set()  # what is zero in a loop's first turn
        self._notes: dict[Any, Any] = {}  # of rules

    def put(self, tensor: tf.Tensor, state: State) -> None:
        """Says what a tensor that no operation of the tower has made is."""
        self._states[tensor.name] = state

    def look_at(self, operations: Iterable[tf.Operation]) -> None:
        """Finds out about what ``operations``, in the order of their making, give."""
        for operation in operations:
            # The last, as a loop gets further ones when its gradient is asked for.
            if operation.outputs and operation.outputs[-1].name not in self._states:
                given = self._operation(operation)
                self._states.update(zip((tensor.name for tensor in operation.outputs), given))

    def problem(self, gradient: tf.Tensor | tf.IndexedSlices | None, asked: bool,
                evenly: bool) -> str:
        """Why the towers' gradients do not add up to one device's; "" where they do.

        Args:
          gradient: what the tower gives an optimizer.
          asked: whether the function has asked for the number of replicas, and so divides by it
            what is the same on all towers, or means.
          evenly: whether all towers have equally many rows, or may: that is right for means then.
        """
        if gradient is None:
            return ""
        if isinstance(gradient, tf.IndexedSlices):
            state = self.of(gradient.values)
            adds_up = isinstance(state.spec, Sharded) and state.power == 0
        else:
            state = self.of(gradient)
            adds_up = _is_part(state)
        if adds_up or state.spec is None:
            right = state.divided == "same" or state.divided == "means" and evenly
            return "" if asked and right else state.cause
        if isinstance(state.spec, Replicated) and state.power == 0:
            return "" if asked else (
                "a gradient is the same on all towers, as that of a term of the weights alone, or "
                "one that is merged already, and counts once a tower")
        if asked and evenly and isinstance(state.spec, (Partial, Sharded)):
            return ""
        return "the loss is a mean over the tower's rows, which nothing has scaled"

    def of(self, tensor: tf.Tensor) -> State:
        """What is known of a tensor; what was made outside of the tower is the same for all."""
        return SAME if _tf.is_eager(tensor) else self._states.get(tensor.name, SAME)

    def _operation(self, operation: tf.Operation) -> Sequence[State]:
        states = [self.of(tensor) for tensor in operation.inputs]
        count = len(operation.outputs)
        if count == 1 and scaling.is_zero(operation.outputs[0]):
            known = all(state.spec is not None for state in states)
            made = _each(operation, states, self._nested, self._notes)[0] if known else SAME
            return [made if isinstance(made.spec, Sharded) else SAME]
        if operation.type in scaling.ADDITIVE:
            states = _without_zeros(operation, states, [
                self._is_zero(tensor) for tensor in operation.inputs])
        if all(state == SAME for state in states):
            return [SAME] * count
        if operation.type in propagate.CALLS:
            return self._call(operation, states)
        if operation.type in propagate.LOOPS:
            return self._loop(operation, states)
        bad = next((state for state in states if state.spec is None and state.cause), None)
        if bad is not None:
            return [bad] * count
        if any(state.spec is None for state in states):
            return [UNKNOWN] * count
        if operation.type in propagate.BRANCHES:
            return self._branches(operation, states)
        return _each(operation, states, self._nested, self._notes)

    def _call(self, operation: tf.Operation, states: Sequence[State]) -> list[State]:
        return self._inside(_tf.called_body(operation), states)

    def _inside(self, body: Any, states: Sequence[State], zeros: Sequence[bool] = ()
                ) -> list[State]:
        """What a function gives that is given ``states``, some of which may be known to be zero."""
        inner = Contract(nested=True)
        for tensor, state in zip(body.inputs, states):
            inner.put(tensor, state)
        inner._zeros = {tensor.name for tensor, zero in zip(body.inputs, zeros) if zero}
        inner.look_at(op.operation for op in graphs.needed_in_order(body)
                      if op.type != "Placeholder")
        return [inner.of(tensor) for tensor in body.outputs]

    def _loop(self, operation: tf.Operation, states: list[State]) -> list[State]:
        """What the loop's variables are, in each turn and behind the last, if all turn as often."""
        asked, body = (graphs.function_of(Op(operation), name) for name in ("cond", "body"))
        zeros = [self._is_zero(tensor) for tensor in operation.inputs]
        for turn in range(propagate.ROUNDS):
            after = [_turned(*each) for each in zip(states, self._inside(
                body, states, () if turn else zeros), operation.inputs, zeros)]
            if turn and after == states:
                if self._inside(asked, states) != [SAME]:
                    break
                return states
            states = after
        return [UNKNOWN] * len(states)

    def _branches(self, operation: tf.Operation, states: Sequence[State]) -> list[State]:
        """What all branches give alike, or zero; each tower has to go the same way."""
        if states[0] != SAME:
            return [UNKNOWN] * len(operation.outputs)
        condition, given = operation.inputs[0].ref(), []
        for number, body in enumerate(graphs.branches_of(Op(operation))):
            found = self._inside(body, [state._replace(spec=state.spec and joined.in_branch(
                condition, number, state.spec)) for state in states[1:]])
            given.append([None if self._is_zero(tensor) else (tensor, state)
                          for tensor, state in zip(body.outputs, found)])
        return [_of_branches(condition, [each for each in outputs if each is not None])
                for outputs in zip(*given)]

    def _is_zero(self, tensor: tf.Tensor) -> bool:
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
        return scaling.is_number(tensor) and (
            tensor.name in self._zeros or scaling.is_zero(tensor))


def _of_branches(condition: Any, given: Sequence[tuple[tf.Tensor, State]]) -> State:
    """What branches give of which those that are not zero give these."""
    specs = [state.spec for _, state in given if state.spec is not None]
    held = {state.power for _, state in given if not isinstance(state.spec, Replicated)}
    if len(specs) < len(given) or len(held) > 1:
        return next((state for _, state in given if state.cause), UNKNOWN)
    if all(state == SAME for _, state in given):
        return SAME
    spec = joined.of_branches(condition, specs, lambda number, element: lists.is_empty(
        given[number][0], element))
    unlike = spec == SUM and specs.count(SUM) < len(specs)  # one that is the same on all towers
    return UNKNOWN if unlike or isinstance(spec, Replicated) else State(spec, held.pop())


def _turned(before: State, after: State, tensor: tf.Tensor, zero: bool) -> State:
    """What a loop's variable is to be that was ``before`` and is ``after`` behind the body."""
    if before == after or after.cause:
        return after
    if before.spec is None or after.spec is None or before.power != after.power and not zero:
        return UNKNOWN
    spec = joined.turned(before.spec, after.spec, tensor)
    if isinstance(spec, Partial) and not zero or isinstance(spec, Replicated):
        return UNKNOWN
    return State(spec, after.power)


def _without_zeros(operation: tf.Operation, states: list[State],
                   zero: Sequence[bool]) -> list[State]:
    """``states``, in which what is known to be zero is as what is added to it."""
    others = [state for tensor, state, each in zip(operation.inputs, states, zero)
              if scaling.is_number(tensor) and not each]
    if not others:
        return states
    rows = all(isinstance(state.spec, Sharded) for state in others)
    return [state if not each else state._replace(power=others[0].power) if rows else others[0]
            for state, each in zip(states, zero)]


def _is_part(state: State) -> bool:
    """Whether the towers' values add up to one device's."""
    return state in (State(SUM), SHARE)


def _each(operation: tf.Operation, states: Sequence[State], nested: bool,
          notes: dict[Any, Any]) -> list[State]:
    """The states of the outputs, the inputs' being known."""
    count = len(operation.outputs)
    if all(isinstance(state.spec, (Replicated, Partial, Size)) for state in states):
        scalars = _of_numbers(operation, states)
        if scalars is not None:
            return [scalars] * count
    specs = [state.spec if state.spec is not None else REPLICATED for state in states]
    plan = registry.plan_of(Op(operation, notes), specs)
    own = plan is not None and plan.once and plan.alone == 0  # done for the tower's rows alone
    if plan is None or not own and not all(_goes_in(spec, wanted, operation.inputs[index])
                               for index, (spec, wanted) in enumerate(zip(specs, plan.takes))):
        listed = operation.outputs and operation.outputs[0].dtype == tf.variant  # for a loop
        crosses = any(isinstance(spec, (Sharded, Partial)) for spec in specs) and not any(
            isinstance(spec, ListOf) for spec in specs) and not listed and registry.has_rule(
                operation.type)
        return [_crossing(operation, states) if crosses else UNKNOWN] * count
    power = _power(operation, states)
    # As wide as the tower has rows, where one device's is as wide as the batch.
    as_wide = any(isinstance(spec, Size) and spec != wanted for spec, wanted in zip(
        specs, plan.takes)) and not all(out.shape.is_fully_defined() for out in operation.outputs)
    if power is None and operation.type in scaling.ADDITIVE:
        return [_unscaled(operation)] * count
    if power is None or as_wide:
        return [UNKNOWN] * count
    if not nested:
        registry.set_static_shape(operation.outputs[0], plan)
    if plan.make is not None:
        if plan.alone is None:
            return [_crossing(operation, states)] * count
        power += plan.alone
    return [UNKNOWN if isinstance(spec, Sizes) else  # a tower has its own
            State(spec, 0 if isinstance(spec, (Size, Axes)) else power) for spec in plan.gives]


def _goes_in(spec: Spec, wanted: Spec, tensor: tf.Tensor) -> bool:
    """Whether a tower's value is what the rule takes as it is."""
    if spec == wanted or isinstance(spec, Replicated) and isinstance(wanted, (
            Replicated, Sharded, ListOf)):
        return True
    return isinstance(spec, Size) and isinstance(wanted, Replicated) and not tensor.shape.rank


def _of_numbers(operation: tf.Operation, states: Sequence[State]) -> State | None:
    """Arithmetic of numbers of rows, shares, sums over rows and what is the same for all."""
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
            return State(SUM)  # each of them is a part of a sum
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
    """By which power of the share the output is multiplied; None where it is no power of it."""
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


def _crossing(operation: tf.Operation, states: Sequence[State]) -> State:
    """That of what an operation gives that needs what other towers have."""
    specs = [state.spec for state in states]
    if not any(spec == SUM or isinstance(spec, Sharded) for spec in specs):
        return UNKNOWN  # a largest number, as a width
    if operation.type in scaling.ADDITIVE and not any(
            isinstance(spec, Sharded) for spec in specs):
        if any(state.power for state in states):
            return _unscaled(operation)
        return _apart(operation, "adds what is the same on all towers to a sum over each tower's "
                      "rows", "same")
    return _apart(operation, "puts rows of the batch together")


def _unscaled(operation: tf.Operation) -> State:
    return _apart(operation, "adds terms that are not all scaled by the tower's share of the rows",
                  "means")


def _apart(operation: tf.Operation, does: str, divided: str = "") -> State:
    """That of what is no part of one device's, as the operation ``does`` this."""
    line = _tf.line_of(operation)
    named = f"{operation.type} ({operation.name}{', ' + line if line else ''})"
    return State(None, 0, f"{named} {does}", divided)
