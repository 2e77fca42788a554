"""Networks of keras.applications on towers, compared with one device.

Goes in: random images.  Comes out: for each network, the difference of its weights from one
device's after two steps, and the losses of a plain ``fit``.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/applications.py
    TF_USE_LEGACY_KERAS=1 python examples/libraries/applications.py     # the same with tf_keras
"""

from __future__ import annotations

import sys
from typing import Any

import common
import numpy as np
import tensorflow as tf

import towerstrategy

CLASSES = 5
NETWORKS = {"Xception": 71, "ResNet50": 32, "EfficientNetB0": 32, "MobileNetV3Small": 32}
ROWS = 13  # batches of 8 and 5 rows
# In float64.  Deep networks with batch norm and small batches amplify rounding errors: ResNet50 on
# one device differs as much if the rows of its batches are in another order.
MAX_DIFFERENCE = 1e-8


def network(name: str, **kwargs: Any) -> Any:
    """The network with random weights, for small images."""
    size = NETWORKS[name]
    return getattr(tf.keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classes=CLASSES, **kwargs)


def images(name: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    size = NETWORKS[name]
    return (random.random([ROWS, size, size, 3], dtype="float32") * 255,
            random.integers(CLASSES, size=ROWS))


def without_dropout(model: Any) -> Any:
    """The model, compiled, without dropout, as each model has a random seed of its own."""
    for layer in model.layers:
        if isinstance(layer, tf.keras.layers.Dropout):
            layer.rate = 0.0
    model.compile(tf.keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy",
                  jit_compile=False)  # else Keras would compile the model on one device with XLA
    return model


def weight_difference(strategy: towerstrategy.TowerStrategy, name: str) -> float:
    """Trains two steps in float64 from the same weights; returns the difference from one device."""
    policy = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy("float64")
    tf.keras.backend.set_floatx("float64")
    try:
        single = without_dropout(network(name))
        with strategy.scope():
            on_towers = without_dropout(network(name))
        on_towers.set_weights(single.get_weights())
        x, y = images(name)
        for model in (single, on_towers):
            model.fit(x, y, batch_size=common.BATCH, shuffle=False, verbose=0)
    finally:
        tf.keras.mixed_precision.set_global_policy(policy)
        tf.keras.backend.set_floatx("float32")
    return common.difference(on_towers.get_weights(), single.get_weights())


def main() -> None:
    findings = common.Findings(tf.keras.Model.__module__.split(".")[0])
    strategy = common.towers()
    for name in sys.argv[1:] or NETWORKS:
        findings.at_most(f"{name}, weights, compared with one device",
                         weight_difference(strategy, name), MAX_DIFFERENCE)
        with strategy.scope():
            model = network(name)
            model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        x, y = images(name)
        losses = model.fit(x, y, batch_size=common.BATCH, epochs=2, verbose=0).history["loss"]
        findings.report(f"{name}, fit", f"losses {losses[0]:.3f}, {losses[1]:.3f}",
                        bool(np.all(np.isfinite(losses))))
        tf.keras.backend.clear_session()
    findings.exit()


if __name__ == "__main__":
    main()
