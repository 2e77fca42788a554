"""TensorFlow's own tests of ``tf.distribute`` that pass with TowerStrategy, from its sources.

``make test-peers TENSORFLOW_SOURCES=folder`` runs them, from the sources of the installed release;
the wheel has no tests, so without the folder they are skipped.  ``upstream.txt`` says which: tests
that pass with MirroredStrategy, too, and so need no mirrored types, no graph mode and no GPU.  See
:mod:`upstream` for how to add to it.
"""

import os
import pathlib

from absl.testing import parameterized

from tests.slow import upstream

SOURCES = os.environ.get("TENSORFLOW_SOURCES", "")


class UpstreamTest(parameterized.TestCase):

    @parameterized.parameters(*sorted(upstream.recorded()))
    def test_passes(self, file):
        """Else code that works with MirroredStrategy, by TensorFlow's own tests, fails here."""
        path = pathlib.Path(SOURCES, file).expanduser()
        if not SOURCES or not path.exists():
            self.skipTest(f"there is no {path}: make test-peers TENSORFLOW_SOURCES=folder, of "
                          "TensorFlow's sources")
        found = upstream.outcomes(path, upstream.recorded()[file])
        print(f"{file}: {len(found)} tests, with their parameters")
        self.assertIn("ok", found.values())
        self.assertEmpty({name: outcome for name, outcome in found.items()
                          if outcome not in upstream.PASSES})
