"""What is dropped is gone: strategies, functions; and nothing is traced twice."""

import gc
import weakref

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import small_models
import wide
from peers import two_towers

X = np.random.RandomState(0).rand(9, 3).astype("f")


def use(kit):
    """Trains a model on two towers, in ``fit`` and by hand; a weak reference to its strategy."""
    strategy = two_towers()
    with strategy.scope():
        model = small_models.make(kit, "functional")
        model.compile("adam", "mse", metrics=["mae"])
    model.fit(X, X[:, :1], batch_size=4, verbose=0)
    parts = strategy.split(X)
    strategy.run(model, (parts,))
    strategy.run(tf.function(lambda x: model(x)), (parts,))
    kit.backend.clear_session()
    return weakref.ref(strategy)


class LifetimeTest(parameterized.TestCase):

    @wide.turns(*small_models.KERAS)
    def test_strategies(self, kit):
        """Else a notebook or a search over settings fills the memory, a model at a time."""
        strategies = [use(kit) for _ in range(2)]
        gc.collect()
        self.assertEqual([strategy() for strategy in strategies], [None, None])

    def test_functions_of_a_strategy_that_stays(self):
        """Else each ``tf.function`` that was ever run stays, with all that it holds."""
        strategy, held = two_towers(), []
        for _ in range(2):
            payload = set()
            held.append(weakref.ref(payload))
            function = tf.function(lambda payload=payload: tf.constant(len(payload)))
            strategy.run(function)
        del payload, function
        gc.collect()
        self.assertEqual([reference() for reference in held], [None, None])

    def test_a_batch_that_was_run(self):
        """Else a loop of eager steps holds many batches, until Python looks for garbage."""
        strategy = two_towers()
        batch = strategy.split(X)
        held = [weakref.ref(part) for part in batch.values]
        gc.disable()
        try:
            strategy.run(tf.reduce_sum, (batch,))
            del batch
            self.assertEqual([reference() for reference in held], [None, None])
        finally:
            gc.enable()

    @wide.turns(*small_models.KERAS)
    def test_traces_with_a_remainder(self, kit):
        """Else the last batch of each epoch, smaller than the others, is traced again."""
        shapes = []

        class Traced(kit.layers.Layer):
            def call(self, x):
                shapes.append(x.shape)
                return x

        strategy = two_towers()
        with strategy.scope():
            model = kit.Sequential([kit.Input([3]), Traced(), kit.layers.Dense(1)])
            model.compile("sgd", "mse")
        counts = []
        after = kit.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: counts.append(len(shapes)))
        model.fit(X, X[:, :1], batch_size=4, epochs=4, verbose=0, callbacks=[after],
                  validation_data=(X, X[:, :1]), validation_batch_size=4)
        self.assertEqual(counts[1:], [counts[0]] * 3)
