"""One call per tower: the replica context, its thread, and ``merge_call``.

Goes in: the replica function and its arguments, per-replica values among them.  Comes out: the
function's results, grouped as ``tf.distribute`` groups them.  Each tower runs in a replica context
that knows its id, its device, its share of the batch and its strategy; where the towers meet
(``merge_call``) the function given there runs once, in cross-replica context, on the merge device.

With one tower nothing is added: the function runs in the calling thread.  With several, each tower
has a thread for as long as the call lasts, and only one of them runs at a time; the threads exist
because a Python function can only be paused in the middle by pausing its thread.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy import devices as devices_lib
from towerstrategy import merge, split

NESTED_MERGE = (
    "`merge_call` called while defining a new graph or a tf.function. This happens if the function "
    "passed to `strategy.run()` contains a nested `@tf.function` or a control flow statement "
    "(tf.cond, tf.while_loop, a converted `if` or `for`) with a synchronization point inside, such "
    "as apply_gradients, all_reduce or a write to a variable with aggregation. The towers cannot "
    "meet there. Move the synchronization point out of the nested function, or put the whole "
    "`strategy.run` inside the tf.function or the control flow.")


# An odd number, so that no two towers get the same multiple of it modulo 2**31.
_SEED_STEP = 0x1E3779B1

OWN_SCOPE = re.compile(r"tower_\d+_[A-Z]+_\d+|merge")


class TowerContext(tf.distribute.ReplicaContext):
    """The replica context of one tower.

    Attributes:
      share: the tower's rows over all rows of the global batch: a float or a scalar float64 tensor.
      shares: the shares of all towers.
    """

    def __init__(self, strategy: tf.distribute.Strategy, tower: int, shares: merge.Shares,
                 call: _Call | None = None) -> None:
        super().__init__(strategy, tower)
        self._tower = tower
        self._call = call
        self.shares = shares
        self.weight: Any = None
        self._graph: tf.Graph | None = None
        self._scaled: dict[int, Any] = {}

    def __enter__(self) -> None:
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        super().__enter__()

    @property
    def tower(self) -> int:
        """This tower's number, a Python int."""
        return self._tower

    @property
    def count(self) -> int:
        """How many towers there are."""
        return len(self._strategy.extended.worker_devices)

    @property
    def share(self) -> Any:
        return self.shares.of(self._tower)

    @contextlib.contextmanager
    def weighted(self, weight: Any) -> Iterator[None]:
        """Within, losses are scaled by ``weight`` (a scalar tensor), not by the share of rows."""
        before, self.weight = self.weight, weight
        try:
            yield
        finally:
            self.weight = before

    def mark_scaled(self, loss: Any) -> Any:
        """Remembers that ``loss`` is this tower's part of the whole batch's loss already."""
        self._scaled[id(loss)] = loss
        return loss

    def is_scaled(self, loss: Any) -> bool:
        """Whether ``loss`` went through :meth:`mark_scaled`."""
        return self._scaled.get(id(loss)) is loss

    def own_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """``seed`` (integers) made this tower's own; tower 0's is what one device would use."""
        if self._tower == 0:
            return seed
        step = tf.constant(self._tower * _SEED_STEP % 2**31, tf.int64)
        return tf.bitwise.bitwise_xor(seed, tf.cast(step, seed.dtype))

    @property
    def device(self) -> str:
        """The full name of this tower's device."""
        return self._strategy.extended.worker_devices[self._tower]

    @property
    def devices(self) -> list[str]:
        return [self.device]

    @property
    def can_merge(self) -> bool:
        """Whether the towers can meet here: not inside a nested function or control flow."""
        if self._graph is None:
            return tf.executing_eagerly()
        return tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self._graph

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """As ``tf.distribute.ReplicaContext.all_reduce``; a stand-in counts for nothing."""
        if self.shares.stand_ins:
            filled = self.shares.filled(self._tower)
            value = tf.nest.map_structure(lambda part: _kept(filled, part), value)
        return super().all_reduce(reduce_op, value, options)

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.can_merge:
            raise RuntimeError(NESTED_MERGE)
        if self._call is not None:
            return self._call.meet(merge_fn, args, kwargs)
        with _tf.cross_replica_context(self._strategy), \
                tf.device(self._strategy.extended.merge_device):
            return merge_fn(self._strategy, *args, **kwargs)


class MergedContext(tf.distribute.ReplicaContext):
    """The replica context of a step whose gradients are merged already.

    Code written for one replica of many runs in it once, as on a single device: an all-reduce has
    nothing left to reduce, and a ``merge_call`` finds the merged values.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, 0)

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _tf.cross_replica_context(self._strategy):
            return merge_fn(self._strategy, *args, **kwargs)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del reduce_op, options
        return value

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        del axis, options
        return value


def _kept(filled: Any, value: Any) -> Any:
    """``value``, or zeros where the tower has no rows."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_kept(filled, value.values), value.indices, value.dense_shape)
    return tf.where(filled, value, tf.zeros_like(value))


class TowerResults(_tf.PerReplica):
    """What the towers returned, with the shares of the batch they returned it for."""

    def __init__(self, values: Any, shares: merge.Shares) -> None:
        super().__init__(values)
        self.shares = shares


def current_tower() -> TowerContext | None:
    """The context of the tower that runs here, or None outside of towers."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, TowerContext) else None


def in_merged_context() -> bool:
    """Whether merged gradients are being applied here."""
    return isinstance(tf.distribute.get_replica_context(), MergedContext)


def all_values(value: Any, count: int) -> list[Any]:
    """One value a tower, from what ``merge_call`` grouped (it groups the same object into one)."""
    if isinstance(value, (_tf.PerReplica, _tf.Mirrored)):
        return list(value.values)
    return [value] * count


def call_each(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any,
              kwargs: Any) -> Any:
    """Calls ``fn`` once a tower, on the tower's device, and groups what comes out.

    Args:
      strategy: the strategy, in whose scope the caller is.
      fn: the replica function; a ``tf.function`` is entered first and the towers run inside it.
      args: positional arguments; each tower gets its own part of per-replica values.
      kwargs: keyword arguments, likewise.

    Returns:
      ``fn``'s result: values that differ between towers as ``PerReplica``, the same object once.

    Raises:
      ValueError: ``fn`` was made with ``jit_compile=True`` and there are several towers.
      Exception: whatever ``fn`` raised, with a note that names the tower and its device.
    """
    if isinstance(fn, _tf.Function):
        return _inside_function(strategy, fn)(*args, **kwargs)
    if not tf.executing_eagerly():
        fn = _tf.autograph_convert(fn)
    devices = strategy.extended.worker_devices
    with tf.device(strategy.extended.host_device):
        shares = _shares(args, kwargs, len(devices))
    if len(devices) == 1:
        return _call_one(strategy, fn, args, kwargs, shares)
    return _Call(strategy, fn, args, kwargs, shares).run()


def _inside_function(strategy: tf.distribute.Strategy, fn: Any) -> Any:
    """``fn`` as a ``tf.function`` whose body runs the towers; made once a function."""
    if _tf.is_jit_compiled(fn) and len(strategy.extended.worker_devices) > 1:
        raise ValueError(
            "the function given to strategy.run was made with tf.function(jit_compile=True), but "
            "XLA compiles a function for one device and cannot hold several towers and their "
            "merge. Leave jit_compile out, or give jit_compile=True to a function of a single "
            "tower's work that is called inside the replica function and does not synchronize.")
    wrapped = strategy.extended.functions.get(fn)
    if wrapped is None:
        def run_towers(*args: Any, **kwargs: Any) -> Any:
            return call_each(strategy, fn.python_function, args, kwargs)

        wrapped = _tf.clone_function(fn, run_towers)
        strategy.extended.functions[fn] = wrapped
    return wrapped


def _shares(args: Any, kwargs: Any, towers: int) -> merge.Shares:
    """The shares of the batch among the arguments; equal ones where there is none."""
    for leaf in tf.nest.flatten((args, kwargs)):
        if isinstance(leaf, split.SubBatches):
            return merge.Shares.of_batch(leaf).prepare()
    return merge.Shares.equal(towers)


def _call_one(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any, kwargs: Any,
              shares: merge.Shares) -> Any:
    context = TowerContext(strategy, 0, shares)
    device = strategy.extended.worker_devices[0]
    args, kwargs = _tf.select_replica(0, args), _tf.select_replica(0, kwargs)
    with context, tf.device(device):
        result = fn(*args, **kwargs)
    return _tf.regroup((result,))


class _Stop(Exception):
    """Ends a tower's thread after another tower has failed."""


class _Call:
    """One call of the replica function on all towers."""

    def __init__(self, strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any,
                 kwargs: Any, shares: merge.Shares) -> None:
        self._strategy = strategy
        self._shares = shares
        state = _tf.ThreadState()
        self._merge_scope = f"{state.name_scope}/merge/" if state.name_scope else "merge/"
        made: dict[str, list[tf.Variable]] = {}
        self._towers = [
            _TowerThread(TowerContext(strategy, tower, shares, self), state, made, fn,
                         _tf.select_replica(tower, args), _tf.select_replica(tower, kwargs))
            for tower in range(len(strategy.extended.worker_devices))]

    def run(self) -> Any:
        try:
            while not self._advance():
                self._merge()
        finally:
            for tower in self._towers:
                tower.stop()
        results = tuple(tower.result for tower in self._towers)
        return _tf.regroup(results, functools.partial(TowerResults, shares=self._shares))

    def meet(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``merge_call`` from the thread of a tower."""
        thread = threading.current_thread()
        if not isinstance(thread, _TowerThread):
            raise RuntimeError("`merge_call` was called in a thread other than its tower's.")
        return thread.pause(_Meeting(merge_fn, args, kwargs))

    def _advance(self) -> bool:
        """Runs each tower to its next meeting or its end; True when all have ended."""
        for tower in self._towers:
            tower.proceed()
            if tower.error is not None:
                raise tower.error
        ended = [tower.ended for tower in self._towers]
        if any(ended) and not all(ended):
            at = [tower.number for tower in self._towers if not tower.ended]
            raise RuntimeError(
                "Some replicas made a different number of replica_context().merge_call() calls: "
                f"tower(s) {at} are at a merge_call, the others have returned.")
        return all(ended)

    def _merge(self) -> None:
        meetings = [tower.meeting for tower in self._towers]
        first = meetings[0]
        args = _tf.regroup(tuple(meeting.args for meeting in meetings))
        kwargs = _tf.regroup(tuple(meeting.kwargs for meeting in meetings))
        controls = {id(op): op for meeting in meetings for op in meeting.controls}
        with _tf.eager_if(first.eager), tf.name_scope(self._merge_scope), \
                tf.control_dependencies(list(controls.values())), \
                tf.device(self._strategy.extended.merge_device):
            result = first.merge_fn(self._strategy, *args, **kwargs)
        for tower in self._towers:
            tower.answer = _tf.select_replica(tower.number, result)


class _Meeting:
    """What a tower brings to a ``merge_call``."""

    def __init__(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        graph = tf.compat.v1.get_default_graph()
        self.merge_fn = merge_fn
        self.args = args
        self.kwargs = kwargs
        self.eager = tf.executing_eagerly()
        self.controls = [] if self.eager else _tf.control_dependencies_of(graph)


class _TowerThread(threading.Thread):
    """Runs one tower, in turn with the others."""

    def __init__(self, context: TowerContext, state: _tf.ThreadState, made: dict[str, Any],
                 fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__(name=f"tower-{context.tower}", daemon=True)
        self._context = context
        self._state = state
        self._creator = _tf.shared_variable_creator_for(made, context.tower)
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._stopping = False
        self.number = context.tower
        self.meeting: _Meeting | None = None
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False

    def proceed(self) -> None:
        """Lets the tower run until it meets the others or ends (called by the caller's thread)."""
        if self.ident is None:
            self.start()
        self._go.release()
        self._paused.acquire()

    def pause(self, meeting: _Meeting) -> Any:
        """Waits for the others (called by the tower's thread)."""
        self.meeting = meeting
        self._paused.release()
        self._go.acquire()
        if self._stopping:
            raise _Stop()
        return self.answer

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        if self.ident is None:
            return
        self._stopping = True
        self._go.release()
        self.join()

    def run(self) -> None:
        self._go.acquire()
        try:
            if not self._stopping:
                self._call()
        except _Stop:
            pass
        except BaseException as error:  # (handed to the caller's thread)
            error.add_note(f"This happened in {self._label()}.")
            self.error = error
        finally:
            self.ended = True
            self._fn = self._args = self._kwargs = None
            self._paused.release()

    def _call(self) -> None:
        with self._state.entered(reuse=self.number > 0), self._context, \
                tf.device(self._context.device), tf.name_scope(self._scope()), \
                _tf.variable_creator_scope(self._creator):
            self.result = self._fn(*self._args, **self._kwargs)

    def _scope(self) -> str:
        outer = f"{self._state.name_scope}/" if self._state.name_scope else ""
        return f"{outer}{scope_name(self.number, self._context.device)}/"

    def _label(self) -> str:
        return f"tower {self.number} on {devices_lib.short_name(self._context.device)}"


def scope_name(tower: int, device: str) -> str:
    """The name scope of a tower's operations, so that TensorFlow's errors name tower and device."""
    return f"tower_{tower}_{devices_lib.short_name(device).replace(':', '_')}"
