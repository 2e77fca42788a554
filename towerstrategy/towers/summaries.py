"""Summaries that a tower writes, under the names that they have on one device.

Goes in: ``tf.summary.scalar`` and the like in a replica function.  Comes out: their tags without
the name scope in which the tower's operations are: TensorBoard would show another curve else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.towers import contexts


def install() -> None:
    """Names the summaries of towers from now on."""
    # TensorBoard, whose functions tf.summary has, takes it from tf.compat.v2.
    _tf.wrap((tf.summary.experimental, tf.compat.v2.summary.experimental), "summary_scope", _named)


def _named(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def summary_scope(*args: Any, **kwargs: Any) -> Iterator[tuple[str, str]]:
        around = tf.get_current_name_scope()
        with original(*args, **kwargs) as (tag, scope):
            if contexts.current_tower() is not None and around:
                tag = f"{contexts.plain_name(around)}{tag[len(around):]}".removeprefix("/")
            yield tag, scope

    return summary_scope
