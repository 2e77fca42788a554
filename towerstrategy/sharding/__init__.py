"""One program: a step is traced once, as on one device, and partitioned over the towers.

Goes in: a function written for one device.  Comes out: its operations on the towers, by one table
of rules.  :mod:`spec` defines the specs of tensors, :mod:`rules` is the table, :mod:`propagate`
finds each tensor's spec, :mod:`partition` makes the towers' operations, :mod:`values` redistributes
tensors, and :mod:`step` does all of it for a function.
"""

from towerstrategy.sharding import rules  # noqa: F401  (fills the table)
from towerstrategy.sharding.rules.registry import Op, Plan, Rule, by_example, register
from towerstrategy.sharding.spec import ListOf, Partial, Replicated, Sharded, Size, Spec

__all__ = ["ListOf", "Op", "Partial", "Plan", "Replicated", "Rule", "Sharded", "Size", "Spec",
           "by_example", "register"]


def __dir__() -> list[str]:
    return __all__
