"""Float8 training: variables whose "gradient" is their next value."""

import functools

import keras
import numpy as np
import pytest
from absl.testing import parameterized

import towerstrategy
import wide

pytestmark = pytest.mark.wide

X = np.random.RandomState(0).randn(22, 3).astype("f")
Y = X[:, :1] * 3


def trained(strategy, layer, accumulate, rows=(7, 2, 8)):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), layer(), keras.layers.Dense(1)])
    model.layers[0].quantize("float8")
    optimizer = keras.optimizers.SGD(.01, gradient_accumulation_steps=accumulate)
    if strategy is None:
        model.compile(optimizer, "mse")
    else:
        with strategy.scope():
            model.compile(optimizer, "mse")
    for _ in range(3):
        for count in rows:
            model.train_on_batch(X[:count], Y[:count])
    return [(variable.name, np.array(variable)) for variable in model.variables
            if "seed" not in variable.path]


# Without a bias, whose gradient Keras rounds to bfloat16 on each tower.
LAYERS = {
    "dense": lambda: keras.layers.Dense(4, use_bias=False, name="first"),
    "einsum": lambda: keras.layers.EinsumDense("ab,bc->ac", 4, name="first"),
}


of_one_device = functools.cache(functools.partial(trained, None))


class Float8Test(parameterized.TestCase):

    @wide.product(layer=list(LAYERS), towers=[1, 3, 4], accumulate=[None, 2])
    def test_as_one_device(self, layer, towers, accumulate):
        """Else scales grow by R in each step, and the weights are NaN."""
        alone = of_one_device(LAYERS[layer], accumulate)
        together = trained(towerstrategy.TowerStrategy(towers), LAYERS[layer], accumulate)
        self.assertGreaterEqual(len(alone), 9)
        for (name, one), (_, other) in zip(alone, together, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6, err_msg=name)
