"""The calls of layers in a model whose calls are known beforehand.

Goes in: a model, and what was said by hand of its layers' stages.  Comes out: a :class:`Position`
for each call of a layer, in order, nested models opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Attributes of layers, MADE of the nodes of functional models, too: stages that were said by hand.
MADE, CALLED = "_tower_stage", "_tower_stages_called"
# Rows of a micro-batch, where a model does not say how many its batches have.
ROWS = 32


class Position(NamedTuple):
    """A call of a layer in a model whose calls are known beforehand.

    Attributes:
      layer: the layer.
      said: the stage that was said by hand, or None.
      result_bytes: of its results for a micro-batch; 0 where they are not known.
    """

    layer: Any
    said: int | None
    result_bytes: int


def positions_of(model: Any, names: Any, said: int | None = None,
                 inside: Sequence[Any] = ()) -> Iterator[Position]:
    """The calls of layers in ``model``, which was said to be in a stage or not."""
    inside = *inside, model
    for layer, node in names.calls_of(model):
        if any(layer is other for other in inside):  # a part that holds the whole
            continue
        here = vars(node).get(MADE) if node is not None else None
        here = vars(layer).get(MADE) if here is None else here
        here = said if here is None else here
        if names.is_opened(layer):
            yield from positions_of(layer, names, here, inside)
        else:
            yield Position(layer, here, 0 if node is None else names.result_bytes(node, ROWS))
