"""The powers of ``rules/scaling``, each by running its operation with an input that is scaled.

The operations are those by which the table of rules is proved.
"""

import numpy as np
import proof_cases  # noqa: F401  registers samples
import proof_cases_algebra  # noqa: F401
import proof_cases_moves  # noqa: F401
import pytest
import tensorflow as tf
from absl.testing import absltest
from proof_samples import samples

from towerstrategy.sharding.rules import scaling

SCALE = 3
# Linear in an input, and left out: nobody has a gradient by it, or it is not one of it alone.
LEFT_OUT = {"CropAndResize", "DebugIdentityV2", "ExtractGlimpseV2", "Fill",
            "ImageProjectiveTransformV3", "NextAfter", "OneHot", "RandomShuffle", "ZerosLike"}


def operations(sample):
    """A sample's operations, what they are fed, and which array is which of their inputs."""
    with tf.Graph().as_default() as graph:
        fed = [tf.compat.v1.placeholder(array.dtype, array.shape) for array in sample.arrays]
        sample.call(*fed)
    places = {tensor.name: place for place, tensor in enumerate(fed)}
    for operation in graph.get_operations():
        if operation.type == sample.type:
            yield operation, fed, {
                index: places[tensor.name] for index, tensor in enumerate(operation.inputs)
                if tensor.name in places and not any(
                    depends(other, tensor) for at, other in enumerate(operation.inputs)
                    if at != index)}


def depends(tensor, source):
    """Whether a tensor is made of another one."""
    return tensor.name == source.name or any(
        depends(before, source) for before in tensor.op.inputs)


def run(operation, fed, arrays):
    with tf.compat.v1.Session(graph=operation.graph) as session:
        return session.run(list(operation.outputs[:3]), dict(zip(fed, arrays)))


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
        found = set()
        for operation, fed, places in operations(sample):
            for index, place in places.items():
                power = scaling.degree(operation, index)
                if power is not None:
                    self.check(sample, operation, fed, [place], SCALE ** power)
                    found.add((sample.type, index))
        return found

    def check(self, sample, operation, fed, places, factor):
        """Whether the outputs are multiplied by ``factor`` where inputs are by ``SCALE``."""
        scaled = [(array * SCALE).astype(array.dtype) if place in places else array
                  for place, array in enumerate(sample.arrays)]
        for one, other in zip(run(operation, fed, sample.arrays), run(operation, fed, scaled)):
            np.testing.assert_allclose(other, one * factor, rtol=1e-4, atol=1e-6,
                                       err_msg=f"{sample.type} of {sample.title}")

    @pytest.mark.wide
    def test_what_is_linear_is_known(self):
        """Else a right gradient of weights behind it is warned of, or what is no part is not."""
        unknown, seen = set(), set()
        for sample in samples():
            for operation, fed, places in operations(sample):
                if sample.type in LEFT_OUT or not operation.outputs \
                        or not all(map(scaling.is_number, operation.outputs)) \
                        or any(array.dtype == np.float16 for array in sample.arrays):
                    continue
                numbers = {index: place for index, place in places.items()
                           if scaling.is_number(fed[place])}
                if sample.type in scaling.ADDITIVE:
                    if len(numbers) == sum(map(scaling.is_number, operation.inputs)):
                        self.check(sample, operation, fed, numbers.values(), SCALE)
                    continue
                for index, place in numbers.items():
                    known = scaling.is_linear(operation, index)
                    adds_up = self.adds_up(operation, fed, sample.arrays, place)
                    self.assertTrue(adds_up or not known, f"{sample.type} {index} {sample.title}")
                    (unknown if adds_up > known else seen).add((sample.type, index))
        self.assertEmpty(unknown - seen)

    def adds_up(self, operation, fed, arrays, place):
        """Whether outputs of two arrays added up are those of each added up."""
        one, given = arrays[place], list(arrays)
        results = []
        for array in (one, np.roll(one, 1) * .5 - .3, one + np.roll(one, 1) * .5 - .3):
            given[place] = array.astype(one.dtype)
            try:
                results.append(run(operation, fed, given))
            except tf.errors.InvalidArgumentError:  # defined for some numbers only
                return False
        return all(np.allclose(first + second, both, rtol=1e-3, atol=1e-4)
                   for first, second, both in zip(*results))


if __name__ == "__main__":
    absltest.main()
