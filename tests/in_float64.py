"""Either Keras in float64, whatever ran before in the process, and in float32 again afterwards."""

import contextlib


@contextlib.contextmanager
def in_float64(kit):
    """Within, ``kit`` makes layers and losses of float64."""
    _set(kit, "float64")
    try:
        yield
    finally:
        _set(kit, "float32")


def _set(kit, dtype):
    kit.backend.set_floatx(dtype)
    kit.mixed_precision.set_global_policy(dtype)
