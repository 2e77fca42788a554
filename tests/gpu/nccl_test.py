"""Two workers with a GPU each meet through NCCL and train as one GPU does."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from absl.testing import parameterized

pytestmark = [pytest.mark.wide, pytest.mark.rest]
ROOT = pathlib.Path(__file__).parent.parent.parent

# Started with --towers, one of two workers; without, what one device gets.
WORKER = """
import sys
import keras
import numpy as np
import tensorflow as tf
import towerstrategy

tf.config.experimental.enable_tensor_float_32_execution(False)
implementation = tf.distribute.experimental.CommunicationImplementation[sys.argv[1]]
options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
alone = sys.argv[2] == "alone"
scope = tf.device(None) if alone else towerstrategy.TowerStrategy(
    1, None if sys.argv[1] == "NCCL" else "cpu", communication_options=options).scope()
random = np.random.default_rng(0)
x, y = random.normal(size=[22, 5]).astype("float32"), random.normal(size=[22, 1]).astype("float32")
keras.utils.set_random_seed(1)
with scope:
    model = keras.Sequential([
        keras.Input([5]), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
print("WEIGHTS", *np.concatenate([weight.ravel() for weight in model.get_weights()]))
"""


def start(implementation, role, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, implementation, role], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment})


def weights(process):
    out, err = process.communicate(timeout=600)
    lines = [line for line in out.splitlines() if line.startswith("WEIGHTS")]
    assert process.returncode == 0 and lines, err[-3000:]
    return np.array([float(number) for number in lines[0].split()[1:]])


def two_workers(implementation, gpus):
    """The weights that one device gets, and that each of two workers gets."""
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("localhost", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    processes = [start(implementation, "worker", CUDA_VISIBLE_DEVICES=gpu, TF_CONFIG=json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}))
        for index, gpu in enumerate(gpus)]
    wanted = weights(start(implementation, "alone", CUDA_VISIBLE_DEVICES=gpus[0]))
    return wanted, [weights(process) for process in processes]


class WorkersTest(parameterized.TestCase):

    @pytest.mark.gpus(2)
    def test_nccl(self):
        """Else machines with GPUs hang where they meet, or train something else."""
        wanted, found = two_workers("NCCL", ("0", "1"))
        for each in found:
            np.testing.assert_allclose(each, wanted, rtol=1e-4, atol=1e-6)
