"""The properties of ``fuzz.py``, each tried hundreds of times.

The draws are others every time.  A failure prints the draw that failed, made small, and a
``@reproduce_failure`` line for it.
"""

from absl.testing import parameterized

from tests.parity import fuzz

EXAMPLES = 2200 // len(fuzz.PROPERTIES)


class FuzzTest(parameterized.TestCase):

    @parameterized.parameters(*fuzz.PROPERTIES)
    def test_property(self, name):
        """Else a nest, dtype, row count or aggregation nobody thought of gives a wrong value."""
        fuzz.try_out(name, EXAMPLES, derandomize=False)
