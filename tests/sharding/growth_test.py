"""What is made, and what Python does for it, grows with towers and operations no faster than these.
"""

import gc
import sys
from unittest import mock

import tensorflow as tf
from absl.testing import absltest, parameterized

from towerstrategy import TowerStrategy
from towerstrategy.placement import devices as devices_lib
from towerstrategy.sharding import transfers
from towerstrategy.sharding.builder import Builder
from towerstrategy.sharding.towers import Towers

COUNTS = (16, 32, 64)


class Name(str):
    """A device's name that is compared by Python, so that comparisons are counted."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return str.__eq__(self, other)


def names(count):
    return [Name(f"/job:localhost/replica:0/task:0/device:CPU:{number}") for number in range(count)]


def calls(function):
    """How many functions are called, Python's and those of C."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        del frame, argument
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def towers_of(builder, devices):
    rows = [[device] for device in devices]
    return Towers(builder, rows, "", "", [f"tower_{tower}/" for tower in range(len(rows))],
                  lambda *_: None, on_cpu=False)


def parts_of(towers, shape):
    """A number of each tower, said to be of ``shape``."""
    parts = [towers.builder.constant(tower, tf.float32, device)
             for tower, device in enumerate(towers.devices)]
    for part in parts:
        towers.builder.note_shape(part, tf.TensorShape(shape))
    return parts


def sum_of_micro_batches(count):
    towers = towers_of(Builder(tf.Graph()), [name for name in names(count) for _ in range(2)])
    parts = parts_of(towers, [2])
    return lambda: towers.add_up(parts, towers.devices[0])


def large_that_all_take(count):
    towers = towers_of(Builder(tf.Graph()), names(count))
    large = parts_of(towers, [transfers.LEAST // 4])[0]
    for tower in range(count):
        towers.on(tower, "Neg", large)

    def hand_on():
        transfers.relay_tensors(towers.builder, towers.places)
        assert "merge/half/relay" in towers.builder.nodes

    return hand_on


def operations_of_scopes(count):
    towers = towers_of(Builder(tf.Graph()), names(count))
    for tower in range(count):
        towers.on(tower, "Neg", towers.number(tower))
    towers.builder.finish()
    return lambda: towers.builder.names_by_scope(towers.scopes)


class GrowthTest(parameterized.TestCase):

    def assert_linear(self, costs):
        """That ``costs`` of COUNTS, each twice the one before, lie on a line, or below."""
        first, second, third = costs
        self.assertGreater(second, first)
        self.assertLessEqual(third - second, 2.1 * (second - first), costs)

    @parameterized.parameters(sum_of_micro_batches, large_that_all_take, operations_of_scopes)
    def test_python(self, made):
        """Else a step of many towers takes minutes to be made."""
        calls(made(COUNTS[0]))  # what is cached
        self.assert_linear([calls(made(count)) for count in COUNTS])

    def test_devices(self):
        """Else a strategy of many devices takes seconds to be made."""
        def made(count):
            there = [tf.config.LogicalDevice(name, "CPU") for name in names(count)]
            with mock.patch.object(tf.config, "list_logical_devices", lambda kind: there), \
                    mock.patch.object(tf, "DeviceSpec", wraps=tf.DeviceSpec) as specs:
                specs.from_string = mock.Mock(wraps=tf.DeviceSpec.from_string)
                devices_lib.place([f"CPU:{number}" for number in range(count)], "cpu")
                return specs.from_string.call_count

        self.assert_linear([made(count) for count in COUNTS])

    def test_garbage(self):
        """Else Python looks through all objects of a trace again and again: a tenth of its time.

        And once at its end; else what the towers' operations were made of stays in memory.
        """
        gc.collect()
        strategy, found = TowerStrategy(["CPU:1", "CPU:2"], "CPU:0"), []

        def step(x):
            found.append(gc.isenabled())
            return x

        strategy.function(step)(tf.ones([4]))
        tf.function(lambda: strategy.run(step, (tf.ones([4]),)), autograph=False)()
        self.assertEqual(found, [False, False])
        self.assertTrue(gc.isenabled())
        self.assertEmpty([each for each in gc.get_objects() if isinstance(each, Builder)])

    def test_checks(self):
        """Else each write of a model waits for each check in it, on each tower."""
        strategy = TowerStrategy(["CPU:1", "CPU:2", "CPU:3"], "CPU:0")
        strategy.extended.keep_graphs = True

        def made(count):
            with strategy.scope():
                weights = [tf.Variable(1.) for _ in range(count)]

            @strategy.function
            def step(x):
                for weight in weights:
                    tf.debugging.assert_less(x, 9.)
                    x *= weight
                for weight in weights:
                    weight.assign_add(tf.reduce_sum(x))

            graph = step.get_concrete_function(*strategy.split((tf.ones([6]),))).graph
            return sum(len(each.control_inputs) for each in graph.get_operations())

        self.assert_linear([made(count) for count in (4, 8, 16)])


if __name__ == "__main__":
    absltest.main()
