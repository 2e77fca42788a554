"""shares="measured": times become shares, seldom, and only who computes a row changes."""

import contextlib
import gc
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from tests.extras.clock import Clock
from towerstrategy.extras import measured
from towerstrategy.extras.report.sample import Sample
from towerstrategy.report import TowerReport

KITS = (("keras", keras), ("tf_keras", tf_keras))


def fit(kit, strategy, rows=640, epochs=1, batch_size=32, **kwargs):
    traces = []

    class Counted(kit.layers.Dense):
        def call(self, x):
            traces.append(x)
            return super().call(x)

    kit.utils.set_random_seed(3)
    random_state = np.random.RandomState(0)
    x = random_state.rand(rows, 4).astype(np.float32)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = kit.Sequential([kit.layers.Input([4]), Counted(3, "tanh"), kit.layers.Dense(1)])
        model.compile(kit.optimizers.Adam(0.01), "mse")
    history = model.fit(x, x[:, :1] * 2, batch_size=batch_size, epochs=epochs, verbose=0,
                        **kwargs)
    return [*model.get_weights(), history.history["loss"],
            model.predict(x, batch_size=32, verbose=0)], len(traces)


class RowsForTest(parameterized.TestCase):

    @parameterized.product(rates=[[1., 1.], [3., 1.], [1000., 1., 1.], [.1, .2, .7], [1e9, 1e-9]],
                           rows=[3, 4, 8, 97, 256])
    def test_all_rows_and_none_without(self, rates, rows):
        """Else a slow tower gets nothing, and is never measured again."""
        sizes = measured.rows_for(rates, rows)
        self.assertEqual(sum(sizes), rows)
        self.assertGreaterEqual(min(sizes), 1)
        wanted = np.maximum(rows * np.array(rates) / sum(rates), 1)
        self.assertLessEqual(max(np.array(sizes) - wanted), 1)


class MeasuringTest(parameterized.TestCase):

    @wide.turns(*KITS)
    def test_towers_end_together(self, kit):
        """Else the step waits for the slow tower, is traced again, or trains something else."""
        clock = Clock(1., 3.)
        with clock.running() as strategy:
            self.assertEqual(strategy.shares, [1., 1.])
            self.assertIn("shares to be measured", strategy.describe())
            report = TowerReport(print_fn=None)
            with mock.patch("towerstrategy.extras.report.epochs.Watch._sampled",
                            lambda watch, call, iterator: call(iterator)):
                seen, traces = fit(kit, strategy, callbacks=[report])
        self.assertEqual(strategy.shares, [24., 8.])
        self.assertIn("75.0%", strategy.describe())
        self.assertIn("shares measured (rounds: ", strategy.describe())
        self.assertEqual(report.epochs[-1].shares, (24., 8.))
        self.assertIn("; shares 24, 8", str(report.epochs[-1]))
        expected, traces_alone = fit(kit, None)
        self.assertLessEqual(traces, traces_alone)  # Keras' build calls the layers once more
        self.assertEmpty(strategy.extended.own_trace_reasons)
        for value, wanted in zip(seen, expected):
            np.testing.assert_allclose(value, wanted, 1e-5, 1e-6)
        again = towerstrategy.TowerStrategy(["CPU:0", "CPU:1"], shares=strategy.shares)
        self.assertEqual(again.shares, [24., 8.])

    def test_one_row_for_the_slowest(self):
        """Else a tower that is much slower drops out."""
        with Clock(1., 1., 1000.).running() as strategy:
            fit(keras, strategy)
        self.assertEqual(strategy.shares[2], 1)
        self.assertEqual(sum(strategy.shares), 32)

    def test_equal_towers_stay_equal(self):
        """Else noise moves rows to and fro."""
        clock = Clock(1., 1., noise=.15)
        with clock.running() as strategy:
            fit(keras, strategy, epochs=3)
        self.assertEqual(strategy.shares[0], strategy.shares[1])
        self.assertGreater(strategy.extended.inputs.measuring.rounds, 5)

    @pytest.mark.wide
    def test_small_steps_stay_equal(self):
        """Else towers that launch all the time drift apart, as more rows then look like speed."""
        clock = Clock(1e-3, 1e-3, launch=1., noise=.5)
        with clock.running() as strategy:
            fit(keras, strategy, epochs=20)
        self.assertEqual(strategy.shares[0], strategy.shares[1])
        self.assertGreater(strategy.extended.inputs.measuring.rounds, 50)

    @pytest.mark.wide
    def test_what_brought_nothing_is_taken_back(self):
        """Else a moment's load deals rows for ever."""
        clock = Clock(0., 0., launch=np.array([1., 4.]))
        with clock.running() as strategy:
            measure = strategy.extended.inputs.measuring
            shares = mock.Mock(wraps=measure.shares.choose)
            with mock.patch.object(measure.shares, "choose", shares):
                fit(keras, strategy)
            self.assertEqual([call.args[0] for call in shares.call_args_list], [[26, 6], (1, 1)])
            clock.seconds, clock.launch = (1., 4.), 0.
            fit(keras, strategy, epochs=3)
        self.assertEqual(strategy.shares, [26., 6.])

    def test_small_steps_say_nothing(self):
        """Else shares go to whoever's operations the profiler leaves out, as they are short."""
        with Clock(1e-5, 5e-5).running() as strategy:
            fit(keras, strategy)
        self.assertEqual(strategy.shares, [1., 1.])
        self.assertGreater(strategy.extended.inputs.measuring.rounds, 3)

    def test_time_that_is_not_in_proportion_to_rows(self):
        """Else shares go to and fro, as who has few rows looks faster than it is with more."""
        with Clock(1., 9., power=2).running() as strategy:
            fit(keras, strategy, rows=10 * 22, batch_size=10)
        self.assertEqual(strategy.shares, [9., 1.])
        self.assertGreater(strategy.extended.inputs.measuring.rounds, 2)

    def test_a_round_is_whole(self):
        """Else machines, which agree between epochs, go by the first sample after a change."""
        workers = mock.Mock(replicas=2)
        workers.gather_rows = lambda own: [tf.concat([own[0], own[0] * [[.25, 1., 1.]]], 0)]
        measure = measured.Measuring(mock.Mock(towers=["CPU:0"]), workers)
        with mock.patch.object(measure.shares, "rows", lambda: [8]):
            for samples, rounds in ((measured.ROUND + 2, 1), (measured.ROUND - 1, 1), (1, 2)):
                for _ in range(samples):
                    measure._add(Sample(1., (1.,), 0., 0., 0., 0.))
                measure.agree()
                self.assertEqual((measure.changes, measure.rounds), (1, rounds))

    def test_settled_it_costs_next_to_nothing(self):
        """Else every step pays for what is known."""
        clock = Clock(1., 1., cost=1000.)
        with clock.running() as strategy:
            fit(keras, strategy, epochs=3)
        self.assertEqual(clock.begun, 2 * measured.ROUND)

    @pytest.mark.wide
    def test_a_tower_that_gets_slower(self):
        """Else shares are those of another machine's load."""
        clock = Clock(1., 1.)
        with clock.running() as strategy:
            fit(keras, strategy)
            clock.seconds = (4., 1.)
            fit(keras, strategy, epochs=3)
        self.assertEqual(strategy.shares[1], 4 * strategy.shares[0] + 2)

    def test_a_last_batch_of_few_rows(self):
        """Else shares come of the rows of another batch than the one that was timed."""
        with Clock(1., 3.).running() as strategy:
            fit(keras, strategy, rows=32 * 8 + 3)
        self.assertEqual(strategy.shares, [24., 8.])

    def test_loops(self):
        """Else a loop of one's own goes on with equal shares, or leaves a profile running."""
        clock = Clock(1., 3.)
        with clock.running() as strategy:
            traces = []

            @tf.function
            def step(x):
                traces.append(x)
                return strategy.reduce("SUM", strategy.run(tf.reduce_sum, (x,)), None)

            dataset = strategy.experimental_distribute_dataset(
                tf.data.Dataset.range(100).batch(8).repeat(5))
            self.assertEqual(sum(int(step(batch)) for batch in dataset), 5 * 4950)
            self.assertEqual(strategy.shares, [6., 2.])
            self.assertLen(traces, 1)
            measure = strategy.extended.inputs.measuring
            measure._next_sample, measure._rates = 0, [[1., 1.]]  # the next step is sampled
            iterator = iter(dataset)
            step(next(iterator))
            self.assertEqual(clock.begun, clock.ended + 1)
            del iterator
            gc.collect()
        self.assertEqual(clock.begun, clock.ended)

    @parameterized.parameters((tf.errors.AlreadyExistsError(None, None, "no"), 0),
                              (OSError("no"), 1))
    def test_without_a_profiler(self, error, warnings):
        """Else a user's own profile, or a machine without one, ends the training."""
        with mock.patch.object(tf.profiler.experimental, "start", side_effect=error):
            strategy = towerstrategy.TowerStrategy(["CPU:0", "CPU:1"], shares="measured")
            if warnings:
                with self.assertWarnsRegex(RuntimeWarning, 'measure the towers of shares="meas'):
                    fit(keras, strategy)
            else:
                fit(keras, strategy)
        self.assertEqual(strategy.shares, [1., 1.])

    def test_the_profiler_itself(self):
        """Else times are measured in tests alone."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], shares="measured")
        with tempfile.TemporaryDirectory() as folder:
            fit(keras, strategy, rows=32 * 8)
            self.assertGreaterEqual(strategy.extended.inputs.measuring.rounds, 1)
            dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(40).batch(8))
            iterator = iter(dataset)
            next(iterator)
            saved = tf.train.Checkpoint(iterator=iterator).save(f"{folder}/iterator")
            other = iter(dataset)
            tf.train.Checkpoint(iterator=other).restore(saved)
            parts = [part.numpy() for part in next(other).values]
        np.testing.assert_array_equal(np.concatenate(parts), range(8, 16))

    def test_one_tower(self):
        """Else a single device is measured for nothing."""
        strategy = towerstrategy.TowerStrategy(["CPU:0"], shares="measured")
        self.assertIsNone(strategy.extended.inputs.measuring)
        self.assertEqual(strategy.shares, [1.])


if __name__ == "__main__":
    absltest.main()
