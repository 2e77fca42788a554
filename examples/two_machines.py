"""Runs one worker of a training on several machines: a small network that classifies ten kinds.

    pip install .     # after `make demo`: .venv/bin/python has it
    python examples/two_machines.py

Goes in: ``TF_CONFIG``, with the addresses of all machines and the index of this one; see
``two_machines.sh``.  Without it, the training runs on this machine alone.  Comes out: the accuracy,
the same on every machine, and the weights in ``out/two_machines.weights.h5``, by the chief only.
"""

import pathlib

import numpy as np
import tensorflow as tf

import towerstrategy

# Make the strategy first: it starts the worker's server.  On machines with GPUs: TowerStrategy().
strategy = towerstrategy.TowerStrategy(towerstrategy.split_cpu(2))


def rows(count=1797, features=64):
    """Made-up rows, the same on every machine; replace them by your data."""
    random_state = np.random.RandomState(0)
    kinds = random_state.randint(0, 10, count)
    centres = random_state.normal(size=[10, features])
    return (centres[kinds] + random_state.normal(size=[count, features])).astype("float32"), kinds


def main():
    tf.keras.utils.set_random_seed(1)  # the same on every machine, so that all shuffle alike
    x, y = rows()
    with strategy.scope():
        model = tf.keras.Sequential([
            tf.keras.Input([64]), tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(10)])
        model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"])
    chief = strategy.extended.should_checkpoint
    # batch_size is the global batch: of 1797 rows, the last batch has 5.
    model.fit(x, y, batch_size=64, epochs=3, verbose=2 if chief else 0)
    loss, accuracy = model.evaluate(x, y, batch_size=64, verbose=0)
    print(f"{strategy.num_replicas_in_sync} towers, this machine's first is number "
          f"{strategy.extended.first_replica}: loss {loss:.4f}, accuracy {accuracy:.4f}")
    if chief:
        pathlib.Path("out").mkdir(exist_ok=True)
        model.save_weights("out/two_machines.weights.h5")


if __name__ == "__main__":
    main()
