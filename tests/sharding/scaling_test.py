"""The powers of ``rules/scaling``, each by running its operation with an input that is scaled.

The operations are those by which the table of rules is proved.
"""

import numpy as np
import proof_cases  # noqa: F401  registers samples
import proof_cases_algebra  # noqa: F401
import proof_cases_moves  # noqa: F401
import tensorflow as tf
from absl.testing import absltest
from proof_samples import samples

from towerstrategy.sharding.rules import scaling

SCALE = 3


class ScalingTest(absltest.TestCase):

    def test_each_power_is_proved(self):
        """Else a replica function's right gradient is warned of, or a wrong one is not."""
        left = {*scaling._INVERSE.items(), *(
            (kind, index) for kind, places in scaling._LINEAR.items() for index in places)}
        for sample in samples():
            if sample.type in {kind for kind, _ in left}:
                left -= self.proved(sample)
        self.assertEmpty(left, "write samples, as tests/sharding/proof_cases.py does")

    def proved(self, sample):
        """The operation's type with each input whose power was seen to be as it is said."""
        with tf.Graph().as_default() as graph:
            fed = [tf.compat.v1.placeholder(array.dtype, array.shape) for array in sample.arrays]
            sample.call(*fed)
        places, found = {tensor.name: place for place, tensor in enumerate(fed)}, set()
        for operation in graph.get_operations():
            names = [tensor.name for tensor in operation.inputs]
            for index, name in enumerate(names):
                if operation.type == sample.type and name in places and names.count(name) == 1:
                    power = scaling.degree(operation, index)
                    if power is not None:
                        self.check(sample, operation, fed, places[name], SCALE ** power)
                        found.add((sample.type, index))
        return found

    def check(self, sample, operation, fed, place, factor):
        """Whether the outputs are multiplied by ``factor`` where an input is by ``SCALE``."""
        scaled = list(sample.arrays)
        scaled[place] = (scaled[place] * SCALE).astype(scaled[place].dtype)
        with tf.compat.v1.Session(graph=operation.graph) as session:
            before, after = (session.run(list(operation.outputs[:3]), dict(zip(fed, arrays)))
                             for arrays in (sample.arrays, scaled))
        for one, other in zip(before, after):
            np.testing.assert_allclose(other, one * factor, rtol=1e-4, atol=1e-6,
                                       err_msg=f"{sample.type} of {sample.title}")


if __name__ == "__main__":
    absltest.main()
