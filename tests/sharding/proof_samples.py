"""How samples for the proof of the table of rules are written.

Goes in: an operation's type, and its inputs: arrays are fed, all else is as it is.  Comes out:
:func:`samples`, all that were written.

A dimension whose size is a multiple of 6 can be the one along which an input is sharded, see
:mod:`proof`; so sizes of 6, 12 and 18 are chosen where that matters, others elsewhere, and some of
6 where they are not the batch's rows.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from proof import Sample

_SAMPLES: list[Sample] = []
random = np.random.default_rng(0)


def samples() -> list[Sample]:
    """All samples."""
    return list(_SAMPLES)


def real(*shape: int, low: float = 0.15, high: float = 0.85, dtype: Any = np.float64) -> np.ndarray:
    """Random numbers, by default where all functions are defined; parts add up to them exactly."""
    return np.asarray(np.round(random.uniform(low, high, shape) * 64) / 64, dtype)


def whole(*shape: int, low: int = 0, high: int = 4, dtype: Any = np.int32) -> np.ndarray:
    """Random integers."""
    return random.integers(low, high, shape).astype(dtype)


def flags(*shape: int) -> np.ndarray:
    """Random booleans."""
    return random.uniform(size=shape) < 0.5


def case(type: str, /, *inputs: Any, **attrs: Any) -> None:
    """An operation of inputs: arrays are fed, all else is as it is. A list is one input."""
    names = list(inspect.signature(getattr(tf.raw_ops, type)).parameters)
    leaves = tf.nest.flatten(list(inputs))
    fed = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]

    def call(*tensors: tf.Tensor) -> Any:
        left = iter(tensors)
        filled = [next(left) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        packed = tf.nest.pack_sequence_as(list(inputs), filled)
        return getattr(tf.raw_ops, type)(**dict(zip(names, packed)), **attrs)

    shapes = " ".join(str(leaf.shape if isinstance(leaf, np.ndarray) else leaf) for leaf in leaves)
    _put(Sample(type, call, tuple(fed), f"{shapes} {attrs or ''}"))


def around(type: str, call: Callable[..., Any], *arrays: np.ndarray, title: str = "") -> None:
    """An operation within a function of the arrays: what a rule sees of its inputs matters."""
    shapes = " ".join(str(array.shape) for array in arrays)
    _put(Sample(type, call, arrays, f"{shapes} {title}"))


def _put(sample: Sample) -> None:
    """Notes a sample; what is drawn next depends on it alone, so that one more moves no others."""
    _SAMPLES.append(sample)
    seed = zlib.crc32(f"{sample.type} {sample.title}".encode())
    random.bit_generator.state = np.random.PCG64(seed).state
