"""Hooks into tf_keras: LSTM and GRU on GPUs.

Goes in: Keras' implementation for any device.  Comes out: cuDNN's on GPU towers.

Keras calls a function, and TensorFlow's graph optimizer replaces a call on a GPU by the function
that uses cuDNN.  On towers the function is inlined, so there is no call to replace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_keras.src.layers.rnn import gru, gru_lstm_utils, lstm
from tf_keras.src.utils import control_flow_util

from towerstrategy import contexts

_WITH_CUDNN = {lstm.standard_lstm: lstm.gpu_lstm, gru.standard_gru: gru.gpu_gru}


def generate_defun_backend(original: Callable[..., Any], api: str, device: str,
                           layer: Callable[..., Any], attributes: Any) -> Callable[..., Any]:
    """The hook for ``generate_defun_backend``; ``layer`` is ``standard_lstm`` or another."""
    context = contexts.current()  # if there is one, the function is partitioned
    if layer not in _WITH_CUDNN or context is None \
            or context.strategy.extended.placement.kinds != {"GPU"}:
        return original(api, device, layer, attributes)

    def call(*, zero_output_for_mask: bool, **kwargs: Any) -> Any:
        return control_flow_util.smart_cond(
            gru_lstm_utils.is_cudnn_supported_inputs(
                kwargs["mask"], kwargs["time_major"], kwargs["sequence_lengths"]),
            lambda: _WITH_CUDNN[layer](**kwargs),
            lambda: layer(zero_output_for_mask=zero_output_for_mask, **kwargs))

    return call
