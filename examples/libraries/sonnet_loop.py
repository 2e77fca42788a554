"""A Sonnet training loop on towers, compared with one device.

Goes in: a batch of random rows.  Comes out: the losses of a module with cross-replica batch norm on
towers and on one device, their differences, and a checkpoint of one model read by the other.

The loop differs from a loop with a Keras optimizer:

- Sonnet's optimizers raise an error for strategies other than Sonnet's own, in ``strategy.run`` and
  in the scope.  As a weight exists once, the loop sums the gradients itself and calls the optimizer
  once, outside of both.
- ``snt.distribute.CrossReplicaBatchNorm`` uses the mean of the towers' means.  This is the mean of
  the batch if all towers have the same number of rows, so the number of rows is a multiple of the
  number of towers.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/sonnet_loop.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import common
import numpy as np
import sonnet as snt
import tensorflow as tf

import towerstrategy

STEPS = 10
MAX_DIFFERENCE = 1e-5


class Network(snt.Module):
    """Two linear layers around a batch norm over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = snt.Linear(16, with_bias=False)
        self.norm = snt.distribute.CrossReplicaBatchNorm(
            create_scale=True, create_offset=True,
            moving_mean=snt.ExponentialMovingAverage(0.9),
            moving_variance=snt.ExponentialMovingAverage(0.9))
        self.last = snt.Linear(1)

    def __call__(self, x: tf.Tensor, is_training: bool) -> tf.Tensor:
        return self.last(tf.nn.swish(self.norm(self.first(x), is_training)))


def make_step(network: Network, rows: int, strategy: towerstrategy.TowerStrategy | None
              ) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """A training step for batches of ``rows`` rows, on one device or on towers."""
    optimizer = snt.optimizers.Adam(0.01)

    def gradients_of(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(network(x, is_training=True) - y)) / rows
        return loss, tape.gradient(loss, network.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if strategy is None:
            loss, gradients = gradients_of(x, y)
        else:
            loss, gradients = tf.nest.map_structure(
                lambda part: strategy.reduce("SUM", part, axis=None),
                strategy.run(gradients_of, strategy.split((x, y))))
        optimizer.apply(gradients, network.trainable_variables)
        return loss

    return step


def main() -> None:
    findings = common.Findings("dm-sonnet")
    strategy = common.towers()
    rows = 3 * strategy.num_replicas_in_sync
    random = np.random.default_rng(0)
    x = tf.constant(random.normal(size=[rows, 5]), tf.float32)
    y = tf.reduce_sum(x, axis=1, keepdims=True)

    single = Network()
    single(x, is_training=False)
    with strategy.scope():
        on_towers = Network()
    strategy.run(lambda: on_towers(x, is_training=False))
    for variable, value in zip(on_towers.variables, single.variables, strict=True):
        variable.assign(value)

    losses = []
    for network, used in ((single, None), (on_towers, strategy)):
        step = make_step(network, rows, used)
        losses.append([float(step(x, y)) for _ in range(STEPS)])
    findings.report("losses on the towers", f"{losses[1][0]:.3f} to {losses[1][-1]:.3f}",
                    losses[1][-1] < losses[1][0])
    findings.at_most("losses, compared with one device", common.difference(*losses[::-1]),
                     MAX_DIFFERENCE)
    findings.at_most("variables with moving statistics, compared with one device",
                     common.difference([value.numpy() for value in on_towers.variables],
                                       [value.numpy() for value in single.variables]),
                     MAX_DIFFERENCE)

    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(network=on_towers).save(f"{folder}/checkpoint")
        tf.train.Checkpoint(network=single).restore(path).assert_consumed()
    findings.at_most("one device's, after reading the towers' checkpoint",
                     common.difference([value.numpy() for value in single.variables],
                                       [value.numpy() for value in on_towers.variables]), 0)
    findings.exit()


if __name__ == "__main__":
    main()
