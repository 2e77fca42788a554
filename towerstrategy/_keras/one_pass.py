"""An optimizer's update as one operation a variable, or a few, in place of a dozen.

Goes in: a Keras optimizer, one of its variables and the merged gradient.  Comes out: the same
update, done by the kernel that TensorFlow has for it (``ResourceApplyAdam`` and the like).

Both Kerases write their updates out in elementwise operations, each of which goes over memory once.
A kernel does it at once, and a step has so many operations less to trace and to start.  Only
formulas that are the same, the place of epsilon included, have one here; other optimizers, and
those that override what is replaced, do as Keras does.

Kernels take a decay rate and make its complement themselves, in float32: of 0.9 that is exact to
2e-7, of Adam's 0.999 it is off by 1e-5.  Such a rate's average is therefore moved outside.

Slices of a sparse gradient are summed into a dense one for the kernel, as Keras does for its
operations, of which each goes over the whole table.  An average of squares is one of each slice's
square, so it is moved outside, too, and gets the slices alone.
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
    """What updates a variable.

    Attributes:
      slots: a name for each slot -> the optimizer's attribute, a list with one a variable.
      apply: takes the variable, its gradient and, by name, the slots.
      sparse: the same for a gradient of slices; None where Keras' way is taken.
    """

    slots: Mapping[str, str]
    apply: Callable[..., Any]
    sparse: Callable[..., Any] | None = None


class Numbers:
    """The numbers of one step of ``optimizer``, as tensors on the current device."""

    def __init__(self, optimizer: Any, learning_rate: Any) -> None:
        self._optimizer, self._learning_rate = optimizer, learning_rate

    def of(self, **hyperparameters: Any) -> dict[str, tf.Tensor]:
        """These and the learning rate."""
        return {name: _number(value)
                for name, value in {**hyperparameters, "lr": self._learning_rate}.items()}

    def power(self, base: Any) -> tf.Tensor:
        """``base`` to the power of the step that is done, counted from 1."""
        return tf.pow(_number(base), _number(self._optimizer.iterations + 1))


# An optimizer and the numbers of a step -> its kernel, or None.
Rule = Callable[[Any, Numbers], Kernel | None]


def sgd(optimizer: Any, numbers: Numbers) -> Kernel:
    """How ``SGD`` updates where it has no momentum."""
    del optimizer
    rate = numbers.of()["lr"]
    return Kernel({}, lambda variable, gradient: _raw.ResourceApplyGradientDescent(
        var=variable.handle, alpha=rate, delta=gradient))


def momentum(optimizer: Any, numbers: Numbers) -> Kernel:
    """How ``SGD`` updates where it has momentum."""
    known = numbers.of(momentum=optimizer.momentum)

    def apply(variable: Any, gradient: Any, accum: Any) -> None:
        _raw.ResourceApplyKerasMomentum(
            var=variable.handle, accum=accum.handle, grad=tf.convert_to_tensor(gradient),
            use_nesterov=optimizer.nesterov, **known)

    # Without momentum, as tf_keras' SGD may be, Keras writes to the slices' rows alone.
    return Kernel({"accum": "momentums"}, apply, apply if optimizer.momentum else None)


def adam(optimizer: Any, numbers: Numbers) -> Kernel | None:
    """How ``Adam`` and ``AdamW`` (which decays weights by itself) update."""
    if not _is_exact(optimizer.beta_1) or getattr(optimizer, "adaptive_epsilon", False):
        return None
    slots = {"m": "_momentums", "v": "_velocities"}
    operation = _raw.ResourceApplyAdam
    if optimizer.amsgrad:
        slots["vhat"] = "_velocity_hats"
        operation = _raw.ResourceApplyAdamWithAmsgrad
    known = numbers.of(beta1=optimizer.beta_1, epsilon=optimizer.epsilon)
    known |= {"beta1_power": numbers.power(optimizer.beta_1),
              "beta2_power": numbers.power(optimizer.beta_2)}
    moves = _is_exact(optimizer.beta_2)
    beta2, kept, rate = map(_number, (optimizer.beta_2, 1.0, 1 - optimizer.beta_2))

    def apply(variable: Any, gradient: Any, v: Any, **others: Any) -> None:
        if not moves:
            _raw.ResourceApplyGradientDescent(
                var=v.handle, alpha=rate, delta=v - tf.square(gradient))
        operation(var=variable.handle, v=v.handle, grad=gradient, beta2=beta2 if moves else kept,
                  **_handles(others), **known)

    def sparse(variable: Any, gradient: tf.IndexedSlices, v: Any, **others: Any) -> None:
        _raw.AssignSubVariableOp(resource=v.handle, value=rate * v)
        _raw.ResourceScatterAdd(resource=v.handle, indices=gradient.indices,
                                updates=rate * tf.square(gradient.values))
        operation(var=variable.handle, v=v.handle, grad=tf.convert_to_tensor(gradient),
                  beta2=kept, **_handles(others), **known)

    return Kernel(slots, apply, sparse)


def adamax(optimizer: Any, numbers: Numbers) -> Kernel | None:
    """How ``Adamax`` updates."""
    if not _is_exact(optimizer.beta_1):
        return None
    known = numbers.of(beta1=optimizer.beta_1, beta2=optimizer.beta_2, epsilon=optimizer.epsilon)
    power = numbers.power(optimizer.beta_1)
    return Kernel({"m": "_m", "v": "_u"}, lambda variable, gradient, **slots:
                  _raw.ResourceApplyAdaMax(var=variable.handle, grad=gradient, beta1_power=power,
                                           **_handles(slots), **known))


def adadelta(optimizer: Any, numbers: Numbers) -> Kernel | None:
    """How ``Adadelta`` updates."""
    if not _is_exact(optimizer.rho):
        return None
    known = numbers.of(rho=optimizer.rho, epsilon=optimizer.epsilon)
    slots = {"accum": "_accumulated_grads", "accum_update": "_accumulated_delta_vars"}
    return Kernel(slots, lambda variable, gradient, **slots: _raw.ResourceApplyAdadelta(
        var=variable.handle, grad=gradient, **_handles(slots), **known))


def rmsprop(optimizer: Any, numbers: Numbers) -> Kernel | None:
    """How ``RMSprop`` with momentum updates; there is no kernel without."""
    if not optimizer.momentum or not _is_exact(optimizer.rho):
        return None
    slots = {"ms": "_velocities", "mom": "_momentums"}
    operation = _raw.ResourceApplyRMSProp
    if optimizer.centered:
        slots["mg"] = "_average_gradients"
        operation = _raw.ResourceApplyCenteredRMSProp
    known = numbers.of(rho=optimizer.rho, momentum=optimizer.momentum, epsilon=optimizer.epsilon)
    return Kernel(slots, lambda variable, gradient, **slots: operation(
        var=variable.handle, grad=gradient, **_handles(slots), **known))


class Step:
    """One step of ``optimizer``; its numbers are made once for all variables of a device.

    Args:
      optimizer: of either Keras.
      rule: how it updates, or None where no kernel does.
      learning_rate: this step's: a number, tensor or variable.
    """

    def __init__(self, optimizer: Any, rule: Rule | None, learning_rate: Any) -> None:
        self._optimizer, self._rule = optimizer, rule
        self._numbers = Numbers(optimizer, learning_rate)
        self._kernels: dict[str, Kernel | None] = {}

    def update(self, variable: Any, gradient: Any, slot: Callable[[str], Any]) -> bool:
        """Updates ``variable`` where there is a kernel for it; says whether there was.

        Args:
          variable: the TensorFlow variable.
          gradient: the merged one.
          slot: gives the variable's TensorFlow variable in a list of the optimizer's slots, by
            the list's name.
        """
        if self._rule is None or not _fits(variable, gradient):
            return False
        home = homes_lib.home_of(variable)
        with tf.device(home):
            if home not in self._kernels:
                self._kernels[home] = self._rule(self._optimizer, self._numbers)
            kernel = self._kernels[home]
            if kernel is None:
                return False
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            apply = kernel.sparse if is_sparse else kernel.apply
            if apply is None:
                return False
            slots = {name: slot(held) for name, held in kernel.slots.items()}
            if not all(_is_beside(variable, held) for held in slots.values()):
                return False
            apply(variable, gradient, **slots)
        return True


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


def _handles(slots: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    return {name: slot.handle for name, slot in slots.items()}


def _number(value: Any) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(value), _DTYPE)
