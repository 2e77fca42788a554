"""TensorFlow Probability on towers: a layer that returns distributions, and a custom training loop.

Goes in: random rows whose noise grows with x.  Comes out: a regression that predicts its own
uncertainty, trained by ``fit`` with the likelihood as loss, and a mixture of normals fitted to
numbers by a custom training loop, both compared with one device.

TensorFlow Probability's layers are layers of tf_keras, whatever ``TF_USE_LEGACY_KERAS`` says.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/probability.py
"""

from __future__ import annotations

import contextlib
import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

from typing import Any

import common
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

import towerstrategy

tfd = tfp.distributions
MAX_DIFFERENCE = 1e-5
RANDOM = np.random.default_rng(0)


def make_regression() -> Any:
    """A normal distribution for each row, whose mean and deviation depend on it."""
    model = tf.keras.Sequential([
        tf.keras.Input([1]),
        tf.keras.layers.Dense(8, activation="tanh"),
        tf.keras.layers.Dense(2),
        tfp.layers.DistributionLambda(
            lambda values: tfd.Normal(values[:, :1], 1e-3 + tf.nn.softplus(values[:, 1:])),
            convert_to_tensor_fn=tfd.Distribution.mean)])
    model.compile(tf.keras.optimizers.Adam(0.02), lambda y, distribution: -distribution.log_prob(y))
    return model


def regression(findings: common.Findings, strategy: towerstrategy.TowerStrategy) -> None:
    x = RANDOM.uniform(-1, 1, size=[90, 1]).astype("float32")
    y = (x + (x + 1) * 0.2 * RANDOM.normal(size=x.shape)).astype("float32")
    models = common.twins(strategy, make_regression)
    losses = [model.fit(x, y, batch_size=common.BATCH, epochs=10, shuffle=False, verbose=0
                        ).history["loss"] for model in models]
    findings.report("regression, losses", f"{losses[0][0]:.3f} to {losses[0][-1]:.3f}",
                    losses[0][-1] < losses[0][0])
    findings.at_most("regression, weights, compared with one device", common.difference(
        *(model.get_weights() for model in models)), MAX_DIFFERENCE)
    means = [model.predict(x, batch_size=common.BATCH, verbose=0) for model in models]
    findings.at_most("regression, predicted means", common.difference(means[:1], means[1:]),
                     MAX_DIFFERENCE)


def fit_mixture(strategy: towerstrategy.TowerStrategy | None,
                numbers: tf.data.Dataset) -> list[np.ndarray]:
    """Fits a mixture of two normals to numbers; returns its weights, means and deviations."""
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        weights, means = tf.Variable([0., 0.]), tf.Variable([-1., 1.])
        deviations = tfp.util.TransformedVariable([1., 1.], tfp.bijectors.Softplus())
        variables = [weights, means, *deviations.trainable_variables]
        optimizer = tf.keras.optimizers.SGD(0.2)
        optimizer.build(variables)
    mixture = tfd.MixtureSameFamily(tfd.Categorical(logits=weights), tfd.Normal(means, deviations))

    def step(batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(mixture.log_prob(batch))
            if strategy is not None:
                loss = strategy.scale_loss(loss)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    if strategy is None:
        train, batches = tf.function(step), numbers
    else:
        train = tf.function(lambda batch: strategy.run(step, args=(batch,)))
        batches = strategy.experimental_distribute_dataset(numbers)
    for batch in batches:
        train(batch)
    return [mixture.mixture_distribution.probs_parameter().numpy(), means.numpy(),
            tf.convert_to_tensor(deviations).numpy()]


def main() -> None:
    findings = common.Findings("tf_keras", "tensorflow-probability")
    strategy = common.towers()
    tf.keras.utils.set_random_seed(1)
    regression(findings, strategy)
    numbers = np.where(RANDOM.uniform(size=300) < 0.3, RANDOM.normal(-2, 0.5, 300),
                       RANDOM.normal(2, 1, 300)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices(numbers).repeat(3).batch(common.BATCH)
    single, on_towers = fit_mixture(None, dataset), fit_mixture(strategy, dataset)
    findings.report("mixture, weights, means and deviations",
                    " ".join(str(np.round(value, 2)) for value in on_towers),
                    abs(on_towers[1][0] + 2) < 0.5 and abs(on_towers[1][1] - 2) < 0.5)
    findings.at_most("mixture, compared with one device", common.difference(on_towers, single),
                     MAX_DIFFERENCE)
    findings.exit()


if __name__ == "__main__":
    main()
