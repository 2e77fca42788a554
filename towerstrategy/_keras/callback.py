"""Callbacks that both Kerases take, without importing either.

Goes in: nothing, or a callback of theirs.  Comes out: a base class whose methods do nothing; the
callback with other methods.
"""

from __future__ import annotations

from typing import Any

_EVENTS = ("batch", "train_batch", "test_batch", "predict_batch", "epoch", "train", "test",
           "predict")


class Callback:
    """A callback of either Keras that looks at epochs and not at batches."""

    # Keras 3 (callbacks/callback_list.py): it does not wait for the batch's logs because of us.
    async_safe = True
    # tf_keras (callbacks.py) likewise.
    _supports_tf_logs = True
    _chief_worker_only = None

    params: dict[str, Any] | None = None
    model: Any = None

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params

    def set_model(self, model: Any) -> None:
        self.model = model

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """None, which is false: no hook of batches is implemented."""

    _implements_train_batch_hooks = _implements_test_batch_hooks = _nothing
    _implements_predict_batch_hooks = _nothing


for _event in _EVENTS:
    for _when in ("begin", "end"):
        setattr(Callback, f"on_{_event}_{_when}", Callback._nothing)


def with_methods(callback: Any, methods: type) -> Any:
    """A Keras callback again, whose methods are these, then those of its own class.

    Both have one state: what is counted in either is what the user reads off ``callback``.
    """
    made_class: Any = type(type(callback).__name__, (methods, type(callback)), {})
    made = made_class.__new__(made_class)
    made.__dict__ = callback.__dict__
    return made
