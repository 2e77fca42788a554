"""Graph networks of Spektral on towers; each row of a batch is a graph.

Goes in: rings of random nodes, padded to one size.  Comes out: two ``GCNConv`` layers and a sum
over the nodes, trained by ``fit``, compared with one device.

Disjoint batches, whose rows are nodes, cannot be split by rows: see docs/libraries.md.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/graphs.py
"""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

from typing import Any

import common
import numpy as np
import tensorflow as tf
from spektral import layers, utils

MAX_DIFFERENCE = 1e-5
NODES, GRAPHS = 6, 45


def make() -> Any:
    nodes, edges = tf.keras.Input([NODES, 3]), tf.keras.Input([NODES, NODES])
    hidden = layers.GCNConv(8, activation="tanh")([nodes, edges])
    hidden = layers.GCNConv(8, activation="tanh")([hidden, edges])
    model = tf.keras.Model([nodes, edges],
                           tf.keras.layers.Dense(1)(layers.GlobalSumPool()(hidden)))
    model.compile(tf.keras.optimizers.SGD(0.02), "mse")
    return model


def rings() -> tuple[list[np.ndarray], np.ndarray]:
    """Graphs of 3 to 6 nodes with their edges, and their labels: the sum of the nodes' features."""
    random = np.random.default_rng(0)
    nodes, edges = np.zeros([GRAPHS, NODES, 3], "float32"), np.zeros([GRAPHS, NODES, NODES])
    for graph, size in enumerate(random.integers(3, NODES + 1, size=GRAPHS)):
        nodes[graph, :size] = random.normal(size=[size, 3])
        for node in range(size):
            edges[graph, node, (node + 1) % size] = edges[graph, (node + 1) % size, node] = 1
    return [nodes, utils.gcn_filter(edges).astype("float32")], nodes.sum((1, 2))[:, np.newaxis]


def main() -> None:
    findings = common.Findings("tf_keras", "spektral")
    tf.keras.utils.set_random_seed(1)
    x, y = rings()
    on_towers, single = common.twins(common.towers(), make)
    losses = [model.fit(x, y, batch_size=common.BATCH, epochs=4, shuffle=False, verbose=0
                        ).history["loss"] for model in (on_towers, single)]
    findings.report("losses", f"{losses[0][0]:.3f} to {losses[0][-1]:.3f}",
                    losses[0][-1] < losses[0][0])
    findings.at_most("weights, compared with one device", common.difference(
        on_towers.get_weights(), single.get_weights()), MAX_DIFFERENCE)
    findings.exit()


if __name__ == "__main__":
    main()
