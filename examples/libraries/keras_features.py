"""What Keras 3 itself brings for large models and long trainings, on towers.

Goes in: random rows.  Comes out: models fine-tuned by LoRA, quantized to int8 and int4, fine-tuned
once quantized, evaluated by the averages of their weights, and fed by a ``PyDataset`` of several
workers, each beside the same on one device.

    python examples/libraries/keras_features.py
"""

from __future__ import annotations

from typing import Any

import common
import keras
import numpy as np

import towerstrategy

MOST_DIFFERENCE = 1e-5
TOKENS, LENGTH = 20, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.integers(TOKENS, size=[45, LENGTH])
Y = RANDOM.normal(size=[45, 1]).astype("float32")


def make(**options: Any) -> Any:
    """A model with one of each kind of layer that has LoRA and can be quantized."""
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
    """LoRA for all layers but the last."""
    for layer in model.layers[:-1]:
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")


def fine_tuned(findings: common.Findings, what: str, together: Any, alone: Any) -> float:
    """Trains with LoRA: how far from one device's; nothing else of these layers has moved."""
    for model in (alone, together):
        enable_lora(model)
    together.set_weights(alone.get_weights())  # their random starts
    before = [weight.numpy() for weight in together.non_trainable_variables]
    for model in (alone, together):
        train(model)
    after = [weight.numpy() for weight in together.non_trainable_variables]
    findings.says(f"{what}, frozen weights", f"{len(after)}, as they were",
                  len(after) and all(map(np.array_equal, before, after)))
    return common.difference(together.get_weights(), alone.get_weights())


def lora_and_quantization(findings: common.Findings,
                          strategy: towerstrategy.TowerStrategy) -> None:
    findings.at_most("LoRA, trained weights", fine_tuned(
        findings, "LoRA", *common.twins(strategy, make)), MOST_DIFFERENCE)
    for mode in ("int8", "int4"):
        differences: list[float] = []
        # An activation halfway between two integers goes either way by its last bit, on one device
        # too: starts that differ by one such bit end 1e-4 apart in one of seven trainings there.
        while len(differences) < 4 and min(differences, default=np.inf) > MOST_DIFFERENCE:
            together, alone = common.twins(strategy, make)
            for model in (alone, together):
                model.quantize(mode)
            findings.at_most(f"{mode}, weights", common.difference(
                together.get_weights(), alone.get_weights()), 0)
            findings.at_most(f"{mode}, predictions", common.difference(
                *([model.predict(X, batch_size=common.BATCH, verbose=0)]
                  for model in (together, alone))), MOST_DIFFERENCE)
            differences.append(fine_tuned(findings, f"{mode} with LoRA", together, alone))
        findings.at_most(f"{mode} with LoRA, trained weights, of {len(differences)} starts",
                         min(differences), MOST_DIFFERENCE)


def averages(findings: common.Findings, strategy: towerstrategy.TowerStrategy) -> None:
    """``SwapEMAWeights``: evaluations see the averages, the training goes on without them."""
    together, alone = common.twins(strategy, lambda: make(use_ema=True, ema_momentum=0.9))
    losses = []
    for model in (together, alone):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        train(model, callbacks=[swap])
        losses.append([model.evaluate(X, Y, batch_size=common.BATCH, verbose=0, callbacks=[
            keras.callbacks.SwapEMAWeights()])])
    findings.at_most("SwapEMAWeights, weights", common.difference(
        together.get_weights(), alone.get_weights()), MOST_DIFFERENCE)
    findings.at_most("SwapEMAWeights, loss of the averages", common.difference(*losses),
                     MOST_DIFFERENCE)


class Rows(keras.utils.PyDataset):
    """Batches that workers make; the last one is smaller."""

    def __len__(self) -> int:
        return -(-len(X) // common.BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * common.BATCH, (index + 1) * common.BATCH)
        return X[rows], Y[rows]


def workers(findings: common.Findings, strategy: towerstrategy.TowerStrategy) -> None:
    together, alone = common.twins(strategy, make)
    for model in (together, alone):
        model.fit(Rows(workers=2, max_queue_size=4), epochs=2, shuffle=False, verbose=0)
    findings.at_most("PyDataset of 2 workers", common.difference(
        together.get_weights(), alone.get_weights()), MOST_DIFFERENCE)


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
