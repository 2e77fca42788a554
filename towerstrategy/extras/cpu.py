"""What pays on CPU devices alone, which share the cores of one machine.

Goes in: what is done on any device.  Comes out: what is done instead.  ``extended.cpu`` is this
module, and None where a tower or the merge device is no CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf

_raw = tf.raw_ops
_EXACT = 1e-6  # relative


def step(towers: int) -> contextlib.AbstractContextManager[None]:
    """Within, functions go without most of TensorFlow's graph optimizer.

    Its work grows with the towers and gains nothing that was measured (benchmarks/RESULTS.md).
    GPU towers keep it, for the memory layouts that it chooses there.
    """
    return _tf.light_graph_optimizer() if towers > 1 else contextlib.nullcontext()


def adam(optimizer: Any, known: Mapping[str, tf.Tensor]) -> Callable[..., None] | None:
    """Adam by kernels that do a small variable on the core that they are on.

    The CPU's own kernel wakes the other cores for 1,000 numbers, and waits for them.  ``known``
    are the step's numbers: "lr", "epsilon", "beta1_power" and "beta2_power".  Comes out: what
    updates a variable, given its gradient and slots; None where it is less exact.
    """
    betas = {name: getattr(optimizer, name) for name in ("beta_1", "beta_2")}
    if optimizer.amsgrad or not all(map(_is_exact_inverse, betas.values())):
        return None
    one, none, back = (tf.constant(number, tf.float32) for number in (1, 0, -1))
    rate = known["lr"] * tf.sqrt(one - known["beta2_power"]) / (one - known["beta1_power"])
    step = {name: tf.constant(1 - 1 / beta, tf.float32) for name, beta in betas.items()}

    def average(slot: Any, name: str, value: tf.Tensor) -> None:
        # Takes (slot - alpha * value) / (1 + l2 * alpha): beta * slot + (1 - beta) * value.
        _raw.ResourceApplyProximalGradientDescent(
            var=slot.handle, alpha=step[name], l1=none, l2=back, delta=value)

    def apply(variable: Any, gradient: Any, m: Any, v: Any) -> None:
        average(m, "beta_1", gradient)
        average(v, "beta_2", tf.square(gradient))
        # Takes rate * m / (sqrt(v) + epsilon) off.
        _raw.ResourceApplyAdagradV2(
            var=variable.handle, accum=v.handle, lr=rate, epsilon=known["epsilon"],
            grad=tf.convert_to_tensor(m), update_slots=False)

    return apply


def _is_exact_inverse(rate: Any) -> bool:
    """Whether dividing by ``1 / rate``, made in float32, decays as ``rate`` does."""
    # Of an average that is divided so in each step, it is what it ends at that would be off.
    if not isinstance(rate, (int, float)) or not 0 < rate < 1:
        return False
    inverse = float(np.float32(1) + np.float32(1 / rate - 1))
    return abs((1 - 1 / inverse) / (1 - rate) - 1) < _EXACT
