"""TF-Agents on towers: its ``Learner`` trains a policy by behavioral cloning.

Goes in: made-up observations, and the actions of an expert.  Comes out: an agent trained by
``tf_agents.train.learner.Learner(strategy=...)``, compared with one device.

TF-Agents 0.19.0 works with Keras 2 only and requires older releases of other packages.  For
TensorFlow 2.21 install it without its dependencies, but with the packages that it imports:

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    pip install --no-deps tf-agents gym==0.23.0 gym-notices
    pip install gin-config pygame
    python examples/libraries/agents.py
"""

from __future__ import annotations

import os
import tempfile

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import common
import numpy as np
import tensorflow as tf
from tf_agents.agents.behavioral_cloning import behavioral_cloning_agent
from tf_agents.networks import sequential
from tf_agents.specs import tensor_spec
from tf_agents.train import learner as learner_lib
from tf_agents.trajectories import time_step, trajectory

STEPS = 20
ACTIONS = 3
MAX_DIFFERENCE = 1e-5
OBSERVATION = tf.TensorSpec([4], tf.float32)
RANDOM = np.random.default_rng(0)
OBSERVATIONS = RANDOM.normal(size=[15 * 12, 4]).astype("float32")
EXPERT_ACTIONS = np.argmax(OBSERVATIONS[:, :ACTIONS], axis=1)


def experience(rows: int) -> tf.data.Dataset:
    """An endless dataset of batches of ``rows`` trajectories."""
    def make_trajectory(observation: tf.Tensor, action: tf.Tensor
                        ) -> tuple[trajectory.Trajectory, tuple[()]]:
        return trajectory.Trajectory(
            step_type=tf.constant(1), observation=observation, action=tf.cast(action, tf.int32),
            policy_info=(), next_step_type=tf.constant(1), reward=tf.constant(0.),
            discount=tf.constant(1.)), ()

    steps = tf.data.Dataset.from_tensor_slices((OBSERVATIONS, EXPERT_ACTIONS))
    return steps.map(make_trajectory).repeat().batch(rows, drop_remainder=True)


def train(strategy: tf.distribute.Strategy) -> tuple[list[np.ndarray], float]:
    """Trains an agent; returns the weights and the last loss."""
    tf.keras.utils.set_random_seed(1)
    rows = 12  # each of three towers gets its own batches of 4
    with strategy.scope():
        step = tf.Variable(0, dtype=tf.int64)
        network = sequential.Sequential([tf.keras.layers.Dense(8, activation="tanh"),
                                         tf.keras.layers.Dense(ACTIONS)])
        agent = behavioral_cloning_agent.BehavioralCloningAgent(
            time_step.time_step_spec(OBSERVATION),
            tensor_spec.BoundedTensorSpec([], tf.int32, 0, ACTIONS - 1), cloning_network=network,
            optimizer=tf.keras.optimizers.Adam(0.02), train_step_counter=step)
    with tempfile.TemporaryDirectory() as folder:
        learner = learner_lib.Learner(
            folder, step, agent, strategy=strategy, checkpoint_interval=5, summary_interval=5,
            experience_dataset_fn=lambda: experience(rows // strategy.num_replicas_in_sync))
        for _ in range(STEPS // 5):
            loss = learner.run(iterations=5)
    return [weight.numpy() for weight in network.variables], float(loss.loss)


def main() -> None:
    findings = common.Findings("tf_keras", "tf-agents")
    towers = common.towers()
    single, on_towers = train(tf.distribute.get_strategy()), train(towers)
    findings.report("loss after training on the towers", f"{on_towers[1]:.3f}",
                    np.isfinite(on_towers[1]))
    findings.at_most("loss, compared with one device", abs(on_towers[1] - single[1]) / single[1],
                     MAX_DIFFERENCE)
    findings.at_most("weights, compared with one device",
                     common.difference(on_towers[0], single[0]), MAX_DIFFERENCE)
    findings.exit()


if __name__ == "__main__":
    main()
