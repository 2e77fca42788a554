"""Eight logical CPU devices for all tests of a process, before anything starts TensorFlow."""

import gc
import os

import pytest

import wide

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


def pytest_addoption(parser):
    parser.addoption("--wide", action="store_true", help="all cases of what wide.product thins out")


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left():
    """Collects garbage after each file: ending an iterator that is old can take up to a minute."""
    yield
    gc.collect()


def pytest_configure(config):
    wide.ALL = config.getoption("--wide")
    if config.getoption("dist", "no") != "no":
        return  # pytest-xdist's own process runs no test, and its workers wait for its imports
    import towerstrategy

    towerstrategy.split_cpu(8)
    # Traces are millions of objects: looking through them took 3.4 of 50 s of CPU (adopt_test).
    gc.set_threshold(50_000, 20, 10)
