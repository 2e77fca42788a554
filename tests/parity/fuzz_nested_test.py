"""The properties of ``fuzz_nested.py``, each tried a few times, the same ones every time."""

from absl.testing import parameterized

import wide
from tests.parity import fuzz, fuzz_nested

EXAMPLES = 8
FIRST, *OTHERS = fuzz_nested.PROPERTIES


class FuzzNestedTest(parameterized.TestCase):

    @wide.parameters(FIRST, wide=OTHERS)
    def test_property(self, name):
        """Else a function inside the replica function trains on another batch's shares."""
        fuzz.try_out(name, EXAMPLES, derandomize=True, properties=fuzz_nested.PROPERTIES)
