"""Optimizations for CPU devices, which share the cores of one machine.

Goes in: an optimizer, or the number of towers.  Comes out: a faster update, or a context for a
step.  ``extended.cpu`` is this module; it is None if a tower or the merge device is no CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf

_raw = tf.raw_ops
_LARGEST_ERROR = 1e-6  # relative


def step(towers: int) -> contextlib.AbstractContextManager[None]:
    """A context in which TensorFlow's graph optimizer skips most of its passes.

    Its time grows with the towers, and no gain was measured (benchmarks/RESULTS.md).  GPU towers
    keep it, for the memory layouts that it chooses there.
    """
    return _tf.graph_optimizer(light=True) if towers > 1 else contextlib.nullcontext()


def adam(optimizer: Any, numbers: Mapping[str, tf.Tensor]) -> Callable[..., None] | None:
    """An update by Adam whose kernels run on one core for a small variable.

    The CPU's Adam kernel wakes the other cores for 1,000 numbers, and waits for them.  ``numbers``
    are the step's "lr", "epsilon", "beta1_power" and "beta2_power".  The update takes a variable,
    its gradient and slots.  None if it would be less exact.
    """
    betas = {name: getattr(optimizer, name) for name in ("beta_1", "beta_2")}
    if optimizer.amsgrad or not all(map(_is_exact_inverse, betas.values())):
        return None
    one, zero, minus_one = (tf.constant(number, tf.float32) for number in (1, 0, -1))
    rate = numbers["lr"] * tf.sqrt(one - numbers["beta2_power"]) / (one - numbers["beta1_power"])
    step = {name: tf.constant(1 - 1 / beta, tf.float32) for name, beta in betas.items()}

    def average(slot: Any, name: str, value: tf.Tensor) -> None:
        # Assigns (slot - alpha * value) / (1 + l2 * alpha) = beta * slot + (1 - beta) * value.
        _raw.ResourceApplyProximalGradientDescent(
            var=slot.handle, alpha=step[name], l1=zero, l2=minus_one, delta=value)

    def apply(variable: Any, gradient: Any, m: Any, v: Any) -> None:
        average(m, "beta_1", gradient)
        average(v, "beta_2", tf.square(gradient))
        # Subtracts rate * m / (sqrt(v) + epsilon).
        _raw.ResourceApplyAdagradV2(
            var=variable.handle, accum=v.handle, lr=rate, epsilon=numbers["epsilon"],
            grad=tf.convert_to_tensor(m), update_slots=False)

    return apply


def _is_exact_inverse(rate: Any) -> bool:
    """Whether dividing by ``1 / rate``, computed in float32, decays as accurately as ``rate``."""
    # If it is off, so is the value to which an average converges that is divided in each step.
    if not isinstance(rate, (int, float)) or not 0 < rate < 1:
        return False
    inverse = float(np.float32(1) + np.float32(1 / rate - 1))
    return abs((1 - 1 / inverse) / (1 - rate) - 1) < _LARGEST_ERROR
