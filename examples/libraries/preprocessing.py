"""Keras' preprocessing layers in a tf.data pipeline, or in the model, on towers.

Goes in: the 178 wines that scikit-learn ships, with a made-up column of words.  Comes out: a
network trained on the towers, with its preprocessing in the pipeline or in the model, both compared
with one device; and a saved model that takes raw rows.

Layers are adapted before training, on all data.  ``adapt`` does not use the towers; its results are
variables with one copy, like weights.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/preprocessing.py
    TF_USE_LEGACY_KERAS=1 python examples/libraries/preprocessing.py     # the same with tf_keras
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import common
import numpy as np
import tensorflow as tf
from sklearn import datasets, model_selection

MAX_DIFFERENCE = 1e-5
WORDS = np.array(["red", "white", "rose"])
Rows = dict[str, np.ndarray]


def wines() -> tuple[Rows, np.ndarray, Rows, np.ndarray]:
    """Training and test rows: 13 numbers, and a word that correlates weakly with the label."""
    numbers, labels = datasets.load_wine(return_X_y=True)
    random = np.random.default_rng(0)
    words = WORDS[np.where(random.random(len(labels)) < 0.3, labels, random.integers(3))]
    train, test = model_selection.train_test_split(
        np.arange(len(labels)), test_size=40, random_state=0, stratify=labels)

    def part(rows: np.ndarray) -> tuple[Rows, np.ndarray]:
        return ({"numbers": numbers[rows].astype("float32"), "word": words[rows][:, np.newaxis]},
                labels[rows])

    return *part(train), *part(test)


class Preprocessing:
    """Adapted layers: numbers are normalized, words are one-hot encoded."""

    def __init__(self, rows: Rows) -> None:
        self.normalize = tf.keras.layers.Normalization()
        self.normalize.adapt(rows["numbers"])
        self.look_up = tf.keras.layers.StringLookup(output_mode="one_hot")
        self.look_up.adapt(rows["word"])
        # Not adapted, because tf_keras does not save adapted bounds, on one device either.
        bounds = np.quantile(rows["numbers"][:, 0], [0.25, 0.5, 0.75]).tolist()
        self.bucket = tf.keras.layers.Discretization(bounds, output_mode="one_hot")

    def __call__(self, rows: Any) -> Any:
        return tf.keras.layers.Concatenate()([
            self.normalize(rows["numbers"]), self.look_up(rows["word"]),
            self.bucket(rows["numbers"][:, :1])])


def network(inputs: Any, features: Any) -> Any:
    hidden = tf.keras.layers.Dense(16, activation="tanh")(features)
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(3, activation="softmax")(hidden))
    model.compile(tf.keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy",
                  metrics=["accuracy"])
    return model


def raw_inputs() -> Any:
    return {"numbers": tf.keras.Input([13], name="numbers"),
            "word": tf.keras.Input([1], name="word", dtype="string")}


def main() -> None:
    findings = common.Findings(tf.keras.Model.__module__.split(".")[0], "scikit-learn")
    strategy = common.towers()
    x, y, x_test, y_test = wines()
    raw = tf.data.Dataset.from_tensor_slices((x, y)).batch(common.BATCH)
    raw_test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(common.BATCH)

    for where in ("pipeline", "model"):
        trained = []
        for scope in (contextlib.nullcontext(), strategy.scope()):
            tf.keras.utils.set_random_seed(1)
            train, test = raw, raw_test
            with scope:
                layers = Preprocessing(x)
                if where == "model":
                    inputs = raw_inputs()
                    model = network(inputs, layers(inputs))
                else:
                    train, test = (
                        data.map(lambda rows, labels, layers=layers: (layers(rows), labels))
                        for data in (raw, raw_test))
                    inputs = tf.keras.Input(train.element_spec[0].shape[1:])
                    model = network(inputs, inputs)
            model.fit(train, epochs=10, verbose=0)
            trained.append(model)
        single, on_towers = trained
        accuracy = on_towers.evaluate(test, verbose=0)[1]
        findings.report(f"in the {where}: accuracy on test wines", f"{accuracy:.0%}",
                        accuracy > 0.8)
        findings.at_most(f"in the {where}: weights, compared with one device", common.difference(
            [weight.numpy() for weight in on_towers.trainable_weights],
            [weight.numpy() for weight in single.trainable_weights]), MAX_DIFFERENCE)

    with tempfile.TemporaryDirectory() as folder:
        on_towers.save(f"{folder}/wines.keras")
        loaded = tf.keras.models.load_model(f"{folder}/wines.keras")
    findings.at_most("loaded model, predictions for raw rows",
                     common.difference([loaded.predict(raw_test, verbose=0)],
                                       [on_towers.predict(raw_test, verbose=0)]), MAX_DIFFERENCE)
    findings.exit()


if __name__ == "__main__":
    main()
