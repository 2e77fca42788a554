"""Features of Keras 3 for large models and long trainings, on towers.

Goes in: random rows.  Comes out: models that are fine-tuned with LoRA, quantized to int8 and int4,
fine-tuned after quantization, evaluated with averaged weights, and trained from a ``PyDataset``
with several workers, each compared with one device.

    python examples/libraries/keras_features.py
"""

from __future__ import annotations

from typing import Any

import common
import keras
import numpy as np

import towerstrategy

MAX_DIFFERENCE = 1e-5
TOKENS, LENGTH = 20, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.integers(TOKENS, size=[45, LENGTH])
Y = RANDOM.normal(size=[45, 1]).astype("float32")


def make(**options: Any) -> Any:
    """A model with each kind of layer that supports LoRA and quantization."""
    model = keras.Sequential([
        keras.Input([LENGTH], dtype="int32"),
        keras.layers.Embedding(TOKENS, 8),
        keras.layers.EinsumDense("abc,cd->abd", [LENGTH, 8], activation="tanh"),
        keras.layers.Flatten(),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9, **options), "mse")
    return model


def train(model: Any, **options: Any) -> list[float]:
    losses: list[float] = model.fit(X, Y, batch_size=common.BATCH, epochs=2, shuffle=False,
                                    verbose=0, **options).history["loss"]
    return losses


def enable_lora(model: Any) -> None:
    """Enables LoRA for all layers but the last one."""
    for layer in model.layers[:-1]:
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")


def fine_tuned(findings: common.Findings, what: str, on_towers: Any, single: Any) -> float:
    """Trains with LoRA; returns the difference from one device, and checks the frozen weights."""
    for model in (single, on_towers):
        enable_lora(model)
    on_towers.set_weights(single.get_weights())  # LoRA's weights are initialized at random
    before = [weight.numpy() for weight in on_towers.non_trainable_variables]
    for model in (single, on_towers):
        train(model)
    after = [weight.numpy() for weight in on_towers.non_trainable_variables]
    findings.report(f"{what}, frozen weights", f"{len(after)}, as they were",
                    len(after) and all(map(np.array_equal, before, after)))
    return common.difference(on_towers.get_weights(), single.get_weights())


def lora_and_quantization(findings: common.Findings,
                          strategy: towerstrategy.TowerStrategy) -> None:
    findings.at_most("LoRA, trained weights", fine_tuned(
        findings, "LoRA", *common.twins(strategy, make)), MAX_DIFFERENCE)
    for mode in ("int8", "int4"):
        differences: list[float] = []
        # The last bit of an activation halfway between two integers decides how it is rounded.  So
        # it is on one device: of seven trainings that start one such bit apart, one ends 1e-4 off.
        while len(differences) < 4 and min(differences, default=np.inf) > MAX_DIFFERENCE:
            on_towers, single = common.twins(strategy, make)
            for model in (single, on_towers):
                model.quantize(mode)
            findings.at_most(f"{mode}, weights", common.difference(
                on_towers.get_weights(), single.get_weights()), 0)
            findings.at_most(f"{mode}, predictions", common.difference(
                *([model.predict(X, batch_size=common.BATCH, verbose=0)]
                  for model in (on_towers, single))), MAX_DIFFERENCE)
            differences.append(fine_tuned(findings, f"{mode} with LoRA", on_towers, single))
        findings.at_most(f"{mode} with LoRA, trained weights, of {len(differences)} starts",
                         min(differences), MAX_DIFFERENCE)


def averages(findings: common.Findings, strategy: towerstrategy.TowerStrategy) -> None:
    """``SwapEMAWeights``: evaluation uses the averaged weights, training the others."""
    on_towers, single = common.twins(strategy, lambda: make(use_ema=True, ema_momentum=0.9))
    losses = []
    for model in (on_towers, single):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        train(model, callbacks=[swap])
        losses.append([model.evaluate(X, Y, batch_size=common.BATCH, verbose=0, callbacks=[
            keras.callbacks.SwapEMAWeights()])])
    findings.at_most("SwapEMAWeights, weights", common.difference(
        on_towers.get_weights(), single.get_weights()), MAX_DIFFERENCE)
    findings.at_most("SwapEMAWeights, loss of the averages", common.difference(*losses),
                     MAX_DIFFERENCE)


class Rows(keras.utils.PyDataset):
    """Batches for the workers to load; the last one is smaller."""

    def __len__(self) -> int:
        return -(-len(X) // common.BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * common.BATCH, (index + 1) * common.BATCH)
        return X[rows], Y[rows]


def workers(findings: common.Findings, strategy: towerstrategy.TowerStrategy) -> None:
    on_towers, single = common.twins(strategy, make)
    for model in (on_towers, single):
        model.fit(Rows(workers=2, max_queue_size=4), epochs=2, shuffle=False, verbose=0)
    findings.at_most("PyDataset of 2 workers", common.difference(
        on_towers.get_weights(), single.get_weights()), MAX_DIFFERENCE)


def main() -> None:
    findings = common.Findings("keras")
    keras.utils.set_random_seed(1)
    strategy = common.towers()
    lora_and_quantization(findings, strategy)
    averages(findings, strategy)
    workers(findings, strategy)
    findings.exit()


if __name__ == "__main__":
    main()
