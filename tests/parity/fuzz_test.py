"""The properties of ``fuzz.py``, each tried a few times, the same ones every time."""

from absl.testing import parameterized

import wide
from tests.parity import fuzz

EXAMPLES = 10


class FuzzTest(parameterized.TestCase):

    @wide.some(3, *fuzz.PROPERTIES)
    def test_property(self, name):
        """Else a nest, dtype, row count or aggregation nobody thought of gives a wrong value."""
        fuzz.try_out(name, EXAMPLES, derandomize=True)
