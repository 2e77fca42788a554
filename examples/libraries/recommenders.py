"""A retrieval model of TensorFlow Recommenders, with in-batch negatives, on towers.

Goes in: made-up users who like made-up films.  Comes out: a trained retrieval model, its accuracy,
and the loss of one batch on one device and on towers.

The negatives of ``tfrs.tasks.Retrieval`` are the other rows of the batch.  In ``fit`` and in a
``strategy.function`` these are all rows of the batch, as on one device.  In ``strategy.run``, as
with every ``tf.distribute`` strategy, they are the rows of the same tower: an easier task with a
smaller loss.

The library raises an error if it is imported with Keras 3, so this runs with tf_keras.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/recommenders.py
"""

from __future__ import annotations

import contextlib
import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import common
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

import towerstrategy

USERS, FILMS, TASTES, ROWS = 30, 24, 4, 400
MAX_DIFFERENCE = 1e-5


def likes() -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a user and a film; each user watches only films of one taste."""
    random = np.random.default_rng(0)
    users = random.integers(USERS, size=ROWS)
    films = random.integers(FILMS // TASTES, size=ROWS) * TASTES + users % TASTES
    return users.astype("int64"), films.astype("int64")


class Retrieval(tfrs.Model):
    """Embeds users and films as vectors; recommends films whose vectors are similar."""

    def __init__(self) -> None:
        super().__init__()
        self.user_model = tf.keras.Sequential([tf.keras.layers.Embedding(USERS, 8),
                                               tf.keras.layers.Dense(8)])
        self.film_model = tf.keras.Sequential([tf.keras.layers.Embedding(FILMS, 8),
                                               tf.keras.layers.Dense(8)])
        self.task = tfrs.tasks.Retrieval()  # the loss is the sum over the batch's rows

    def vectors(self, features: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        return self.user_model(features["user"]), self.film_model(features["film"])

    def compute_loss(self, features: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        users, films = self.vectors(features)
        return self.task(users, films, compute_metrics=not training)


def losses_of_a_batch(strategy: towerstrategy.TowerStrategy, batch: dict[str, np.ndarray]
                      ) -> tuple[float, float, list[list[np.ndarray]]]:
    """Trains one step with one batch; returns both losses, and the weights of both models."""
    models, losses = [], []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        with scope:
            model = Retrieval()
            model.vectors({name: column[:1] for name, column in batch.items()})  # builds it
            model.compile(tf.keras.optimizers.SGD(0.01))
        models.append(model)
    models[1].set_weights(models[0].get_weights())
    for model, used in zip(models, (None, strategy)):
        losses.append(step(model, used, batch))
    return losses[0], losses[1], [model.get_weights() for model in models]


def step(model: Retrieval, strategy: towerstrategy.TowerStrategy | None,
         batch: dict[str, np.ndarray]) -> float:
    """Runs a training step; returns the loss, which is a sum over the rows of the batch."""
    def train_step(part: dict[str, tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(part, training=True)
        weights = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    if strategy is None:
        return float(tf.function(train_step)(
            {name: tf.constant(column) for name, column in batch.items()}))
    return float(strategy.function(train_step)(strategy.split(batch)))


def main() -> None:
    findings = common.Findings("tf_keras", "tensorflow-recommenders")
    strategy = common.towers()
    users, films = likes()
    data = {"user": users, "film": films}

    with strategy.scope():
        model = Retrieval()
        model.compile(tf.keras.optimizers.Adagrad(0.5))
    model.fit(tf.data.Dataset.from_tensor_slices(data).batch(32), epochs=6, verbose=0)
    scores = model.user_model(np.arange(USERS)) @ tf.transpose(model.film_model(np.arange(FILMS)))
    best = np.argmax(scores, axis=1)
    good = float(np.mean(best % TASTES == np.arange(USERS) % TASTES))
    findings.report("fit, users whose first film is to their taste", f"{good:.0%}", good > 0.8)

    batch = {name: column[:common.BATCH] for name, column in data.items()}
    single, on_towers, weights = losses_of_a_batch(strategy, batch)
    findings.at_most(f"in-batch loss, one device {single:.3f}, towers {on_towers:.3f}",
                     abs(on_towers - single) / single, MAX_DIFFERENCE)
    findings.at_most("weights after that step, compared with one device",
                     common.difference(*weights[::-1]), MAX_DIFFERENCE)
    findings.exit()


if __name__ == "__main__":
    main()
