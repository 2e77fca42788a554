"""An optimizer's update as one operation a variable, or a few, in place of a dozen.

Goes in: a Keras optimizer, one of its variables and the merged gradient.  Comes out: the same
update, done by the kernel that TensorFlow has for it (``ResourceApplyAdam`` and the like), in one
pass over memory.  SGD and Adam have one whose formulas are Keras', the place of epsilon included;
other optimizers, and those that override what is replaced, do as Keras does.

Kernels take a decay rate and make its complement themselves, in float32: of 0.9 that is exact to
2e-7, of Adam's 0.999 it is off by 1e-5.  The average of squares is therefore moved outside.

Slices of a sparse gradient are summed into a dense one for the kernel, as Keras does.  The average
of squares is of each slice's square; not written sparsely: TensorFlow would copy the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.placement import homes as homes_lib
from towerstrategy.variables import one_copy

_DTYPE = tf.float32  # with others Keras rounds the numbers of an update in ways of its own
_EXACT = 5e-7  # relative

_raw = tf.raw_ops


class Kernel(NamedTuple):
    """What updates a variable."""

    slots: Mapping[str, str]  # a name for each -> the optimizer's attribute, a list
    apply: Callable[..., Any]  # takes the variable, its gradient and, by name, the slots
    sparse: Callable[..., Any] | None = None  # the same for slices; None where Keras' way is taken


# An optimizer, the step's learning rate, and what CPU devices do otherwise (None on others) -> the
# kernel, whose numbers are tensors on the current device; or None.
Rule = Callable[[Any, Any, Any], Kernel | None]


def sgd(optimizer: Any, learning_rate: Any, cpu: Any) -> Kernel:
    del cpu
    rate = _number(learning_rate)
    if not optimizer.momentums:  # tf_keras makes them without momentum, too
        return Kernel({}, lambda variable, gradient: _raw.ResourceApplyGradientDescent(
            var=variable.handle, alpha=rate, delta=gradient))
    decay = _number(optimizer.momentum)

    def apply(variable: Any, gradient: Any, accum: Any) -> None:
        _raw.ResourceApplyKerasMomentum(
            var=variable.handle, accum=accum.handle, lr=rate, momentum=decay,
            grad=tf.convert_to_tensor(gradient), use_nesterov=optimizer.nesterov)

    # Of slices, without momentum, Keras writes to the rows alone.
    return Kernel({"accum": "momentums"}, apply, apply if optimizer.momentum else None)


def adam(optimizer: Any, learning_rate: Any, cpu: Any) -> Kernel | None:
    """How ``Adam`` and ``AdamW`` (which decays weights by itself) update."""
    if not _is_exact(optimizer.beta_1) or getattr(optimizer, "adaptive_epsilon", False):
        return None
    slots = {"m": "_momentums", "v": "_velocities"}
    operation = _raw.ResourceApplyAdam
    if optimizer.amsgrad:
        slots["vhat"] = "_velocity_hats"
        operation = _raw.ResourceApplyAdamWithAmsgrad
    beta1, beta2 = map(_number, (optimizer.beta_1, optimizer.beta_2))
    step = _number(optimizer.iterations + 1)
    known = {"lr": _number(learning_rate), "beta1": beta1, "epsilon": _number(optimizer.epsilon),
             "beta1_power": tf.pow(beta1, step), "beta2_power": tf.pow(beta2, step)}
    kept, rate = _number(1), _number(1 - optimizer.beta_2)

    def apply(variable: Any, gradient: Any, **slots: Any) -> None:
        v, squares = slots["v"], tf.square(getattr(gradient, "values", gradient))
        if isinstance(gradient, tf.IndexedSlices):
            squares = tf.convert_to_tensor(tf.IndexedSlices(
                squares, gradient.indices, gradient.dense_shape))
        _raw.ResourceApplyGradientDescent(var=v.handle, alpha=rate, delta=v - squares)
        operation(var=variable.handle, grad=tf.convert_to_tensor(gradient), beta2=kept,
                  **{name: slot.handle for name, slot in slots.items()}, **known)

    on_cpu = cpu and cpu.adam(optimizer, known)
    return Kernel(slots, on_cpu or apply, apply)


class Step:
    """One step of ``optimizer``, which updates by ``rule``, if there is a kernel for it.

    Its numbers are made once for all variables of a device.
    """

    def __init__(self, optimizer: Any, rule: Rule | None, learning_rate: Any) -> None:
        self._optimizer, self._rule, self._learning_rate = optimizer, rule, learning_rate
        self._kernels: dict[str, Kernel | None] = {}

    def update(self, variable: Any, gradient: Any, slot: Callable[[str], Any]) -> bool:
        """Updates a TensorFlow variable where there is a kernel for it; says whether there was.

        ``slot`` gives the variable's slot by the name of the optimizer's list of such slots.
        """
        if self._rule is None or not _fits(variable, gradient):
            return False
        home = homes_lib.home_of(variable)
        with tf.device(home):
            if home not in self._kernels:
                cpu = variable.distribute_strategy.extended.cpu
                self._kernels[home] = self._rule(self._optimizer, self._learning_rate, cpu)
            kernel, is_sparse = self._kernels[home], isinstance(gradient, tf.IndexedSlices)
            apply = kernel and (kernel.sparse if is_sparse else kernel.apply)
            if kernel is None or apply is None:
                return False
            slots = {name: slot(held) for name, held in kernel.slots.items()}
            fits = all(_is_beside(variable, held) for held in slots.values())
            if fits:
                apply(variable, gradient, **slots)
        return fits


def _fits(variable: Any, gradient: Any) -> bool:
    """Whether a kernel takes these: it does not cast or broadcast."""
    if not (isinstance(variable, one_copy.TowerVariable) and variable.dtype == _DTYPE
            and gradient.dtype == _DTYPE):
        return False
    if _tf.is_compiled_here():  # XLA makes one pass of Keras' operations
        return False
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values
        return (not _tf.is_eager(values) and values.shape.rank == variable.shape.rank
                and values.shape[1:] == variable.shape[1:])
    return (isinstance(gradient, tf.Tensor) and not _tf.is_eager(gradient)
            and gradient.shape.is_fully_defined() and gradient.shape == variable.shape)


def _is_beside(variable: Any, slot: Any) -> bool:
    """Whether a slot is as the variable is, and where it is."""
    return (isinstance(slot, _tf.BaseResourceVariable) and slot.dtype == _DTYPE
            and slot.shape == variable.shape
            and homes_lib.home_of(slot) == homes_lib.home_of(variable))


def _is_exact(rate: Any) -> bool:
    """Whether ``1 - rate``, made in float32 of a rate in float32, is what it is."""
    if not isinstance(rate, (int, float)) or rate == 1:
        return False
    return abs(float(np.float32(1) - np.float32(rate)) / (1 - rate) - 1) < _EXACT


def _number(value: Any) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(value), _DTYPE)
