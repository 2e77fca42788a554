"""Where the operations of a Keras training step are, in the graph that was traced.

A tower's operations carry the tower's name scope, those that are done once the scope ``merge``.
Reads of a variable have no device of their own (TensorFlow puts them where the variable is), and
neither have a function's inputs.
"""

import collections
import re

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide

FOLLOWS_OTHERS = ("ReadVariableOp", "ResourceGather", "Placeholder", "Identity", "NoOp")
SHAPES = ("StridedSlice", "Pack", "DynamicStitch")  # a CPU's, on any device
WRITES = re.compile("Assign.*VariableOp|Resource(Apply|SparseApply|Scatter).*")


def traced_step(strategy, library):
    """The graph of the training step of a small network that has seen a batch, and the network."""
    tf.random.set_seed(1)  # else what tf_keras draws is nobody's, and no tower counts it
    with strategy.scope():
        model = library.Sequential([
            library.layers.Input([8, 8, 1]), library.layers.Conv2D(4, 3),
            library.layers.BatchNormalization(), library.layers.Dropout(.1),
            library.layers.Flatten(), library.layers.Dense(10)])
        model.compile("adam", library.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"])
    random = np.random.default_rng(0)
    x = random.normal(size=[10, 8, 8, 1]).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, np.arange(10))).batch(7)
    model.fit(batches, verbose=0)
    with strategy.scope(), strategy.extended.step():
        iterator = iter(strategy.experimental_distribute_dataset(batches))
        step = function_in(model.train_function).get_concrete_function(iterator)
    return step.graph.as_graph_def(), model


def function_in(wrapper):
    """The ``tf.function`` that a Python function holds, however deep."""
    if hasattr(wrapper, "get_concrete_function"):
        return wrapper
    for cell in getattr(wrapper, "__closure__", None) or ():
        found = function_in(cell.cell_contents) if callable(cell.cell_contents) else None
        if found is not None:
            return found
    return None


def operations(graph_def):
    """Pairs of an operation and the tower that it belongs to: a number, "merge" or "other"."""
    functions = {function.signature.name: function for function in graph_def.library.function}
    seen = set()

    def walk(nodes, owner):
        for node in nodes:
            tower = re.search(r"tower_(\d+)_CPU_\d+", node.name)
            mine = int(tower.group(1)) if tower else owner
            if mine == "other" and re.search("(^|/)merge/", node.name):
                mine = "merge"
            yield node, mine
            for name in called(node):
                if name in functions and (name, mine) not in seen:
                    seen.add((name, mine))
                    yield from walk(functions[name].node_def, mine)

    return walk(graph_def.node, "other")


def called(node):
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)


class TrainingStepTest(parameterized.TestCase):

    @wide.turns(("keras", keras), ("tf_keras", tf_keras))
    def test_each_operation_is_on_its_device(self, library):
        """Else one device does the others' work: the first GPU is full while the others wait."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"], merge_device="CPU:0")
        step, model = traced_step(strategy, library)
        devices = {0: "CPU:1", 1: "CPU:2", 2: "CPU:3", "merge": "CPU:0", "other": "CPU:0"}
        kept = [variable if library is tf_keras else variable.value
                for metric in model.metrics for variable in metric.variables]
        of_metrics = {part.device[-5:] for one in kept for part in getattr(one, "values", [one])}
        counts, wrong = collections.Counter(), []
        for node, owner in operations(step):
            counts[owner] += 1
            device = node.device[-5:]
            unplaced = not device and (node.op in FOLLOWS_OTHERS or owner == "other")
            unplaced |= node.op == "NoOp" and owner == "other"  # the end waits for each device
            unplaced |= node.op == "Const" and owner == "other"
            unplaced |= device == devices["other"] and node.op in SHAPES
            unplaced |= owner in ("merge", "other") and device in of_metrics
            if device != devices[owner] and not unplaced:
                wrong.append((node.name, node.op, device, owner))
        self.assertEmpty(wrong)
        for owner in (0, 1, 2, "merge"):
            self.assertGreater(counts[owner], 50, f"{owner} has done nothing worth checking")

    @wide.turns(("keras", keras), ("tf_keras", tf_keras))
    def test_weights_are_written_once(self, library):
        """Else each tower writes the one copy, or updates it with its own gradient."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"], merge_device="CPU:0")
        step, _ = traced_step(strategy, library)
        writes = collections.Counter(
            owner for node, owner in operations(step) if WRITES.fullmatch(node.op))
        self.assertGreaterEqual(writes["merge"], 6 + 2, "6 weights, 2 moving statistics")
        self.assertEqual(list(writes), ["merge"])
