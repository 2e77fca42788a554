"""The table of sharding rules, a file for each family of ops.

Goes in: nothing.  Comes out: :mod:`registry`, filled: each file registers its rules when imported.
"""

from towerstrategy.sharding.rules import (
    cut as cut,
    draws as draws,
    elementwise as elementwise,
    gathers as gathers,
    images as images,
    lists as lists,
    matrices as matrices,
    normalization as normalization,
    recurrent as recurrent,
    reductions as reductions,
    shapes as shapes,
    views as views,
)
