"""One program: a step is traced once, as on one device, and partitioned over the towers.

Goes in: a function written for one device.  Comes out: its operations on the towers, by one table
of rules.  :mod:`spec` says what a tensor can be, :mod:`rules` is the table, :mod:`propagate` gives
each tensor its spec, :mod:`partition` makes the towers' operations, :mod:`values` redistributes,
and :mod:`step` does all of it for a function.
"""

from towerstrategy.sharding import rules as rules
from towerstrategy.sharding.rules.registry import Op as Op
from towerstrategy.sharding.rules.registry import Plan as Plan
from towerstrategy.sharding.rules.registry import by_example as by_example
from towerstrategy.sharding.rules.registry import register as register
from towerstrategy.sharding.spec import ListOf as ListOf
from towerstrategy.sharding.spec import Partial as Partial
from towerstrategy.sharding.spec import Replicated as Replicated
from towerstrategy.sharding.spec import Sharded as Sharded
from towerstrategy.sharding.spec import Size as Size
