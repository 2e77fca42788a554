"""Layers and stages, as both Kerases have them: who runs where.

Goes in: models, and what was said by hand: ``strategy.stage`` or ``tf.device`` around making or
calling layers.  Comes out: a stage for each call of a layer in a tower, and for each variable.

A functional or sequential model, nested ones opened, whose order of calls is known, has a
:class:`Plan`: as said by hand where anything was said, else cut by cost.  Of other models what is
said by hand holds.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy._keras.positions import CALLED, MADE, Position, positions_of
from towerstrategy.placement import cuts, homes as homes_lib, kind
from towerstrategy.variables import one_copy

_PLAN = "_tower_plan"  # the attribute of models that holds it


class Plan:
    """The stage of each call of each layer of a model, in the order of the calls."""

    def __init__(self, positions: Sequence[Position], stages: Sequence[int]) -> None:
        self.positions, self.stages = positions, stages
        self.calls: dict[int, list[int]] = {}  # the stages of each layer's calls
        for position, stage in zip(positions, stages):
            self.calls.setdefault(id(position.layer), []).append(stage)


class Run:
    """A model's run in a tower: counts how often each layer has been called.

    Attributes:
      plan: the model's, or None.
      entered: the stages in which something has run.
    """

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan
        self._counts: collections.Counter[int] = collections.Counter()
        self.entered: set[int] = set()

    def stage_of(self, layer: Any) -> int | None:
        """The stage of the call of ``layer`` that begins; None where none is known of it."""
        calls = None if self.plan is None else self.plan.calls.get(id(layer))
        if calls is None:
            return vars(layer).get(MADE)
        number = self._counts[id(layer)]
        self._counts[id(layer)] += 1
        return calls[min(number, len(calls) - 1)]


def layer_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Remembers the stage that a layer is made for."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy = _staged_scope()
        if strategy is not None and contexts.current() is None:
            vars(self)[MADE] = _said_here(strategy)
        original(self, *args, **kwargs)

    return __init__


def layer_call(names: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs a layer in its stage, and remembers where it was called while a model was built."""

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            strategy = _staged_scope()
            if strategy is None:
                return original(self, *args, **kwargs)
            tower = contexts.current()
            if tower is None:
                return _called_outside(strategy, original, self, args, kwargs)
            if not contexts.has_stages_here(tower):  # a branch or a loop is in one stage
                return original(self, *args, **kwargs)
            with _stage_in_tower(strategy, tower, self, names):
                return original(self, *args, **kwargs)

        return __call__

    return hook


def sequential_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Calls all layers anew for each that is added: where that is done says nothing of others."""

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = _staged_scope()
        if strategy is None or contexts.current() is not None:
            return original(self, *args, **kwargs)
        with strategy.extended.stages.within(None), tf.device(None):
            return original(self, *args, **kwargs)

    return build


def _called_outside(strategy: tf.distribute.Strategy, original: Callable[..., Any], layer: Any,
                    args: Any, kwargs: Any) -> Any:
    said = _said_here(strategy)
    stage = vars(layer).get(MADE) if said is None else said
    if stage is None:
        return original(layer, *args, **kwargs)
    called = vars(layer).setdefault(CALLED, [])
    if stage not in called:
        called.append(stage)
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
    asked = strategy.extended.stages.asked
    if asked is not None:  # around the call; that holds for all inside
        _note_asked(strategy, layer, asked, names)
        yield
        return
    outermost = tower.stage_run is None
    if outermost:
        tower.stage_run = Run(plan_of(strategy, layer, names))
        settle(strategy, layer, names)
    try:
        run = tower.stage_run
        stage = run.stage_of(layer)
        if stage is None:
            yield
        else:
            with strategy.extended.stages.within(stage):
                yield
        if outermost and isinstance(layer, names.TRAINER):
            _check_entered(strategy, layer, run, names)
    finally:
        if outermost:
            tower.stage_run = None


def _note_asked(strategy: tf.distribute.Strategy, layer: Any, stage: int, names: Any) -> None:
    """Remembers the first stage that a tower has called a layer in, and moves its variables there.
    """
    if isinstance(layer, names.TRAINER) or vars(layer).setdefault(CALLED, [stage]) != [stage]:
        return  # what is in a model is called itself
    strategy.extended.homes.settle(
        (variable, stage) for variable, _ in names.variables_of_layer(layer)
        if isinstance(variable, one_copy.TowerVariable))


def _check_entered(strategy: tf.distribute.Strategy, model: Any, run: Run, names: Any) -> None:
    """Raises ``ValueError`` where a model has not said by hand where it runs, or not all of it."""
    count = strategy.extended.placement.stages
    if not run.entered:
        raise ValueError(
            f"model {model.name!r} of type {type(model).__name__} cannot be cut into the "
            f"{count} stages that each tower has: the order in which its layers are called is in "
            "its call method, not in a graph of layers as in a functional or sequential model. "
            "Say by hand where they run: `with strategy.stage(0):`, `with strategy.stage(1):` "
            "around calling them in `call`, or around making them.")
    # What is not compiled may be one part of several; what is not trained, a part of itself.
    if run.plan is None and names.optimizers_of(model) and _tf.may_be_recorded():
        _check_used(strategy, model, run.entered)


def plan_of(strategy: tf.distribute.Strategy, model: Any, names: Any) -> Plan | None:
    """The plan of a model whose calls are known; else None.

    Raises:
      ValueError: more stages than layers, of which nothing was said by hand.
    """
    if not names.is_opened(model):
        return None
    positions = list(positions_of(model, names))
    slots = max(map(_slots, names.optimizers_of(model)), default=0)
    trained = [trained for position in positions
               for _, trained in names.variables_of_layer(position.layer)]
    key = strategy, slots, trained, [(id(position.layer), position.said) for position in positions]
    known = vars(model).get(_PLAN)
    if known is None or known[0] != key:
        known = key, _planned(strategy, model, positions, names)
        vars(model)[_PLAN] = known
    return known[1]


def _planned(strategy: tf.distribute.Strategy, model: Any, positions: Sequence[Position],
             names: Any) -> Plan | None:
    placement = strategy.extended.placement
    if not positions:
        return None
    said = [position.said for position in positions]
    if any(stage is not None for stage in said):
        return Plan(positions, _followed(said, 0))
    optimizers = names.optimizers_of(model)
    stages = _of_weights(positions, names, bool(optimizers))
    if set(stages) == set(range(placement.stages)) or stages and not optimizers:
        return Plan(positions, stages)
    if len(positions) < placement.stages:
        raise ValueError(
            f"devices gives each tower {placement.stages} stages, but model {model.name!r} has "
            f"only {len(positions)} layer(s) for them: "
            f"{', '.join(position.layer.name for position in positions)}. Give each tower as many "
            "devices at the most, or say by strategy.stage where these layers run.")
    costs = list(_costs(positions, max(map(_slots, optimizers), default=0), names))
    return Plan(positions, cuts.cut(costs, placement.stages, placement.micro_batches))


def _of_weights(positions: Sequence[Position], names: Any, trained: bool) -> list[int]:
    """The stages in which the layers' weights are to stay; nothing where there are none.

    A part of a larger model leaves weights where that has put them.  A model that is trained may
    bring them elsewhere, unless functions hold them.
    """
    found: list[int | None] = []
    for position in positions:
        settled = (variable._settled for variable, _ in names.variables_of_layer(position.layer)
                   if getattr(variable, "_settled", None) is not None
                   and not (trained and variable._home_may_change))
        found.append(next(settled, None))
    first = next((stage for stage in found if stage is not None), None)
    return [] if first is None else _followed(found, first)


def _followed(found: Sequence[int | None], first: int) -> list[int]:
    """The stages: what has none follows what comes before it, and begins in ``first``."""
    stages, last = [], first
    for stage in found:
        last = last if stage is None else stage
        stages.append(last)
    return stages


def check_all_used(strategy: tf.distribute.Strategy, model: Any, names: Any) -> None:
    """Raises ``ValueError`` where a model that is trained as a whole leaves out a stage."""
    if strategy.extended.placement.stages == 1:
        return
    plan = plan_of(strategy, model, names)
    if plan is not None:
        _check_used(strategy, model, (stage for _, stage in _uses(model, plan)))


def _check_used(strategy: tf.distribute.Strategy, model: Any, used: Iterable[int]) -> None:
    count, used = strategy.extended.placement.stages, sorted(set(used))
    missing = " and ".join(str(stage) for stage in range(count) if stage not in used)
    if missing:
        raise ValueError(
            f"no layer of model {model.name!r} went to stage {missing} of the {count} that "
            f"each tower has (0 to {count - 1}): by strategy.stage or tf.device all are in "
            f"{' and '.join(map(str, used))}. Put some there, or give each tower fewer devices.")


def _costs(positions: Sequence[Position], slots: int, names: Any) -> Iterator[cuts.Cost]:
    seen: set[int] = set()
    for position in positions:
        held = 0
        for variable, trained in names.variables_of_layer(position.layer):
            if id(variable) not in seen:
                seen.add(id(variable))
                times = 2 + slots if trained else 1  # the weight, its gradient, its slots
                held += times * homes_lib.size_of(variable)
        yield cuts.Cost(held, position.result_bytes)


def _slots(optimizer: Any) -> int:
    """How many slots of a weight's size an optimizer has, built or not."""
    # Not by comparing: legacy optimizers hold some options as variables, which are 0 or are not.
    return _SLOTS.get(type(optimizer).__name__, 2) + sum(
        bool(getattr(optimizer, option, False))
        for option in ("momentum", "amsgrad", "centered", "use_ema"))


_SLOTS = {"SGD": 0, "RMSprop": 1, "Adagrad": 1, "Lion": 1, "Adafactor": 0, "LossScaleOptimizer": 0,
          "LossScaleOptimizerV3": 0}


def settle(strategy: tf.distribute.Strategy, model: Any, names: Any) -> None:
    """Brings a model's variables, and their slots, to the stages that use them.

    Raises:
      ValueError: more stages than layers, of which nothing was said by hand.
    """
    if not strategy.extended.placement.rows:
        return
    used: dict[int, tuple[Any, int]] = {}
    for layer, stage in _uses(model, plan_of(strategy, model, names)):
        for variable, _ in names.variables_of_layer(layer):
            if isinstance(variable, one_copy.TowerVariable):
                used.setdefault(id(variable), (variable, stage))
    strategy.extended.homes.settle(used.values())


def _uses(model: Any, plan: Plan | None) -> Iterator[tuple[Any, int]]:
    """Layers and their stages; of a layer that comes again the first counts."""
    if plan is None:
        for layer in reversed(list(model._flatten_layers())):  # what is inside comes first
            said = vars(layer).get(CALLED, [vars(layer).get(MADE)])[0]
            if said is not None:
                yield layer, said
        return
    for position, stage in zip(plan.positions, plan.stages):
        for layer in reversed(list(position.layer._flatten_layers())):
            made = vars(layer).get(MADE)
            if made is not None and layer is not position.layer:
                yield layer, made
        yield position.layer, stage


def lines(strategy: tf.distribute.Strategy, model: Any, names: Any) -> list[tuple[str, str, str]]:
    """The bytes of variables, slots among them, and the layers of each stage, if there are any."""
    if not strategy.extended.placement.rows:
        return []
    found: dict[int, dict[str, int]] = collections.defaultdict(dict)
    seen: set[int] = set()
    slots = max(map(_slots, names.optimizers_of(model)), default=0)
    for layer, stage in _uses(model, plan_of(strategy, model, names)):
        size = 0
        for variable, trained in names.variables_of_layer(layer):
            if id(variable) not in seen:
                size += homes_lib.size_of(variable) * (1 + trained * slots)
            seen.add(id(variable))
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
