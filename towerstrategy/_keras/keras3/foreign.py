"""Keras 3 on JAX or PyTorch: its models would train on one device in a scope, without a word.

Goes in: that Keras' ``compile``.  Comes out: the same; in a ``TowerStrategy``'s scope an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src import backend
from keras.src.trainers import trainer as base_trainer

from towerstrategy._keras import hooks
from towerstrategy.placement import kind


def compile(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    scope = tf.distribute.get_strategy()
    if kind.is_tower_strategy(scope) and backend.backend() != "tensorflow":
        raise ValueError(
            f"model {self.name!r} is compiled in the scope of {scope!r}, whose towers are "
            f"TensorFlow's, but Keras runs on {backend.backend()!r} here. Set "
            "KERAS_BACKEND=tensorflow before Keras is imported (or \"backend\" in "
            "~/.keras/keras.json).")
    original(self, *args, **kwargs)


HOOKS: dict[tuple[Any, str], hooks.Hook] = {(base_trainer.Trainer, "compile"): hooks.Hook(
    compile, "on another backend than TensorFlow it knows no strategy")}
