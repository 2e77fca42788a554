"""The cases of optimizers: their options, and the gradients that they get.

Goes in and comes out: what ``cases`` says; this file adds the group ``optimizers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from .cases import (
    KERAS_3,
    ROWS,
    TF_KERAS,
    Run,
    adam,
    case,
    dense,
    is_keras_3,
    numbers,
    regression,
    row_weights,
    sgd,
)


def _optimizer(name: str, make_optimizer: Callable[[Any], Any], **options: Any) -> None:
    @case(f"optimizers/{name}", **options)
    def make(keras: Any) -> Run:
        return Run(dense(keras), **regression(), compile={"optimizer": make_optimizer(keras)})


_optimizer("SGD with momentum", lambda keras: sgd(keras, nesterov=True), wide=True)
_optimizer("Adam", adam)
_optimizer("Adam, amsgrad", lambda keras: adam(keras, amsgrad=True), wide=True)
_optimizer("AdamW", lambda keras: keras.optimizers.AdamW(0.02, weight_decay=0.05), wide=True)
_optimizer("RMSprop", lambda keras: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
           wide=True)
_optimizer("Adagrad", lambda keras: keras.optimizers.Adagrad(0.05), wide=True)
_optimizer("Adadelta", lambda keras: keras.optimizers.Adadelta(1.0), wide=True)
_optimizer("Adamax", lambda keras: keras.optimizers.Adamax(0.02), wide=True)
_optimizer("Nadam", lambda keras: keras.optimizers.Nadam(0.02), wide=True)
_optimizer("Adafactor", lambda keras: keras.optimizers.Adafactor(0.02), wide=True)
_optimizer("Ftrl", lambda keras: keras.optimizers.Ftrl(
    0.05, l1_regularization_strength=0.001, l2_regularization_strength=0.01), wide=True)
_optimizer("Lion", lambda keras: keras.optimizers.Lion(0.01), wide=True)
_optimizer("Lamb", lambda keras: keras.optimizers.Lamb(0.02), keras=(KERAS_3,),
           reason="tf_keras has no Lamb", wide=True)
_optimizer("Muon", lambda keras: keras.optimizers.Muon(0.02), keras=(KERAS_3,),
           reason="tf_keras has no Muon", wide=True)
_optimizer("legacy SGD", lambda keras: keras.optimizers.legacy.SGD(0.1, momentum=0.9, clipnorm=0.3),
           keras=(TF_KERAS,), reason="Keras 3 has no legacy optimizers", wide=True)
_optimizer("legacy Adam", lambda keras: keras.optimizers.legacy.Adam(0.02, global_clipnorm=0.3),
           keras=(TF_KERAS,), reason="Keras 3 has no legacy optimizers")
_optimizer("clipnorm", lambda keras: sgd(keras, clipnorm=0.2))
_optimizer("clipvalue", lambda keras: sgd(keras, clipvalue=0.05), wide=True)
_optimizer("global_clipnorm", lambda keras: adam(keras, global_clipnorm=0.2), wide=True)
_optimizer("weight decay", lambda keras: sgd(keras, weight_decay=0.03), wide=True)
_optimizer("EMA with overwriting", lambda keras: sgd(
    keras, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3), wide=True)
_optimizer("EMA", lambda keras: adam(keras, use_ema=True, ema_momentum=0.8), wide=True)
_optimizer("a learning rate schedule", lambda keras: sgd(
    keras, keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)), wide=True)
for _steps in (3, 4):
    _optimizer(f"gradient_accumulation_steps={_steps}",
               lambda keras, steps=_steps: adam(keras, gradient_accumulation_steps=steps),
               keras=(KERAS_3,), reason="tf_keras does not accumulate gradients", wide=True)
_optimizer("gradient accumulation, clipping, decay and EMA", lambda keras: sgd(
    keras, gradient_accumulation_steps=2, global_clipnorm=0.3, weight_decay=0.02, use_ema=True,
    ema_overwrite_frequency=2), keras=(KERAS_3,), reason="tf_keras does not accumulate gradients")


def _loss_scaled(keras: Any, inner: Any, scale: float = 1024.0) -> Any:
    optimizers = keras.optimizers if is_keras_3(keras) else keras.mixed_precision
    options = {"dynamic_growth_steps": 4, "initial_scale": scale}
    return optimizers.LossScaleOptimizer(inner, **options)


_optimizer("LossScaleOptimizer", lambda keras: _loss_scaled(keras, adam(keras)), wide=True)


@case("optimizers/LossScaleOptimizer, a row overflows")
def _(keras: Any) -> Run:
    data = regression(32)
    # One row of the second batch: a finite loss whose scaled gradient, 3e39, is not. (At 3e38, a
    # tenth below the limit, the order of additions decides.)
    data["y"][9] = 1e18
    optimizer = _loss_scaled(keras, sgd(keras), scale=2.0**75)

    def seen(model: Any) -> dict[str, Any]:
        scale = getattr(optimizer, "dynamic_scale", None)
        scale = optimizer.loss_scale if scale is None else scale
        return {"log2 of the scale": np.log2(np.array(scale, "float64")),
                "iterations": np.array(optimizer.iterations)}

    return Run(dense(keras), **data, compile={"optimizer": optimizer}, fit={"epochs": 1}, seen=seen)


@case("optimizers/constraints", wide=True)
def _(keras: Any) -> Run:
    constraints = keras.constraints
    return Run(dense(keras, kernel_constraint=constraints.MaxNorm(0.5),
                     bias_constraint=constraints.NonNeg()), **regression())


@case("optimizers/a frozen layer", wide=True)
def _(keras: Any) -> Run:
    model = dense(keras)
    model.layers[0].trainable = False
    return Run(model, **regression(), compile={"optimizer": adam(keras)})


@case("optimizers/a gradient that is None", wide=True)
def _(keras: Any) -> Run:
    class Partly(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = keras.layers.Dense(3), keras.layers.Dense(4)
            self.used.build((None, 5))
            self.unused.build((None, 5))

        def call(self, x: Any) -> Any:
            return self.used(x)

    return Run(Partly(), **regression())


def _used_twice(keras: Any) -> Any:
    x = keras.Input((5,))
    shared = keras.layers.Dense(5, activation="tanh")
    return keras.Model(x, keras.layers.Dense(3)(shared(shared(x))))


@case("optimizers/a variable used twice", wide=True)
def _(keras: Any) -> Run:
    return Run(_used_twice(keras), **regression(), compile={"optimizer": sgd(keras)})


# One element's gradient is so near zero here that Adam, which divides by its size, makes 1.5e-5 of
# float32's rounding; in float64 nothing is left of it.
@case("optimizers/a variable used twice, Adam", wide=True, policy="float64", bound=1e-12)
def _(keras: Any) -> Run:
    data = {name: values.astype("float64") for name, values in regression().items()}
    return Run(_used_twice(keras), **data, compile={"optimizer": adam(keras)})


@case("optimizers/sparse gradients, SGD", wide=True)
def _(keras: Any) -> Run:
    return Run(_bag(keras), **_bags(), compile={"optimizer": sgd(keras)})


@case("optimizers/sparse gradients, Adam and clipping")
def _(keras: Any) -> Run:
    return Run(_bag(keras), **_bags(), compile={"optimizer": adam(keras, global_clipnorm=0.1)})


@case("optimizers/sparse gradients, Adagrad and weights", wide=True)
def _(keras: Any) -> Run:
    return Run(_bag(keras), **_bags(), weights=row_weights(),
               compile={"optimizer": keras.optimizers.Adagrad(0.1)})


@case("optimizers/sparse gradients, a table used twice", wide=True)
def _(keras: Any) -> Run:
    a, b = keras.Input((4,), dtype="int32"), keras.Input((4,), dtype="int32")
    table = keras.layers.Embedding(9, 3)
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(table(part)) for part in (a, b)])
    data = _bags()
    return Run(keras.Model([a, b], keras.layers.Dense(1)(joined)), [data["x"], data["x"][::-1]],
               data["y"], compile={"optimizer": sgd(keras)})


@case("optimizers/sparse gradients, accumulated", wide=True, keras=(KERAS_3,),
      reason="tf_keras does not accumulate gradients")
def _(keras: Any) -> Run:
    return Run(_bag(keras), **_bags(),
               compile={"optimizer": adam(keras, gradient_accumulation_steps=2)})


@case("optimizers/sparse inputs, Adam", wide=True)
def _(keras: Any) -> Run:
    x = keras.Input((9,), sparse=True)
    data = numbers(ROWS, 9, seed=7)
    rows = tf.sparse.from_dense(np.where(data > 0.5, data, 0.))
    y = numbers(ROWS, 1, seed=8)
    return Run(keras.Model(x, keras.layers.Dense(1)(x)),
               tf.data.Dataset.from_tensor_slices((rows, y)).batch(8),
               compile={"optimizer": adam(keras)}, fit={"batch_size": None})


def _bag(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential([keras.Input((4,), dtype="int32"), layers.Embedding(9, 3),
                             layers.GlobalAveragePooling1D(), layers.Dense(1)])


def _bags() -> dict[str, Any]:
    """Few ids, so that each batch repeats them within and across towers; some never come."""
    return {"x": np.random.RandomState(7).randint(0, 6, (ROWS, 4)), "y": numbers(ROWS, 1, seed=8)}
