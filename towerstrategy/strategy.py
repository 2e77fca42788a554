"""TowerStrategy: the constructor and the methods that users call.

Goes in: devices, a merge device, batches, models.  Comes out: a ``tf.distribute.Strategy`` that
trains on several devices and keeps every weight once.  Each method delegates to another module.
"""

from __future__ import annotations

import contextlib
import functools
import html
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from towerstrategy import _keras, _tensorflow as _tf, arguments, contexts, extended, losses
from towerstrategy._keras import adopting, stages, state
from towerstrategy.extras.machines import clusters, shards
from towerstrategy.extras.report import description
from towerstrategy.placement import devices as devices_lib, kind, names
from towerstrategy.sharding import function as functions
from towerstrategy.variables import rules

_log = logging.getLogger("towerstrategy")


class TowerStrategy(kind.Kind):
    """Data-parallel training on the devices of one machine, with one copy of each weight.

    A global batch is split into sub-batches, each runs through the model on a device of its own (a
    *tower*), the gradients are summed on the merge device, and the optimizer runs there once.  It
    is used like ``tf.distribute.MirroredStrategy``.  Towers can be GPUs, or logical CPU devices
    where there is no GPU:

    >>> strategy = TowerStrategy(split_cpu(4))
    >>> strategy.num_replicas_in_sync
    4

    A batch is split in order, as evenly as it goes.  Variables made in the strategy's scope exist
    once; a write from inside the towers is merged, then done once:

    >>> parts = strategy.split(tf.range(10.))
    >>> with strategy.scope():
    ...   total = tf.Variable(0., aggregation=tf.VariableAggregation.SUM)
    >>> @tf.function
    ... def add_up(x):
    ...   total.assign_add(tf.reduce_sum(x))
    >>> strategy.run(add_up, args=(parts,))
    >>> float(total)
    45.0

    A Keras model compiled in the scope trains on the towers, and gets the weights that one device
    would have given it:

    >>> with strategy.scope():
    ...   model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    ...   model.compile("sgd", "mse")
    >>> history = model.fit(np.ones([10, 3]), np.ones([10, 1]), batch_size=4, verbose=0)
    >>> model.predict(np.ones([10, 3]), verbose=0).shape
    (10, 1)

    Args:
      devices: the towers: None (every GPU, or one CPU tower if there is no GPU), a count, or a list
        of GPU ids, device strings such as ``"GPU:0"`` or ``"/device:CPU:1"``, or devices from
        ``tf.config.list_logical_devices``.  A list of lists gives each tower several devices, its
        *stages*; one model is laid over them, see docs/one_large_model.md.
      merge_device: where variables live, gradients are summed and the optimizer runs: ``"cpu"``
        (the default with several CPU towers), a device string such as ``"GPU:0"``, or
        ``"balanced"`` (the default with several GPUs): each variable has one of the towers as its
        home, see docs/merge_device.md.  With stages, each weight lives with its stage.
      shares: a list of one number per device: its rows of every batch are proportional to it;
        ``"measured"``: by the towers' step times, measured while training; ``"memory"``: by the
        memory that each GPU may use; None: equal rows.  With ``shares``, CPU and GPU towers can be
        in one strategy, see docs/unequal_devices.md.
      cross_device_ops: accepted so that this class can replace ``MirroredStrategy``; not used.
      cluster_resolver: says which machines train together and which of them this process is; None
        to read ``TF_CONFIG``, if it is set, see docs/several_machines.md.
      communication_options: for collectives between machines: the implementation (RING or NCCL) and
        the timeout.
      synchronize_batch_norm: whether batch norm uses the statistics of the whole batch in a step of
        Keras and in ``strategy.function``, as on one device.  False: each tower uses its own rows'
        statistics and waits for no other tower, except in layers with ``synchronized=True``; moving
        statistics follow the towers' mean.  In ``strategy.run`` the layer decides.
      micro_batches: the number of parts into which a tower's rows are cut, to run through the model
        one after another, for batches whose activations do not fit.  Each part is a replica, see
        docs/micro_batches.md.
      draws: the random numbers of a tower's rows (dropout, noise, ``tf.random``) in a step of Keras
        and in ``strategy.function``: ``"per row"``: the numbers that one device draws for these
        rows; ``"per tower"``: other numbers (an underscore is accepted, too).  In ``strategy.run``
        each tower draws its own numbers.

    Raises:
      TypeError, ValueError: for wrong arguments; the message says which values are possible.
      RuntimeError: in TensorFlow 1 graph mode; or for a worker's strategy, if TensorFlow has
        already started.
    """

    def __init__(self, devices: int | str | tf.config.LogicalDevice | Sequence[
                     int | str | tf.config.LogicalDevice | Sequence[
                         int | str | tf.config.LogicalDevice]] | None = None,
                 merge_device: str | tf.config.LogicalDevice | None = None, *,
                 shares: Sequence[float] | Literal["measured", "memory"] | None = None,
                 cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
                 cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
                 communication_options: tf.distribute.experimental.CommunicationOptions
                 | None = None,
                 synchronize_batch_norm: bool = True, micro_batches: int = 1,
                 draws: Literal["per row", "per_row", "per tower", "per_tower"] = "per row"
                 ) -> None:
        arguments.check_constructor(cross_device_ops, communication_options, synchronize_batch_norm,
                                    draws)
        resolver = (clusters.resolver_of_environment() if cluster_resolver is None
                    else cluster_resolver)
        cluster = clusters.join(resolver, devices_lib.largest_stage_count(devices))
        placement = devices_lib.place(devices, merge_device, shares, micro_batches)
        workers = None if cluster is None else shards.ShardingMachines(
            cluster, placement, communication_options)
        super().__init__(extended.TowerExtended(
            self, placement, workers, resolver, draws in arguments.DRAWS[:2],
            synchronize_batch_norm))
        losses.install()
        _tf.KEYS.wrap(lambda original, generator, key: (
            key if contexts.has_all_rows() else original(generator, key)))
        _keras.install_hooks()
        if workers is not None:  # callbacks that write files may be made outside of the scope
            _tf.enter_work()
            weakref.finalize(self, _tf.leave_work)
        _log.info("%r", self)

    @_tf.with_short_tracebacks
    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """As ``tf.distribute.Strategy.run``.

        >>> strategy = TowerStrategy(split_cpu(4)[:2])
        >>> sums = strategy.run(tf.reduce_sum, (strategy.split(np.arange(4)),))
        >>> [int(part) for part in strategy.experimental_local_results(sums)]
        [1, 5]
        """
        arguments.check_run(self, fn, args, kwargs, options)
        return super().run(fn, args, kwargs, options)

    def function(self, func: Callable[..., Any] | None = None,
                 input_signature: Sequence[Any] | None = None, autograph: bool = True,
                 jit_compile: bool | None = None, reduce_retracing: bool = False) -> Any:
        """As ``tf.function``, for a step written for one device; it runs on the towers.

        The step sees all rows of the batch, in a replica context of one replica.  It is traced once
        and partitioned: each tower computes its rows, and the result is that of one device.

        Arguments that come from :meth:`split`, or from this strategy's distributed datasets, are
        sharded; all others are the same for all towers.  Take batches from an iterator outside of
        the step, in eager code or in a ``tf.function`` around it.  ``input_signature`` has the
        shapes of the whole batch; with ``jit_compile``, XLA compiles the towers' operations.

        Raises:
          NotImplementedError: if towers have several stages.

        >>> strategy = TowerStrategy(split_cpu(4)[:3])
        >>> with strategy.scope():
        ...   weight = tf.Variable(1.)
        >>> @strategy.function
        ... def train_step(x, y):
        ...   with tf.GradientTape() as tape:
        ...     loss = tf.reduce_mean((weight * x - y) ** 2)
        ...   weight.assign_sub(0.25 * tape.gradient(loss, weight))
        ...   return loss
        >>> x, y = strategy.split((np.float32([1., 2., 3., 0.]), np.float32([2., 4., 6., 0.])))
        >>> [float(train_step(x, y)) for _ in range(2)]
        [3.5, 1.96875]
        >>> float(weight)
        1.4375
        """
        arguments.check_one_device_each(self)
        make = functools.partial(functions.Function, self, input_signature=input_signature,
                                 jit_compile=jit_compile, autograph=autograph,
                                 reduce_retracing=reduce_retracing)
        return make if func is None else make(func)

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """As ``tf.distribute.Strategy.reduce``.

        >>> strategy = TowerStrategy(split_cpu(4)[:2])
        >>> float(strategy.reduce("MEAN", strategy.split(np.arange(5.)), axis=0))
        2.0
        """
        arguments.check_op(reduce_op)
        axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
        with arguments.merging(self, value, axis, axes, "None, a whole number or a tuple of them"):
            return super().reduce(reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """As ``tf.distribute.Strategy.gather``.

        >>> strategy = TowerStrategy(split_cpu(4)[:2])
        >>> strategy.gather(strategy.split(np.arange(5)), axis=0).numpy().tolist()
        [0, 1, 2, 3, 4]
        """
        with arguments.merging(self, value, axis, (axis,), "a whole number"):
            return super().gather(value, axis)

    def split(self, batch: Any) -> Any:
        """Splits the rows of ``batch`` over the towers, into per-replica values for ``run``.

        Args:
          batch: any nest of tensors or arrays whose first dimension is the examples, one row each:
            dense, ragged, sparse, any dtype.  ``None`` leaves stay ``None``.

        Returns:
          The same nest of per-replica values; with one tower, of tensors.

        >>> strategy = TowerStrategy(split_cpu(4)[:3])
        >>> x, y = strategy.split((np.arange(8).reshape([4, 2]), np.arange(4)))
        >>> [part.shape.as_list() for part in strategy.experimental_local_results(x)]
        [[2, 2], [1, 2], [1, 2]]
        """
        arguments.check_outside("strategy.split splits a global batch over the towers")
        return self.extended.inputs.split(batch)

    @property
    def devices(self) -> list[Any]:
        """This machine's towers: each tower's device, or the list of the devices of its stages.

        >>> TowerStrategy(split_cpu(4)[:2]).devices
        ['CPU:0', 'CPU:1']
        """
        placement = self.extended.placement
        rows = [list(map(names.short_name, row)) for row in placement.rows]
        return rows or list(map(names.short_name, placement.devices))

    @property
    def num_towers(self) -> int:
        """How many towers this machine has; with micro-batches, each is several replicas."""
        return len(self.extended.placement.devices)

    @property
    def merge_device(self) -> str | None:
        """Such as ``"CPU:0"``, or ``"balanced"``; None with stages, whose weights merge on them."""
        placement = self.extended.placement
        return None if placement.rows else placement.merge_name

    @property
    def micro_batches(self) -> int:
        """The number of parts into which a tower's rows are cut, to run one after another."""
        return self.extended.placement.micro_batches

    @property
    def shares(self) -> list[float] | None:
        """The shares of this machine's towers; None if all get equal rows.

        With ``shares="measured"``, the shares measured so far, to pass to a later strategy.

        >>> TowerStrategy(split_cpu(4)[:2], shares=[3, 1]).shares
        [3.0, 1.0]
        """
        return self.extended.inputs.shares

    def adopt(self, model: Any) -> Any:
        """Makes ``model``, built outside this strategy's scope, train on its towers.

        The weights keep their values, their identity and their device.  If the model already has an
        optimizer and metrics, they are adopted with their state.  Compiling a model inside the
        scope adopts it, too.

        Args:
          model: a Keras or tf_keras model, built or not, compiled or not.

        Returns:
          ``model``.  The logger ``"towerstrategy"`` lists the adopted variables; :meth:`describe`
          shows where they live.

        >>> model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> strategy = TowerStrategy(split_cpu(4))
        >>> history = strategy.adopt(model).fit(np.ones([6, 3]), np.ones([6, 1]), verbose=0)
        """
        arguments.check_outside("strategy.adopt makes a model train on all towers")
        return adopting.adopt(self, model, _keras.names_of(model))

    def scale_loss(self, loss: Any) -> tf.Tensor:
        """Scales a tower's mean to its part of the mean over the whole batch.

        For functions given to ``strategy.run``, where the towers' gradients are summed: a loss that
        is a mean over the tower's rows has to be weighted by the tower's share of the batch's rows.
        Values that Keras 3's loss objects return are scaled already and stay as they are; a sum
        over rows, divided by a constant, needs no scaling.

        Returns:
          ``loss`` times the tower's share; ``loss`` itself in a step of Keras and in
          ``strategy.function``, which see all rows, with one tower, and outside of towers.

        >>> strategy = TowerStrategy(split_cpu(4)[:2])
        >>> @tf.function
        ... def loss_of(x):
        ...   return strategy.scale_loss(tf.reduce_mean(x))
        >>> losses = strategy.run(loss_of, (strategy.split(np.arange(3.)),))
        >>> [round(float(part), 3) for part in strategy.experimental_local_results(losses)]
        [0.333, 0.667]
        """
        return losses.scale_loss(loss)

    def stage(self, index: int) -> contextlib.AbstractContextManager[None]:
        """A context in which layers that are made or called belong to one stage of each tower.

        For towers of several devices, see docs/one_large_model.md.  Use it where layers are made,
        where they are called to build a functional model, and in a ``call`` or a replica function.
        If a layer is made and called in different stages, the call decides.  Stages count from 0.

        >>> strategy = TowerStrategy([split_cpu(4)[:2]])
        >>> with strategy.scope():
        ...   with strategy.stage(0):
        ...     layers = [tf.keras.Input([3]), tf.keras.layers.Dense(5)]
        ...   with strategy.stage(1):
        ...     layers.append(tf.keras.layers.Dense(1))
        ...   model = tf.keras.Sequential(layers)
        ...   model.compile("sgd", "mse")
        >>> [weight.value.device[-5:] for weight in model.weights]
        ['CPU:0', 'CPU:0', 'CPU:1', 'CPU:1']
        """
        arguments.check_stage(self, index)
        return self.extended.stages.within(int(index), chosen=True)

    def merge_rule(self, variable: Any, rule: Literal["max", "min"]) -> None:
        """Merges the towers' writes to a variable by taking the largest, or smallest, value.

        By default, values that towers write to a variable are merged by its ``aggregation``: a sum,
        a mean weighted by share of rows, or the first tower's value.  Other state, such as the
        largest number seen, needs this rule.

        Args:
          variable: a variable made in this strategy's scope, or of a model that it has adopted; it
            may be a metric's.
          rule: ``"max"`` or ``"min"``.

        >>> strategy = TowerStrategy(split_cpu(4)[:2])
        >>> with strategy.scope():
        ...   peak = tf.Variable(0.)
        >>> strategy.merge_rule(peak, "max")
        >>> @tf.function
        ... def see(x):
        ...   peak.assign(tf.maximum(peak, tf.reduce_max(x)))
        >>> strategy.run(see, (strategy.split(np.float32([3., 7., 5.])),))
        >>> float(peak)
        7.0
        """
        rules.set_rule(self, variable, rule)

    def describe(self, model: Any = None) -> str:
        """A table of where everything lives: towers, merge device, variables, bytes per device.

        Args:
          model: None, or a Keras or tf_keras model of this strategy, for a second table: the state
            that is not trained by gradients (statistics, counters, metrics), where it is kept, and
            how the towers' writes in :meth:`run` are merged, see :meth:`merge_rule`; a step of
            Keras writes it once, as one device does.  If towers have stages, a third table has the
            layers and bytes of each stage.

        >>> strategy = TowerStrategy(split_cpu(4)[:2])
        >>> with strategy.scope():
        ...   model = tf.keras.Sequential([
        ...     tf.keras.Input([3]), tf.keras.layers.BatchNormalization(name="norm")], name="small")
        ...   model.compile("sgd", "mse")
        >>> print(strategy.describe(model))
        TowerStrategy: 2 towers, merge device CPU:0
        ...
        state                       kept      merged in strategy.run
        --...
        2 trained weights           one copy  gradients: sum of all rows'
        small/norm/moving_mean      one copy  mean by share of rows
        small/norm/moving_variance  one copy  mean by share of rows
        ...
        """
        if model is None:
            return description.describe(self)
        names = _keras.names_of(model)
        return description.describe(self, state.lines(self, model, names),
                                    stages.lines(self, model, names))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.describe())}</pre>"

    def __repr__(self) -> str:
        return f"<TowerStrategy {self.extended.placement}>"
