"""The properties of ``fuzz.py`` and ``fuzz_nested.py``, each tried hundreds of times.

The draws are others every time.  A failure prints the draw that failed, made small, and a
``@reproduce_failure`` line for it.
"""

from absl.testing import parameterized

from tests.parity import fuzz, fuzz_nested

EXAMPLES = 2200 // len(fuzz.PROPERTIES)


class FuzzTest(parameterized.TestCase):

    @parameterized.parameters(*fuzz.PROPERTIES)
    def test_property(self, name):
        """Else a nest, dtype, row count or aggregation nobody thought of gives a wrong value."""
        fuzz.try_out(name, EXAMPLES, derandomize=False)

    @parameterized.parameters(*fuzz_nested.PROPERTIES)
    def test_nested_property(self, name):
        """Else a function inside the replica function trains on another batch's shares."""
        fuzz.try_out(name, EXAMPLES, derandomize=False, properties=fuzz_nested.PROPERTIES)
