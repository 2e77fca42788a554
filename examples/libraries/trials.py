"""Optuna's trials on towers, with pruning, on a dataset of TensorFlow Datasets.

Goes in: a small dataset, which the example generates.  Comes out: a study of two trials, each a
training on the towers; the better one is compared with the same training on one device.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/trials.py
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import common
import keras
import numpy as np
import optuna
import tensorflow_datasets as tfds
from optuna_integration import KerasPruningCallback

import towerstrategy

MAX_DIFFERENCE = 1e-5


class Sums(tfds.core.GeneratorBasedBuilder):
    """Rows of numbers, and their sums."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            "x": tfds.features.Tensor(shape=[4], dtype=np.float32),
            "y": tfds.features.Tensor(shape=[1], dtype=np.float32)}), supervised_keys=("x", "y"))

    def _split_generators(self, manager: Any) -> dict[str, Any]:
        del manager
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        rows = np.random.default_rng(0).normal(size=[60, 4]).astype("float32")
        for number, row in enumerate(rows):
            yield number, {"x": row, "y": row.sum(keepdims=True)}


def train(strategy: towerstrategy.TowerStrategy | None, data: Any, rate: float,
          callbacks: list[Any]) -> tuple[float, list[np.ndarray]]:
    """Trains a model; returns the last loss and the weights."""
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8, activation="tanh"),
                                  keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate), "mse")
    history = model.fit(data, epochs=3, verbose=0, callbacks=callbacks).history
    return history["loss"][-1], model.get_weights()


def main() -> None:
    findings = common.Findings("keras", "optuna", "optuna-integration", "tensorflow-datasets")
    strategy = common.towers()
    with tempfile.TemporaryDirectory() as folder:
        builder = Sums(data_dir=folder)
        builder.download_and_prepare()
        data = builder.as_dataset(split="train", as_supervised=True).batch(common.BATCH).cache()
        study = optuna.create_study(sampler=optuna.samplers.GridSampler({"rate": [0.001, 0.1]}))
        study.optimize(lambda trial: train(
            strategy, data, trial.suggest_float("rate", 0.001, 0.1),
            [KerasPruningCallback(trial, "loss")])[0], n_trials=2)
        findings.report("the better rate", str(study.best_params["rate"]),
                        study.best_params["rate"] == 0.1)
        on_towers, single = train(strategy, data, 0.1, []), train(None, data, 0.1, [])
    findings.at_most("its loss, compared with one device",
                     abs(study.best_value - single[0]) / single[0], MAX_DIFFERENCE)
    findings.at_most("weights, compared with one device",
                     common.difference(on_towers[1], single[1]), MAX_DIFFERENCE)
    findings.exit()


if __name__ == "__main__":
    main()
