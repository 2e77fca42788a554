"""How long each layer of a model takes, found by trying.

Goes in: the calls of layers in a functional or sequential model.  Comes out: for each the seconds
of one way forwards and backwards, with a micro-batch of ones.

Layers are tried where no tower, scope, graph or tape is known, in a thread of their own, and what
they write (statistics, the states of generators) is put back.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_RUNS = 3  # of which the fastest counts


def seconds(calls: Sequence[tuple[Any, Any]], rows: int, device: str, names: Any) -> list[float]:
    """The seconds of each of ``calls``, layers with the nodes of their graph, on ``device``.

    Their micro-batch has ``rows`` where the model does not say how many its batches have.

    Raises:
      ValueError: a layer that cannot be tried alone.
    """
    found: list[float] = []
    errors: list[Exception] = []

    def ones(tensor: Any) -> tf.Tensor:
        first, *others = tensor.shape
        return tf.ones([first or rows, *(size or 1 for size in others)], tensor.dtype)

    def try_all() -> None:
        try:
            for layer, node in calls:
                with tf.device(device):
                    args, kwargs = names.call_of(node, ones)
                    found.append(_seconds(layer, args, kwargs, names))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=try_all, name="towerstrategy-trial")
    thread.start()
    thread.join()
    if errors:
        layer = calls[len(found)][0]
        raise ValueError(
            f'balance="time" tries each layer alone, with ones, but layer {layer.name!r} of type '
            f"{type(layer).__name__} cannot be tried: {errors[0]} Use "
            'balance="bytes", or strategy.stage to say where layers are.') from errors[0]
    return found


def _seconds(layer: Any, args: Any, kwargs: Any, names: Any) -> float:
    if "training" in inspect.signature(layer.call).parameters:
        kwargs = {**kwargs, "training": True}
    given = [leaf for leaf in tf.nest.flatten((args, kwargs))
             if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]
    weights = [variable for variable, trained in names.variables_of_layer(layer) if trained]

    @tf.function(autograph=False)
    def step() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            made = [leaf for leaf in tf.nest.flatten(layer(*args, **kwargs))
                    if isinstance(leaf, tf.Tensor)]
            total = tf.add_n([tf.reduce_sum(tf.cast(leaf, tf.float32)) for leaf in made
                              if leaf.dtype.is_floating] or [tf.zeros([])])
        return made, tape.gradient(total, [given, weights])

    with names.trying(layer):
        run = step.get_concrete_function()
        before = [(variable, variable.read_value()) for variable in run.variables]
        times = []
        for _ in range(1 + _RUNS):
            start = time.perf_counter()
            run()
            tf.test.experimental.sync_devices()
            times.append(time.perf_counter() - start)
        for variable, value in before:
            variable.assign(value)
    return min(times[1:])
