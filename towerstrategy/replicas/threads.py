"""Runs, or traces, the towers in turn, each in a thread of its own.

Goes in: the replica function and its arguments.  Comes out: its results, grouped.  The only way to
pause a Python function in the middle, at a ``merge_call``, is to pause its thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.merge import results, shares as shares_lib
from towerstrategy.placement import scopes
from towerstrategy.variables import alone


def call(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any, kwargs: Any,
         shares: shares_lib.Shares) -> Any:
    """Calls ``fn`` on every tower, see :func:`calls.call_each`."""
    result = _Call(strategy, fn, args, kwargs, shares).run()
    # A gradient tape of this thread does not record the ops of the towers' threads.
    if not tf.executing_eagerly() or not _tf.may_be_recorded():
        return result
    weights = [each.value() for each in strategy.extended.variables() if each.trainable]
    return results.with_refused_gradients(result, RuntimeError(_OUTSIDE_GRADIENT), weights)


_OUTSIDE_GRADIENT = (
    "cannot take a gradient through strategy.run: the towers ran eagerly, each in a thread of its "
    "own, whose operations a gradient tape outside does not record. Put the GradientTape into the "
    "function given to strategy.run, or call strategy.run and the tape in a tf.function.")


class _Stop(SystemExit):
    """Ends a tower's thread after another tower has failed, or after Ctrl-C."""


class _Call(contexts.Call):
    """One call of the replica function on all towers."""

    def __init__(self, strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any,
                 kwargs: Any, shares: shares_lib.Shares) -> None:
        super().__init__(strategy, shares)
        self._eager = tf.executing_eagerly()
        self._graph: Any = tf.compat.v1.get_default_graph()
        if not self._eager:
            self._graph.switch_to_thread_local()
        outer = self._graph.get_name_scope()
        self._scope = f"{outer}/" if outer else ""
        self._turns = alone.Turns(strategy.extended.variables)
        self._written: list[alone.Written] = []
        devices = strategy.extended.worker_devices
        self._operations: list[set[str]] = [set() for _ in devices]  # names, for each tower
        self._stages: dict[str, int] = {}  # of operations, by name
        shared: dict[str, list[tf.Variable]] = {}  # what tower 0 creates, the others get
        self._towers = [_Tower(
            contexts.TowerContext(self, number), f"{self._scope}{scopes.of_tower(number, device)}/",
            _tf.shared_variable_creator_for(shared, number), fn, _tf.select_replica(number, args),
            _tf.select_replica(number, kwargs)) for number, device in enumerate(devices)]

    def run(self) -> Any:
        done = False
        try:
            while not done:
                done = self._advance()
                try:
                    # Merges what the towers have written to variables since their last sync point.
                    with _tf.not_recorded(), tf.control_dependencies(None):
                        alone.merge_written(self.shares, self._written)
                    if not done:
                        self._merge()
                except Exception as error:
                    _tf.add_note(error, self._strategy.extended.placement.merge_note,
                                 traced=not self._eager)
                    raise
        finally:
            for tower in self._towers:
                tower.stop()
        values = tuple(tower.main_result for tower in self._towers)
        if not self._eager:
            stages = self._strategy.extended.stages
            stages.put_in_order(self._graph, self._operations, values)
        return _tf.regroup(values, functools.partial(results.TowerResults, shares=self.shares))

    def sync(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``merge_call``, called in a tower's thread."""
        thread = threading.current_thread()
        if not isinstance(thread, _Tower):
            raise RuntimeError("`merge_call` was called in a thread other than its tower's.")
        return thread.pause(merge_fn, args, kwargs)

    def note_written(self, variable: Any) -> None:
        super().note_written(variable)
        if self._eager:
            self._turns.note(variable)

    def _advance(self) -> bool:
        """Runs each tower to its next sync point or its end; True if all have ended."""
        self._written = []
        if self._eager:
            self._turns.begin()
        for number, tower in enumerate(self._towers):
            start = 0 if self._eager else len(self._graph.get_operations())
            with _tf.graph_seeded(tower.replica_id_in_sync_group):
                tower.proceed()
            if tower.error is not None:
                raise tower.error
            self._end_turn(number, start)
        waiting = [number for number, tower in enumerate(self._towers) if not tower.done]
        if waiting and len(waiting) < len(self._towers):
            raise RuntimeError(
                "Some replicas made a different number of replica_context().merge_call() calls: "
                f"tower(s) {waiting} are at a merge_call, the others have returned.")
        return not waiting

    def _end_turn(self, number: int, start: int) -> None:
        """Handles the operations of a tower's turn, in the graph from number ``start`` on."""
        if self._eager:
            self._written.append(self._turns.end_turn())
            return
        operations = self._graph.get_operations()[start:]
        extended = self._strategy.extended
        extended.stages.place(number, operations, self._stages)
        self._operations[number].update(operation.name for operation in operations)
        self._written.append(alone.divert(self._graph, operations, extended.variables()))

    def _merge(self) -> None:
        """Runs the function given to ``merge_call``, and hands its result to each tower."""
        first = self._towers[0]
        args = _tf.regroup(tuple(tower.merge_args for tower in self._towers))
        kwargs = _tf.regroup(tuple(tower.merge_kwargs for tower in self._towers))
        controls = {id(op): op for tower in self._towers for op in tower.captured_control_deps}
        with _tf.eager_if(first.merge_call_entered_in_eager), \
                tf.name_scope(f"{self._scope}merge/"), \
                tf.control_dependencies(list(controls.values())), \
                tf.device(self._strategy.extended.merge_device):
            result = first.merge_fn(self._strategy, *args, **kwargs)
        for number, tower in enumerate(self._towers):
            tower.merge_result = _tf.select_replica(number, result)


class _Tower(_tf.ReplicaThread):
    """Runs one tower, in turn with the others; ``error`` is what its function has raised."""

    def __init__(self, context: contexts.TowerContext, scope: str, creator: Callable[..., Any],
                 fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        filters = tf.debugging.is_traceback_filtering_enabled()
        super().__init__(context.strategy, tf.train.Coordinator(), context.tower,
                         context.strategy.extended.worker_devices, creator,
                         functools.partial(self._in_tower, fn), None, args, kwargs,
                         () if filters else (tf.debugging.disable_traceback_filtering,))
        self.name, self.daemon = f"tower-{context.tower}", True
        self._context, self._scope, self._running = context, scope, False
        self.error: BaseException | None = None

    def proceed(self) -> None:
        """Lets the tower run to its next sync point or its end (called in the caller's thread)."""
        if self.ident is None:
            self.start()
        self._running = True
        self.should_run.set()
        # Short waits: a Ctrl-C that comes just before a wait is handled only when the wait ends.
        while not self.has_paused.wait(.5):
            pass
        self.has_paused.clear()

    def pause(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Waits at a ``merge_call`` for the other towers (called in the tower's thread)."""
        self.merge_fn, self.merge_args, self.merge_kwargs = merge_fn, args, kwargs
        self.merge_call_entered_in_eager = tf.executing_eagerly()
        self.captured_control_deps = [] if tf.executing_eagerly() else \
            _tf.control_dependencies_of(self.graph)
        self._running = False
        self.has_paused.set()
        self.should_run.wait()
        self.should_run.clear()
        if self.coord.should_stop():
            raise _Stop()
        return self.merge_result

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        if self.ident is None:
            return
        self.coord.request_stop()
        if self._running:  # Ctrl-C has ended the caller's wait for this tower's turn
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident),
                                                       ctypes.py_object(_Stop))
        self.should_run.set()
        self.join()

    def run(self) -> None:
        try:
            super().run()
        finally:  # main_fn refers to the thread, and this circle would keep the batch
            self.main_fn = self.main_args = self.main_kwargs = None

    def _in_tower(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with self._context, tf.name_scope(self._scope):
                return fn(*args, **kwargs)
        except _Stop:
            return None
        except BaseException as error:  # handed to the caller's thread
            note = self._context.strategy.extended.placement.note(
                self.replica_id, self._context.shares.in_words(self.replica_id))
            _tf.add_note(error, note, not self.in_eager)
            self.error = error
            return None
        finally:
            self._running = False
