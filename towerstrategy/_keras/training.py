"""The steps of a training, as both Kerases have them: their data, and whether XLA compiles them.

Goes in: a model or a step's data.  Comes out: sub-batches, or yes or no.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from towerstrategy.placement import kind


def split_plain(strategy: tf.distribute.Strategy, data: Any) -> Any:
    """A step's data, split unless it is already."""
    is_split = any(isinstance(leaf, tf.distribute.DistributedValues)
                   for leaf in tf.nest.flatten(data))
    return data if is_split else strategy.extended.split(data)


def compiles_towers(model: Any) -> bool:
    """Whether XLA compiles what the towers do in a model's steps, and not the steps as a whole."""
    strategy = model.distribute_strategy
    return (bool(model.jit_compile) and kind.is_tower_strategy(strategy)
            and not strategy.extended.compiles_whole)
