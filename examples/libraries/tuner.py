"""KerasTuner on towers: each trial trains on all towers.

Goes in: a function that builds a model from hyperparameters.  Comes out: the best model of three
trials, loaded and trained further on the towers.

KerasTuner 1.4.8 writes TensorBoard's files, so it needs ``tensorboard``, which TensorFlow 2.21 does
not install any more.  It supports only models of Keras 3, whatever ``TF_USE_LEGACY_KERAS`` says.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/tuner.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import common
import keras
import keras_tuner
import numpy as np


def build(choice: keras_tuner.HyperParameters) -> Any:
    """Builds a model; KerasTuner calls this in the strategy's scope."""
    model = keras.Sequential([
        keras.Input([6]),
        keras.layers.Dense(choice.Int("units", 4, 16, step=4), activation="tanh"),
        keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(choice.Choice("rate", [1e-3, 1e-2, 1e-1])), "mse")
    return model


def main() -> None:
    findings = common.Findings("keras", "keras-tuner")
    strategy = common.towers()
    x = np.random.default_rng(0).normal(size=[70, 6]).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.RandomSearch(
            build, objective="val_loss", max_trials=3, seed=1, directory=folder,
            distribution_strategy=strategy)
        tuner.search(x, y, epochs=3, batch_size=common.BATCH, validation_data=(x, y), verbose=0)
        trials = tuner.oracle.get_best_trials(3)
        findings.report("losses of the trials", ", ".join(f"{trial.score:.3f}" for trial in trials),
                        all(np.isfinite(trial.score) for trial in trials))
        best, = tuner.get_best_models(1)
    findings.report("the best model's strategy", repr(best.distribute_strategy),
                    best.distribute_strategy is strategy)
    loss = best.evaluate(x, y, batch_size=common.BATCH, verbose=0)
    findings.at_most("its loss, loaded, compared with the trial",
                     abs(loss - trials[0].score) / loss, 1e-5)
    history = best.fit(x, y, batch_size=common.BATCH, epochs=5, verbose=0).history["loss"]
    findings.report("trained further", f"losses {history[0]:.4f} to {history[-1]:.4f}",
                    history[-1] < history[0])
    findings.exit()


if __name__ == "__main__":
    main()
