"""Layers and stages, as both Kerases have them: who runs where.

Goes in: models, and what was said by hand: ``strategy.stage`` or ``tf.device`` around making or
calling layers.  Comes out: a stage for each call of a layer in a tower, and for each variable.

A call is in the stage that was said around it, else around making the layer.  In a functional or
sequential model, nested ones opened, the order of calls is known: a call without a stage takes that
of the call before; if none has one, the calls are cut into stages by cost.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy._keras import hooks, state
from towerstrategy.placement import homes as homes_lib, kind

# Attributes of layers, MADE of the nodes of functional models, too: stages that were said by hand.
MADE, CALLED = "_tower_stage", "_tower_stage_called"
# Rows of a micro-batch, where a model does not say how many its batches have.
ROWS = 32
# What is held of a trained weight: itself, its gradient, and two slots, as most optimizers have.
TRAINED = 4

Plan = Sequence[tuple[Any, int]]  # a layer and a stage for each call, in order


class Call(NamedTuple):
    """A call of a layer in a model whose calls are known beforehand."""

    layer: Any
    said: int | None  # the stage that was said by hand
    result_bytes: int  # for a micro-batch; 0 where they are not known


class Run:
    """A model's run in a tower."""

    def __init__(self, plan: Plan) -> None:
        self.entered: set[int] = set()  # stages in which something has run
        self._to_come: dict[int, list[int]] = collections.defaultdict(list)
        for layer, stage in plan:
            self._to_come[id(layer)].append(stage)

    def stage_of(self, layer: Any) -> int | None:
        """The stage of the call of ``layer`` that begins; None where none is known of it."""
        stages = self._to_come.get(id(layer))
        if not stages:
            return vars(layer).get(MADE)
        return stages.pop(0) if len(stages) > 1 else stages[0]


def layer_init(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> None:
    """Remembers the stage that a layer is made for."""
    strategy = _staged_scope()
    if strategy is not None and contexts.current() is None:
        vars(self)[MADE] = _said_here(strategy)
    original(self, *args, **kwargs)


def layer_call(names: Any, original: Callable[..., Any], self: Any, /, *args: Any,
               **kwargs: Any) -> Any:
    """Runs a layer in its stage, and remembers where it was called while a model was built."""
    strategy = _staged_scope()
    if strategy is None:
        return original(self, *args, **kwargs)
    tower = contexts.current()
    if tower is None:
        return _called_outside(strategy, original, self, args, kwargs)
    if not tower.can_merge:  # a branch or a loop is in one stage
        return original(self, *args, **kwargs)
    with _stage_in_tower(strategy, tower, self, names):
        return original(self, *args, **kwargs)


def sequential_build(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls all layers anew for each that is added: where that is done says nothing of others."""
    strategy = _staged_scope()
    if strategy is None or contexts.current() is not None:
        return original(self, *args, **kwargs)
    with strategy.extended.stages.within(None), tf.device(None):
        return original(self, *args, **kwargs)


def _called_outside(strategy: tf.distribute.Strategy, original: Callable[..., Any], layer: Any,
                    args: Any, kwargs: Any) -> Any:
    said = _said_here(strategy)
    stage = vars(layer).get(MADE) if said is None else said
    if stage is None:
        return original(layer, *args, **kwargs)
    vars(layer).setdefault(CALLED, stage)
    before = len(layer._inbound_nodes)  # of a functional model that is being built
    with strategy.extended.stages.within(stage, said is not None):
        result = original(layer, *args, **kwargs)
    if said is not None:
        for node in layer._inbound_nodes[before:]:
            vars(node)[MADE] = said
    return result


@contextlib.contextmanager
def _stage_in_tower(strategy: tf.distribute.Strategy,
                    tower: contexts.AnyContext, layer: Any,
                    names: Any) -> Iterator[None]:
    stages = strategy.extended.stages
    if stages.asked is not None:  # around the call; that holds for all inside
        # Variables are in the first stage in which their layer is called; models call layers.
        if not isinstance(layer, names.TRAINER) \
                and vars(layer).setdefault(CALLED, stages.asked) == stages.asked:
            strategy.extended.homes.settle(
                (variable, stages.asked) for variable, _ in names.variables_of_layer(layer))
        yield
        return
    outermost = tower.stage_run is None
    run = Run(settle(strategy, layer, names)) if outermost else tower.stage_run
    stage = run.stage_of(layer)
    with hooks.having(tower, stage_run=run), \
            contextlib.nullcontext() if stage is None else stages.within(stage):
        yield
    if outermost and isinstance(layer, names.TRAINER):
        _check_entered(strategy, layer, run.entered, names)


def _check_entered(strategy: tf.distribute.Strategy, model: Any, entered: set[int],
                   names: Any) -> None:
    """Raises ``ValueError`` where a model that is trained as a whole leaves out a stage."""
    # What is not compiled may be one part of several; what is not trained, a part of itself.
    if entered and not (state.optimizers_of(model, names) and _tf.may_be_recorded()):
        return
    count = strategy.extended.placement.stages
    missing = " and ".join(str(stage) for stage in range(count) if stage not in entered)
    if missing:
        raise ValueError(
            f"no layer of model {model.name!r} went to stage {missing} of the {count} that each "
            f"tower has (0 to {count - 1}). A functional or sequential model of at least {count} "
            "layers is cut by itself where nothing is said by hand; of others, say by "
            "`with strategy.stage(0):`, `with strategy.stage(1):` around making or calling layers "
            "where they run. Or give each tower fewer devices.")


def _plan_of(strategy: tf.distribute.Strategy, model: Any, names: Any) -> Plan:
    """The plan of a model whose calls are known; else nothing."""
    calls = list(_calls_in(model, names)) if type(model).call in names.OPENED else []
    if not calls:
        return []
    placement = strategy.extended.placement
    stages = _followed([call.said for call in calls])
    if not stages:
        trained = bool(state.optimizers_of(model, names))
        kept = [_kept(call.layer, trained, names) for call in calls]
        stages = _followed(kept, next((stage for stage in kept if stage is not None), 0))
        if not stages or trained and len({*stages}) < placement.stages:
            stages = cut(list(_costs(calls, names)), min(placement.stages, len(calls)),
                         placement.micro_batches)
    return [(call.layer, stage) for call, stage in zip(calls, stages)]


def _calls_in(model: Any, names: Any, said: int | None = None,
              inside: Sequence[Any] = ()) -> Iterator[Call]:
    """The calls of layers in ``model``, which was said to be in a stage or not."""
    inside = *inside, model
    for layer, node in _nodes_of(model):
        if any(layer is other for other in inside):  # a part that holds the whole
            continue
        here = next((stage for part in (node, layer) if part is not None
                     and (stage := vars(part).get(MADE)) is not None), said)
        if type(layer).call in names.OPENED:
            yield from _calls_in(layer, names, here, inside)
        else:
            yield Call(layer, here, 0 if node is None else _result_bytes(node))


def _nodes_of(model: Any) -> Iterator[tuple[Any, Any]]:
    """The layers that a model calls, in order, each with the node of its graph, if there is one."""
    graph = getattr(model, "_functional", None) or model  # Keras 3's sequential models hold one
    if not hasattr(graph, "_nodes_by_depth"):
        yield from ((layer, None) for layer in model.layers)
        return
    for _, nodes in sorted(graph._nodes_by_depth.items(), reverse=True):
        for node in nodes:
            layer = node.operation if hasattr(node, "operation") else node.layer
            if not node.is_input and hasattr(layer, "_flatten_layers"):  # and no plain operation
                yield layer, node


def _result_bytes(node: Any) -> int:
    """Bytes of a call's results, of ``ROWS`` where it does not say how many it is made for."""
    shapes = [(tf.TensorShape(output.shape), tf.as_dtype(output.dtype))
              for output in tf.nest.flatten(node.outputs)]
    return sum(math.prod([shape[0] or ROWS, *(size or 1 for size in shape[1:])]) * dtype.size
               for shape, dtype in shapes if shape.rank)


def _kept(layer: Any, trained: bool, names: Any) -> int | None:
    """The stage in which a layer's weights are to stay."""
    # A part of a larger model leaves weights where that has put them.  A model that is trained may
    # bring them elsewhere, unless functions hold them.
    return next((variable._settled for variable, _ in names.variables_of_layer(layer)
                 if getattr(variable, "_settled", None) is not None
                 and not (trained and variable._home_may_change)), None)


def _followed(found: Sequence[int | None], last: int = 0) -> list[int]:
    """The stages: what has none follows what comes before it; nothing where there are none."""
    stages: list[int] = []
    for stage in found:
        last = last if stage is None else stage
        stages.append(last)
    return stages if any(stage is not None for stage in found) else []


def _costs(calls: Sequence[Call], names: Any) -> Iterator[Cost]:
    seen: set[int] = set()
    for call in calls:
        held = {id(variable): homes_lib.size_of(variable) * (TRAINED if trained else 1)
                for variable, trained in names.variables_of_layer(call.layer)
                if id(variable) not in seen}
        seen.update(held)
        yield Cost(sum(held.values()), call.result_bytes)


class Cost(NamedTuple):
    """The bytes that a layer costs its stage."""

    held: float  # what is there once: weights, gradients and slots
    in_flight: float = 0.  # what is there for each micro-batch that the stage holds: activations


def cut(costs: Sequence[Cost], stages: int, micro_batches: int = 1) -> list[int]:
    """The stage of each of a row of layers; each stage has a layer.

    A stage holds as many micro-batches as there are stages from it to the end, so that early ones
    pay more for activations.  Of cuts that are as good the one with the early layers together.
    There are as many layers as stages, at least.
    """
    count = len(costs)
    held = np.cumsum([0., *(cost.held for cost in costs)])
    in_flight = np.cumsum([0., *(cost.in_flight for cost in costs)])
    worst = np.full(count + 1, np.inf)
    worst[0] = 0.
    begins: list[np.ndarray] = []
    for stage in range(stages):
        each = (held + in_flight * min(micro_batches, stages - stage))
        reached, begin = np.full(count + 1, np.inf), np.zeros(count + 1, int)
        for end in range(stage + 1, count + 1):
            through = np.maximum(worst[:end], each[end] - each[:end])
            # The latest begin of the best: what costs nothing stays with the stage before.
            begin[end] = end - 1 - int(np.argmin(through[::-1]))
            reached[end] = through[begin[end]]
        worst = reached
        begins.append(begin)
    found, end = [0] * count, count
    for stage in reversed(range(stages)):
        start = int(begins[stage][end])
        found[start:end] = [stage] * (end - start)
        end = start
    return found


def settle(strategy: tf.distribute.Strategy, model: Any, names: Any) -> Plan:
    """Brings a model's variables, and their slots, to the stages that use them; says which."""
    if not strategy.extended.placement.rows:
        return []
    plan = _plan_of(strategy, model, names)
    used: dict[int, tuple[Any, int]] = {}
    for layer, stage in _uses(model, plan):
        for variable, _ in names.variables_of_layer(layer):
            used.setdefault(id(variable), (variable, stage))
    strategy.extended.homes.settle(used.values())
    return plan


def _uses(model: Any, plan: Plan) -> Iterator[tuple[Any, int]]:
    """Layers and their stages; of a layer that comes again the first counts."""
    calls: Sequence[tuple[Any, int | None]] = plan or [(model, None)]
    for layer, stage in calls:
        for part in reversed(list(layer._flatten_layers())):  # what is inside comes first
            said = vars(part).get(CALLED, vars(part).get(MADE))
            at = said if stage is None or part is not layer else stage
            if at is not None:
                yield part, at


def lines(strategy: tf.distribute.Strategy, model: Any, names: Any) -> list[tuple[str, str, str]]:
    """The bytes of variables, slots among them, and the layers of each stage, if there are any."""
    if not strategy.extended.placement.rows:
        return []
    found: dict[int, dict[str, int]] = collections.defaultdict(dict)
    seen: set[int] = set()
    for layer, stage in _uses(model, _plan_of(strategy, model, names)):
        new = {id(variable): variable for variable, _ in names.variables_of_layer(layer)
               if id(variable) not in seen}
        seen.update(new)
        size = sum(homes_lib.size_of(part) for variable in new.values()
                   for part in (variable, *homes_lib.followers_of(variable)))
        found[stage][layer.name] = found[stage].get(layer.name, 0) + size
    order = {layer.name: place for place, layer in enumerate(model._flatten_layers())}
    return [(str(stage), f"{sum(found[stage].values()):,}",
             ", ".join(sorted(found[stage], key=order.__getitem__)) or "not known")
            for stage in range(strategy.extended.placement.stages)]


def _said_here(strategy: tf.distribute.Strategy) -> int | None:
    """The stage said by hand around what runs here: by ``strategy.stage``, else ``tf.device``."""
    stage = strategy.extended.stages.asked
    if stage is not None or not tf.executing_eagerly():
        return stage
    device = _tf.current_device()
    return strategy.extended.placement.stage_at(device) if device else None


def _staged_scope() -> tf.distribute.Strategy | None:
    """The strategy whose scope, or tower, this is, where its towers have stages."""
    strategy = tf.distribute.get_strategy()
    return strategy if (
        kind.is_tower_strategy(strategy) and strategy.extended.placement.rows) else None
