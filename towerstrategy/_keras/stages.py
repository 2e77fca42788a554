"""Finds the stage of each layer call and of each variable; the same for both Kerases.

Goes in: models, and the user's choices: ``strategy.stage`` or ``tf.device`` around making or
calling layers.  Comes out: a stage for each call of a layer in a tower, and for each variable.

A call has the stage that the user chose around the call, else around making the layer.  In a
functional or sequential model, nested models included, the order of calls is known: a call without
a stage has that of the call before it.  If no call has one, the calls are cut into stages by cost.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy._keras import hooks, state
from towerstrategy.placement import homes as homes_lib, kind

# Attributes for the stages in which a layer, or a functional model's node, was made and called.
MADE_IN, CALLED_IN = "_tower_stage", "_tower_stage_called"
# The rows of a micro-batch if the model does not say how many its batches have.
DEFAULT_ROWS = 32
# Memory for a trained weight: itself, its gradient, and two slots, as in most optimizers.
COPIES_IF_TRAINED = 4

Plan = Sequence[tuple[Any, int]]  # a layer and a stage for each call, in order


class Call(NamedTuple):
    """A call of a layer in a model whose calls are known beforehand."""

    layer: Any
    chosen: int | None  # the stage that the user chose
    result_bytes: int  # for a micro-batch; 0 if unknown


class Run:
    """One call of the outermost model in a tower: ``strategy.extended.stages.run``."""

    def __init__(self, plan: Plan) -> None:
        self.entered: set[int] = set()  # the stages in which something has run
        self._stages_left: dict[int, list[int]] = collections.defaultdict(list)  # by layer
        for layer, stage in plan:
            self._stages_left[id(layer)].append(stage)

    def next_stage(self, layer: Any) -> int | None:
        """The stage of the next call of ``layer``; None if unknown."""
        stages = self._stages_left.get(id(layer))
        if not stages:
            return vars(layer).get(MADE_IN)
        return stages.pop(0) if len(stages) > 1 else stages[0]


def hooks_of(layer: type, names: Any) -> dict[tuple[Any, str], hooks.Hook]:
    """The hooks into ``layer``, a Keras' base class of layers."""
    return {
        (layer, "__init__"): hooks.Hook(
            _layer_init, "does not remember the stage for which a layer is made"),
        (layer, "__call__"): hooks.Hook(
            functools.partial(_layer_call, names),
            "runs all layers of a tower on one device, and does not remember a call's tf.device")}


def _layer_init(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> None:
    """The hook for a layer's ``__init__``: stores the stage in which the layer is made."""
    strategy = _staged_scope()
    if strategy is not None and contexts.current() is None:
        vars(self)[MADE_IN] = _chosen_stage(strategy)
    original(self, *args, **kwargs)


def _layer_call(names: Any, original: Callable[..., Any], self: Any, /, *args: Any,
                **kwargs: Any) -> Any:
    """The hook for a layer's ``__call__``: runs it in its stage, or stores the stage of a call."""
    strategy = _staged_scope()
    if strategy is None:
        return original(self, *args, **kwargs)
    tower = contexts.current()
    if tower is None:
        return _call_outside_tower(strategy, original, self, args, kwargs)
    if not tower.can_merge:  # a branch or a loop runs in one stage
        return original(self, *args, **kwargs)
    with _stage_in_tower(strategy, self, names):
        return original(self, *args, **kwargs)


def sequential_build(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The hook for ``Sequential.build``, which calls all layers again whenever one is added.

    So the stage around adding a layer is not that of the other layers' calls.
    """
    strategy = _staged_scope()
    if strategy is None or contexts.current() is not None:
        return original(self, *args, **kwargs)
    with strategy.extended.stages.within(None), tf.device(None):
        return original(self, *args, **kwargs)


def _call_outside_tower(strategy: tf.distribute.Strategy, original: Callable[..., Any],
                        layer: Any, args: Any, kwargs: Any) -> Any:
    """Calls a layer outside of towers, as in building a model; stores the stage of the call."""
    chosen = _chosen_stage(strategy)
    stage = vars(layer).get(MADE_IN) if chosen is None else chosen
    if stage is None:
        return original(layer, *args, **kwargs)
    vars(layer).setdefault(CALLED_IN, stage)
    count = len(layer._inbound_nodes)  # of a functional model that is being built
    with strategy.extended.stages.within(stage, chosen is not None):
        result = original(layer, *args, **kwargs)
    if chosen is not None:
        for node in layer._inbound_nodes[count:]:
            vars(node)[MADE_IN] = chosen
    return result


@contextlib.contextmanager
def _stage_in_tower(strategy: tf.distribute.Strategy, layer: Any, names: Any) -> Iterator[None]:
    """A context that runs a layer of a tower in its stage."""
    stages = strategy.extended.stages
    if stages.chosen is not None:  # around the call: all calls inside have this stage, too
        # Variables are in the first stage in which their layer is called; a model has none itself.
        if not isinstance(layer, names.TRAINER) \
                and vars(layer).setdefault(CALLED_IN, stages.chosen) == stages.chosen:
            strategy.extended.homes.settle(
                (variable, stages.chosen) for variable, _ in names.variables_of_layer(layer))
        yield
        return
    outermost = stages.run is None
    run = Run(settle(strategy, layer, names)) if outermost else stages.run
    stage = run.next_stage(layer)
    with _tf.patched(stages, run=run), \
            contextlib.nullcontext() if stage is None else stages.within(stage):
        yield
    if outermost and isinstance(layer, names.TRAINER):
        _check_entered(strategy, layer, run.entered, names)


def _check_entered(strategy: tf.distribute.Strategy, model: Any, entered: set[int],
                   names: Any) -> None:
    """Raises ``ValueError`` if no layer of a trained model has run in some stage."""
    # An uncompiled model may be a part of another; without training, only a part of it may run.
    if entered and not (state.optimizers_of(model, names) and _tf.may_be_recorded()):
        return
    count = strategy.extended.placement.stages
    missing = " and ".join(str(stage) for stage in range(count) if stage not in entered)
    if missing:
        raise ValueError(
            f"no layer of model {model.name!r} went to stage {missing} of the {count} that each "
            f"tower has (0 to {count - 1}). A functional or sequential model of at least {count} "
            "layers is cut into stages by itself if you choose none. In other models, choose them "
            "by `with strategy.stage(0):`, `with strategy.stage(1):` around making or calling "
            "layers. Or give each tower fewer devices.")


def _make_plan(strategy: tf.distribute.Strategy, model: Any, names: Any) -> Plan:
    """The plan of a functional or sequential model; an empty one for other models."""
    calls = list(_calls_in(model, names)) if type(model).call in names.GRAPH_CALLS else []
    if not calls:
        return []
    placement = strategy.extended.placement
    stages = _filled([call.chosen for call in calls])
    if not stages:
        trained = bool(state.optimizers_of(model, names))
        settled = [_settled_stage(call.layer, trained, names) for call in calls]
        stages = _filled(settled, next((stage for stage in settled if stage is not None), 0))
        if not stages or trained and len({*stages}) < placement.stages:
            stages = cut(list(_costs(calls, names)), min(placement.stages, len(calls)),
                         placement.micro_batches)
    return [(call.layer, stage) for call, stage in zip(calls, stages)]


def _calls_in(model: Any, names: Any, chosen: int | None = None) -> Iterator[Call]:
    """The layer calls in ``model``; ``chosen`` is its stage."""
    for layer, node in _nodes_of(model):
        stage = next((stage for part in (node, layer) if part is not None
                      and (stage := vars(part).get(MADE_IN)) is not None), chosen)
        if type(layer).call in names.GRAPH_CALLS:
            yield from _calls_in(layer, names, stage)
        else:
            yield Call(layer, stage, 0 if node is None else _result_bytes(node))


def _nodes_of(model: Any) -> Iterator[tuple[Any, Any]]:
    """The layers that a model calls, in order, each with its node in Keras' graph, or None."""
    graph = getattr(model, "_functional", None) or model  # a Keras 3 Sequential has one inside
    if not hasattr(graph, "_nodes_by_depth"):
        yield from ((layer, None) for layer in model.layers)
        return
    for _, nodes in sorted(graph._nodes_by_depth.items(), reverse=True):
        for node in nodes:
            layer = node.operation if hasattr(node, "operation") else node.layer
            if not node.is_input and hasattr(layer, "_flatten_layers"):  # else Keras' operation
                yield layer, node


def _result_bytes(node: Any) -> int:
    """The bytes of a call's results, for :data:`DEFAULT_ROWS` if the number of rows is open."""
    shapes = [(tf.TensorShape(output.shape), tf.as_dtype(output.dtype))
              for output in tf.nest.flatten(node.outputs)]
    return sum(math.prod([shape[0] or DEFAULT_ROWS, *(size or 1 for size in shape[1:])])
               * dtype.size for shape, dtype in shapes if shape.rank)


def _settled_stage(layer: Any, trained: bool, names: Any) -> int | None:
    """The stage in which a layer's weights have to stay; None if they may move, or are nowhere."""
    # A part of a larger model leaves its weights where the larger one has put them.  A trained
    # model may move weights, unless a traced function holds them.
    return next((variable._settled for variable, _ in names.variables_of_layer(layer)
                 if getattr(variable, "_settled", None) is not None
                 and not (trained and variable._home_may_change)), None)


def _filled(stages: Sequence[int | None], last: int = 0) -> list[int]:
    """``stages``, with the stage before in place of each None; no stages if all are None."""
    filled: list[int] = []
    for stage in stages:
        last = last if stage is None else stage
        filled.append(last)
    return filled if any(stage is not None for stage in stages) else []


def _costs(calls: Sequence[Call], names: Any) -> Iterator[Cost]:
    """The cost of each call; a variable counts for the first call that uses it."""
    seen: set[int] = set()
    for call in calls:
        held = {id(variable): homes_lib.size_of(variable) * (COPIES_IF_TRAINED if trained else 1)
                for variable, trained in names.variables_of_layer(call.layer)
                if id(variable) not in seen}
        seen.update(held)
        yield Cost(sum(held.values()), call.result_bytes)


class Cost(NamedTuple):
    """The bytes that a layer costs its stage."""

    held: float  # once: weights, gradients and slots
    in_flight: float = 0.  # once per micro-batch in the stage: activations


def cut(costs: Sequence[Cost], stages: int, micro_batches: int = 1) -> list[int]:
    """The stage of each layer of a sequence, so that the largest stage costs the least.

    Each stage gets a layer, so there must be as many layers as stages, or more.  Stage s of P holds
    P - s micro-batches at a time, so early stages pay more for activations.  Of equally good cuts
    it returns the one with the most layers in early stages.
    """
    count = len(costs)
    held = np.cumsum([0., *(cost.held for cost in costs)])
    in_flight = np.cumsum([0., *(cost.in_flight for cost in costs)])
    largest = np.full(count + 1, np.inf)  # of the stages so far, if they end before this layer
    largest[0] = 0.
    starts: list[np.ndarray] = []  # for each stage: the end of its layers -> their start
    for stage in range(stages):
        total = held + in_flight * min(micro_batches, stages - stage)
        by_start = np.where(np.tri(count + 1, k=-1, dtype=bool), np.maximum(
            largest, total[:, np.newaxis] - total), np.inf)  # row: end, column: start, before it
        # The latest of the best starts: a layer without cost stays in the stage before.
        starts.append(count - np.argmin(by_start[:, ::-1], axis=1))
        largest = by_start.min(axis=1)
    stage_of_layers: list[int] = []
    end = count
    for stage in reversed(range(stages)):
        first = int(starts[stage][end])
        stage_of_layers = [stage] * (end - first) + stage_of_layers
        end = first
    return stage_of_layers


def settle(strategy: tf.distribute.Strategy, model: Any, names: Any) -> Plan:
    """Moves a model's variables, and their slots, to the stages that use them; returns the plan."""
    if not strategy.extended.placement.rows:
        return []
    plan = _make_plan(strategy, model, names)
    first_uses: dict[int, tuple[Any, int]] = {}
    for layer, stage in _layers_with_stages(model, plan):
        for variable, _ in names.variables_of_layer(layer):
            first_uses.setdefault(id(variable), (variable, stage))
    strategy.extended.homes.settle(first_uses.values())
    return plan


def _layers_with_stages(model: Any, plan: Plan) -> Iterator[tuple[Any, int]]:
    """The layers of a model and their stages; of a repeated layer, the first counts."""
    calls: Sequence[tuple[Any, int | None]] = plan or [(model, None)]
    for layer, planned in calls:
        for part in reversed(list(layer._flatten_layers())):  # inner layers first
            stored = vars(part).get(CALLED_IN, vars(part).get(MADE_IN))
            stage = stored if planned is None or part is not layer else planned
            if stage is not None:
                yield part, stage


def lines(strategy: tf.distribute.Strategy, model: Any, names: Any) -> list[tuple[str, str, str]]:
    """A table of the stages, if there are any: bytes of variables with their slots, and layers."""
    if not strategy.extended.placement.rows:
        return []
    sizes: dict[int, dict[str, int]] = collections.defaultdict(dict)  # stage -> layer -> bytes
    seen: set[int] = set()
    for layer, stage in _layers_with_stages(model, _make_plan(strategy, model, names)):
        new = {id(variable): variable for variable, _ in names.variables_of_layer(layer)
               if id(variable) not in seen}
        seen.update(new)
        size = sum(homes_lib.size_of(part) for variable in new.values()
                   for part in (variable, *homes_lib.followers_of(variable)))
        sizes[stage][layer.name] = sizes[stage].get(layer.name, 0) + size
    order = {layer.name: index for index, layer in enumerate(model._flatten_layers())}
    return [(str(stage), f"{sum(sizes[stage].values()):,}",
             ", ".join(sorted(sizes[stage], key=order.__getitem__)) or "not known")
            for stage in range(strategy.extended.placement.stages)]


def _chosen_stage(strategy: tf.distribute.Strategy) -> int | None:
    """The stage that the user chose around this code: by ``strategy.stage``, or ``tf.device``."""
    stage = strategy.extended.stages.chosen
    if stage is not None or not tf.executing_eagerly():
        return stage
    device = _tf.current_device()
    return strategy.extended.placement.stage_at(device) if device else None


def _staged_scope() -> tf.distribute.Strategy | None:
    """The strategy of the current scope or tower if its towers have stages, else None."""
    strategy = tf.distribute.get_strategy()
    return strategy if (
        kind.is_tower_strategy(strategy) and strategy.extended.placement.rows) else None
