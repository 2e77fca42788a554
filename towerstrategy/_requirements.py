"""Checks TensorFlow's version, before an older TensorFlow fails elsewhere in the package.

Goes in: the version of the installed TensorFlow.  Comes out: nothing, or an ``ImportError``.
"""

import tensorflow as tf

OLDEST = (2, 16)  # setup.cfg says the same to pip


def check(version: str) -> None:
    """Raises ``ImportError`` if TensorFlow ``version`` is too old."""
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < OLDEST:
        raise ImportError(f"towerstrategy needs TensorFlow {'.'.join(map(str, OLDEST))} or later, "
                          f"but the one installed is {version}.")


check(tf.__version__)
