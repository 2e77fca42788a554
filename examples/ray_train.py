"""Runs the training of ``two_machines.py`` by Ray Train: 2 workers with 2 CPU towers each.

    pip install ".[ray]"
    python examples/ray_train.py

Goes in: a Ray cluster; without one, Ray starts a cluster on this machine.  Comes out: the accuracy,
the same on every worker.  Ray's ``TensorflowTrainer`` sets ``TF_CONFIG`` in each worker; nothing
else is needed.
"""


def train(config):
    """The training, which runs on each worker.

    It imports its packages itself, as the strategy must be made before TensorFlow initializes.
    """
    import numpy as np
    import tensorflow as tf
    from ray import train as ray_train

    import towerstrategy

    # On machines with GPUs: TowerStrategy(), and GPUs in the ScalingConfig below.
    strategy = towerstrategy.TowerStrategy(towerstrategy.split_cpu(config["towers"]))
    tf.keras.utils.set_random_seed(1)
    random_state = np.random.RandomState(0)
    kinds = random_state.randint(0, 10, 1797)
    centres = random_state.normal(size=[10, 64])
    x = (centres[kinds] + random_state.normal(size=[1797, 64])).astype("float32")
    with strategy.scope():
        model = tf.keras.Sequential([
            tf.keras.Input([64]), tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(10)])
        model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"])
    model.fit(x, kinds, batch_size=64, epochs=3, verbose=0)
    loss, accuracy = model.evaluate(x, kinds, batch_size=64, verbose=0)
    print(f"{strategy.num_replicas_in_sync} towers, this worker's first is number "
          f"{strategy.extended.first_replica}: loss {loss:.4f}, accuracy {accuracy:.4f}")
    ray_train.report({"towers": strategy.num_replicas_in_sync, "loss": loss,
                      "accuracy": accuracy})


def main():
    from ray.train import ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    trainer = TensorflowTrainer(train, train_loop_config={"towers": 2},
                                scaling_config=ScalingConfig(num_workers=2))
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
