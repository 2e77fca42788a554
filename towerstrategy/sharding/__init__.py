"""One program: a step is traced once, as on one device, and partitioned over the towers.

Goes in: a function written for one device.  Comes out: its operations on the towers, by one table
of rules.  :mod:`spec` says what a tensor can be, :mod:`rules` is the table, :mod:`propagate` gives
each tensor its spec, :mod:`partition` makes the towers' operations, :mod:`values` redistributes,
and :mod:`step` does all of it for a function.
"""

from towerstrategy.sharding import rules as rules
from towerstrategy.sharding.rules.registry import (
    Op as Op,
    Plan as Plan,
    by_example as by_example,
    register as register,
)
from towerstrategy.sharding.spec import (
    ListOf as ListOf,
    Partial as Partial,
    Replicated as Replicated,
    Sharded as Sharded,
    Size as Size,
)
