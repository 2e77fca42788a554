"""What the hooks into Keras 3 and into tf_keras say the same way.

Goes in: a tower's context and Keras' own functions.  Comes out: wrappers that are installed once
and act in towers of a ``TowerStrategy`` only, the merge-first rule for optimizers, and what is done
to losses.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy import factors, merge, own_losses, parts, results, split, towers, variables

_MARK = "_towerstrategy_original"


class MovedError(Exception):
    """This Keras release does not have a name that we hook."""


def require(hooks: Iterable[tuple[Any, str]]) -> None:
    """Raises :class:`MovedError` unless each ``owner.name`` is there, before any is replaced."""
    for owner, name in hooks:
        if name not in owner.__dict__:
            raise MovedError(f"{getattr(owner, '__name__', owner)}.{name}")


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces ``owner.name`` by ``make(owner.name)``, once."""
    original = owner.__dict__[name]
    if hasattr(original, _MARK):
        return
    hooked = functools.wraps(original)(make(original))
    setattr(hooked, _MARK, original)
    setattr(owner, name, hooked)


def is_tower_strategy(strategy: Any) -> bool:
    """Whether ``strategy`` is a ``TowerStrategy``."""
    from towerstrategy.strategy import TowerStrategy  # which imports the hooks

    return isinstance(strategy, TowerStrategy)


def splitting_tower() -> towers.TowerContext | None:
    """The current tower where there are several of them, on any machine; None otherwise.

    With one tower Keras' own single-device code is right as it is.
    """
    tower = towers.current_tower()
    return tower if tower is not None and tower.several else None


def wrap_own_losses(cls: type, base: type) -> None:
    """Hooks ``compute_loss`` where ``cls``, a model's, overrides that of ``base``, Keras' own."""
    for owner in cls.__mro__[:cls.__mro__.index(base)]:
        if inspect.isfunction(owner.__dict__.get("compute_loss")):
            wrap(owner, "compute_loss", _own_loss)


def _own_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        tower = splitting_tower()
        if tower is None or tower.own_means:
            return original(self, *args, **kwargs)
        return parts.own_loss(tower, lambda: original(self, *args, **kwargs))

    return compute_loss


def silence_stand_ins(tower: towers.TowerContext, loss: tf.Tensor) -> tf.Tensor:
    """``loss``, 0 in a tower that works on a stand-in, for steps whose gradients all come of it.

    Such a tower's gradients are 0 then, and nothing has to leave them out where they are merged.
    """
    if not tower.stand_ins or tower.shares.workers is not None:
        return loss
    tower.silenced = True
    return merge.kept(tower.filled, loss)


def whole_batch_mask(tower: towers.TowerContext, weights: tf.Tensor, mask: Any) -> tf.Tensor:
    """Sample weights that hold a tower's ``total / valid`` factor -> those of the whole batch.

    Keras gives the unmasked entries of a batch the weight ``total / valid`` so that the mean over
    all entries is the mean over the unmasked ones; on R towers both counts are the whole batch's.

    Args:
      tower: where this runs.
      weights: what Keras made from this tower's mask.
      mask: this tower's mask, 1 or True for valid entries.
    """
    kept = tf.cast(mask, tf.float64)
    valid, count = tf.reduce_sum(kept), tf.cast(tf.size(kept), tf.float64)
    all_valid, all_count = tower.all_reduce(_tf.ReduceOp.SUM, [valid, count])
    factor = tf.math.divide_no_nan(all_count * valid, all_valid * count)
    return tf.where(valid > 0, weights * tf.cast(factor, weights.dtype), tf.zeros_like(weights))


def merged_if_alone() -> contextlib.AbstractContextManager[None]:
    """For an optimizer in the only tower there is: its gradients are merged as they are.

    Without it Keras would all-reduce them, which it does inside of ``tf.cond`` where it accumulates
    gradients or scales the loss, and there the towers cannot meet.
    """
    tower = towers.current_tower()
    return contextlib.nullcontext() if tower is None else towers.MergedContext(tower.strategy)


def merge_then(tower: towers.TowerContext, gradients: Sequence[Any], variables_: Sequence[Any],
               apply: Callable[[list[Any]], Any], merged_already: bool = False,
               overwriting: Sequence[bool] = ()) -> Any:
    """Merges the towers' gradients, then runs the optimizer's own single-device code once.

    Args:
      tower: where the optimizer was called.
      gradients: this tower's, one a variable: tensors, ``tf.IndexedSlices`` or None.
      variables_: the resource variables they belong to.
      apply: takes the merged gradients; runs in a :class:`towers.MergedContext`.
      merged_already: whether the caller has merged them, so that the towers agree.  Where they do
        not, there is one copy to update all the same: each tower counts by its share of the rows.
      overwriting: for each variable whether its gradient is its next value (the largest numbers
        seen, in float8 layers).  Of these the towers' maximum is taken, by the rule by which Keras
        accumulates them.
    """
    own_losses.check_applied(tower, variables_)
    count = tower.count
    homes = [variables.home_of(variable) for variable in variables_]

    from_factors = tower.strategy.extended.placement.on_cpu and not merged_already
    if from_factors and tower.is_copied:  # else towers may differ in what they hand over
        gradients = [factors.apart(gradient) for gradient in gradients]

    def merged(strategy: tf.distribute.Strategy, *grouped: Any) -> Any:
        per_variable = [_per_tower(value, count) for value in grouped]
        largest = _take_largest(per_variable, homes, tower.shares, overwriting)
        summed = (merge.agreed_gradients(per_variable, homes, tower.shares) if merged_already else
                  merge.gradients(per_variable, homes, tower.shares, tower.silenced, from_factors))
        for index, value in largest.items():
            summed[index] = value
        with towers.MergedContext(strategy), tf.device(strategy.extended.merge_device), \
                tf.name_scope(towers.UPDATE_SCOPE), \
                tf.profiler.experimental.Trace(towers.UPDATE_SCOPE):
            return apply(summed)

    return tower.merge_call(merged, args=tuple(gradients))


def _take_largest(per_variable: list[list[Any] | None], homes: Sequence[str],
                  shares: merge.Shares, overwriting: Sequence[bool]) -> dict[int, Any]:
    """Takes the variables' next values out of ``per_variable``; by index, the towers' maximum."""
    found: dict[int, Any] = {}
    for index, overwrites in enumerate(overwriting):
        values = per_variable[index]
        if overwrites and values is not None:
            with tf.device(homes[index]):
                found[index] = merge.largest(values, shares)
            per_variable[index] = None
    return found


def _per_tower(value: Any, count: int) -> list[Any] | None:
    """One gradient a tower from what ``merge_call`` grouped; None where there is none."""
    if value is None:
        return None
    if isinstance(value, (factors.Product, factors.RowSum)):
        parts = [towers.all_values(part, count) for part in value]
        return [type(value)(*one) for one in zip(*parts)]
    return towers.all_values(value, count)


def split_plain(strategy: tf.distribute.Strategy, data: Any) -> Any:
    """A step's data, split unless it is already."""
    leaves = tf.nest.flatten(data)
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
        return data
    return strategy.extended.split(data, stand_ins=True)


def rows_only(values: Any) -> list[Any]:
    """The towers' outputs without what came of stand-ins."""
    parts = list(values.values)
    shares = getattr(values, "shares", None)
    if shares is None or not shares.stand_ins:
        return parts
    return [_first_rows(part, shares.filled(number)) if part.shape.rank != 0 else part
            for number, part in enumerate(parts)]


def joined(value: Any, concat: Callable[[list[Any]], Any]) -> Any:
    """A model's output for the whole batch, from the towers' outputs ``value``.

    The rows of all towers and machines; an output that has no row for each of the batch's (a
    table, a mean over the batch) once: exactly what the towers agree on, else their mean by share.
    """
    parts, shares = list(value.values), value.shares
    rows = results.have_rows(parts, shares)
    if rows is True:
        return _joined_rows(value, concat)
    if rows is False:
        return _once(parts, shares)
    return tf.cond(rows, lambda: _joined_rows(value, concat), lambda: _once(parts, shares))


def _joined_rows(value: Any, concat: Callable[[list[Any]], Any]) -> Any:
    rows, workers = concat(rows_only(value)), value.shares.workers
    return rows if workers is None else workers.gather(rows)


def _once(parts: list[Any], shares: merge.Shares) -> Any:
    if parts[0].dtype.is_floating:
        return merge.agreed(parts, shares)
    return shares.firsts(merge.first_of_filled(parts, shares))


def _first_rows(part: Any, filled: Any) -> Any:
    if isinstance(part, tf.SparseTensor):
        size = tf.where(filled, part.dense_shape, tf.zeros_like(part.dense_shape))
        return tf.sparse.slice(part, tf.zeros_like(size), size)
    return part[:tf.where(filled, tf.cast(split.rows_in(part), tf.int64), 0)]


def predict_in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Model.predict`` with its rows in the dataset's order, whoever of the machines has them."""

    def predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_tower_strategy(self.distribute_strategy):
            return original(self, *args, **kwargs)
        with self.distribute_strategy.extended.in_order():
            return original(self, *args, **kwargs)

    return predict


def check_owner(strategy: tf.distribute.Strategy, what: str,
                owner: tf.distribute.Strategy | None) -> None:
    """Raises ``ValueError`` where ``what`` belongs to a strategy other than ``strategy``."""
    if owner is None or owner is strategy or not _is_distributing(owner):
        return
    raise ValueError(
        f"{what} belongs to another strategy: it was made or adopted in the scope of {owner!r} and "
        f"cannot be adopted by {strategy!r}. Save the model and load it again, or use the strategy "
        "that it has.")


def check_variables(strategy: tf.distribute.Strategy, model: Any, held: Iterable[Any]) -> None:
    """Raises ``ValueError`` where a TensorFlow variable of ``model`` is another strategy's."""
    for variable in held:
        check_owner(strategy, f"variable {getattr(variable, 'name', variable)!r} of model "
                              f"{model.name!r}", getattr(variable, "_distribute_strategy", None))


def adopt_variables(strategy: tf.distribute.Strategy, held: Iterable[Any]) -> list[Any]:
    """Makes resource variables the strategy's own, in place; returns those with one copy."""
    resident = list({id(variable): variable for variable in held
                     if isinstance(variable, _tf.BaseResourceVariable)}.values())
    new = [variable for variable in resident if not isinstance(variable, variables.TowerVariable)]
    if strategy.extended.workers is not None:
        values = strategy.extended.workers.chiefs([variable.read_value() for variable in new])
        for variable, value in zip(new, values):
            variable.assign(value)
    for variable in new:
        variables.into_tower_variable(variable, strategy)
    return resident


def check_no_states(strategy: tf.distribute.Strategy, model: Any, rnn: type[Any]) -> None:
    """Raises ``ValueError`` where a layer keeps a state for each row of a batch.

    Args:
      strategy: whose the model is to be.
      model: the model.
      rnn: the class of recurrent layers of the model's Keras.
    """
    towers_ = strategy.num_replicas_in_sync
    stateful = [] if towers_ == 1 else [layer for layer in model._flatten_layers()
                                        if isinstance(layer, rnn) and layer.stateful]
    for layer in stateful:
        states = [state for state in tf.nest.flatten(layer.states) if state is not None]
        rows = states[0].shape[0] if states else None
        parts = "" if rows is None else (f" ({rows} rows, of which the towers get "
                                         f"{', '.join(map(str, split.deal(rows, towers_)[1]))})")
        raise ValueError(
            f"layer {layer.name!r} of model {model.name!r} is a stateful RNN. Its state has a row "
            f"for each row of a batch{parts}, and exists once, while each of the {towers_} towers "
            "works on a part of the batch. Make the layer with stateful=False, or use a strategy "
            "of one tower.")


def check_trains_on_towers(model: Any, scope: tf.distribute.Strategy) -> None:
    """Raises ``ValueError`` where a model that is not adopted trains in the scope of towers."""
    from towerstrategy.strategy import TowerStrategy

    if isinstance(scope, TowerStrategy):
        raise ValueError(
            f"model {model.name!r} is used inside the scope of {scope!r}, but was built and "
            "compiled outside of it and is not adopted. Compile it inside the scope, or call "
            "strategy.adopt(model), which keeps its optimizer and metrics, state and all.")


def adopted_sentence(strategy: tf.distribute.Strategy, model: Any, resident: Iterable[Any],
                     local: Iterable[Any], without_xla: bool) -> str:
    """What ``adopt`` says."""
    count = 0
    homes: dict[str, int] = {}
    for variable in resident:
        count += 1
        home = variables.home_of(variable)
        homes[home] = homes.get(home, 0) + variables.size_of(variable)
    from towerstrategy import devices as devices_lib

    where = ", ".join(f"{size:,} bytes on {devices_lib.short_name(home) if home else 'no device'}"
                      for home, size in homes.items()) or "none built yet"
    number = strategy.num_replicas_in_sync
    return (f"adopted model {model.name!r} for {number} tower{'s' if number > 1 else ''}: "
            f"{count} variables with one copy ({where}), "
            f"{sum(1 for _ in local)} tower-local ones."
            + (" jit_compile was turned off: XLA compiles for one device." if without_xla else ""))


def _is_distributing(strategy: tf.distribute.Strategy) -> bool:
    """False for TensorFlow's default strategy, which is no strategy."""
    return type(strategy).__name__ != "_DefaultDistributionStrategy"
