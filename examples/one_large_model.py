"""Trains a model that is larger than what each of its devices may hold, laid over four of them.

Goes in: nothing; every GPU of the machine where there are two or more, else four logical CPU
devices.  Comes out: the strategy's table, with the bytes of weights and slots on each device
beside the limit for one; then the training, and how far its weights are from those of one device
without a limit.

    python examples/one_large_model.py
    TF_USE_LEGACY_KERAS=1 python examples/one_large_model.py     # the same with tf_keras

TensorFlow limits the memory of a GPU, not of a logical CPU device, so the limit is held by
counting: what is counted is what a training holds from its first step to its last.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import tensorflow as tf

import towerstrategy

MOST_BYTES = 8 * 2**20  # of weights and slots, on a device
MOST_DIFFERENCE = 1e-4
LAYERS, UNITS, ROWS = 12, 384, 96


def network() -> Any:
    """A deep network of dense layers, compiled with Adam, which has two slots a weight."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input([64])], name="large")
    for _ in range(LAYERS):
        model.add(tf.keras.layers.Dense(UNITS, activation="tanh"))
    model.add(tf.keras.layers.Dense(10))
    model.compile(tf.keras.optimizers.Adam(1e-4),
                  tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def bytes_of_devices(model: Any) -> dict[str, int]:
    """The bytes of the model's weights and of its optimizer's slots on each device."""
    slots = model.optimizer.variables
    held: collections.Counter[str] = collections.Counter()
    for variable in [*model.weights, *(slots() if callable(slots) else slots)]:
        variable = getattr(variable, "value", variable) if hasattr(variable, "path") else variable
        held[variable.device.rpartition("device:")[2]] += (
            variable.shape.num_elements() * variable.dtype.size)
    return dict(held)


def main() -> None:
    """Trains on the devices, then on one, and compares."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    devices = [f"GPU:{number}" for number in range(gpus)] if gpus > 1 \
        else towerstrategy.split_cpu(4)
    random = np.random.default_rng(0)
    x = random.random([2 * ROWS, 64]).astype("float32")
    y = random.integers(0, 10, 2 * ROWS)

    strategy = towerstrategy.TowerStrategy([devices], micro_batches=2 * len(devices))
    with strategy.scope():
        model = network()
    model.fit(x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=2)
    print(strategy.describe(model))

    held = bytes_of_devices(model)
    for device, size in sorted(held.items()):
        print(f"{device}: {size / 2**20:5.1f} MiB of {MOST_BYTES / 2**20:.0f}")
    print(f"all:   {sum(held.values()) / 2**20:5.1f} MiB, more than one device may hold")
    if max(held.values()) > MOST_BYTES or sum(held.values()) <= MOST_BYTES:
        raise SystemExit("The model is not over the devices as it should be.")

    alone = network()
    alone.fit(x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0)
    apart = max(float(np.abs(one - other).max())
                for one, other in zip(model.get_weights(), alone.get_weights()))
    print(f"largest difference of a weight from one device's: {apart:.1e}")
    if apart > MOST_DIFFERENCE:
        raise SystemExit("The weights are not those of one device.")


if __name__ == "__main__":
    main()
