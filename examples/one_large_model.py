"""Trains a model that is larger than the memory limit of a device, over several devices.

Goes in: nothing.  It uses all GPUs of the machine, if there are two or more, else four logical CPU
devices.  Comes out: the progress of the training, the strategy's table, the bytes of weights and
slots on each device and the limit; then the difference of the weights from those of one device
without a limit.

    python examples/one_large_model.py
    TF_USE_LEGACY_KERAS=1 python examples/one_large_model.py     # the same with tf_keras

TensorFlow cannot limit the memory of a logical CPU device.  So the example counts the bytes of
weights and slots, which a training holds from its first step to its last, and checks the limit.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import tensorflow as tf

import towerstrategy

MAX_BYTES = 8 * 2**20  # of weights and slots on a device
MAX_DIFFERENCE = 1e-4
LAYERS, UNITS, ROWS = 12, 384, 96


def network() -> Any:
    """A deep network of dense layers, compiled with Adam, which has two slots for each weight."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input([64])], name="large")
    for _ in range(LAYERS):
        model.add(tf.keras.layers.Dense(UNITS, activation="tanh"))
    model.add(tf.keras.layers.Dense(10))
    model.compile(tf.keras.optimizers.Adam(1e-4),
                  tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def bytes_by_device(model: Any) -> dict[str, int]:
    """The bytes of the model's weights and of its optimizer's slots on each device."""
    slots = model.optimizer.variables
    sizes: collections.Counter[str] = collections.Counter()
    for variable in [*model.weights, *(slots() if callable(slots) else slots)]:
        variable = getattr(variable, "value", variable) if hasattr(variable, "path") else variable
        sizes[variable.device.rpartition("device:")[2]] += (
            variable.shape.num_elements() * variable.dtype.size)
    return dict(sizes)


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

    sizes = bytes_by_device(model)
    for device, size in sorted(sizes.items()):
        print(f"{device}: {size / 2**20:5.1f} MiB of {MAX_BYTES / 2**20:.0f}")
    print(f"all:   {sum(sizes.values()) / 2**20:5.1f} MiB, more than the limit of a device")
    if max(sizes.values()) > MAX_BYTES or sum(sizes.values()) <= MAX_BYTES:
        raise SystemExit("The model is not distributed over the devices as it should be.")

    single = network()
    single.fit(x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0)
    difference = max(float(np.abs(a - b).max())
                     for a, b in zip(model.get_weights(), single.get_weights()))
    print(f"largest difference of a weight from one device's: {difference:.1e}")
    if difference > MAX_DIFFERENCE:
        raise SystemExit("The weights are not those of one device.")


if __name__ == "__main__":
    main()
