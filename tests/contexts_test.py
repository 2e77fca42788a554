"""Where code runs: what it sees of the towers in a step, in a tower and outside of both."""

import tensorflow as tf
from absl.testing import absltest

import towerstrategy
from towerstrategy import contexts


def two_towers():
    return towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "CPU:0")


class HereTest(absltest.TestCase):

    def test_a_step_has_one_replica_also_where_it_merges(self):
        """Else who divides by the number of replicas in merge_call gets a part of one device's."""
        strategy, seen = two_towers(), set()

        @strategy.function
        def step(x):
            seen.add(strategy.num_replicas_in_sync)
            tf.distribute.get_replica_context().merge_call(
                lambda merged: seen.add(merged.num_replicas_in_sync))
            raise ValueError(x.shape)

        with self.assertRaises(ValueError):
            step(strategy.split(tf.zeros([4])))
        self.assertEqual(seen, {1})
        self.assertEqual(strategy.num_replicas_in_sync, 2)

    def test_what_merge_functions_call(self):
        """Else a loop that merges by itself, or averages weights, fails under strategy.function."""
        strategy = two_towers()
        with strategy.scope():
            weight = tf.Variable(1.)
            other = tf.Variable(2., aggregation=tf.VariableAggregation.SUM)
            average = tf.train.ExponentialMovingAverage(.5)
            average.apply([weight])

        def merge(merged, value):
            one = merged.extended.reduce_to("SUM", value, destinations=weight)
            merged.extended.update(weight, lambda variable, step: variable.assign_add(step), (one,))
            both = merged.extended.batch_reduce_to("MEAN", [(value, weight), (one, other)])
            other.assign(merged.reduce("SUM", both[0] + both[1], axis=None))
            merged.extended.call_for_each_replica(lambda value: tf.group(
                other.assign_add(value * merged.num_replicas_in_sync)), (one,))

        @strategy.function
        def step(x):
            tf.distribute.get_replica_context().merge_call(merge, [tf.reduce_sum(x)])
            average.apply([weight])

        step(strategy.split(tf.range(4.)))
        self.assertEqual([float(each) for each in (weight, other, average.average(weight))],
                         [7., 18., 4.])

    def test_what_runs_where(self):
        """Else a hook takes a tower for a step of all rows, or a scope for a tower."""
        strategy, seen = two_towers(), {}

        def note(where):
            seen[where] = (contexts.current_tower() is not None, contexts.has_all_rows(),
                           contexts.outside_of_towers() is strategy,
                           getattr(contexts.current(), "strategy", None) is strategy)

        note("nowhere")
        with strategy.scope():
            note("scope")
        strategy.run(lambda: note("tower"))
        strategy.function(lambda: note("step"))()
        self.assertEqual(seen, {"nowhere": (False,) * 4, "scope": (False, False, True, False),
                                "tower": (True, False, False, True),
                                "step": (False, True, False, True)})
