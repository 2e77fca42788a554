"""Either Keras in a dtype policy, whatever ran before in the process, and in float32 afterwards."""

import contextlib


@contextlib.contextmanager
def policy(kit, name):
    """Within, what ``kit`` makes is of the policy ``name``, such as "float64"."""
    _set(kit, name)
    try:
        yield
    finally:
        _set(kit, "float32")


def _set(kit, name):
    kit.backend.set_floatx("float64" if name == "float64" else "float32")
    kit.mixed_precision.set_global_policy(name)
