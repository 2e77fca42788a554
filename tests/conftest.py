"""Eight logical CPU devices for all tests of a process, before anything starts TensorFlow."""

import gc
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# Of a test on two idle cores, on average; of a few files alone it says nothing.
SECONDS, FEW = {"not wide": 0.17, "wide and not rest": 0.8}, 300
# The files that take longest; begun last, one of two processes would wait for the other.
FIRST = ("rules_proof_test.py", "parity_test.py")


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left():
    """Collects garbage after each file: ending an iterator that is old can take up to a minute.

    What is left (modules, what TensorFlow keeps) is millions of objects, not to be looked through
    again.
    """
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    names = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: names.get(item.path.name, len(names)))


def pytest_configure(config):
    if config.getoption("dist", "no") != "no":
        return  # pytest-xdist's own process runs no test, and its workers wait for its imports
    import towerstrategy

    towerstrategy.split_cpu(8)
    # Traces are millions of objects: looking through them took 3.4 of 50 s of CPU (adopt_test).
    gc.set_threshold(50_000, 20, 10)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    """Says what is ahead, once: all workers find the same tests."""
    if node.gateway.id == "gw0" and len(ids) > FEW:
        chosen = node.config.getoption("markexpr")
        minutes = len(ids) * SECONDS.get(chosen, max(SECONDS.values())) / 60
        node.config.get_terminal_writer().line(
            f"{len(ids)} tests, about {minutes:.0f} minutes on two idle cores")
