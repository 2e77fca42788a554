"""variables: one copy on the merge device, merged writes, and tower-local variables.

The matrix does each write in each context with TowerStrategy and with ``MirroredStrategy``; where
they differ, :func:`deliberate` says why.
"""

import copy
import itertools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
import wide
from peers import mirrored, outcome, per_replica, plain, two_towers
from towerstrategy import _tensorflow
from towerstrategy.variables import one_copy

Sync = tf.VariableSynchronization
Aggregation = tf.VariableAggregation
ASSIGNS = ("assign", "assign_add", "assign_sub")
SCATTERS = ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div", "scatter_min",
            "scatter_max", "scatter_update")
CONTEXTS = ("replica", "replica_in_function", "cross", "plain", "cross_in_function",
            "cross_of_per_replica", "update", "init_scope")


def tower():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def made(strategy, value=1., **kwargs):
    with strategy.scope():
        return tf.Variable(value, **kwargs)


def wrote(strategy, where, method, agree, dtype, modes):
    """What a variable holds after one write: (what the replicas saw, what outside reads)."""
    scatters = method.startswith("scatter")
    v = made(strategy, tf.cast([4, 6, 8] if scatters else 4, dtype), trainable=False, **modes)

    def argument(replica=None):
        value = tf.cast(3 if agree or replica is None else 2 + 2 * replica, dtype)
        if not scatters:
            return value
        row = 1 if agree or replica is None else replica
        return tf.IndexedSlices(value[None], tf.reshape(row, [1]), tf.constant([3]))

    def write(replica=None):
        if method != "read":
            getattr(v, method)(argument(replica))

    def replica():
        write(tower())
        return tf.identity(v)

    def in_init_scope():
        with tf.init_scope():
            write()

    seen = None
    if where == "replica":
        seen = strategy.run(replica)
    elif where == "replica_in_function":
        seen = tf.function(lambda: strategy.run(replica))()
    elif where == "plain":
        write()
    elif where == "update":
        strategy.extended.update(v, lambda part, x: getattr(part, method)(x), (argument(),))
    elif where == "cross_of_per_replica":
        getattr(v, method)(strategy.run(lambda: argument(tower())))
    else:
        with strategy.scope():
            {"cross": write, "cross_in_function": tf.function(lambda: write()),
             "init_scope": tf.function(in_init_scope)}[where]()
    with strategy.scope():
        return plain(seen), plain(v.read_value())


def deliberate(where, method, agree, dtype, synchronization, aggregation):
    """Why TowerStrategy differs here; None where it must not."""
    replica = where.startswith("replica")
    local = synchronization is Sync.ON_READ
    if not local and aggregation is Aggregation.NONE and replica and not agree:
        return "MirroredStrategy's copies drift apart; there is one copy here"
    if not local and where == "cross_of_per_replica" and not agree:
        return "MirroredStrategy's copies drift apart; there is one copy here"
    if not local and not replica and method in ("scatter_min", "scatter_max", "scatter_update"):
        return "MirroredStrategy refuses what one copy can do"
    if local and aggregation is Aggregation.SUM and not replica:
        return "values given to a sum from outside go whole to tower 0's part"
    return None


class WriteMatrixTest(parameterized.TestCase):

    MODES = Sync.AUTO, Sync.ON_READ  # ON_WRITE is what AUTO is for these

    @wide.parameters((Sync.ON_READ, Aggregation.SUM),
                     wide=[(Sync.AUTO, Aggregation.MEAN), (Sync.ON_READ, Aggregation.MEAN)],
                     rest=[(Sync.AUTO, Aggregation.SUM), *itertools.product(MODES, [
                               Aggregation.NONE, Aggregation.ONLY_FIRST_REPLICA]),
                           *((Sync.ON_WRITE, rule) for rule in Aggregation)])
    def test_as_mirrored(self, synchronization, aggregation):
        """Else a variable written by code made for MirroredStrategy holds something else."""
        modes = {"synchronization": synchronization, "aggregation": aggregation}
        methods = ("read", *ASSIGNS)
        if synchronization is Sync.AUTO:
            methods += SCATTERS
        for method in methods:
            for where in CONTEXTS:
                if method == "read" and where in ("update", "cross_of_per_replica"):
                    continue
                for dtype in (tf.float32, tf.int32):
                    if dtype is tf.int32 and method not in ("assign", "assign_add", "scatter_add"):
                        continue
                    self._check(where, method, dtype, modes)

    def _check(self, where, method, dtype, modes):
        for agree in (True, False) if where.startswith("replica") else (True,):
            if deliberate(where, method, agree, dtype, **modes):
                continue
            with self.subTest(where=where, method=method, agree=agree, dtype=dtype.name):
                ours, theirs = (
                    outcome(wrote, strategy, where, method, agree, dtype, modes)
                    for strategy in (two_towers(), mirrored()))
                self.assertEqual(ours, theirs)


class MergedWriteTest(parameterized.TestCase):
    """The rules where MirroredStrategy has no result: its copies would differ.

    What numbers come of assigned and added ones is tried by ``parity/fuzz.py``.
    """

    @wide.product(run_in=[lambda fn: fn, tf.function], method=SCATTERS)
    def test_scatters_of_python_lists(self, run_in, method):
        """Else `tf.IndexedSlices` of plain lists, which TensorFlow takes, fail in a function."""
        strategy = two_towers()

        def written(made_of, each, **modes):
            v = made(strategy, [8., 8.], **modes)
            slices = [tf.IndexedSlices(made_of([2. + number]), made_of([number]), dense_shape=(2,))
                      for number in range(2)]
            argument = _tensorflow.PerReplica(slices) if each else slices[1]
            run_in(lambda: strategy.run(getattr(v, method), (argument,)))()
            return plain(v)

        for each in (False, True):
            self.assertEqual(written(list, each), written(tf.constant, each))
            with self.assertRaisesRegex(NotImplementedError, f"ON_READ.*{method}"):
                written(list, each, synchronization=Sync.ON_READ, aggregation=Aggregation.MEAN)

    @parameterized.parameters("scatter_min", "scatter_max", "scatter_update")
    def test_replacing_scatters_with_one_copy(self, method):
        """Else towers overwrite each other's rows, or outside code cannot replace rows."""
        strategy = two_towers()
        v = made(strategy, [4., 4., 8.])
        strategy.run(lambda: getattr(v, method)(tf.IndexedSlices(
            [2. + 4. * tf.cast(tower(), tf.float32)], tf.reshape(tower(), [1]))))
        wanted = {"scatter_min": [2., 4., 8.], "scatter_max": [4., 6., 8.],
                  "scatter_update": [2., 6., 8.]}[method]
        self.assertEqual(plain(v), wanted)
        summed = made(strategy, [4., 4.], aggregation=Aggregation.SUM)
        getattr(summed, method)(tf.IndexedSlices([5.], [0]))
        with self.assertRaisesRegex(NotImplementedError, f"{method} is only supported"):
            strategy.run(lambda: getattr(summed, method)(tf.IndexedSlices([5.], [0])))

    def test_values_of_towers_written_from_outside(self):
        """Else ``v.assign(strategy.run(...))`` fails, or ignores how many rows each tower had."""
        strategy = two_towers()
        v = made(strategy, 0.)
        means = strategy.run(tf.reduce_mean, (strategy.split(tf.constant([1., 2., 6.])),))
        v.assign(means)
        self.assertEqual(v.numpy(), 3.)
        v.assign_add(per_replica(strategy, 1., 3.))
        self.assertEqual(v.numpy(), 5.)

    @parameterized.parameters((lambda fn: fn,), (tf.function,))
    def test_a_batch_without_rows(self, run_in):
        """Else weights that the towers write are zero after an empty batch."""
        strategy = two_towers()
        v = made(strategy, 4.)

        def step(x):
            v.assign(v / 2 + 1)
            if not tf.executing_eagerly():
                tf.cond(v > 0, lambda: v.assign(v / 2 + 1), lambda: v.value())

        run_in(lambda x: strategy.run(step, (x,)))(strategy.split(tf.zeros([0, 3])))
        self.assertEqual(v.numpy(), 4.)

    def test_outside_values_of_a_sum(self):
        """Else counts set from outside are cut off, or a counter cannot be stepped there."""
        strategy = two_towers()
        count = made(strategy, 0, synchronization=Sync.ON_READ, aggregation=Aggregation.SUM)
        count.assign(3)
        self.assertEqual(count.numpy(), 3)
        count.assign_add(4)
        count.assign_sub(2)
        self.assertEqual(count.numpy(), 5)
        self.assertEqual([int(count), float(count), complex(count)], [5, 5., 5 + 0j])
        self.assertFalse(count.assign(0))
        count.assign(5)
        self.assertEqual(plain(strategy.run(count.read_value)), ("per replica", [5, 0]))

    def test_a_step_of_all_rows_writes_a_sum_in_one_place(self):
        """Else each step writes a zero on every other tower for each metric, and waits for it."""
        strategy = two_towers()
        modes = {"synchronization": Sync.ON_READ, "aggregation": Aggregation.SUM}
        total, one, handles = made(strategy, 0., **modes), made(strategy, 1., **modes), []

        def counted(x):
            total.assign(total + tf.reduce_sum(x))
            one.assign(one + tf.reduce_sum(x))
            handles.append(sorted(outer.device[-5:] for outer, _ in tf.compat.v1.get_default_graph(
                ).captures if outer.dtype == tf.resource))

        rows = tf.constant([2., 3., 4.])
        strategy.function(counted)(rows)
        self.assertEqual([total.numpy(), one.numpy()], [9., 10.])
        strategy.run(lambda: total.assign_add(2.))  # now each tower has a part

        def started_anew(x):
            total.assign(tf.reduce_sum(x))

        strategy.function(started_anew)(rows)
        self.assertEqual(total.numpy(), 9.)
        self.assertEqual(handles, [["CPU:1", "CPU:1"]])

    def test_a_step_of_all_rows_counts_the_first_value_once(self):
        """Else a metric whose state starts at 1 has another 1 of each tower."""
        strategy = two_towers()
        total = made(strategy, 1., synchronization=Sync.ON_READ, aggregation=Aggregation.SUM)
        strategy.function(lambda x: total.assign_add(tf.reduce_sum(x)).value())(
            strategy.split(tf.constant([2., 3., 4.])))
        self.assertEqual(total.numpy(), 10.)

    def test_a_step_of_all_rows_that_was_traced_before_towers_wrote(self):
        """Else it misses what the towers count from then on, or cannot start anew."""
        strategy = two_towers()
        total = made(strategy, 0., synchronization=Sync.ON_READ, aggregation=Aggregation.SUM)

        @strategy.function
        def set_anew(x):
            total.assign(tf.reduce_sum(x))

        @strategy.function
        def added(x):
            total.assign_add(tf.reduce_sum(x))
            return total.value()

        @tf.function
        def by_towers(x):
            strategy.run(lambda x: total.assign_add(tf.reduce_sum(x)), (x,))

        rows, seen = strategy.split(tf.constant([2., 3., 4.])), []
        for step in (set_anew, added, by_towers, added, set_anew, by_towers, added):
            result = step(rows)
            seen.append(float(total.numpy() if result is None else result))
        self.assertEqual(seen, [9., 18., 27., 36., 9., 18., 27.])

    @parameterized.parameters(Aggregation.NONE, Aggregation.ONLY_FIRST_REPLICA)
    def test_a_first_tower_without_rows(self, aggregation):
        """Else a variable gets what a tower makes of nothing while another has all rows."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "CPU:0", shares=[1, 3])
        v, in_branch = (made(strategy, 5, dtype=tf.int32, aggregation=aggregation)
                        for _ in range(2))

        def step(x):
            most = tf.cast(tf.reduce_max(x), tf.int32)
            v.assign(most)
            if tf.size(x) > -1:
                in_branch.assign(most)

        tf.function(lambda x: strategy.run(step, (x,)))(strategy.split(tf.constant([7.])))
        self.assertEqual([v.numpy(), in_branch.numpy()], [7, 7])

    @parameterized.parameters(Aggregation.SUM, Aggregation.MEAN)
    def test_python_numbers_in_float64(self, aggregation):
        """Else they are rounded to float32 on their way."""
        strategy = two_towers()
        v = made(strategy, 0., dtype=tf.float64, synchronization=Sync.ON_READ,
                 aggregation=aggregation)
        step = strategy.function(lambda: (v.assign(.1), v.assign_add(.1))[1].read_value())
        self.assertEqual(step(), .2)
        v.assign(.1)
        self.assertEqual(v.numpy(), .1)

    @parameterized.parameters(Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA)
    def test_slices_in_a_step_of_all_rows(self, aggregation):
        """Else a metric that counts by class with `scatter_nd_add` fails in `fit`."""
        strategy, rows = two_towers(), tf.constant([[2.], [3.], [4.]])
        modes = {"synchronization": Sync.ON_READ, "aggregation": aggregation}
        one, ours = tf.Variable([1., 2., 3.]), made(strategy, [0., 0., 0.], **modes)
        parts = 2. if aggregation is Aggregation.SUM else 1.
        strategy.run(lambda: ours.assign_add(tf.constant([1., 2., 3.]) / parts))

        def step(v, x):
            v.scatter_nd_add([[0], [2]], [tf.reduce_sum(x), x[0, 0]])
            v.scatter_update(tf.IndexedSlices([tf.reduce_max(x)], [1]))
            v.scatter_nd_update([[2]], v.gather_nd([[0]]))
            v.scatter_max(tf.IndexedSlices([7.], [1]))
            v.assign_add([1., 1., 1.])
            v.scatter_sub(tf.IndexedSlices([tf.reduce_mean(x)], [1]))
            return v.sparse_read([1, 2])

        for _ in range(2):
            wanted = tf.function(step)(one, rows)
            got = strategy.function(lambda x: step(ours, x))(strategy.split(rows))
            self.assertEqual(plain(got), plain(wanted))
            self.assertEqual(plain(ours), plain(one))

    def test_sum_in_cond_explains(self):
        """Else a write that needs all towers does something else inside control flow."""
        strategy = two_towers()
        v = made(strategy, 0., aggregation=Aggregation.SUM)

        def replica():
            return tf.cond(tower() >= 0, lambda: v.assign_add(1.), lambda: v.read_value())

        with self.assertRaisesRegex(RuntimeError, "`merge_call` called while defining"):
            tf.function(lambda: strategy.run(replica))()

    @parameterized.named_parameters(("floats", 1.), ("ints", 1))
    def test_agreed_steps_in_cond(self, step):
        """Else a counter stepped inside a condition counts once a tower."""
        strategy = two_towers()
        v = made(strategy, 5 * step)
        first = made(strategy, 5 * step, aggregation=Aggregation.ONLY_FIRST_REPLICA)

        def replica():
            def stepped():
                v.assign_add(step)
                first.assign_add(step)
                return 0

            return tf.cond(tower() >= 0, stepped, lambda: 1)

        tf.function(lambda: strategy.run(replica))()
        self.assertEqual((plain(v), plain(first)), (6 * step, 6 * step))

    @parameterized.parameters(Aggregation.NONE, Aggregation.MEAN)
    def test_agreed_values_in_cond(self, aggregation):
        """Else a flag or a table set inside a condition ends up between its old and new value."""
        strategy = two_towers()
        fixed, moving = made(strategy, 5.), made(strategy, 5., aggregation=aggregation)

        def replica(x):
            def written():
                fixed.assign(tf.reduce_mean(x))
                moving.assign(moving + .01 * (tf.reduce_mean(x) - moving))
                return 0

            return tf.cond(tower() >= 0, written, lambda: 1)

        step = tf.function(lambda rows: strategy.run(replica, (rows,)))
        step(strategy.split(tf.constant([3., 3., 3.])))
        self.assertEqual(plain(fixed), 3.)
        self.assertAlmostEqual(plain(moving), 4.98, places=3)
        step(strategy.split(tf.constant([np.inf] * 3)))
        self.assertEqual(plain(fixed), np.inf)
        step(strategy.split(tf.constant([1., 2., 6.])))
        self.assertAlmostEqual(plain(fixed), 3., places=5)

    def test_scatters_in_cond(self):
        """Else rows added inside a condition count once a tower."""
        strategy = two_towers()
        v = made(strategy, [4., 4.])

        def replica():
            return tf.cond(tower() >= 0, lambda: v.scatter_add(tf.IndexedSlices([2.], [1])),
                           lambda: v.read_value())

        tf.function(lambda: strategy.run(replica))()
        self.assertEqual(plain(v), [4., 6.])


class CreationTest(parameterized.TestCase):

    def test_one_copy_on_the_merge_device(self):
        """Else weights exist once a tower, or somewhere nobody asked for."""
        v = made(two_towers("CPU:3"))
        self.assertIsInstance(v, one_copy.TowerVariable)
        self.assertEqual(v.device[-5:], "CPU:3")

    def test_balanced_homes(self):
        """Else one device holds most bytes."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "balanced")
        with strategy.scope():
            devices = [tf.Variable(tf.zeros([rows])).device[-5:] for rows in (8, 5, 2, 3)]
        self.assertEqual(devices, ["CPU:1", "CPU:2", "CPU:2", "CPU:2"])

    def test_names_and_modes_as_mirrored(self):
        """Else checkpoints, filters by name and optimizers see other variables."""
        def described(strategy):
            with strategy.scope(), tf.name_scope("a"):
                made_here = [tf.Variable(1., name="b"), tf.Variable(1., trainable=False),
                             tf.Variable(1., name="c", synchronization=Sync.ON_READ,
                                         aggregation=Aggregation.MEAN)]
            return [(v.name, v.shape, v.dtype, v.trainable, v.synchronization, v.aggregation,
                     v.distribute_strategy is strategy,
                     strategy.extended.variable_created_in_scope(v)) for v in made_here]

        self.assertEqual(described(two_towers()), described(mirrored()))

    @parameterized.parameters(
        ({"synchronization": Sync.NONE}, "NONE"), ({"synchronization": "x"}, "Invalid"),
        ({"aggregation": "x"}, "Invalid"),
        ({"aggregation": Aggregation.MEAN, "dtype": tf.int32}, "non-floating"),
        ({"aggregation": Aggregation.MEAN, "dtype": tf.int32, "synchronization": Sync.ON_READ},
         "non-floating"))
    def test_impossible_modes(self, modes, message):
        """Else a variable that cannot be kept in sync fails at its first write."""
        for strategy in (two_towers(), mirrored()):
            with self.assertRaisesRegex(ValueError, message):
                made(strategy, 1, **modes)

    def test_foreign_colocation(self):
        """Else a variable is put beside another strategy's."""
        strategy, foreign = two_towers(), made(two_towers())
        with strategy.scope(), self.assertRaisesRegex(ValueError, "colocate_vars_with"), \
                strategy.extended.colocate_vars_with(foreign):
            tf.Variable(1.)

    def test_colocation(self):
        """Else an optimizer's slot is on another device than its variable."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "balanced")
        with strategy.scope():
            tf.Variable(tf.zeros([100]))
            v = tf.Variable(tf.zeros([2]))
            with strategy.extended.colocate_vars_with(v):
                slots = [tf.Variable(tf.zeros([200])) for _ in range(3)]
        self.assertEqual({slot.device for slot in slots}, {v.device})

    def test_creator_scope_and_constraint(self):
        """Else creators around variables (partitioning, mixed precision) are passed by."""
        names = []

        def creator(next_creator, **kwargs):
            names.append(kwargs["name"])
            return next_creator(**kwargs)

        with two_towers().scope(), tf.variable_creator_scope(creator):
            v = tf.Variable(1., name="v", constraint=tf.abs)
        self.assertEqual(names, ["v"])
        self.assertIs(v.constraint, tf.abs)

    def test_unknown_shape(self):
        """Else a variable that grows cannot be made."""
        v = made(two_towers(), tf.zeros([0, 3]), shape=[None, 3])
        v.assign(tf.ones([2, 3]))
        self.assertEqual(v.read_value().shape, [2, 3])

    def test_made_in_replica_functions(self):
        """Else layers that build at their first call have weights of their own on each tower."""
        def run(strategy, wrap):
            held = {}

            def replica(x):
                if not held:
                    held["v"] = tf.Variable(lambda: tf.ones([2]) * 3., name="w")
                    held["m"] = tf.Variable(0., name="m", synchronization=Sync.ON_READ,
                                            aggregation=Aggregation.SUM)
                held["m"].assign_add(x)
                return held["v"] * x

            step = wrap(strategy, replica)
            results = [plain(step((per_replica(strategy, 1., 2.),))) for _ in range(2)]
            return results, plain(held["v"].read_value()), plain(held["m"].read_value()), [
                v.name for v in held.values()]

        def in_function(strategy, replica):
            return tf.function(lambda args: strategy.run(replica, args))

        def of_function(strategy, replica):
            compiled = tf.function(replica)
            return lambda args: strategy.run(compiled, args)

        for wrap in (in_function, of_function):
            ours, theirs = run(two_towers(), wrap), run(mirrored(), wrap)
            self.assertEqual(ours, theirs)

    def test_made_in_function_in_scope(self):
        """Else a model that builds inside a tf.function in the scope cannot be made."""
        held = {}

        @tf.function
        def call(x):
            if not held:
                held["v"] = tf.Variable(tf.ones([2]) * 2.)
            return held["v"] * x

        with two_towers().scope():
            self.assertEqual(plain(call([1., 2.])), [2., 4.])
        self.assertIsInstance(held["v"], one_copy.TowerVariable)

    def test_made_in_a_function_before_it_runs(self):
        """Else a first step that makes metrics is another program, whose draws begin anew."""
        held = []

        @tf.function
        def call():
            if not held:
                held.append(tf.Variable(lambda: tf.ones([]), synchronization=Sync.ON_READ,
                                        aggregation=Aggregation.SUM))
            return tf.random.uniform([])

        tf.random.set_seed(1)
        with two_towers().scope():
            self.assertNotEqual(plain(call()), plain(call()))


class UseTest(parameterized.TestCase):

    def test_operators_and_reads(self):
        """Else arithmetic on variables fails or reads another part."""
        def results(strategy):
            v = made(strategy, 4.)
            m = made(strategy, 1., synchronization=Sync.ON_READ, aggregation=Aggregation.SUM)
            with strategy.scope():
                outside = [v + 1, 1 - v, v * m, -m, v < m, v ** 2, tf.stack([v, m]), abs(m)]
            inside = strategy.run(lambda: [v + 1, m * 2, v.read_value(), m.value()])
            return plain(outside), plain(inside), v.numpy().tolist()

        self.assertEqual(results(two_towers()), results(mirrored()))

    def test_gradients(self):
        """Else a tape does not see the variable."""
        strategy = two_towers()
        v = made(strategy, 3.)

        def replica(x):
            with tf.GradientTape() as tape:
                y = v * v * x
            return tape.gradient(y, v)

        for fn in (replica, tf.function(replica)):
            result = strategy.run(fn, (per_replica(strategy, 1., 2.),))
            self.assertEqual(plain(result), ("per replica", [6., 12.]))

    def test_as_argument_of_functions(self):
        """Else a function given a variable writes to the one it was traced with, or fails."""
        strategy = two_towers()
        first, second = (made(strategy, value, aggregation=Aggregation.SUM) for value in (1., 10.))
        step = tf.function(lambda v, x: v.assign_add(x * v))
        inputs = per_replica(strategy, 1., 2.)
        for v in (first, second, first):
            strategy.run(step, (v, inputs))
        self.assertEqual((first.numpy(), second.numpy()), (16., 40.))
        self.assertEqual(plain(strategy.run(tf.function(lambda v: 1.), (first,))), 1.)

    def test_as_an_array(self):
        """Else what reads a model's metrics by NumPy, as on one device, ends in an error."""
        strategy = two_towers()
        with strategy.scope():
            count = tf.Variable([0., 0.], synchronization=tf.VariableSynchronization.ON_READ,
                                aggregation=tf.VariableAggregation.SUM)
        strategy.run(lambda: count.assign_add([1., 2.]))
        np.testing.assert_array_equal(np.array(count), [2., 4.])
        self.assertEqual(np.asarray(count, "float64").dtype, np.float64)

    def test_write_in_anothers_tower(self):
        """Else two strategies that alternate write to each other's variables, unmerged."""
        v = made(two_towers(), name="mine")
        with self.assertRaisesRegex(ValueError, "'mine:0' belongs to another strategy"):
            two_towers().run(lambda: v.assign(1.))

    def test_deepcopy(self):
        """Else a copied model shares its weights or leaves the strategy."""
        strategy = two_towers()
        v = made(strategy, 3.)
        m = made(strategy, 2., synchronization=Sync.ON_READ, aggregation=Aggregation.SUM)
        for original in (v, m):
            copied = copy.deepcopy(original)
            copied.assign(9.)
            self.assertIs(type(copied), type(original))
            self.assertIs(copied.distribute_strategy, strategy)
            self.assertEqual(copied.device, original.device)
            self.assertEqual(plain(copied.read_value()), 9.)
        self.assertEqual((plain(v.read_value()), plain(m.read_value())), (3., 4.))
        strategy.merge_rule(v, "max")
        local, largest = copy.deepcopy(m), copy.deepcopy(v)

        @tf.function
        def step(x):
            strategy.run(lambda x: (local.assign(x[0]), largest.assign(x[0]), None)[2], (x,))

        step(strategy.split(tf.constant([2., 6.])))
        self.assertEqual((local.numpy(), largest.numpy()), (8., 6.))
        self.assertEqual(strategy.function(lambda x: local + x[0])(tf.constant([1.])), 9.)

    def test_repr(self):
        """Else nobody sees what a variable is and where."""
        strategy = two_towers()
        self.assertRegex(repr(made(strategy, 3., name="v")),
                         r"<TowerVariable 'v:0' shape=\(\) dtype=float32, one copy on .*CPU:0.*3")
        local = made(strategy, 3., name="m", synchronization=Sync.ON_READ,
                     aggregation=Aggregation.SUM)
        self.assertRegex(repr(local), r"<TowerLocalVariable 'm:0' .*SUM.*CPU:1.*CPU:2")

    def test_cannot_be_made_by_hand(self):
        """Else somebody makes one that no strategy knows."""
        with self.assertRaisesRegex(TypeError, "in the scope of a TowerStrategy"):
            one_copy.TowerVariable(1.)

    def test_one_tower_has_plain_variables(self):
        """Else one tower pays for parts that nobody reads."""
        strategy = towerstrategy.TowerStrategy(["CPU:1"])
        m = made(strategy, 1., synchronization=Sync.ON_READ, aggregation=Aggregation.SUM)
        strategy.run(lambda: m.assign_add(2.))
        self.assertIsInstance(m, one_copy.TowerVariable)
        self.assertEqual(m.numpy(), 3.)
