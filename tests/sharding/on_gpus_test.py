"""Keras steps as they would be on GPUs: what crosses to and from the host, and memory at the peak.

Steps of five kinds of model are traced on logical CPU devices that stand for GPUs, with the merge
device that GPUs have by default.
"""

import collections
import dataclasses

import keras
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import dtypes
from benchmarks import flat, gpus, kernels, links, memory, on_gpus, schedule
from towerstrategy import _tensorflow as _tf
from towerstrategy.placement import scopes

pytestmark = pytest.mark.wide

TOWERS = 4
MACHINE = links.MACHINES["A100 NVLink"]
SMALL = 32  # bytes: paddings of four dimensions


def convolutions():
    layers = keras.layers
    return keras.Sequential([
        keras.Input([16, 16, 3]), layers.Conv2D(32, 3, activation="relu"),
        layers.BatchNormalization(), layers.MaxPooling2D(2), layers.Conv2D(64, 3),
        layers.BatchNormalization(), layers.Flatten(), layers.Dense(256), layers.Dense(10)])


def transformer():
    layers = keras.layers
    words = keras.Input([16], dtype="int32")
    x = layers.Embedding(100, 128)(words)
    for _ in range(2):
        x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(4, 32)(x, x)]))
        inner = layers.Dense(128)(layers.Dense(512, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, inner]))
    return keras.Model(words, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def embedding():
    layers = keras.layers
    return keras.Sequential([
        keras.Input([8], dtype="int32"), layers.Embedding(5000, 32, mask_zero=True),
        layers.GlobalAveragePooling1D(), layers.Dense(256, activation="relu"), layers.Dense(10)])


def recurrent():
    layers = keras.layers
    return keras.Sequential([
        keras.Input([16, 32]), layers.LSTM(128, return_sequences=True), layers.GRU(128),
        layers.Dense(10)])


CASES = {
    "convolutions": gpus.Case("", convolutions, (16, 16, 3), "float32", 64),
    "transformer": gpus.Case("", transformer, (16,), "int32", 64),
    "embedding": gpus.Case("", embedding, (8,), "int32", 256),
    "recurrent": gpus.Case("", recurrent, (16, 32), "float32", 64)}


# How often a tensor may cross between the host and a GPU: shapes, counts of rows and of steps.
CROSSINGS = {"convolutions": 40, "transformer": 160, "embedding": 50,
             "recurrent": 80}
# The peak on the fullest of several GPUs over that on one.
PEAKS = {"convolutions": 1.0, "transformer": 1.09, "embedding": 1.5,
         "recurrent": 1.0}


def traced(name, policy="float32", towers=TOWERS):
    """The operations of a step."""
    def build():
        keras.mixed_precision.set_global_policy(policy)  # which a new session forgets
        return CASES[name].build()

    with dtypes.policy(keras, policy):
        return gpus.traced(dataclasses.replace(CASES[name], build=build), towers,
                           "balanced").operations


def by_way_of_the_host(operations):
    """Pairs of what makes a tensor and the bytes, once for each device that takes it, for those
    that cross between the host and a GPU. Of what is packed to cross together: the bytes of one."""
    found = {(source, each.device) for each in operations for source in each.inputs
             if on_gpus.HOST in (each.device, operations[source[0]].device)
             and each.device != operations[source[0]].device}
    sent = [(operations[number], operations[number].sizes[index])
            for (number, index), _ in sorted(found)]
    return [(each, size // len(each.inputs) if each.type == "Pack" else size)
            for each, size in sent if size and each.type != "Placeholder"]


def is_made_on_the_host(operation):
    """Whether a GPU's kernel makes its result in the host's memory, as it does with shapes."""
    if operation.type in flat.SHAPE_OPS | {"Const"}:
        return True
    node = tf.compat.v1.NodeDef.FromString(operation.query[0]) if operation.query else None
    made = {each.name for each in _tf.op_def(operation.type).output_arg}
    return node is not None and made <= kernels.host_memory_args(node)


class StepsTest(parameterized.TestCase):

    @parameterized.product(name=list(CASES), policy=("float32", "mixed_float16"))
    def test_the_host(self, name, policy):
        """Else a step waits for the host, or takes weights, rows or gradients through it."""
        operations = traced(name, policy)
        found = by_way_of_the_host(operations)
        self.assertEmpty([pair for pair in found if pair[1] > SMALL])
        back = [each for each, _ in found if each.device != on_gpus.HOST]
        self.assertEmpty([each.traced_name for each in back if not is_made_on_the_host(each)])
        self.assertLessEqual(len(found), CROSSINGS[name])

    def test_moments_are_merged_on_each_tower(self):
        """Else a tower that has them first goes on, and the others wait for all its next layer."""
        operations, crossing = traced("convolutions"), collections.Counter()
        for each in operations:
            for source in {number for number, _ in each.inputs}:
                start, end = (scopes.TOWER.match(one.traced_name)
                              for one in (operations[source], each))
                if start and end and start[1] != end[1]:
                    crossing[operations[source].type, int(start[1]), int(end[1])] += 1
        norms = 2
        self.assertEqual(crossing, {("Pack", start, end): 2 * norms for start in range(TOWERS)
                                    for end in range(TOWERS) if start != end})

    @parameterized.parameters(*CASES)
    def test_peak(self, name):
        """Else a batch fits one GPU, and as many rows a GPU do not fit several."""
        peaks = []
        for operations in (traced(name, towers=1), traced(name)):
            line = schedule.run(operations, flat.Costs(MACHINE).seconds(operations), MACHINE)
            peaks.append(max(memory.peaks(operations, line).values()))
        self.assertLess(peaks[1], PEAKS[name] * peaks[0])


if __name__ == "__main__":
    absltest.main()
