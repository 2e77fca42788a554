"""What a step copies between the host and GPUs: by TensorFlow's profiler, or on the step's graph.

A graph's devices are CPU devices that stand for GPUs, and ``CPU:0`` for the host; see
:mod:`host_memory`.
"""

import collections
import dataclasses
import pathlib
import re
import tempfile

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks import flat
from tests.gpu import host_memory
from tests.gpu.host_memory import HOST
from tests.placement.placement_test import function_in

UP, DOWN, BETWEEN, WITHIN = "host to GPU", "GPU to host", "between GPUs", "within a GPU"


@dataclasses.dataclass(frozen=True)
class Copy:
    way: str
    size: int
    what: str = ""


class Copies:
    """What was copied in some steps."""

    def __init__(self, found, steps=1):
        self.found, self.steps = found, steps

    def of(self, way):
        return [each for each in self.found if each.way == way]

    def a_step(self, way):
        return len(self.of(way)) / self.steps

    def size(self, way):
        return sum(each.size for each in self.of(way)) / self.steps

    def __str__(self):
        """All, by way and size: how often a step, and what some of them are."""
        kinds = collections.defaultdict(list)
        for each in self.found:
            kinds[each.way, each.size].append(each.what)
        return "".join(f"\n  {way} {size} bytes: {len(whats) / self.steps:g} a step, "
                       f"{sorted(set(whats))[:6]}"
                       for (way, size), whats in sorted(kinds.items(), reverse=True))


def profiled(train, steps):
    """What the GPUs copied while ``train`` ran ``steps`` steps, by TensorFlow's profiler."""
    space = xplane_pb2.XSpace()
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            train()
            tf.test.experimental.sync_devices()
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            space.MergeFromString(file.read_bytes())
    planes = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    assert any(line.events for plane in planes for line in plane.lines), (
        f"the profiler saw no GPU: {[plane.name for plane in space.planes]}, {space.errors}")
    return Copies([copy for plane in planes for line in plane.lines for event in line.events
                   for copy in copies_of(plane, event)], steps)


def copies_of(plane, event):
    """The copy that an event is, if it is one."""
    stats = {}
    for stat in event.stats:
        kind = stat.WhichOneof("value")
        value = getattr(stat, kind) if kind else ""
        stats[plane.stat_metadata[stat.metadata_id].name] = str(
            plane.stat_metadata[value].name if kind == "ref_value" else value)
    size = re.search(r"\b(?:size|num_bytes):(\d+)", stats.get("memcpy_details", ""))
    name = plane.event_metadata[event.metadata_id].name
    if size:
        # TensorFlow names the edge of what it sends from device to device; kernels copy, too.
        way = {"MemcpyH2D": UP, "MemcpyD2H": DOWN, "MemcpyP2P": BETWEEN}.get(
            name, BETWEEN if "edge_name" in stats else WITHIN)
        what = stats.get("edge_name") or f"{name} by {stats.get('tf_op') or stats.get('hlo_op')}"
        yield Copy(way, int(size.group(1)), what)


def traced(strategy, model, data, rows, compiles=False):
    """What is copied in a step of ``rows`` a tower, but the batch, by the step's graph."""
    with strategy.scope():
        iterator = iter(strategy.experimental_distribute_dataset(data))
    with strategy.scope(), strategy.extended.step(compiles, iterator.batch_rows):
        step = function_in(model.train_function).get_concrete_function(iterator)
    memories = host_memory.Memories(flat.flatten(step, [HOST]))
    return Copies([Copy(DOWN if target == HOST else UP if start == HOST else BETWEEN, size,
                        operation.traced_name)
                   for operation, index, start, target in memories.crossings()
                   if operation.type not in host_memory.OF_BATCH
                   and (size := host_memory.size_of(operation, index, rows))])
