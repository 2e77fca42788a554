"""Two GPUs for the tests in this folder: two that are there, or the halves of one.

Run them with ``make test-gpu``.  Without a GPU, or where the tests' own ``conftest.py`` has hidden
the GPUs, two of the CPU's logical devices stand for them: so what is written here has run.  Tests
that are marked ``gpus`` need what only GPUs have, so many of them; they are skipped, and say so.
"""

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import tensorflow as tf

# MiB of each half: enough for these tests, and there on any GPU that trains.
HALF = 3072

GPUS = tf.config.list_physical_devices("GPU")

if len(GPUS) == 1:
    halves = [tf.config.LogicalDeviceConfiguration(memory_limit=HALF) for _ in range(2)]
    tf.config.set_logical_device_configuration(GPUS[0], halves)
CPU = tf.config.list_physical_devices("CPU")[0]
if tf.config.get_logical_device_configuration(CPU) is None:
    tf.config.set_logical_device_configuration(CPU, 3 * [tf.config.LogicalDeviceConfiguration()])


def pytest_collection_modifyitems(items):
    """Skips what needs GPUs that are not there."""
    for item in items:
        mark = item.get_closest_marker("gpus")
        if mark is not None and len(GPUS) < mark.args[0]:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
            why = "; CUDA_VISIBLE_DEVICES hides them: use make test-gpu" if hidden else ""
            item.add_marker(pytest.mark.skip(
                reason=f"needs {mark.args[0]} GPU(s), TensorFlow sees {len(GPUS)}{why}"))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(number): needs so many physical GPUs")
