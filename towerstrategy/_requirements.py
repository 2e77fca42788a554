"""What the package asks of TensorFlow, said before anything else fails for the lack of it.

Goes in: the installed TensorFlow's version.  Comes out: nothing, or one sentence.
"""

import tensorflow as tf

OLDEST = (2, 16)  # setup.cfg says the same to pip


def check(version: str) -> None:
    """Raises ``ImportError`` where TensorFlow ``version`` is too old."""
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < OLDEST:
        raise ImportError(f"towerstrategy needs TensorFlow {'.'.join(map(str, OLDEST))} or later, "
                          f"but the one installed is {version}.")


check(tf.__version__)
