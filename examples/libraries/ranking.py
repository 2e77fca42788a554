"""A model of Keras Recommenders (keras-rs) that ranks films, on towers.

Goes in: made-up users, each with a list of four films and ratings.  Comes out: a model with feature
crosses, dot products of features and embedding tables (``DistributedEmbedding``, which needs no
TPU), trained with a pairwise loss and ranking metrics, compared with one device.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/ranking.py
"""

from __future__ import annotations

from typing import Any

import common
import keras
import keras_rs
import numpy as np

MAX_DIFFERENCE = 1e-5
USERS, FILMS, SEEN, LISTED, ROWS = 12, 20, 3, 4, 70


def make() -> Any:
    """A model that scores a list of films for a user."""
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
    on_towers, single = common.twins(common.towers(), make)
    logs = [model.fit(x, y, batch_size=common.BATCH, epochs=8, shuffle=False, verbose=0).history
            for model in (on_towers, single)]
    for name in ("loss", "ndcg", "mrr"):
        findings.report(name, f"{logs[0][name][0]:.3f} to {logs[0][name][-1]:.3f}")
        findings.at_most(f"{name}, compared with one device", common.difference(
            [logs[0][name]], [logs[1][name]]), MAX_DIFFERENCE)
    findings.at_most("weights, compared with one device", common.difference(
        on_towers.get_weights(), single.get_weights()), MAX_DIFFERENCE)
    scores = [model.predict(x, batch_size=common.BATCH, verbose=0) for model in (on_towers, single)]
    findings.at_most("scores", common.difference(scores[:1], scores[1:]), MAX_DIFFERENCE)
    findings.exit()


if __name__ == "__main__":
    main()
