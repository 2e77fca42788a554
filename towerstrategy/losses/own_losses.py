"""The losses of replica functions of one's own: TensorFlow's helpers by rows, and one warning.

Goes in: what a replica function hands to ``tf.nn.compute_average_loss``,
``tf.nn.scale_regularization_loss`` and an optimizer.  Comes out: what
these helpers mean where towers have unequal parts of a batch; and a warning, before any weight
changes, where a loss that is differentiated is a mean over one tower's rows which nothing has
scaled.  The towers' gradients are summed, so such a step would be as many times too large as there
are towers.

Only what is traced is looked at, see :mod:`provenance`; eager code is not warned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import derivatives, parts, provenance
from towerstrategy.towers import contexts

MESSAGE = "towerstrategy: unscaled loss: "
_OF_ALL = (
    "towerstrategy: a compiled loss returns one number that is neither a sum nor a mean over the "
    "rows it gets, so it would have to be computed of the rows of all towers; but as it writes "
    "variables, draws numbers, takes gradients by a tape or uses tensors that it is not given, it "
    "is computed of each tower's rows, and counts as a mean: it comes out otherwise than on one "
    "device. Give it to towerstrategy.losses.WholeBatch, or let it return a value a row.")


def install() -> None:
    """Wraps TensorFlow's helpers, once; outside of towers they stay what they are."""
    _tf.wrap_losses(_average, _regularization)
    derivatives.install()
    _tf.tell_unique(_note_unique)


def _note_unique(values: tf.Tensor) -> None:
    tower = contexts.splitting_tower() if _tf.is_eager(values) else None
    if tower is not None:
        tower.uniques.append(values)


def _average(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_average_loss(per_example_loss: Any, sample_weight: Any = None,
                             global_batch_size: Any = None) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return original(per_example_loss, sample_weight, global_batch_size)
        if global_batch_size is not None:
            return parts.summed(tower, original(per_example_loss, sample_weight,
                                                global_batch_size))
        per_example_loss = tf.convert_to_tensor(per_example_loss)
        own = original(per_example_loss, sample_weight, tf.shape(per_example_loss)[0])
        return parts.scaled(tower, own)

    return compute_average_loss


def _regularization(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_regularization_loss(regularization_loss: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return original(regularization_loss)
        return parts.scaled(tower, tf.reduce_sum(regularization_loss))

    return scale_regularization_loss


def check_number(tower: contexts.TowerContext, loss: tf.Tensor, reduction: Any) -> None:
    """Warns, once, where a loss that is one number is not what its reduction makes of it.

    Args:
      tower: where the loss was computed.
      loss: what a loss function returned.
      reduction: the loss object's, by which the number counts as a sum or as a mean over rows.
    """
    if (loss.shape.rank != 0 or not isinstance(loss, tf.Tensor) or _tf.is_eager(loss)
            or tower.trial is not None and tower.trial.fails):
        return
    is_sum = reduction in (None, "none", "sum")
    kinds = parts.kinds(tower, loss, None)
    extended = tower.strategy.extended
    wrong = provenance.Kind.MEAN in kinds if is_sum else kinds == {provenance.Kind.PART}
    of_all = tower.trial is not None and tower.trial.misfits and not wrong
    if not (wrong or of_all) or (reduction, of_all) in extended.warned_numbers:
        return
    extended.warned_numbers.add((reduction, of_all))
    if of_all:
        warnings.warn(_OF_ALL, UserWarning, stacklevel=2)
        return
    made, counted, size, other = (
        ("a mean over", "added up", "large", 'reduction="sum_over_batch_size", the default')
        if is_sum else ("a sum over", "taken for means", "small", 'reduction="sum"'))
    warnings.warn(
        f"towerstrategy: a compiled loss returns one number, {made} the rows it gets, and has "
        f"reduction={reduction!r}, by which the towers' numbers are {counted}: it comes out "
        f"{extended._num_replicas_in_sync} times as {size} as on one device. Give the loss "
        f"{other}, or let it return a value a row.", UserWarning, stacklevel=2)


def _is_own_mean(tower: contexts.TowerContext, gradient: Any) -> bool:
    """Whether a gradient is a mean over the tower's rows, made without a tape."""
    if (not isinstance(gradient, tf.Tensor) or _tf.is_eager(gradient) or tower.own_means
            or tower.gradients.holds(gradient)):
        return False
    kinds = parts.kinds(tower, gradient, None)
    return provenance.Kind.MEAN in kinds and kinds <= provenance.MEANS


def check_applied(tower: contexts.TowerContext, targets: Sequence[Any],
                  gradients: Sequence[Any]) -> None:
    """Warns, once for a set of variables, where an optimizer gets such gradients.

    Args:
      tower: where the optimizer was called.
      targets: the variables that it is to change.
      gradients: of each the tower's gradient.
    """
    changed = {id(variable) for variable in targets}
    tower.suspects |= {id(variable) for variable, gradient in zip(targets, gradients)
                       if _is_own_mean(tower, gradient)}
    warned = tower.strategy.extended.warned
    if tower.asked or tower.suspects.isdisjoint(changed) or not warned.isdisjoint(changed):
        return
    count = tower.strategy.extended._num_replicas_in_sync
    warnings.warn(
        f"{MESSAGE}the loss that is differentiated here is a mean over the rows of one tower, or "
        "has a term of the weights alone, and nothing has scaled it. The gradients of the "
        f"{count} towers are summed, so they come out {count} times as large as on one device, and "
        "rows of a smaller part count for more. Write loss = strategy.scale_loss(loss) before "
        "tape.gradient; what Keras' loss objects, compute_loss and tf.nn.compute_average_loss "
        "return is scaled already. Where this is what you want, say so with "
        f'warnings.filterwarnings("ignore", "{MESSAGE.rstrip()}").', UserWarning, stacklevel=2)
    warned |= changed  # last: where the warning is an error, the towers' own traces raise it again
