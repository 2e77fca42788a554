"""Compares MirroredStrategy and TowerStrategy with one device, by a small training.

Goes in: 990 made-up rows, in batches of 32, so that the last batch has 30.  Comes out: for each
strategy on four logical CPU devices, the difference of the train weights from one device's.

    pip install .     # after `make demo`: .venv/bin/python has it
    python examples/same_as_one_device.py
"""

import numpy as np
import tensorflow as tf

import towerstrategy


def train(strategy):
    """Trains a small network for five epochs; returns all weights as one vector."""
    tf.keras.utils.set_random_seed(1)
    x = np.random.RandomState(0).rand(990, 8).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True))
    with strategy.scope():
        model = tf.keras.Sequential([
            tf.keras.Input([8]), tf.keras.layers.Dense(16, "tanh"), tf.keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(x, y, batch_size=32, epochs=5, shuffle=False, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def main():
    devices = towerstrategy.split_cpu(4)
    print("training on one device, then on four with each strategy: half a minute", flush=True)
    one_device = train(tf.distribute.get_strategy())
    for strategy in (tf.distribute.MirroredStrategy(devices),
                     towerstrategy.TowerStrategy(devices)):
        difference = np.abs(train(strategy) - one_device).max()
        print(f"{type(strategy).__name__:<17} differs from one device by {difference:.1e}",
              flush=True)


if __name__ == "__main__":
    main()
