"""Calls a replica function on each tower.

Goes in: the replica function and its arguments, per-replica values among them.  Comes out: the
function's results, grouped as ``tf.distribute`` groups them.

With one tower the function runs in the calling thread.  With several towers, eager code runs in
:mod:`threads`.  In a ``tf.function`` :mod:`once` traces tower 0 for all towers, or :mod:`threads`
traces each tower if one trace cannot serve all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.batch import sub_batches
from towerstrategy.merge import results, shares as shares_lib
from towerstrategy.placement import scopes
from towerstrategy.replicas import once, threads
from towerstrategy.sharding.replica_plans import NeedsOwnTrace


def call_each(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any,
              kwargs: Any, compiles: bool = False) -> Any:
    """Calls ``fn`` on each tower's device, in the strategy's scope, and groups the results.

    Each tower gets its part of per-replica arguments.  If ``fn`` is a ``tf.function``, one such
    function runs all towers inside.  An error gets a note that names the tower.  ``compiles``:
    whether XLA compiles the towers' ops between their sync points (``jit_compile=True``).
    """
    if isinstance(fn, _tf.Function):
        with _noting_rows(strategy, args, kwargs):
            return _inside_function(strategy, fn)(*args, **kwargs)
    if _tf.is_compiled_here() and not strategy.extended.compiles_whole:
        raise ValueError(_WHOLE)
    if not tf.executing_eagerly():
        fn = _tf.autograph_convert(fn)
    devices = strategy.extended.worker_devices
    with tf.device(strategy.extended.host_device):
        shares = _shares(strategy, args, kwargs)
    if len(devices) == 1 and not strategy.extended.placement.rows:
        return _call_one(strategy, fn, args, kwargs, shares, compiles)
    if not tf.executing_eagerly() and strategy.extended.trace_once:
        try:
            # Layers choose ops by the kind of device that they are traced on.
            if len(strategy.extended.placement.kinds) > 1:
                raise NeedsOwnTrace("the towers are devices of different kinds")
            with strategy.extended.modes.within(compiles=compiles):
                return _in_function(
                    strategy, lambda: once.call(strategy, fn, args, kwargs, shares))
        except NeedsOwnTrace as reason:
            strategy.extended.own_trace_reasons.append(str(reason))
    return _in_function(
        strategy, lambda: threads.call(strategy, fn, args, kwargs, shares), compiles)


_WHOLE = (
    "strategy.run was called inside of a function made with tf.function(jit_compile=True). XLA "
    "compiles a function for one device, but this strategy has several devices, or another one "
    "than TensorFlow's default. Set jit_compile=True on the function given to strategy.run "
    "instead: then XLA compiles what each tower does between two sync points.")


@contextlib.contextmanager
def _noting_rows(strategy: tf.distribute.Strategy, args: Any, kwargs: Any) -> Iterator[None]:
    """In this context, an error of a function that runs gets a note with the tower's rows.

    The trace did not know how many rows there are.  If a function of the user's own calls
    ``strategy.run`` inside, there is no such note.
    """
    try:
        yield
    except tf.errors.OpError as error:
        scope = scopes.TOWER.search(error.message)
        if scope is not None and tf.executing_eagerly():
            tower = int(scope[1])
            shares = _shares(strategy, args, kwargs)
            _tf.add_note(error, strategy.extended.placement.note(
                tower, shares.in_words(tower)), traced=False)
        raise


def _inside_function(strategy: tf.distribute.Strategy, fn: Any) -> Any:
    """A ``tf.function`` like ``fn`` whose body runs the towers; it is made once for each ``fn``."""
    wrapped = strategy.extended.functions.get(fn)
    if wrapped is None:
        # A weak reference, as a strong one would keep fn alive; the caller holds fn.
        reference: Callable[[], Any] = weakref.ref(fn)
        compiles = _tf.is_jit_compiled(fn) and not strategy.extended.compiles_whole

        def run_towers(*args: Any, **kwargs: Any) -> Any:
            return call_each(strategy, reference().python_function, args, kwargs, compiles)

        wrapped = _tf.clone_function(fn, run_towers, not compiles)
        strategy.extended.functions[fn] = wrapped
    return wrapped


def _shares(strategy: tf.distribute.Strategy, args: Any, kwargs: Any) -> shares_lib.Shares:
    """The shares of the batch in the arguments, or of results of an earlier run, or equal ones."""
    leaves, workers = tf.nest.flatten((args, kwargs)), strategy.extended.workers
    for leaf in leaves:
        if isinstance(leaf, sub_batches.SubBatches):
            return shares_lib.Shares.of_batch(leaf, workers)
    return results.shares_of(leaves, workers) or strategy.extended.equal_shares()


def _call_one(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any, kwargs: Any,
              shares: shares_lib.Shares, compiles: bool) -> Any:
    """Calls ``fn`` on this machine's only tower."""
    call = _SingleTowerCall(strategy, shares)
    device = strategy.extended.worker_devices[0]
    args, kwargs = _tf.select_replica(0, args), _tf.select_replica(0, kwargs)
    first = strategy.extended.first_replica

    def run() -> Any:
        with contexts.TowerContext(call, 0), tf.device(device), _tf.graph_seeded(first):
            result = fn(*args, **kwargs)
        return _tf.regroup((result,), call.result,
                           always_wrap=strategy.extended.workers is not None)

    return _in_function(strategy, run, compiles) if compiles else run()


def _in_function(strategy: tf.distribute.Strategy, make: Callable[[], Any],
                 compiles: bool = False) -> Any:
    """What ``make`` returns, traced into a function body where one is needed; XLA may compile it.

    So a trace that is given up leaves no ops behind, and a gradient tape around the call records
    one op, whatever threads the towers are traced in.
    """
    if tf.executing_eagerly() or not (compiles or _tf.may_be_recorded()):
        return make()
    returned: list[Any] = []

    @tf.function(autograph=False)
    def run_towers() -> list[tf.Tensor]:
        _tf.call_once()
        with _tf.as_in_caller():
            returned.append(make())
        if compiles:
            strategy.extended.xla.mark(tf.compat.v1.get_default_graph())
        return results.tensors_in(returned[0])

    outputs = list(run_towers())
    call = outputs[0].op if outputs else None
    outer = dict(zip(map(id, results.tensors_in(returned[0])), outputs))
    return results.map_tensors(lambda leaf: call if isinstance(leaf, tf.Operation)
                               else outer.get(id(leaf), leaf), returned[0])


class _SingleTowerCall(contexts.Call):
    """The call of a machine's only tower, which records the results of its sync points."""

    def __init__(self, strategy: tf.distribute.Strategy, shares: shares_lib.Shares) -> None:
        super().__init__(strategy, shares)
        self._synced: dict[int, Any] = {}

    def sync(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = super().sync(merge_fn, args, kwargs)
        self._synced.update((id(leaf), leaf) for leaf in tf.nest.flatten(result))
        return result

    def result(self, values: tuple[Any]) -> Any:
        """The tower's value as a per-replica value, unless a sync point made it on all machines."""
        value, = values
        is_tensor = isinstance(value, (tf.Tensor, _tf.CompositeTensor))
        is_own = is_tensor and id(value) not in self._synced
        return results.TowerResults(values, self.shares) if is_own else value
