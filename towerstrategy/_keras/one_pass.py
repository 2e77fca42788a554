"""Updates of a variable by one or few operations instead of Keras' dozen.

Goes in: a Keras optimizer, one of its variables and the merged gradient.  Comes out: the same
update by TensorFlow's kernel for it (such as ``ResourceApplyAdam``), in one pass over memory.  For
SGD and Adam there are kernels with Keras' formulas, epsilon included.  Other optimizers, and those
that override what the kernel replaces, run Keras' code.

A kernel takes a decay rate and computes ``1 - rate`` in float32.  For 0.9 the error is 2e-7, for
Adam's 0.999 it is 1e-5.  So the average of squares is updated by an operation of its own.

Slices of a sparse gradient are summed into a dense gradient for the kernel, as Keras does.  The
average of squares takes each slice's square.  It is not written sparsely, because TensorFlow would
copy the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.placement import homes as homes_lib
from towerstrategy.variables import one_copy
from towerstrategy.variables.rules import held_variable

_DTYPE = tf.float32  # for other dtypes Keras rounds an update's numbers in its own way
_LARGEST_ERROR = 5e-7  # relative

_raw = tf.raw_ops


class Kernel(NamedTuple):
    """An update of a variable by a kernel of TensorFlow."""

    slots: Mapping[str, str]  # the slots' names -> the optimizer's attributes, lists of slots
    apply: Callable[..., Any]  # takes the variable, its gradient and, by name, the slots
    sparse: Callable[..., Any] | None = None  # the same for slices; None if Keras' code has to run


# Takes an optimizer, the step's learning rate, and the extra ``cpu`` (None on other devices).
# Returns the kernel, whose numbers are tensors on the current device; None if there is none.
Rule = Callable[[Any, Any, Any], Kernel | None]


def sgd(optimizer: Any, learning_rate: Any, cpu: Any) -> Kernel:
    """The kernel of ``SGD``."""
    del cpu
    rate = _to_float32(learning_rate)
    if not optimizer.momentums:  # tf_keras makes these slots without momentum, too
        return Kernel({}, lambda variable, gradient: _raw.ResourceApplyGradientDescent(
            var=variable.handle, alpha=rate, delta=gradient))
    decay = _to_float32(optimizer.momentum)

    def apply(variable: Any, gradient: Any, accum: Any) -> None:
        _raw.ResourceApplyKerasMomentum(
            var=variable.handle, accum=accum.handle, lr=rate, momentum=decay,
            grad=tf.convert_to_tensor(gradient), use_nesterov=optimizer.nesterov)

    # For slices without momentum, Keras' code writes only the rows that have slices.
    return Kernel({"accum": "momentums"}, apply, apply if optimizer.momentum else None)


def adam(optimizer: Any, learning_rate: Any, cpu: Any) -> Kernel | None:
    """The kernel of ``Adam`` and ``AdamW``; Keras decays the weights before the update."""
    if not _is_exact(optimizer.beta_1) or getattr(optimizer, "adaptive_epsilon", False):
        return None
    slots = {"m": "_momentums", "v": "_velocities"}
    operation = _raw.ResourceApplyAdam
    if optimizer.amsgrad:
        slots["vhat"] = "_velocity_hats"
        operation = _raw.ResourceApplyAdamWithAmsgrad
    beta1, beta2 = map(_to_float32, (optimizer.beta_1, optimizer.beta_2))
    step = _to_float32(optimizer.iterations + 1)
    numbers = {"lr": _to_float32(learning_rate), "beta1": beta1,
               "epsilon": _to_float32(optimizer.epsilon),
               "beta1_power": tf.pow(beta1, step), "beta2_power": tf.pow(beta2, step)}
    keep_all, rate = _to_float32(1), _to_float32(1 - optimizer.beta_2)  # beta2=1: v stays as it is

    def apply(variable: Any, gradient: Any, **slots: Any) -> None:
        v, squares = slots["v"], tf.square(getattr(gradient, "values", gradient))
        if isinstance(gradient, tf.IndexedSlices):
            squares = tf.convert_to_tensor(tf.IndexedSlices(
                squares, gradient.indices, gradient.dense_shape))
        _raw.ResourceApplyGradientDescent(var=v.handle, alpha=rate, delta=v - squares)
        operation(var=variable.handle, grad=tf.convert_to_tensor(gradient), beta2=keep_all,
                  **{name: slot.handle for name, slot in slots.items()}, **numbers)

    on_cpu = cpu and cpu.adam(optimizer, numbers)
    return Kernel(slots, on_cpu or apply, apply)


class Step:
    """One step of ``optimizer``; ``rules`` has the kernels, by Keras' ``update_step``.

    The kernel's numbers are made once for all variables of a device.
    """

    def __init__(self, optimizer: Any, rules: Mapping[Any, Rule], learning_rate: Any) -> None:
        self._optimizer, self._learning_rate = optimizer, learning_rate
        self.rule = rules.get(getattr(optimizer.update_step, "__func__", None))
        self._kernels: dict[str, Kernel | None] = {}

    def update(self, variable: Any, gradient: Any, index: int) -> bool:
        """Updates the optimizer's variable ``index`` if a kernel can do it; returns if it did."""
        variable = held_variable(variable)
        if self.rule is None or not _are_supported(variable, gradient):
            return False
        home = homes_lib.home_of(variable)
        with tf.device(home):
            if home not in self._kernels:
                cpu = variable.distribute_strategy.extended.cpu
                self._kernels[home] = self.rule(self._optimizer, self._learning_rate, cpu)
            kernel, is_sparse = self._kernels[home], isinstance(gradient, tf.IndexedSlices)
            apply = kernel and (kernel.sparse if is_sparse else kernel.apply)
            if kernel is None or apply is None:
                return False
            slots = {name: held_variable(getattr(self._optimizer, attribute)[index])
                     for name, attribute in kernel.slots.items()}
            if not all(_slot_matches(each, variable) for each in slots.values()):
                return False
            if not (is_sparse or gradient.shape.is_fully_defined()):  # kernels do not broadcast
                gradient = tf.broadcast_to(gradient, variable.shape)
            apply(variable, gradient, **slots)
        return True


def _are_supported(variable: Any, gradient: Any) -> bool:
    """Whether kernels take these dtypes and shapes; they do not cast."""
    if not (isinstance(variable, one_copy.TowerVariable) and variable.dtype == _DTYPE
            and gradient.dtype == _DTYPE):
        return False
    if _tf.is_compiled_here():  # XLA fuses Keras' operations into one pass
        return False
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values
        return (tf.is_symbolic_tensor(values) and values.shape.rank == variable.shape.rank
                and values.shape[1:] == variable.shape[1:])
    return tf.is_symbolic_tensor(gradient) and gradient.shape.is_compatible_with(variable.shape)


def _slot_matches(slot: Any, variable: Any) -> bool:
    """Whether a slot has the variable's dtype, shape and device."""
    return (isinstance(slot, _tf.BaseResourceVariable) and slot.dtype == _DTYPE
            and slot.shape == variable.shape
            and homes_lib.home_of(slot) == homes_lib.home_of(variable))


def _is_exact(rate: Any) -> bool:
    """Whether ``1 - rate`` is accurate if computed in float32 from a float32 rate."""
    if not isinstance(rate, (int, float)) or rate == 1:
        return False
    return abs(float(np.float32(1) - np.float32(rate)) / (1 - rate) - 1) < _LARGEST_ERROR


def _to_float32(value: Any) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(value), _DTYPE)
