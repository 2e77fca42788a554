"""An Orbit training loop on towers, compared with one device.

Goes in: random rows.  Comes out: a trainer and an evaluator run by ``orbit.Controller`` (loops of
steps, evaluations, checkpoints), on towers and on one device, and the differences of the two.

Orbit is the package ``orbit`` in ``tf-models-official``; ``orbit-ml`` is an unrelated package of
the same import name.  tf-models-official 2.20.0 requires TensorFlow 2.20 and many packages that
Orbit does not need, so with another TensorFlow install it without its dependencies:

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    pip install --no-deps tf-models-official
    python examples/libraries/orbit_loop.py
    TF_USE_LEGACY_KERAS=1 python examples/libraries/orbit_loop.py     # the same with tf_keras
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import common
import numpy as np
import orbit
import tensorflow as tf

STEPS = 12
MAX_DIFFERENCE = 1e-5


class Task(orbit.StandardTrainer, orbit.StandardEvaluator):
    """Trains and evaluates a small network; create it in the strategy's scope."""

    def __init__(self, strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> None:
        self.strategy = strategy
        self.model = tf.keras.Sequential([
            tf.keras.Input([5]), tf.keras.layers.Dense(16, activation="tanh"),
            tf.keras.layers.Dense(1)])
        self.optimizer = tf.keras.optimizers.Adam(0.01)
        self.optimizer.build(self.model.trainable_variables)
        self.global_step = orbit.utils.create_global_step()
        self.loss = tf.keras.metrics.Mean("loss")
        distributed = strategy.experimental_distribute_dataset(dataset)
        orbit.StandardTrainer.__init__(self, distributed)
        orbit.StandardEvaluator.__init__(self, distributed)

    def train_loop_begin(self) -> None:
        self.loss.reset_state()

    def train_step(self, iterator: Iterator[Any]) -> None:
        def replica_step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                errors = tf.square(self.model(x, training=True) - y)
                loss = tf.reduce_sum(errors) / common.BATCH  # of the global batch
            weights = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            self.loss.update_state(errors)

        self.strategy.run(replica_step, next(iterator))
        self.global_step.assign_add(1)

    def train_loop_end(self) -> dict[str, tf.Tensor]:
        return {"loss": self.loss.result()}

    def eval_begin(self) -> None:
        self.loss.reset_state()

    def eval_step(self, iterator: Iterator[Any]) -> None:
        def replica_step(x: tf.Tensor, y: tf.Tensor) -> None:
            self.loss.update_state(tf.square(self.model(x, training=False) - y))

        self.strategy.run(replica_step, next(iterator))

    def eval_end(self) -> dict[str, tf.Tensor]:
        return {"loss": self.loss.result()}


def train(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset
          ) -> tuple[list[np.ndarray], float]:
    """Trains, resumes from the checkpoint; returns the weights and the last loss."""
    with tempfile.TemporaryDirectory() as folder:
        for steps in (STEPS // 2, STEPS):  # the second controller starts where the first ended
            tf.keras.utils.set_random_seed(1)
            with strategy.scope():
                task = Task(strategy, dataset)
            checkpoint = tf.train.Checkpoint(model=task.model, optimizer=task.optimizer,
                                             step=task.global_step)
            controller = orbit.Controller(
                global_step=task.global_step, trainer=task, evaluator=task, strategy=strategy,
                steps_per_loop=3, checkpoint_manager=tf.train.CheckpointManager(
                    checkpoint, folder, max_to_keep=2, step_counter=task.global_step))
            losses = controller.train_and_evaluate(
                train_steps=steps, eval_steps=2, eval_interval=STEPS // 2)
    return [weight.numpy() for weight in task.model.weights], float(losses["loss"])


def main() -> None:
    findings = common.Findings(tf.keras.Model.__module__.split(".")[0], "tf-models-official")
    towers = common.towers()
    x = np.random.default_rng(0).normal(size=[40, 5]).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True)))
    dataset = dataset.repeat().batch(common.BATCH)
    single, single_loss = train(tf.distribute.get_strategy(), dataset)
    on_towers, loss = train(towers, dataset)
    findings.report("loss after training on the towers", f"{loss:.3f}", np.isfinite(loss))
    findings.at_most("loss, compared with one device", abs(loss - single_loss) / single_loss,
                     MAX_DIFFERENCE)
    findings.at_most("weights, compared with one device", common.difference(on_towers, single),
                     MAX_DIFFERENCE)
    findings.exit()


if __name__ == "__main__":
    main()
