"""The strategies that the benchmarks measure: ``TowerStrategy`` and its peers.

Goes in: a name, the towers' devices and a merge device.  Comes out: a strategy; for ``none``,
TensorFlow's default strategy.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

import towerstrategy

Maker = Callable[[list[str], str | None], tf.distribute.Strategy]

STRATEGIES: dict[str, Maker] = {
    "none": lambda devices, merge: tf.distribute.get_strategy(),  # noqa: ARG005
    "tower": lambda devices, merge: towerstrategy.TowerStrategy(devices, merge),
    "mirrored": lambda devices, merge: tf.distribute.MirroredStrategy(devices),  # noqa: ARG005
    "mirrored_reduce": lambda devices, merge: tf.distribute.MirroredStrategy(  # noqa: ARG005
        devices, tf.distribute.ReductionToOneDevice()),
    "central": lambda devices, merge: tf.distribute.experimental.CentralStorageStrategy(
        devices, merge if merge not in (None, "cpu", "balanced") else "CPU:0"),
}
# These compile the model with jit_compile=True.
XLA = {"none_xla": "none", "tower_xla": "tower"}
STRATEGIES.update((name, STRATEGIES[plain]) for name, plain in XLA.items())
# Keras 3 on JAX: keras.distribution.DataParallel, and one device; see jax_peer.
JAX = ("jax", "jax_one")
NAMES = (*STRATEGIES, *JAX)


def devices(kind: str, count: int) -> list[str]:
    """Device strings for ``count`` towers.  Call it before TensorFlow initializes its devices.

    Args:
      kind: ``"cpu"`` (logical devices of one CPU; GPUs are hidden) or ``"gpu"``.
      count: the number of devices.

    Raises:
      ValueError: there are fewer than ``count`` GPUs.
    """
    if kind == "cpu":
        tf.config.set_visible_devices([], "GPU")
        return towerstrategy.split_cpu(count)
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) < count:
        raise ValueError(f"{count} GPU towers were asked for, but there are {len(gpus)} GPUs: ask "
                         "for fewer towers or for --device=cpu.")
    return [f"GPU:{index}" for index in range(count)]
