"""A second handle on a model: the same class, layers and variables, a training state of its own.

Goes in: a model, which of its attributes make up its training state, and fresh ones for the handle.
Comes out: a *twin*, another object of the model's class.  All that makes the model what it is is
shared, so that it saves as the model does; what ``compile`` and ``fit`` set is not, so that each of
the two trains in its own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

from towerstrategy import _tensorflow as _tf

_MISSING = object()


def make(model: Any, own: Collection[str], fresh: dict[str, Any], builders: Iterable[str]) -> Any:
    """A twin of ``model``.

    Args:
      model: a Keras or tf_keras model.
      own: the attributes that belong to one handle: the training state.
      fresh: values for those of them that the twin has before it is compiled.
      builders: methods that build the model when it is first used.  The twin's calls of them build
        the model.
    """
    twin = object.__new__(type(model))
    seen = {name: value for name, value in vars(model).items() if name not in own}
    vars(twin).update(seen, **fresh)
    _tf.share_dependencies(twin, model, own)

    def follow() -> None:
        """Takes over what building has changed in the model."""
        for name, value in list(vars(model).items()):
            before = seen.get(name, _MISSING)
            changed = name not in own and value is not before
            if changed and vars(twin).get(name, _MISSING) is before:
                seen[name] = vars(twin)[name] = value
        _tf.share_dependencies(twin, model, own)

    for name in builders:
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
