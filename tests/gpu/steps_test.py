"""What a training step of Keras copies, and its memory at the peak, with the user's defaults.

On GPUs TensorFlow's profiler says what was copied while ``fit`` ran. Without a GPU the step is
traced as for GPUs on CPU devices that stand for them, and what is in another memory than it is
taken from is counted on its graph (:mod:`host_memory`); memory is the GPU's alone. Messages list
all that was found.
"""

import contextlib
import gc
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import towerstrategy
from benchmarks import on_gpus
from tests import dtypes
from tests.gpu.copies import BETWEEN, DOWN, UP, WITHIN, Copies, Copy, copies_of, profiled, traced
from towerstrategy.sharding.maker import Maker

pytestmark = pytest.mark.wide
ARE_GPUS = bool(tf.config.list_physical_devices("GPU"))
TOWERS = ["GPU:0", "GPU:1"] if ARE_GPUS else on_gpus.towers(2)
ROWS, STEPS = 16, 4
WIDTH = 128  # of the smallest weights, which have ...
SMALLEST = 4 * WIDTH  # ... more bytes than scalars, shapes, counts of rows and all words of a batch
WORDS = 4  # of a row
MIB = 2**20


def convolutions(kit):
    layers = kit.layers
    return kit.Sequential([
        kit.Input([8, 8, 3]), layers.Conv2D(WIDTH, 3, activation="relu"),
        layers.BatchNormalization(), layers.Conv2D(WIDTH, 3, activation="relu"),
        layers.BatchNormalization(), layers.GlobalAveragePooling2D(), layers.Dense(WIDTH)])


def transformer(kit, width=WIDTH, blocks=1, vocabulary=1000):
    layers = kit.layers
    words = kit.Input([WORDS], dtype="int32")
    x = layers.Embedding(vocabulary, width)(words)
    for _ in range(blocks):
        attended = layers.MultiHeadAttention(4, width // 4)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        inner = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, inner]))
    return kit.Model(words, layers.Dense(WIDTH)(layers.GlobalAveragePooling1D()(x)))


def embedding(kit):
    layers = kit.layers
    return kit.Sequential([
        kit.Input([WORDS], dtype="int32"), layers.Embedding(20_000, WIDTH), layers.Flatten(),
        layers.Dense(WIDTH, activation="relu"), layers.Dense(WIDTH)])


def dense(kit, width=512, depth=4):
    layers = kit.layers
    return kit.Sequential([
        kit.Input([width]), *(layers.Dense(width, activation="relu") for _ in range(depth)),
        layers.Dense(WIDTH, dtype="float32")])


def data_for(model):
    """Batches of ``ROWS`` without an end, and the bytes of a tower's part of a batch's arrays."""
    random, shape = np.random.default_rng(0), model.inputs[0].shape[1:]
    x = random.integers(0, 1000, [ROWS, *shape]).astype("int32")
    if model.inputs[0].dtype not in ("int32", tf.int32):
        x = random.normal(size=[ROWS, *shape]).astype("float32")
    y = random.integers(0, WIDTH, [ROWS]).astype("int32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS).repeat()
    return data, {each.nbytes // len(TOWERS) for each in (x, y)}


def compiled(kit, make, policy="float32"):
    """A model as a user has it."""
    with dtypes.policy(kit, policy):
        model = make(kit)
        model.compile("adam", kit.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"])
    return model


def copied(kit, make, merge_device="balanced", policy="float32"):
    """What a step on two GPUs copies, its model, and the bytes of a tower's part of a batch."""
    with contextlib.nullcontext() if ARE_GPUS else on_gpus.tracing():
        strategy = towerstrategy.TowerStrategy(
            TOWERS, "CPU:0" if merge_device == "cpu" else merge_device)
        strategy.extended.keep_graphs = not ARE_GPUS
        with strategy.scope():
            model = compiled(kit, make, policy)
        data, parts = data_for(model)
        model.fit(data, steps_per_epoch=2, verbose=0)
        copies = profiled(lambda: model.fit(data, steps_per_epoch=STEPS, verbose=0), STEPS) \
            if ARE_GPUS else traced(strategy, model, data, ROWS // len(TOWERS),
                                    compiles=kit is keras)  # as Keras 3 has it on GPUs
    return copies, model, parts


def copied_by_one(kit, make, policy="float32"):
    """What a step on one GPU copies, without a strategy; nothing where that is a CPU."""
    if not ARE_GPUS:
        return Copies([])
    model = compiled(kit, make, policy)
    data, _ = data_for(model)
    model.fit(data, steps_per_epoch=2, verbose=0)
    return profiled(lambda: model.fit(data, steps_per_epoch=STEPS, verbose=0), STEPS)


def large(copies, parts):
    """What may be a weight or a gradient by its size, and is no part of the batch: by way."""
    return {way: [each for each in copies.of(way) if each.size >= SMALLEST
                  and (way == DOWN or each.size not in parts)] for way in (UP, DOWN)}


CASES = [(kit, make, policy) for kit in (keras, tf_keras) for make, policy in (
    (convolutions, "float32"), (transformer, "float32"), (embedding, "float32"),
    (dense, "mixed_float16"))]


class ProfileTest(absltest.TestCase):

    def test_copies(self):
        """Else the profiler's copies are taken for others, or for none."""
        plane, event = xplane_pb2.XPlane(), xplane_pb2.XEvent(metadata_id=1)
        names = ["memcpy_details", "edge_name", "edge_7_cast",
                 "kind_src:device kind_dst:pinned size:512 dest:0 async:1"]
        for number, name in enumerate(names):
            plane.stat_metadata[number].name = name
        event.stats.add(metadata_id=0, ref_value=3)
        for name, way in (("MemcpyD2H", DOWN), ("MemcpyH2D", UP), ("MemcpyP2P", BETWEEN),
                          ("MemcpyD2D", WITHIN)):
            plane.event_metadata[1].name = name
            self.assertEqual(list(copies_of(plane, event)), [Copy(way, 512, f"{name} by None")])
        event.stats.add(metadata_id=1, ref_value=2)
        self.assertEqual(list(copies_of(plane, event)), [Copy(BETWEEN, 512, "edge_7_cast")])
        self.assertEmpty(list(copies_of(plane, xplane_pb2.XEvent(metadata_id=1))))


class HostTest(parameterized.TestCase):

    @parameterized.parameters(*CASES)
    def test_no_weight_crosses_to_or_from_the_host(self, kit, make, policy):
        """Else each step waits for weights or gradients on the slowest link there is, or the host
        for the GPU in the middle of a step, for a shape whose sizes it knows."""
        copies, model, parts = copied(kit, make, policy=policy)
        one = copied_by_one(kit, make, policy)
        said = f"\ntwo GPUs:{copies}\none GPU:{one}"
        print(make.__name__, kit.__name__, said)
        self.assertEqual(large(copies, parts), {UP: [], DOWN: []}, said)
        weights = len(model.trainable_variables)
        if ARE_GPUS:
            # Down beside one GPU's, for each: what tf.data asks, words, a flag of the loss scale.
            # Up: the batch is two arrays.
            down, up = 5 * len(TOWERS), len(TOWERS) * (2 + weights)
        else:
            # Down: words that XLA gave, or a sparse update makes unique. Up: these and labels of
            # each; counts of rows of the loss, metrics and means; Adam's count of steps. Counts of
            # pixels and the towers' shares, which each tower takes for batch norms.
            norms = sum(isinstance(layer, kit.layers.BatchNormalization) for layer in model.layers)
            down, up = len(TOWERS), 4 + weights + norms * len(TOWERS)
        self.assertLessEqual(copies.a_step(DOWN), one.a_step(DOWN) + down, said)
        self.assertLessEqual(copies.a_step(UP), one.a_step(UP) + up, said)
        self.assertGreater(copies.size(BETWEEN), 4 * WIDTH * WIDTH, said)  # the rest was seen

    @pytest.mark.skipif(ARE_GPUS, reason="of what is counted on a graph")
    def test_shapes_that_xla_gives_are_seen(self):
        """Else the test above passes whatever the host waits for."""
        with mock.patch.object(Maker, "own_shape", lambda maker, index, tower, dtype: maker.make(
                "Shape", [maker.part(index, tower)], tower, out_type=dtype)):
            copies = copied(keras, transformer)[0]
        self.assertGreater(copies.a_step(DOWN), 3 * len(TOWERS), copies)

    def test_merge_device_cpu_is_seen(self):
        """Else the test above passes whatever crosses."""
        copies, model, parts = copied(keras, dense, "cpu")
        weight = 4 * 512 * 512
        for way, found in large(copies, parts).items():
            self.assertIn(weight, [each.size for each in found], f"{way}{copies}")
        self.assertGreater(copies.a_step(UP), len(model.trainable_variables), copies)


class HalvesTest(parameterized.TestCase):

    @parameterized.parameters(keras, tf_keras)
    def test_halves_cross_as_halves(self, kit):
        """Else links carry twice what a half policy is used for."""
        whole, half = (copied(kit, dense, policy=policy)[0]
                       for policy in ("float32", "mixed_float16"))
        said = f"\nfloat32:{whole}\nmixed_float16:{half}"
        print(kit.__name__, said)
        # Kernels cross to the other GPU; of their gradients the few rows that they are made of.
        self.assertBetween(whole.size(BETWEEN) / (4 * 4 * 512 * 512), .9, 1.1, said)
        self.assertBetween(half.size(BETWEEN) / whole.size(BETWEEN), .4, .6, said)


def wide_transformer(kit):
    return transformer(kit, width=1024, blocks=2, vocabulary=2000)


def wide_dense(kit):
    return dense(kit, width=2048, depth=8)


def peaks(strategy, make):
    """Bytes at the peak of a training on each GPU, and what they may be by the model's sizes."""
    gc.collect()
    memory, before = tf.config.experimental, [held(device) for device in TOWERS]
    with strategy.scope():
        model = compiled(keras, make)
    data, _ = data_for(model)
    model.fit(data, steps_per_epoch=2, verbose=0)
    tf.test.experimental.sync_devices()
    for device in TOWERS:
        memory.reset_memory_stats(device)
    model.fit(data, steps_per_epoch=STEPS, verbose=0)
    tf.test.experimental.sync_devices()
    found = [memory.get_memory_info(device)["peak"] - was for device, was in zip(TOWERS, before)]
    return found, [allowed(model, device) for device in TOWERS]


def held(device):
    return tf.config.experimental.get_memory_info(device)["current"]


def allowed(model, device):
    """Bytes on a GPU where each weight and slot is once."""
    def size(variables, place=""):
        return sum(4 * int(np.prod(each.shape)) for each in variables
                   if each.value.device.endswith(place))

    weights, own = size(model.trainable_variables), size(model.trainable_variables, device)
    largest = max(size([each]) for each in model.trainable_variables)
    return sum((
        size([*model.variables, *model.optimizer.variables], device),  # its share
        weights - own,  # copies of the others, for a step
        weights + own,  # its tower's gradients, and those of its share from the other tower
        4 * largest,  # what Adam makes on its way, of one weight at a time
        64 * MIB))  # activations of a few rows, workspaces of cuBLAS


@pytest.mark.gpus(1)
class PeakTest(parameterized.TestCase):

    @parameterized.parameters(wide_dense, wide_transformer)
    def test_peak(self, make):
        """Else what fits two GPUs with MirroredStrategy is out of memory.

        Of one GPU it says nothing: each of two holds half of the weights and slots, and for a step
        a copy of the other half and gradients of all, which on one GPU are there one by one.
        """
        ours, bounds = peaks(towerstrategy.TowerStrategy(TOWERS, "balanced"), make)
        one = peaks(tf.distribute.get_strategy(), make)[0]
        # NCCL refuses two ranks on one GPU.
        mirrored = peaks(tf.distribute.MirroredStrategy(
            TOWERS, tf.distribute.ReductionToOneDevice()), make)[0]
        merged = peaks(towerstrategy.TowerStrategy(TOWERS, "GPU:0"), make)[0]
        said = "".join(
            f"\n{name}: {[round(each / MIB) for each in sizes]} MiB" for name, sizes in (
                ("balanced", ours), ("may be", bounds), ("one GPU", one),
                ("MirroredStrategy", mirrored), ("merged on GPU:0", merged)))
        print(make.__name__, said)
        for found, bound in zip(ours, bounds):
            self.assertLessEqual(found, bound, said)
        self.assertLess(max(ours), max(mirrored), said)
        self.assertLess(max(ours), merged[0], said)  # so a GPU that holds more is seen
