"""Replica contexts: a tower's number, its share of the rows, and its sync points."""

from towerstrategy.contexts.here import (
    AnyContext as AnyContext,
    OneReplicaContext as OneReplicaContext,
    current as current,
    current_tower as current_tower,
    has_all_rows as has_all_rows,
    outside_of_towers as outside_of_towers,
    splitting_tower as splitting_tower,
    writer_of as writer_of,
)
from towerstrategy.contexts.tower import (
    NESTED_MERGE as NESTED_MERGE,
    Call as Call,
    TowerContext as TowerContext,
)
