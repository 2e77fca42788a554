"""Whether a step is traced here that is written for one device, in a replica context of all rows.

Goes in: nothing.  Comes out: yes or no; the strategy.
"""

from __future__ import annotations

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.towers import contexts


def has_all_rows() -> bool:
    """Whether such a step is traced here."""
    return isinstance(tf.distribute.get_replica_context(), contexts.OneReplicaContext)


def strategy_of_replica() -> tf.distribute.Strategy | None:
    """The strategy in one of whose towers, or in whose traced step, this runs; else None."""
    context = tf.distribute.get_replica_context()
    inside = isinstance(context, (contexts.TowerContext, contexts.OneReplicaContext))
    return context.strategy if inside else None


def current() -> contexts.TowerContext | contexts.OneReplicaContext | None:
    """The context of the tower, or of the step with all rows, that runs here; else None."""
    context = tf.distribute.get_replica_context()
    inside = isinstance(context, (contexts.TowerContext, contexts.OneReplicaContext))
    return context if inside else None


def has_stages_here(context: contexts.TowerContext | contexts.OneReplicaContext) -> bool:
    """Whether what runs here may be in another stage than what is around it: in no loop, say."""
    if isinstance(context, contexts.TowerContext):
        return context.can_merge
    return not _tf.is_in_control_flow(None)
