"""Optimizers without gradients: what Keras does of it on one device."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import wide
from peers import outcome, two_towers

OPTIMIZERS = {
    "keras": lambda: keras.optimizers.Adam(0.1),
    "keras_loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.1),
    "tf_keras_legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
    "tf_keras_loss_scale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.SGD(0.1)),
    "tf_keras_legacy_loss_scale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.legacy.SGD(0.1)),
}
CALLS = {
    "none": lambda optimizer, v: optimizer.apply_gradients([]),
    "an_iterator": lambda optimizer, v: optimizer.apply_gradients(zip([], [])),
    "apply": lambda optimizer, v: optimizer.apply([]),
    "apply_for": lambda optimizer, v: optimizer.apply([], [v]),
    "apply_too_many": lambda optimizer, v: optimizer.apply([tf.ones([]), tf.ones([])]),
}


def called(strategy, optimizer, call):
    """What comes of two calls in a step: an exception's name, or the variables afterwards."""
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        v = tf.Variable(1.)
        optimizer = OPTIMIZERS[optimizer]()
        if hasattr(optimizer, "build"):
            optimizer.build([v])

    @tf.function
    def step():
        for _ in range(2):
            CALLS[call](optimizer, v)

    run = step if strategy is None else lambda: strategy.run(step)
    ended = outcome(run)
    state = optimizer.variables
    return ended, [np.array(part).tolist() for part in (state() if callable(state) else state)]


class NoGradientsTest(parameterized.TestCase):

    @wide.product(optimizer=tuple(OPTIMIZERS), call=tuple(CALLS))
    def test_as_on_one_device(self, optimizer, call):
        """Else a step that has nothing to train fails with a message about unpacking."""
        self.assertEqual(called(two_towers(), optimizer, call), called(None, optimizer, call))

    @wide.product(module=(keras, tf_keras), optimizer=("sgd", "adam"))
    def test_all_layers_frozen(self, module, optimizer):
        """Else a model of which only the statistics are to be followed cannot be fitted."""
        x = np.random.default_rng(1).normal(size=[7, 3]).astype("float32")
        seen = []
        for strategy in (two_towers(), None):
            module.utils.set_random_seed(2)
            with strategy.scope() if strategy is not None else contextlib.nullcontext():
                model = module.Sequential([module.layers.Dense(2)])
                model.build([None, 3])
                model.trainable = False
                model.compile(optimizer, "mse", metrics=["mae"])
            history = model.fit(x, x[:, :2], batch_size=4, epochs=2, shuffle=False, verbose=0)
            seen.append([history.history["loss"], history.history["mae"], *model.get_weights()])
        tf.nest.map_structure(lambda *both: np.testing.assert_allclose(*both, 1e-6), *seen)
