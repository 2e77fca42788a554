"""Files written under one strategy are read under another, and training goes on."""

import contextlib
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import small_models
import wide
from towerstrategy import TowerStrategy

ROWS = 8
STEPS = 2


class Anywhere:
    """Stands for no strategy."""

    def scope(self):
        return contextlib.nullcontext()


STRATEGIES = {
    "towers": lambda: TowerStrategy(["CPU:1", "CPU:2"]),
    "mirrored": lambda: tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()),
    "one": Anywhere,
}
MOVES = (("towers", "mirrored"), ("towers", "one"), ("mirrored", "towers"), ("one", "towers"))


def compiled(kit):
    model = small_models.make(kit, "functional")
    # Not "mse": Keras 3 cannot load that from .h5.
    model.compile(kit.optimizers.Adam(0.05), kit.losses.MeanSquaredError(),
                  metrics=[kit.metrics.MeanAbsoluteError()])
    return model


def fit(model, steps=STEPS):
    """Batches that divide evenly: for the others MirroredStrategy computes something else."""
    x, y = small_models.data("functional", rows=ROWS)
    model.fit(x, y, batch_size=4, epochs=steps, shuffle=False, verbose=0)


def optimizer_values(model):
    found = model.optimizer.variables
    return [tf.convert_to_tensor(variable).numpy() for variable in found]


class InterchangeTest(parameterized.TestCase):

    @wide.parameters((tf_keras, MOVES[3]), wide=[
        (keras, MOVES[0]), (keras, MOVES[2]), (tf_keras, MOVES[1])], rest=[
        (keras, MOVES[1]), (keras, MOVES[3]), (tf_keras, MOVES[0]), (tf_keras, MOVES[2])])
    def test_training_goes_on(self, kit, move):
        """Lost otherwise: training moved between machines; optimizer slots start from zero."""
        writer, reader = (STRATEGIES[name]() for name in move)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        with writer.scope():
            model = compiled(kit)
        fit(model)
        model.save(f"{folder}/model.keras")
        model.save(f"{folder}/model.h5")
        model.save_weights(f"{folder}/model.weights.h5")
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.save(f"{folder}/checkpoint")
        slots, weights = optimizer_values(model), small_models.weights(model)
        uninterrupted = compiled(kit)
        fit(uninterrupted, 2 * STEPS)
        expected = small_models.weights(uninterrupted)

        for how in ("checkpoint", "model.weights.h5", "model.keras", "model.h5"):
            with self.subTest(how), reader.scope():
                if how in ("model.keras", "model.h5"):
                    restored = kit.models.load_model(f"{folder}/{how}")
                else:
                    restored = compiled(kit)
                    restored.optimizer.build(restored.trainable_variables)
                if how == "checkpoint":
                    again = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer)
                    status = again.restore(f"{folder}/checkpoint-1")
                    status.assert_existing_objects_matched()
                elif how == "model.weights.h5":
                    restored.load_weights(f"{folder}/{how}")
                for got, wanted in zip(small_models.weights(restored), weights, strict=True):
                    np.testing.assert_allclose(got, wanted, rtol=1e-6)
                if kit is keras and how == "model.h5":
                    continue  # Keras 3 itself does not read the optimizer back from .h5.
                for got, wanted in zip(optimizer_values(restored), slots, strict=True):
                    np.testing.assert_allclose(got, wanted, rtol=1e-6)
                if how == "model.weights.h5":
                    continue  # as with a checkpoint
                fit(restored)
                for got, wanted in zip(small_models.weights(restored), expected, strict=True):
                    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)

    @wide.parameters(keras, wide=[tf_keras])
    def test_optimizer_built_outside_of_the_scope(self, kit):
        """Lost otherwise: a script that restores where it has left the scope, as on one device."""
        path = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "checkpoint")

        def ended(strategy):
            def begun():
                with strategy.scope():
                    model = small_models.make(kit, "functional")
                    inner = kit.optimizers.Adam(0.05, use_ema=True)
                    model.compile(kit.optimizers.LossScaleOptimizer(inner) if kit is keras
                                  else kit.mixed_precision.LossScaleOptimizer(inner), "mse")
                built = inner if kit is tf_keras else model.optimizer
                built.build(model.trainable_variables)
                return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)

            model, checkpoint = begun()
            fit(model, 1)
            checkpoint.write(path)
            model, checkpoint = begun()
            checkpoint.read(path).assert_consumed()
            fit(model, 1)
            return small_models.weights(model) + optimizer_values(model)

        for got, wanted in zip(ended(STRATEGIES["towers"]()), ended(Anywhere()), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)

    @wide.product(kit=[keras, tf_keras], move=MOVES)
    def test_metrics(self, kit, move):
        """Lost otherwise: counts of metrics, checkpointed in the middle of an evaluation."""
        if kit is keras and not hasattr(keras.Variable, "synchronization"):
            self.skipTest("before Keras 3.10 each replica adds what all have, under every strategy")
        writer, reader = (STRATEGIES[name]() for name in move)
        folder = self.enter_context(tempfile.TemporaryDirectory())

        def update(strategy, metric, value):
            if isinstance(strategy, Anywhere):
                metric.update_state([value])
                metric.update_state([2 * value])
            else:
                strategy.run(lambda: metric.update_state([value * (1. + tf.cast(
                    tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32))]))

        def checkpoint(metric):
            # A Keras 3 metric is in no file that Keras writes, but its variables can be.
            return tf.train.Checkpoint(**{str(number): variable for number, variable
                                          in enumerate(metric.variables)})

        with writer.scope():
            metric = kit.metrics.Mean()
            update(writer, metric, 3.)
        checkpoint(metric).write(f"{folder}/metric")
        with reader.scope():
            restored = kit.metrics.Mean()
            update(reader, restored, 100.)
            checkpoint(restored).read(f"{folder}/metric").assert_existing_objects_matched()
        np.testing.assert_allclose(restored.result(), 4.5)
        with reader.scope():
            update(reader, restored, 1.)
        np.testing.assert_allclose(restored.result(), (3 + 6 + 1 + 2) / 4)

    @parameterized.named_parameters(("two", 2), ("three", 3))
    def test_whole_numbers_in_tower_local_variables(self, towers):
        """Lost otherwise: a count of rows that comes back rounded."""
        strategy = TowerStrategy(towers)
        with strategy.scope():
            count = tf.Variable(0, synchronization=tf.VariableSynchronization.ON_READ,
                                aggregation=tf.VariableAggregation.SUM, dtype=tf.int64)
        strategy.run(lambda: count.assign_add(1))
        count.assign(7)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        path = tf.train.Checkpoint(count=count).save(f"{folder}/count")
        count.assign(0)
        tf.train.Checkpoint(count=count).restore(path)
        self.assertEqual(int(count.read_value()), 7)
