"""The table of sharding rules: an op type -> how ops of this type run on the towers.

Goes in: rules, by :func:`rule` (ours) or :func:`register` (a user's).  Comes out: :func:`plan_of`.

A rule is a function of an :class:`Op` and the specs of its inputs.  It returns a :class:`Plan`, or
None where the op cannot be partitioned and has to run once, with all rows.  ``tests/sharding``
proves the rules: it runs each op whole and in pieces, and compares.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.spec import (
    REPLICATED,
    ListOf,
    Partial,
    Replicated,
    Sharded,
    Size,
    Spec,
    can_be_cut,
)

# In place of a tower's number: the host, which holds the numbers of rows; every tower.
HOST, EACH = -1, -2


class Definition(NamedTuple):
    """What the towers' copies of an op take over from it.

    Attributes:
      device: the device that it was traced on; "" for none.
      attributes: a serialized ``NodeDef`` that has nothing but the attributes.
      dtypes: the dtypes of the outputs.
    """

    device: str
    attributes: bytes
    dtypes: list[tf.DType]


class Op:
    """An op of a traced graph: its type, attributes, static shapes and static values.

    It caches what ``tf.Operation`` computes anew at each access.

    Attributes:
      before: the names of the ops that make the inputs, one for each input.
      controls: the names of its control inputs, sorted, as TensorFlow's order differs by process.
      handles: the indices of the inputs that are resources.
      is_call: whether it calls a function.
      is_stateful: whether its type is registered as stateful.
      has_effect: whether it writes to a variable or to the world outside.
      notes: what rules store while they go over a graph; all its ops share it.
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
        self.handles = [index for index, tensor in enumerate(self.inputs)
                        if tensor.dtype == tf.resource]
        self.is_call = _tf.is_call(self.type)
        self.is_stateful = _tf.is_stateful(self.type)
        controls = operation.control_inputs
        self.controls = sorted([control.name for control in controls]) if controls else []
        self.has_effect = (self.is_stateful or bool(self.handles)) and _tf.has_effect(operation)

    def pass_by(self, passed: Mapping[str, Op]) -> None:
        """Replaces each input that one of these identities makes by the identity's own input."""
        for index, name in enumerate(self.before):
            if name in passed:
                source = passed[name].inputs[self.inputs[index].value_index]
                self.inputs[index] = source
                self.input_names[index], self.before[index] = source.name, source.op.name
        if not passed.keys().isdisjoint(self.controls):
            self.controls = sorted({before for name in self.controls for before in (
                passed[name].before[:len(passed[name].outputs)] if name in passed else [name])})

    @property
    def writes_variables(self) -> bool:
        """Whether it has an effect and has resources among its inputs."""
        return self.has_effect and bool(self.handles)

    @property
    def only_reads(self) -> bool:
        """Whether all that it does to resources is to read them; calls may do more."""
        return bool(self.handles) and not self.has_effect and self.type not in _tf.CALLERS

    @property
    def has_state(self) -> bool:
        """Whether it matters how often it runs: it has an effect, or its kernel keeps a state.

        Kernels of some random ops keep a state.  Nothing has to wait for these ops: they run only
        if their output is used.
        """
        return self.is_stateful and not self.handles or self.has_effect

    @functools.cached_property
    def _node(self) -> Any:
        """The ``NodeDef``, which TensorFlow makes anew at each access, even to one attribute."""
        return self.operation.node_def

    @functools.cached_property
    def definition(self) -> Definition:
        """What the towers' copies take over from it."""
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
        """The value of an attribute; a string is a ``str``."""
        attributes = self._node.attr
        kind = attributes[name].WhichOneof("value") if name in attributes else None
        value = getattr(attributes[name], kind) if kind in ("b", "i", "f", "s") \
            else self.operation.get_attr(name)
        return value.decode() if isinstance(value, bytes) else value

    def value(self, index: int) -> Any:
        """The static value of an input; None if unknown."""
        return _tf.constant_value(self.inputs[index])

    def rank(self, index: int) -> Any:
        """The rank of an input; None if unknown."""
        return self.inputs[index].shape.rank

    def out_rank(self, index: int = 0) -> Any:
        """The rank of an output; None if unknown."""
        return self.outputs[index].shape.rank

    def axes(self, index: int, rank: int | None) -> list[int] | None:
        """The axes that an input lists, of a tensor of this rank, from 0 up; None if unknown."""
        value = self.value(index)
        if value is None or rank is None:
            return None
        return [int(axis) % max(rank, 1) for axis in np.ravel(value)]


@dataclasses.dataclass
class Plan:
    """How an op runs on the towers: by default, each tower runs a copy of it.

    Attributes:
      takes: the spec that each input has to have; an input with another spec is redistributed.
      gives: the spec of each output.
      make: makes the towers' nodes where copies of the op would not do. It is called with a
        :class:`maker.Maker` and returns, for each output, one value for all or a list, one a tower.
      alone: with ``make`` or ``once``, for ``strategy.run``, where each tower runs the op itself:
        the op's output on a tower is the plan's, times the tower's share of the rows to this power.
        None where no power makes them equal.
      padded: a tower without rows gets one row of zeros, which is cut off its outputs: for kernels
        that fail on no rows, or return a wrong shape; "CPU" if only those for CPUs do.
      ones: the inputs whose row of padding is of ones.
      sizes: a constant that may replace the last input, a shape, with -1 for the rows. So no tower
        has to compute the shape of its rows.
      near: an input of which the towers need a few entries only: all towers' copies run on its
        device, so that only these entries are sent.
      passes: each output equals the input of the same index: the op need not run.
      once: the op runs once, with all rows, and its outputs are cut for the towers.
      part: makes a GPU tower's outputs with less work than a copy of the op.
      whole: makes the outputs for the whole batch, where a copy of the op would not do: sizes of
        sharded inputs, or a cheaper way to run the op once.
    """

    takes: Sequence[Spec]
    gives: Sequence[Spec]
    make: Callable[[Any], list[Any]] | None = None
    part: Callable[[Any, int], list[Any]] | None = None
    whole: Callable[[Any], list[Any]] | None = None
    alone: int | None = None
    near: int | None = None
    once: bool = False
    padded: bool | str = False
    ones: Sequence[int] = ()
    passes: bool = False
    sizes: Sequence[int] | None = None


def once(op: Op) -> Plan:
    """The plan of an op that runs once, with all rows, and whose outputs are replicated."""
    return _once(len(op.inputs), len(op.outputs))


@functools.cache
def _once(inputs: int, outputs: int) -> Plan:
    return Plan([REPLICATED] * inputs, [REPLICATED] * outputs, once=True)


def set_static_shape(output: tf.Tensor, plan: Plan) -> None:
    """Sets the static shape of an output to ``plan.sizes``, for the rules of its consumers."""
    if plan.sizes is not None:
        output.set_shape([None if size < 0 else size for size in plan.sizes])


Rule = Callable[[Op, Sequence[Spec]], "Plan | None"]
_RULES: dict[str, Rule] = {}
_LIGHT: set[str] = set()
_MOVES: set[str] = set()
SIZES: dict[str, int] = {}  # see rule()


def rule(*types: str, light: bool = False, moves: bool = False,
         size: int | None = None) -> Callable[[Rule], Rule]:
    """Registers a rule for operations of these types; one rule a type.

    Args:
      types: the types.
      light: whether such an op costs no more than to read its inputs and to write its outputs, so
        that it does not matter whether it runs once or on each tower.
      moves: whether such an op only moves entries.
      size: for ops that make rows and take none: the input that is the output's shape, or its
        number of rows.
    """

    def decorator(function: Rule) -> Rule:
        for name in types:
            if name in _RULES:
                raise ValueError(f"operation type {name!r} has a rule already: {_RULES[name]}")
            _RULES[name] = function
        _LIGHT.update(types if light else ())
        _MOVES.update(types if moves else ())
        SIZES.update(dict.fromkeys(types, size) if size is not None else {})
        return function

    return decorator


def register(type: str, rule: Rule) -> None:
    """Registers a user's rule for an op type, in place of the rule that it has, if any.

    Args:
      type: the type of a TensorFlow operation, such as ``"MatMul"`` (``tensor.op.type``).
      rule: a function of an :class:`Op` and the specs of its inputs that returns a :class:`Plan`,
        or None to run the op once, with all rows. :func:`by_example` is a ready one.

    Raises:
      ValueError: ``type`` is not an operation type that is loaded in this process.
      TypeError: ``rule`` cannot be called.

    >>> import towerstrategy.sharding
    >>> towerstrategy.sharding.register("Mfcc", towerstrategy.sharding.by_example)
    """
    if not isinstance(type, str) or not hasattr(tf.raw_ops, type) and _tf.op_def(type) is None:
        raise ValueError("type must be the type of a TensorFlow operation that is loaded, such as "
                         f"'MatMul', but got {type!r}")
    if not callable(rule):
        raise TypeError("rule must be a function of an operation and the specs of its inputs, but "
                        f"got {rule!r}")
    _RULES[type] = functools.partial(_checked, rule)


def _checked(rule: Rule, op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan that a user's rule returns; raises if it is not a valid one."""
    plan = rule(op, specs)
    problem = "" if plan is None else _problem(plan, op)
    if problem:
        raise TypeError(f"the rule for {op.type} (operation {op.name!r}) {problem}")
    return plan


def is_light(type: str) -> bool:
    """Whether ops of this type are registered as light, see :func:`rule`."""
    return type in _LIGHT


def computes(type: str) -> bool:
    """Whether ops of this type have a rule and do more than to move entries."""
    return type in _RULES and type not in _MOVES


def plan_of(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan of ``op`` with inputs of these specs; None if it runs once, with all rows.

    Raises:
      TypeError: a user's rule does not return a :class:`Plan` of specs.
    """
    own_rule = _RULES.get(op.type)
    plan = None if own_rule is None else own_rule(op, specs)
    if plan is None or plan.once and not all(
            can_be_cut(spec) for spec in plan.gives if isinstance(spec, Sharded)):
        return None
    for index, (spec, wanted) in enumerate(zip(specs, plan.takes)):
        if wanted is not spec and isinstance(wanted, Sharded) and op.rank(index) is None \
                and spec != wanted.given:
            return None  # a tensor of unknown rank cannot be cut
    return plan


def rows_made(op: Op) -> int | None:
    """The constant number of rows that an op makes without taking any; None if it does not."""
    value = op.value(SIZES[op.type]) if op.type in SIZES else None
    return int(value.flat[0]) if value is not None and value.size and np.issubdtype(
        value.dtype, np.integer) else None


def plan_of_rows(op: Op, group: str) -> Plan | None:
    """The plan by which each tower makes its part of such rows, as rows of this group."""
    index = SIZES[op.type]
    specs: list[Spec] = [REPLICATED] * len(op.inputs)
    specs[index] = Size(0, 1, group, tuple(op.value(index).ravel().tolist()))
    return plan_of(op, specs)


def _problem(plan: Any, op: Op) -> str:
    """What is wrong with a user's plan; "" if nothing is."""
    if not isinstance(plan, Plan):
        return f"must return a towerstrategy.sharding.Plan or None, but returned {plan!r}"
    kinds = (Replicated, Sharded, Partial, Size, ListOf)
    for field, specs, tensors in (("takes", plan.takes, op.inputs),
                                  ("gives", plan.gives, op.outputs)):
        if len(specs) != len(tensors):
            return f"must have {len(tensors)} specs in `{field}`, but has {len(specs)}: {specs!r}"
        for spec in specs:
            if not isinstance(spec, kinds):
                return f"must have specs in `{field}`, but has {spec!r}"
    return ""


def by_example(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The rule of an op that handles each example, along the first dimension, by itself.

    Inputs that are sharded along their first dimension stay so, all other inputs are the same for
    all towers, and all outputs are sharded along their first dimension.
    """
    sharded = [spec for spec in specs if isinstance(spec, Sharded)]
    if not sharded or any(spec != sharded[0] or spec.dim for spec in sharded):
        return None
    return Plan([spec if isinstance(spec, Sharded) else REPLICATED for spec in specs],
                [sharded[0]] * len(op.outputs))
