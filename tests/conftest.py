"""Makes eight logical CPU devices for all tests of a process, before TensorFlow initializes."""

import gc
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# The mean seconds of a test on two idle cores, by the chosen marks; wrong for a few files alone.
SECONDS, FEW = {"not wide": 0.2, "wide and not rest": 1.1}, 300
# The slowest files run first: if they ran last, the other processes would wait for them.
FIRST = ("rules_proof_test.py", "parity_test.py")


@pytest.fixture(autouse=True, scope="module")
def collect_garbage():
    """Collects garbage after each file, as it can take up to a minute to end an old iterator.

    The remaining objects (modules, objects that TensorFlow keeps) are millions, so the garbage
    collector ignores them from then on.
    """
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    positions = {name: position for position, name in enumerate(FIRST)}
    items.sort(key=lambda item: positions.get(item.path.name, len(positions)))


def pytest_configure(config):
    if config.getoption("dist", "no") != "no":
        return  # the main process of pytest-xdist runs no tests, and its workers wait for it
    import towerstrategy

    towerstrategy.split_cpu(8)
    # Traces are millions of objects: collecting often took 3.4 of 50 s of CPU time (adopt_test).
    gc.set_threshold(50_000, 20, 10)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    """Prints the number of tests and their time, once, as all workers collect the same tests."""
    if node.gateway.id == "gw0" and len(ids) > FEW:
        chosen = node.config.getoption("markexpr")
        minutes = len(ids) * SECONDS.get(chosen, max(SECONDS.values())) / 60
        node.config.get_terminal_writer().line(
            f"{len(ids)} tests, about {minutes:.0f} minutes on two idle cores")
