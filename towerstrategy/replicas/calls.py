"""One call per tower.

Goes in: the replica function and its arguments, per-replica values among them.  Comes out: the
function's results, grouped as ``tf.distribute`` groups them.

With one tower the function runs in the calling thread.  With several, eager code runs in
:mod:`threads`; inside a ``tf.function`` :mod:`once` traces tower 0 for all of
them, and hands over to :mod:`threads` where that cannot be right.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.batch import sub_batches
from towerstrategy.merge import results, shares as shares_lib
from towerstrategy.placement import scopes
from towerstrategy.replicas import enclosed, once, threads
from towerstrategy.sharding.replica import NeedsOwnTrace


def call_each(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any,
              kwargs: Any, compiles: bool = False) -> Any:
    """Calls ``fn`` once a tower, on the tower's device, and groups what comes out.

    Each tower gets its own part of per-replica arguments.  A ``fn`` that is a ``tf.function`` is
    entered first and the towers run inside it.  An error has a note that names the tower.

    Args:
      strategy: the strategy, in whose scope the caller is.
      fn: the replica function.
      args: its positional arguments.
      kwargs: its keyword arguments.
      compiles: whether XLA compiles what the towers do between their sync points, as it does for a
        ``fn`` made with ``jit_compile=True``.
    """
    if isinstance(fn, _tf.Function):
        with _with_rows_said(strategy, args, kwargs):
            return _inside_function(strategy, fn)(*args, **kwargs)
    finish = strategy.extended.xla.mark if compiles and not tf.executing_eagerly() else None
    if _tf.is_compiled_here() and not strategy.extended.compiles_whole:
        raise ValueError(_WHOLE)
    if not tf.executing_eagerly():
        fn = _tf.autograph_convert(fn)
    devices = strategy.extended.worker_devices
    with tf.device(strategy.extended.host_device):
        shares = _shares(strategy, args, kwargs)
    if len(devices) == 1 and not strategy.extended.placement.rows:
        return _call_one(strategy, fn, args, kwargs, shares, finish)
    if not tf.executing_eagerly() and strategy.extended.trace_once:
        try:
            # Layers choose kernels by the kind of device that they are traced on.
            if len(strategy.extended.placement.kinds) > 1:
                raise NeedsOwnTrace("the towers are devices of different kinds")
            with strategy.extended.modes.within(compiles=compiles):
                return once.call(strategy, fn, args, kwargs, shares)
        except NeedsOwnTrace as reason:
            strategy.extended.own_trace_reasons.append(str(reason))
    return threads.call(strategy, fn, args, kwargs, shares, finish)


_WHOLE = (
    "strategy.run was called inside of a function made with tf.function(jit_compile=True). XLA "
    "compiles a function for one device, and this strategy's towers and merge device are several, "
    "or not TensorFlow's default device. Give jit_compile=True to the function that strategy.run "
    "is given: what each tower does between two sync points is compiled then.")


@contextlib.contextmanager
def _with_rows_said(strategy: tf.distribute.Strategy, args: Any, kwargs: Any) -> Iterator[None]:
    """Within, an error of a running function says how many rows the tower had that it names.

    Its trace did not know them.  A function of the user's own that calls ``strategy.run`` inside
    fails without a word.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = scopes.TOWER.search(error.message)
        if found is not None and tf.executing_eagerly():
            tower = int(found[1])
            shares = _shares(strategy, args, kwargs)
            _tf.add_note(error, strategy.extended.placement.note(
                tower, shares.in_words(tower)), traced=False)
        raise


def _inside_function(strategy: tf.distribute.Strategy, fn: Any) -> Any:
    """``fn`` as a ``tf.function`` whose body runs the towers; made once a function."""
    wrapped = strategy.extended.functions.get(fn)
    if wrapped is None:
        # Whoever calls it holds fn; a reference from here would keep fn for good.
        reference: Callable[[], Any] = weakref.ref(fn)
        compiles = _tf.is_jit_compiled(fn) and not strategy.extended.compiles_whole

        def run_towers(*args: Any, **kwargs: Any) -> Any:
            return call_each(strategy, reference().python_function, args, kwargs, compiles)

        wrapped = _tf.clone_function(fn, run_towers, not compiles)
        strategy.extended.functions[fn] = wrapped
    return wrapped


def _shares(strategy: tf.distribute.Strategy, args: Any, kwargs: Any) -> shares_lib.Shares:
    """The shares of the batch among the arguments, else of the rows that towers returned before.

    Equal ones where there are none.
    """
    leaves, workers = tf.nest.flatten((args, kwargs)), strategy.extended.workers
    for leaf in leaves:
        if isinstance(leaf, sub_batches.SubBatches):
            return shares_lib.Shares.of_batch(leaf, workers).prepare()
    return results.shares_of(leaves, workers) or strategy.extended.equal_shares()


def _call_one(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any, kwargs: Any,
              shares: shares_lib.Shares, finish: enclosed.Finish | None) -> Any:
    call = _Lone(strategy)
    context = contexts.TowerContext(strategy, 0, shares, call)
    device = strategy.extended.worker_devices[0]
    args, kwargs = _tf.select_replica(0, args), _tf.select_replica(0, kwargs)
    first = strategy.extended.first_replica

    def made() -> Any:
        with context, tf.device(device), _tf.graph_seeded(_tf.graph_seed(), first):
            return fn(*args, **kwargs)

    if strategy.extended.workers is None:
        result = made() if finish is None else enclosed.run(made, finish)
        return _tf.regroup((result,))

    def made_for_others() -> Any:
        return _tf.regroup((made(),), functools.partial(call.result, shares), always_wrap=True)

    if tf.executing_eagerly():
        return made_for_others()
    # In a function of its own, as where a worker has several towers: in a loop TensorFlow numbers
    # what crosses machines in another order inside of a function, and all workers must have one.
    return enclosed.run(made_for_others, finish)


class _Lone(contexts.Call):
    """The call of the only tower of a machine, which knows what it has met the others on."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        self._synced: dict[int, Any] = {}

    def sync(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        answer = super().sync(merge_fn, args, kwargs)
        self._synced.update((id(leaf), leaf) for leaf in tf.nest.flatten(answer))
        return answer

    def result(self, shares: shares_lib.Shares, values: tuple[Any]) -> Any:
        """What the tower returned: its own, unless all machines have met on it."""
        value, = values
        is_tensor = isinstance(value, (tf.Tensor, _tf.CompositeTensor))
        is_own = is_tensor and id(value) not in self._synced
        return results.TowerResults(values, shares) if is_own else value
