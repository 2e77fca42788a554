"""Small models of every kind, for Keras 3 and tf_keras.

Goes in: ``keras`` or ``tf_keras`` and a kind.  Comes out: a model, inputs and targets for it.  The
initializers have seeds of their own, so that two models of a kind start with the same weights.
"""

import keras
import numpy as np
import tensorflow as tf
import tf_keras

KERAS = (("keras", keras), ("tf_keras", tf_keras))
KINDS = ("functional", "sequential", "unbuilt_sequential", "subclassed", "own_weight", "several",
         "dicts")


def dense(kit, units, name, activation=None):
    return kit.layers.Dense(units, activation, name=name,
                            kernel_initializer=kit.initializers.GlorotUniform(seed=units))


def subclass_of(kit):
    """A subclassed model with two layers; ``units`` so that it has a config."""

    @kit.utils.register_keras_serializable("small_models", "Subclassed")
    class Subclassed(kit.Model):
        def __init__(self, units=4, **kwargs):
            super().__init__(**kwargs)
            self.units = units
            self.hidden = dense(kit, units, "hidden", "tanh")
            self.head = dense(kit, 1, "head")

        def call(self, x):
            return self.head(self.hidden(x))

        def get_config(self):
            return {**super().get_config(), "units": self.units}

    return Subclassed


class _OwnWeight:
    """Makes its weight in ``build``."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 1), name="kernel", initializer="ones")
        self.built = True

    def call(self, x):
        return tf.matmul(x, self.kernel)


def make(kit, kind):
    """A model that is not compiled."""
    if kind == "functional":
        x = kit.Input([3], name="x")
        return kit.Model(x, dense(kit, 1, "head")(dense(kit, 4, "hidden", "tanh")(x)))
    if kind in ("sequential", "unbuilt_sequential"):
        layers = [dense(kit, 4, "hidden", "tanh"), dense(kit, 1, "head")]
        return kit.Sequential([kit.Input([3]), *layers] if kind == "sequential" else layers)
    if kind == "subclassed":
        return subclass_of(kit)()
    if kind == "own_weight":
        return type("OwnWeight", (_OwnWeight, kit.Model), {})()
    left, right = kit.Input([3], name="left"), kit.Input([2], name="right")
    both = kit.layers.Concatenate(name="both")([dense(kit, 4, "hidden", "tanh")(left), right])
    outputs = {"first": dense(kit, 1, "first")(both), "second": dense(kit, 2, "second")(both)}
    if kind == "several":
        return kit.Model([left, right], list(outputs.values()))
    return kit.Model({"left": left, "right": right}, outputs)


def data(kind, rows=10):
    """``(x, y)`` for a model of ``kind``."""
    random = np.random.RandomState(rows)
    left, right = random.rand(rows, 3).astype("f"), random.rand(rows, 2).astype("f")
    first, second = left.sum(1, keepdims=True), right * 2
    if kind == "several":
        return [left, right], [first, second]
    if kind == "dicts":
        return {"left": left, "right": right}, {"first": first, "second": second}
    return left, first


def weights(model):
    return [np.array(weight) for weight in model.get_weights()]
