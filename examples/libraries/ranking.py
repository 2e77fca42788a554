"""A model that ranks films, of Keras Recommenders (keras-rs), on towers.

Goes in: made-up users, lists of four films each, and how they liked them.  Comes out: a model with
crossed and dotted features and embedding tables (``DistributedEmbedding``, which needs no TPU),
trained by a pairwise loss and measured by ranking metrics, beside one device.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/ranking.py
"""

from __future__ import annotations

from typing import Any

import common
import keras
import keras_rs
import numpy as np

MOST_DIFFERENCE = 1e-5
USERS, FILMS, SEEN, LISTED, ROWS = 12, 20, 3, 4, 70


def make() -> Any:
    """Scores a list of films for a user."""
    def table(name: str, size: int, ids: int) -> Any:
        return keras_rs.layers.FeatureConfig(
            name, keras_rs.layers.TableConfig(name, size, 8, placement="default_device"),
            [None, ids], [None, 8])

    inputs = {"user": keras.Input([1], dtype="int32", name="user"),
              "seen": keras.Input([SEEN], dtype="int32", name="seen"),
              "film": keras.Input([LISTED], dtype="int32", name="film")}
    films = keras.layers.Embedding(FILMS, 8)(inputs["film"])
    vectors = keras_rs.layers.DistributedEmbedding({
        "user": table("user", USERS, 1), "seen": table("seen", FILMS, SEEN)})(
            {name: inputs[name] for name in ("user", "seen")})
    taste = keras_rs.layers.DotInteraction()([vectors["user"], vectors["seen"]])
    known = keras.layers.Concatenate()([vectors["user"], vectors["seen"], taste])
    both = keras.layers.Concatenate()([keras.layers.RepeatVector(LISTED)(known), films])
    crossed = keras_rs.layers.FeatureCross(projection_dim=4)(both, both)
    scores = keras.layers.Flatten()(keras.layers.Dense(1)(crossed))
    model = keras.Model(inputs, scores)
    model.compile(
        keras.optimizers.SGD(0.05), keras_rs.losses.PairwiseHingeLoss(),
        metrics=[keras_rs.metrics.NDCG(k=3, name="ndcg"),
                 keras_rs.metrics.MeanReciprocalRank(name="mrr")])
    return model


def main() -> None:
    findings = common.Findings("keras", "keras-rs")
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = {"user": random.integers(USERS, size=[ROWS, 1]),
         "seen": random.integers(FILMS, size=[ROWS, SEEN]),
         "film": random.integers(FILMS, size=[ROWS, LISTED])}
    y = ((x["user"] + x["film"]) % 5).astype("float32")
    together, alone = common.twins(common.towers(), make)
    logs = [model.fit(x, y, batch_size=common.BATCH, epochs=8, shuffle=False, verbose=0).history
            for model in (together, alone)]
    for name in ("loss", "ndcg", "mrr"):
        findings.says(name, f"{logs[0][name][0]:.3f} to {logs[0][name][-1]:.3f}")
        findings.at_most(f"{name} beside one device's", common.difference(
            [logs[0][name]], [logs[1][name]]), MOST_DIFFERENCE)
    findings.at_most("weights beside one device's", common.difference(
        together.get_weights(), alone.get_weights()), MOST_DIFFERENCE)
    scores = [model.predict(x, batch_size=common.BATCH, verbose=0) for model in (together, alone)]
    findings.at_most("scores", common.difference(scores[:1], scores[1:]), MOST_DIFFERENCE)
    findings.exit()


if __name__ == "__main__":
    main()
