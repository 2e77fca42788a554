"""The table of rules: an operation's type -> what it makes of the specs of its inputs.

Goes in: rules, by :func:`rule` (ours) or :func:`register` (a user's).  Comes out: :func:`plan_of`.

A rule is a function of an :class:`Op` and of the specs of its inputs.  It returns a :class:`Plan`,
or None where the operation cannot be done in parts: it is done once then, with all rows.  That
what a rule claims is so is proved by running operations whole and in pieces (``tests/sharding``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.spec import REPLICATED, ListOf, Partial, Replicated, Sharded, Size, Spec

# In place of a tower: the CPU that numbers of rows are kept on; each tower.
HOST, EACH = -1, -2

class Definition(NamedTuple):
    """What the copies of an operation have of it, or might have.

    Attributes:
      device: where it was traced to be; "" where nobody says.
      attributes: a serialized ``NodeDef`` of attributes alone.
      dtypes: of its outputs.
    """

    device: str
    attributes: bytes
    dtypes: list[tf.DType]


class Op:
    """An operation of a traced graph: its type, attributes, static shapes and static values.

    TensorFlow makes most of it anew whenever it is asked, so each operation has one of these.

    Attributes:
      before: the operations that make its inputs, by name.
      controls: the operations that it waits for, sorted, as TensorFlow's order differs by process.
      handles: which inputs are resources.
      is_stateful: whether its type says so.
      has_effect: whether it writes to a variable or to the world outside.
      notes: what rules remember of a graph while it is gone over once, of all its operations.
    """

    def __init__(self, operation: tf.Operation, notes: dict[Any, Any] | None = None) -> None:
        self.operation = operation
        self.notes = {} if notes is None else notes
        self.type: str = operation.type
        self.name: str = operation.name
        self.inputs: list[tf.Tensor] = list(operation.inputs)
        self.outputs: list[tf.Tensor] = list(operation.outputs)
        self.input_names: list[str] = [tensor.name for tensor in self.inputs]
        self.before = [name.partition(":")[0] for name in self.input_names]
        self.output_names: list[str] = [tensor.name for tensor in self.outputs]
        self.handles = [place for place, tensor in enumerate(self.inputs)
                        if tensor.dtype == tf.resource]
        self.is_stateful = _tf.is_stateful(self.type)
        waits = self.inputs or self.is_stateful  # a constant need not, as gradients have them do
        self.controls = sorted([control.name for control in operation.control_inputs]
                               if waits else [])
        self.has_effect = (self.is_stateful or bool(self.handles)) and _tf.has_effect(operation)

    def pass_by(self, passed: Mapping[str, Op]) -> None:
        """Takes the inputs of those operations, by name, whose outputs are their inputs."""
        for place, name in enumerate(self.before):
            if name in passed:
                given = passed[name].inputs[self.inputs[place].value_index]
                self.inputs[place] = given
                self.input_names[place], self.before[place] = given.name, given.op.name
        if not passed.keys().isdisjoint(self.controls):
            self.controls = sorted({before for name in self.controls for before in (
                passed[name].before[:len(passed[name].outputs)] if name in passed else [name])})

    @property
    def writes_variables(self) -> bool:
        """Whether it has an effect on variables that it is given."""
        return self.has_effect and bool(self.handles)

    @property
    def has_state(self) -> bool:
        """Whether it counts how often it is done: it has an effect, or its kernel keeps a state.

        The kernels of some random operations do; nothing waits for these, and they run if their
        draw is used.
        """
        return self.is_stateful and not self.handles or self.has_effect

    @functools.cached_property
    def _node(self) -> Any:
        """What TensorFlow makes anew whenever it is asked, as it does of a single attribute."""
        return self.operation.node_def

    @functools.cached_property
    def definition(self) -> Definition:
        """What its copies have of it."""
        node = vars(self).pop("_node", None) or self.operation.node_def
        device = str(node.device)
        for field in ("name", "op", "input", "device", "experimental_debug_info"):
            node.ClearField(field)
        for name in ("_class", "_output_shapes"):
            if name in node.attr:
                del node.attr[name]
        return Definition(device, node.SerializeToString(deterministic=True),
                          [tensor.dtype for tensor in self.outputs])

    def attr(self, name: str) -> Any:
        """An attribute; strings as ``str``."""
        attributes = self._node.attr
        kind = attributes[name].WhichOneof("value") if name in attributes else None
        value = getattr(attributes[name], kind) if kind in ("b", "i", "f", "s") \
            else self.operation.get_attr(name)
        return value.decode() if isinstance(value, bytes) else value

    def value(self, index: int) -> Any:
        """The value of an input where it is known without running anything, else None."""
        return _tf.constant_value(self.inputs[index])

    def rank(self, index: int) -> Any:
        """The rank of an input; None if unknown."""
        return self.inputs[index].shape.rank

    def out_rank(self, index: int = 0) -> Any:
        """The rank of an output; None if unknown."""
        return self.outputs[index].shape.rank

    def axes(self, index: int, rank: int | None) -> list[int] | None:
        """The dimensions that an input names, counted from the first; None if unknown."""
        value = self.value(index)
        if value is None or rank is None:
            return None
        return [int(axis) % max(rank, 1) for axis in np.ravel(value)]


@dataclasses.dataclass
class Plan:
    """How an operation is done on the towers.

    Attributes:
      takes: what each input is to be; where it is something else it is redistributed before.
      gives: what each output then is.
      make: makes the towers' operations in place of a copy of the operation on each; it is called
        with a :class:`maker.Maker` and gives, for each output, one value a tower. For a rule
        whose towers need to do something else than one device does.
      alone: with ``make`` or ``once``: by which power of a tower's share of the rows what the
        operation itself gives there differs from what they give; None where it is something else.
        For ``strategy.run``, where a tower does what was written.
      padded: a tower without rows gets one of zeros, which is cut off behind: for kernels that fail
        on no rows, or give something of a wrong shape.
      ones: the inputs of which such a row is of ones.
      sizes: what may stand for the last input, a shape: -1 where the rows are; so no tower makes
        the shape of its rows.
      near: an input of which the towers need a few entries: theirs are done where it is, so that
        only the entries are sent.
      passes: each output is the input of its number, as it is: the operation need not be done.
      once: it is done once with all rows, of which each tower then takes its own.
      part: makes a GPU tower's outputs, those that a copy of the operation gives, at less cost.
      whole: likewise makes the whole batch's outputs: of sizes that are made of sharded inputs, and
        of what is done once in another way.
    """

    takes: Sequence[Spec]
    gives: Sequence[Spec]
    make: Callable[[Any], list[list[Any]]] | None = None
    part: Callable[[Any, int], list[Any]] | None = None
    whole: Callable[[Any], list[Any]] | None = None
    alone: int | None = None
    near: int | None = None
    once: bool = False
    padded: bool = False
    ones: Sequence[int] = ()
    passes: bool = False
    sizes: Sequence[int] | None = None


def once(op: Op) -> Plan:
    """Done once, with all rows."""
    return _once(len(op.inputs), len(op.outputs))


@functools.cache
def _once(inputs: int, outputs: int) -> Plan:
    return Plan([REPLICATED] * inputs, [REPLICATED] * outputs, once=True)


def tell_sizes(output: tf.Tensor, plan: Plan) -> None:
    """Gives a tensor the static sizes that the plan knows, for the rules of what is made of it."""
    if plan.sizes is not None:
        output.set_shape([None if size < 0 else size for size in plan.sizes])


Rule = Callable[[Op, Sequence[Spec]], "Plan | None"]
_RULES: dict[str, Rule] = {}
_LIGHT: set[str] = set()


def rule(*types: str, light: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for operations of these types; one rule a type.

    Args:
      types: the types.
      light: they take no longer than to read and to write what they are given and give, so that it
        does not matter who does them.
    """

    def put(function: Rule) -> Rule:
        for name in types:
            if name in _RULES:
                raise ValueError(f"operation type {name!r} has a rule already: {_RULES[name]}")
            _RULES[name] = function
        _LIGHT.update(types if light else ())
        return function

    return put


def register(type: str, rule: Rule) -> None:
    """Gives operations of a type a rule, or another one than they have.

    Args:
      type: the type of a TensorFlow operation, such as ``"MatMul"`` (``tensor.op.type``).
      rule: a function of an :class:`Op` and the specs of its inputs that returns a :class:`Plan`,
        or None: done once with all rows. :func:`by_example` is a ready one.

    Raises:
      ValueError: ``type`` is no operation of this process.
      TypeError: ``rule`` cannot be called.

    >>> import towerstrategy.sharding
    >>> towerstrategy.sharding.register("Mfcc", towerstrategy.sharding.by_example)
    """
    if not isinstance(type, str) or not hasattr(tf.raw_ops, type) and not _is_operation(type):
        raise ValueError("type must be the type of a TensorFlow operation that is loaded, such as "
                         f"'MatMul', but got {type!r}")
    if not callable(rule):
        raise TypeError("rule must be a function of an operation and the specs of its inputs, but "
                        f"got {rule!r}")
    _RULES[type] = functools.partial(_checked, rule)


def _checked(rule: Rule, op: Op, specs: Sequence[Spec]) -> Plan | None:
    """What a user's rule says, if that is a plan."""
    plan = rule(op, specs)
    problem = "" if plan is None else _problem(plan, op)
    if problem:
        raise TypeError(f"the rule for {op.type} (operation {op.name!r}) {problem}")
    return plan


def _is_operation(type: str) -> bool:
    return _tf.op_def(type) is not None


def is_light(type: str) -> bool:
    """Whether operations of this type take no longer than to read and to write."""
    return type in _LIGHT


def has_rule(type: str) -> bool:
    """Whether it is known what operations of this type do with rows."""
    return type in _RULES


def types() -> list[str]:
    """The operation types that have a rule."""
    return sorted(_RULES)


def plan_of(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """How ``op`` is done with inputs of these specs; None: once, with all rows.

    Raises:
      TypeError: a rule that does not return a :class:`Plan` of specs.
    """
    found = _RULES.get(op.type)
    plan = None if found is None else found(op, specs)
    if plan is None:
        return None
    for index, (spec, wanted) in enumerate(zip(specs, plan.takes)):
        if wanted is not spec and isinstance(wanted, Sharded) and op.rank(index) is None \
                and spec != dataclasses.replace(wanted, broadcast=False):
            return None  # nothing can be cut whose rank is unknown
    return plan


def _problem(plan: Any, op: Op) -> str:
    if not isinstance(plan, Plan):
        return f"must return a towerstrategy.sharding.Plan or None, but returned {plan!r}"
    specs = (Replicated, Sharded, Partial, Size, ListOf)
    for word, got, of in (("takes", plan.takes, op.inputs), ("gives", plan.gives, op.outputs)):
        if len(got) != len(of):
            return f"must say {len(of)} specs in `{word}`, but said {len(got)}: {got!r}"
        for spec in got:
            if not isinstance(spec, specs):
                return f"must say specs in `{word}`, but said {spec!r}"
    return ""


def by_example(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The rule of an operation that keeps examples apart along the first dimension.

    Every input that has the batch's rows in its first dimension keeps them, every other input is
    the same for all towers, and all outputs have the rows in their first dimension.
    """
    sharded = [spec for spec in specs if isinstance(spec, Sharded)]
    if not sharded or any(spec != sharded[0] or spec.dim for spec in sharded):
        return None
    return Plan([spec if isinstance(spec, Sharded) else REPLICATED for spec in specs],
                [sharded[0]] * len(op.outputs))
