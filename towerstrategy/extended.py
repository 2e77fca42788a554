"""``tf.distribute``'s extension points, each delegating to one package.

Goes in: the calls of TensorFlow's ``Strategy``, and of libraries, to ``strategy.extended``.  Comes
out: the results of :mod:`batch`, :mod:`sharding`, :mod:`replicas`, :mod:`merge` and
:mod:`variables`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _keras, _tensorflow as _tf, arguments, contexts
from towerstrategy.batch import datasets as datasets_lib, inputs, splitting
from towerstrategy.extras import cpu, measured, xla
from towerstrategy.extras.stages.within import Stages
from towerstrategy.merge import reductions, shares as shares_lib
from towerstrategy.placement import devices as devices_lib, homes as homes_lib
from towerstrategy.replicas import calls
from towerstrategy.sharding import step as whole_batch
from towerstrategy.variables import creation, tower_local


class Modes(threading.local):
    """Flags that are set for a while (:meth:`within`), in one thread."""

    kept = False  # whether an iterator over a dataset lives longer than an epoch of Keras
    one_replica = False  # whether `merge_call` of a step that has all rows runs
    keras_step = False  # whether Keras traces a step, or builds a model from a first batch
    compiles = False  # whether XLA compiles the towers' operations
    keeps_graph = False  # whether a traced step's graph must be complete, because someone reads it
    takes_iterators = False  # whether the predict function of a Keras model takes iterators
    batch_rows = 0  # the rows of most batches of a step, if they are known before it is traced
    adopts = False  # whether variables that are not the strategy's yet are adopted
    watch: Any = None  # the watcher (a TowerReport) of a model's training steps, if any

    within = _tf.patched


class TowerExtended(_tf.StrategyExtended):
    """The ``strategy.extended`` of a ``TowerStrategy``.

    ``workers`` is None with one machine.
    """

    def __init__(self, container_strategy: tf.distribute.Strategy,
                 placement: devices_lib.Placement, workers: Any,
                 cluster_resolver: Any, draws_rows: bool, synchronizes_batch_norm: bool) -> None:
        self.modes = Modes()
        self.draws_rows, self.synchronizes_batch_norm = draws_rows, synchronizes_batch_norm
        self.placement, self.workers = placement, workers  # TensorFlow's constructor reads them
        self.inputs = inputs.Inputs(placement, workers, measured.of(placement, workers))
        self._cluster_resolver = cluster_resolver  # for the property of TensorFlow's Strategy
        super().__init__(container_strategy)
        self.homes = homes_lib.Homes(self.parameter_devices, placement.balanced, placement.rows,
                                     placement.merge)
        self.stages, self.xla = Stages(placement), xla.Xla(
            {*placement.towers, *itertools.chain(*placement.rows)})
        # The variables that still exist, by id.
        self._tracked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # Whether functions are traced for tower 0 alone, and why some were not.
        self.trace_once = True
        self.keep_graphs = False  # for tools that walk traced functions in Python
        self.own_trace_reasons: list[str] = []
        # tf.function -> the same function with the towers inside.
        self.functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # A nested tf.function may read tower-local variables, so each device has its own trace.
        self._retrace_functions_for_each_device = len(placement.towers) > 1
        self.experimental_enable_get_next_as_optional = True
        # Of partitioned steps: ops without a rule, by type; the last step's crossings, by kind.
        self.done_with_all_rows: dict[str, tuple[str, int, str]] = {}
        self.crossings: dict[str, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> TowerExtended:
        """A copy for the same towers, without variables; the caller sets its strategy."""
        memo[id(self)] = copied = TowerExtended(
            self._container_strategy(), self.placement, self.workers, self._cluster_resolver,
            self.draws_rows, self.synchronizes_batch_norm)
        return copied

    @property
    def cpu(self) -> Any:
        """The module ``extras.cpu``, with optimizations for CPU devices; None if there are GPUs."""
        return cpu if self.placement.on_cpu else None

    @property
    def compiles_whole(self) -> bool:
        """Whether XLA can compile a whole step: it is on one device of one machine."""
        return self.workers is None and self.placement.compiles

    @contextlib.contextmanager
    def step(self, compiles: bool = False, batch_rows: int = 0) -> Iterator[None]:
        """A context for a Keras step; ``compiles``: whether XLA compiles the towers' operations."""
        optimizer = self.cpu.step(len(self.placement.towers)) if self.cpu else \
            _tf.graph_optimizer(light=False) if compiles else contextlib.nullcontext()
        with optimizer, self.modes.within(
                keras_step=True, compiles=compiles, batch_rows=batch_rows):
            yield

    def call_step(self, call: Callable[[Any], Any], iterator: Any, compiles: bool,
                  trained: Any) -> Any:
        """Calls a Keras step in :meth:`step`; ``trained`` is the model if the step trains it."""
        measuring, watch = self.inputs.measuring, self.modes.watch
        if trained is not None and measuring is not None:
            call = functools.partial(measuring.step, call)
        if trained is not None and watch is not None and watch.model is trained:
            call = functools.partial(watch.step, call)
        with self.step(compiles, getattr(iterator, "batch_rows", 0)):
            return call(iterator)

    # Devices and replica numbers.

    @property
    def merge_device(self) -> str:
        """The device that merges results that belong to no variable."""
        return self.placement.merge

    @property
    def host_device(self) -> str:
        """The CPU that runs the input pipeline."""
        spec = tf.DeviceSpec.from_string(self.placement.towers[0])
        return spec.replace(device_type="CPU", device_index=0).to_string()

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self.placement.towers

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        if self.placement.rows:
            return tuple(itertools.chain(*self.placement.rows))
        return self.placement.devices if self.placement.balanced else (self.placement.merge,)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        del var_list
        return (self.placement.merge,)

    @property
    def _num_replicas_in_sync(self) -> Any:
        if self.modes.one_replica or contexts.has_all_rows():
            return 1
        tower = contexts.current_tower()
        if tower is not None:
            tower.call.knows_replica_count = True
        return len(self.placement.towers) if self.workers is None else self.workers.replicas

    @property
    def first_replica(self) -> int:
        """The number of this machine's first tower among the towers of all machines."""
        return 0 if self.workers is None else self.workers.first

    def equal_shares(self) -> shares_lib.Shares:
        """The shares of a call without a batch: every tower counts the same."""
        towers = len(self.placement.towers) if self.workers is None else self.workers.replicas
        return shares_lib.Shares([1] * towers, self.workers)

    def variable_created_in_scope(self, v: Any) -> bool:
        # True for other variables while a model is compiled, which adopts them.
        return self.modes.adopts or super().variable_created_in_scope(v)

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> Any:
        return replica_id_in_sync_group - self.first_replica

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> Any:
        return replica_id + self.first_replica

    # What kind of strategy this is.

    _global_batch_size = experimental_should_init = property(lambda _: True)
    experimental_between_graph = property(lambda self: self.workers is not None)
    should_checkpoint = should_save_summary = _is_chief = property(
        lambda self: self.workers is None or self.workers.is_chief)
    # tf_keras uses it in the folder names of workers that are not the chief.
    _task_id = property(lambda self: 0 if self.workers is None else self.workers.index)

    def _use_merge_call(self) -> bool:
        # If gradients are merged already, libraries must use their code for a single device.
        return not contexts.has_all_rows()

    def _in_multi_worker_mode(self) -> bool:
        return self.workers is not None

    # Scope and variables.

    def _scope(self, strategy: tf.distribute.Strategy) -> Any:
        return _keras.Scope(self.bare_scope(strategy))

    def bare_scope(self, strategy: tf.distribute.Strategy) -> Any:
        """TensorFlow's scope without our hooks, for calls whose traced code enters our scope."""
        return super()._scope(strategy)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        _keras.install_hooks()
        return creation.create(self._container_strategy(), next_creator, **kwargs)

    def track(self, variable: Any) -> None:
        """Adds a variable to :meth:`variables`, without keeping it alive."""
        self._tracked[id(variable)] = variable

    def variables(self) -> list[Any]:
        """The variables of this strategy that still exist."""
        return list(self._tracked.values())

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """As TensorFlow's; outside of any scope, where optimizers may be built, in this scope."""
        with contextlib.ExitStack() as stack:
            if not tf.distribute.has_strategy():
                stack.enter_context(self._container_strategy().scope())
            stack.enter_context(super().colocate_vars_with(colocate_with_variable))
            yield

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        owner = getattr(colocate_with_variable, "_distribute_strategy", None)
        # A step of a model that was made outside of the scope is traced as on one device.
        if owner is not None or not contexts.has_all_rows():
            _tf.validate_colocate(colocate_with_variable, self)

    def read_var(self, v: Any) -> tf.Tensor:
        if isinstance(v, tower_local.TowerLocalVariable):
            return v._get_cross_replica()
        return tf.identity(v)

    value_container = staticmethod(_tf.value_container)

    # Running, distributing, merging, updating.

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.modes.one_replica:  # in `merge_call` of a step that has all rows
            with contexts.OneReplicaContext(self._container_strategy()):
                return fn(*args, **kwargs)
        if self.modes.keras_step:
            return whole_batch.run(self._container_strategy(), fn, args, kwargs)
        result = calls.call_each(self._container_strategy(), fn, args, kwargs)
        for variable in self.variables():
            if isinstance(variable, tower_local.TowerLocalVariable):
                variable.merge_for_steps()
        return result

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset,
                                         options: Any) -> tf.distribute.DistributedDataset:
        arguments.check_outside("a dataset is distributed to all towers")
        per_replica, fetch, ready = inputs.read(options, self)
        if per_replica:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only supported in "
                "`distribute_datasets_from_function`.")
        if self.modes.kept and dataset.options().autotune.enabled is False:
            # Keras' data-loading threads end with the epoch; prefetching past its end would fail.
            fetch, ready = fetch._replace(devices=()), 0
        return self.inputs.distribute(dataset, ready, fetch)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any],
                                           options: Any) -> tf.distribute.DistributedDataset:
        arguments.check_outside("a dataset is distributed to all towers")
        arguments.check_function("dataset_fn", dataset_fn)
        return self.inputs.from_function(dataset_fn, options, self)

    def _make_dataset_iterator(self, dataset: tf.data.Dataset) -> Any:
        return datasets_lib.RestartableIterator(
            self._experimental_distribute_dataset(dataset, None))

    def _make_input_fn_iterator(self, input_fn: Callable[..., Any],
                                replication_mode: Any) -> Any:
        del replication_mode  # make_input_fn_iterator takes one mode only
        return datasets_lib.RestartableIterator(
            self._distribute_datasets_from_function(input_fn, None))

    def _experimental_run_steps_on_iterator(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise NotImplementedError(
            "TowerStrategy has no extended.experimental_run_steps_on_iterator, of tf.distribute's "
            "first API: call strategy.run in a loop, in a tf.function.")

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        arguments.check_outside("values are distributed to all towers")
        arguments.check_function("value_fn", value_fn)
        count, first = self._num_replicas_in_sync, self.first_replica
        values = [value_fn(tf.distribute.experimental.ValueContext(first + tower, count))
                  for tower in range(len(self.worker_devices))]
        arguments.check_structures("value_fn", values)
        grouped = _tf.regroup(values, always_wrap=True)
        # With several machines, no machine knows the rows of the others.
        return grouped if self.workers is not None else splitting.as_sub_batches(grouped)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return self._batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        del options
        if self.workers is not None and not self.modes.one_replica:
            return reductions.reduce_across(self.workers, reduce_op, value_destination_pairs)
        return [reductions.reduce_one(reduce_op, value, destinations, self._num_replicas_in_sync)
                for value, destinations in value_destination_pairs]

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int,
                                  options: Any) -> Any:
        del options
        return reductions.gather(value, destinations, axis, self.workers)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if contexts.has_all_rows():  # tf_keras reads a metric so
            return value
        return super()._replica_ctx_all_reduce(reduce_op, value, options)

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        if isinstance(tensor, (float, int)):
            return tensor
        return reductions.onto(destinations or self.worker_devices, lambda: tf.identity(tensor))

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        parts = var._values if isinstance(var, tower_local.TowerLocalVariable) else (var,)
        select = _tf.select_replica if len(parts) > 1 else reductions.the_one
        results = []
        for number, part in enumerate(parts):
            with tf.device(homes_lib.home_of(part)), _tf.UpdateContext(number), \
                    tf.name_scope(f"update_{number}"):
                results.append(fn(part, *select(number, args), **select(number, kwargs)))
        return _tf.update_regroup(self, results, group)

    def _update_non_slot(self, colocate_with: Any, fn: Callable[..., Any], args: Any, kwargs: Any,
                         group: bool) -> Any:
        device = colocate_with[0] if isinstance(colocate_with, tuple) else colocate_with
        device = device if isinstance(device, str) else homes_lib.home_of(device)
        with tf.device(device), _tf.UpdateContext(0), tf.name_scope("update_0"):
            result = fn(*reductions.the_one(0, args), **reductions.the_one(0, kwargs))
        return _tf.update_regroup(self, [result], group)
