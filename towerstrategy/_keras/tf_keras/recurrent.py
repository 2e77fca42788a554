"""Hooks into tf_keras: LSTM and GRU on GPUs.

Goes in: Keras' implementation for any device.  Comes out: cuDNN's on GPU towers.

Keras calls a function, and TensorFlow's graph optimizer replaces a call on a GPU by the function
that uses cuDNN.  In a partitioned step the function is inlined, so there is no call to replace.  In
``strategy.run`` there is one, but cuDNN refuses the part of a tower without rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_keras.src.layers.rnn import gru, gru_lstm_utils, lstm
from tf_keras.src.utils import control_flow_util

from towerstrategy import contexts

_WITH_CUDNN = {lstm.standard_lstm: lstm.gpu_lstm, gru.standard_gru: gru.gpu_gru}


def generate_defun_backend(original: Callable[..., Any], api: str, device: str,
                           layer: Callable[..., Any], attributes: Any) -> Callable[..., Any]:
    """The hook for ``generate_defun_backend``; ``layer`` is ``standard_lstm`` or another."""
    tower = contexts.current_tower()
    if layer not in _WITH_CUDNN or not (tower or contexts.has_all_rows()) or (
            tf.distribute.get_strategy().extended.placement.kinds != {"GPU"}):
        return original(api, device, layer, attributes)

    def call(*, zero_output_for_mask: bool, **kwargs: Any) -> Any:
        return control_flow_util.smart_cond(
            gru_lstm_utils.is_cudnn_supported_inputs(
                kwargs["mask"], kwargs["time_major"], kwargs["sequence_lengths"]),
            lambda: _WITH_CUDNN[layer](**kwargs),
            lambda: layer(zero_output_for_mask=zero_output_for_mask, **kwargs))

    def padded_call(*, mask: Any, **kwargs: Any) -> Any:
        return call(mask=mask, **kwargs) if mask is None else _with_rows(call, mask=mask, **kwargs)

    return padded_call if tower else call


def _with_rows(call: Callable[..., Any], *, inputs: Any, mask: Any, time_major: bool,
               **kwargs: Any) -> Any:
    """``call`` with one row of zeros if there are none: no padding reaches into its branches."""
    batch_axis = 1 if time_major else 0
    rows = tf.shape(inputs)[batch_axis]
    missing = tf.cast(rows < 1, tf.int32)

    def padded(value: Any, axis: int = 0) -> Any:
        return tf.pad(value, [[0, missing if each == axis else 0]
                              for each in range(value.shape.rank)])

    kwargs.update((name, padded(kwargs[name])) for name in ("init_h", "init_c") if name in kwargs)
    last, outputs, *states, runtime = call(
        inputs=padded(inputs, batch_axis), time_major=time_major, **kwargs,
        mask=padded(tf.cast(tf.logical_not(mask), inputs.dtype), batch_axis) < 1)
    outputs = outputs[:, :rows] if time_major else outputs[:rows]
    return last[:rows], outputs, *(state[:rows] for state in states), runtime
