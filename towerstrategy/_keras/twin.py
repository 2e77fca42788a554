"""A second handle on a model: the same class, layers and variables, a training state of its own.

Goes in: a model, and how its Keras names things.  Comes out: a *twin*, another object of its class.
All that makes the model what it is is shared, so that it saves as the model does; what ``compile``
and ``fit`` set is not, so that each of the two trains in its own way.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf

_MISSING = object()


def make(model: Any, names: Any) -> Any:
    """A twin of ``model``, whose Keras names things in this way.

    It builds the model where that is built when it is first used.
    """
    own = names.TRAINING_STATE
    twin = object.__new__(type(model))
    seen = {name: value for name, value in vars(model).items() if name not in own}
    vars(twin).update(seen, **{name: value for name, value in vars(names.TRAINER()).items()
                               if name in own and name not in names.ENTRIES})
    if "_checkpoint" in vars(twin):  # tf_keras'
        vars(twin)["_checkpoint"] = tf.train.Checkpoint(root=weakref.ref(twin))
    _tf.share_dependencies(twin, model, own)

    def follow() -> None:
        """Takes over what building has changed in the model."""
        for name, value in list(vars(model).items()):
            before = seen.get(name, _MISSING)
            changed = name not in own and value is not before
            if changed and vars(twin).get(name, _MISSING) is before:
                seen[name] = vars(twin)[name] = value
        _tf.share_dependencies(twin, model, own)

    for name in names.BUILDERS:
        if hasattr(model, name):
            vars(twin)[name] = _handed_on(getattr(model, name), follow)
    return twin


def _handed_on(method: Callable[..., Any], follow: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        follow()
        return result

    return call
