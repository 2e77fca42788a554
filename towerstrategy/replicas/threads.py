"""Trace every tower: a thread a tower, in turn.

Goes in: the replica function and each tower's arguments.  Comes out: its results, grouped.  Each
tower has a thread for as long as the call lasts, and only one of them runs at a time; the threads
exist because a Python function can only be paused in the middle, at a ``merge_call``, by pausing
its thread. Eager code always runs this way; functions do where :mod:`once` cannot copy tower 0's
trace.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.merge import results, shares as shares_lib
from towerstrategy.placement import scopes
from towerstrategy.replicas import enclosed, notes
from towerstrategy.variables import alone


def call(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any, kwargs: Any,
         shares: shares_lib.Shares, finish: enclosed.Finish | None = None) -> Any:
    """Calls ``fn`` on every tower, see :func:`calls.call_each`."""

    def made() -> Any:
        return _Call(strategy, fn, args, kwargs, shares).run()

    # A gradient tape of this thread sees nothing of what the towers' threads do.
    if tf.executing_eagerly():
        return _refusing_gradients(strategy, made()) if _tf.may_be_recorded() else made()
    if finish or _tf.may_be_recorded() or strategy.extended.workers is not None:
        return enclosed.run(made, finish)[0]
    return made()


_OUTSIDE_GRADIENT = (
    "a gradient is asked for through strategy.run, whose towers ran eagerly, each in a thread that "
    "a gradient tape outside of it does not see. Put the GradientTape into the function given to "
    "strategy.run, or call strategy.run, and the tape, in a tf.function.")


def _refusing_gradients(strategy: tf.distribute.Strategy, result: Any) -> Any:
    """``result``, with an error in place of None for whoever asks for its gradient."""
    sources = [variable.value() for variable in strategy.extended.variables() if variable.trainable]

    @tf.custom_gradient
    def through(value: tf.Tensor, *sources: tf.Tensor) -> Any:
        del sources

        def gradient(*_: tf.Tensor) -> Any:
            raise RuntimeError(_OUTSIDE_GRADIENT)

        return tf.identity(value), gradient

    def refusing(leaf: Any) -> Any:
        if isinstance(leaf, results.TowerResults):
            return results.TowerResults([refusing(value) for value in leaf.values], leaf.shares)
        floats = isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_complex)
        return through(leaf, *sources) if floats else leaf

    return tf.nest.map_structure(refusing, result)


class _Stop(BaseException):
    """Ends a tower's thread after another tower has failed, or the caller was interrupted.

    Not an ``Exception``, so that the user's own handlers do not take it for one of theirs.
    """


class _Call(contexts.Call):
    """One call of the replica function on all towers."""

    def __init__(self, strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any,
                 kwargs: Any, shares: shares_lib.Shares) -> None:
        super().__init__(strategy)
        self._shares = shares
        self._graph_seed = _tf.graph_seed()
        self._operation_seeds = _tf.OperationSeeds(tf.compat.v1.get_default_graph())
        state = self._state = _tf.ThreadState()
        self._merge_scope = f"{state.name_scope}/merge/" if state.name_scope else "merge/"
        self._turns = alone.Turns(strategy.extended.written_alone)
        self._written: list[alone.Written] = []
        self._operations: list[set[str]] = [
            set() for _ in strategy.extended.worker_devices]  # names, by tower
        self._placers = [] if state.eager else [
            strategy.extended.stages.placer(state.graph, tower)
            for tower in range(len(strategy.extended.worker_devices))]
        self._made_for_all: dict[str, Any] = {}
        made: dict[str, list[tf.Variable]] = {}
        towers = [contexts.TowerContext(strategy, tower, shares, self)
                  for tower in range(len(strategy.extended.worker_devices))]
        self._towers = [
            _TowerThread(tower, state, made, fn, _tf.select_replica(number, args),
                         _tf.select_replica(number, kwargs))
            for number, tower in enumerate(towers)]

    def run(self) -> Any:
        try:
            while not self._advance():
                with _tf.noting(notes.of_merge(self._strategy.extended.merge_device)):
                    self._merge_written()
                    self._merge()
            self._merge_written()
        finally:
            for tower in self._towers:
                tower.stop()
        values = tuple(tower.result for tower in self._towers)
        if not self._state.eager:
            stages = self._strategy.extended.stages
            stages.put_in_order(self._state.graph, self._operations, values)
        return _tf.regroup(values, functools.partial(results.TowerResults, shares=self._shares))

    def sync(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``merge_call`` from the thread of a tower."""
        thread = threading.current_thread()
        if not isinstance(thread, _TowerThread):
            raise RuntimeError("`merge_call` was called in a thread other than its tower's.")
        return thread.pause(_SyncPoint(merge_fn, args, kwargs))

    def for_all(self, tower: int, key: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gives when the first tower asks; a tower asks once for a ``key``."""
        del tower
        if key not in self._made_for_all:
            root = contextlib.nullcontext() if self._state.eager \
                else self._state.graph.as_default()
            with root, tf.name_scope(self._merge_scope), tf.device(None), \
                    tf.device(self._strategy.extended.host_device):
                self._made_for_all[key] = make()
        return self._made_for_all[key]

    def note_written(self, variable: Any) -> None:
        """A tower writes ``variable`` where the towers cannot sync, or will when it is called."""
        if self._state.eager:
            self._turns.note(variable)

    def _advance(self) -> bool:
        """Runs each tower to its next sync point or its end; True when all have ended."""
        self._written = []
        if self._state.eager:
            self._turns.begin()
        for tower in self._towers:
            replica = self._strategy.extended.first_replica + tower.number
            before = 0 if self._state.eager else len(self._state.graph.get_operations())
            seeds = contextlib.nullcontext() if self._state.eager \
                else self._operation_seeds.of(tower.number)
            with _tf.graph_seeded(self._graph_seed, replica), seeds:
                tower.proceed()
            if tower.error is not None:
                raise tower.error
            self._end_turn(tower.number, before)
        ended = [tower.ended for tower in self._towers]
        if any(ended) and not all(ended):
            at = [tower.number for tower in self._towers if not tower.ended]
            raise RuntimeError(
                "Some replicas made a different number of replica_context().merge_call() calls: "
                f"tower(s) {at} are at a merge_call, the others have returned.")
        return all(ended)

    def _end_turn(self, number: int, before: int) -> None:
        """A tower is at a sync point or its end; its operations begin at number ``before``."""
        if self._state.eager:
            self._turns.end_turn()
            return
        graph = self._state.graph
        own = graph.get_operations()[before:]
        self._placers[number].place(own)
        self._operations[number].update(operation.name for operation in own)
        self._written.append(alone.divert(graph, own, self._strategy.extended.variables()))

    def _merge_written(self) -> None:
        """One value for what the towers have written since they last met."""
        with _tf.not_recorded(), tf.control_dependencies(None):
            if self._state.eager:
                self._turns.merge(self._shares)
            elif any(self._written):
                alone.merge_written(self._shares, self._written, alone.read_temporary)

    def _merge(self) -> None:
        points = [tower.point for tower in self._towers if tower.point is not None]
        first = points[0]
        args = _tf.regroup(tuple(point.args for point in points))
        kwargs = _tf.regroup(tuple(point.kwargs for point in points))
        controls = {id(op): op for point in points for op in point.controls}
        with _tf.eager_if(first.eager), tf.name_scope(self._merge_scope), \
                tf.control_dependencies(list(controls.values())), \
                tf.device(self._strategy.extended.merge_device):
            result = first.merge_fn(self._strategy, *args, **kwargs)
        for tower in self._towers:
            tower.answer = _tf.select_replica(tower.number, result)


class _SyncPoint:
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

    def __init__(self, context: contexts.TowerContext, state: _tf.ThreadState, made: dict[str, Any],
                 fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__(name=f"tower-{context.tower}", daemon=True)
        self._context = context
        self._state = state
        self._creator = _tf.shared_variable_creator_for(made, context.tower)
        self._fn: Any = fn
        self._args, self._kwargs = args, kwargs
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._running = False
        self._stopping = False
        self.number = context.tower
        self.point: _SyncPoint | None = None
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False

    def proceed(self) -> None:
        """Lets the tower run to a sync point or its end (called by the caller's thread)."""
        if self.ident is None:
            self.start()
        self._running = True
        self._go.release()
        # Again and again: a Ctrl-C that comes just before a wait begins is seen at its end only.
        while not self._paused.acquire(timeout=.5):
            pass

    def pause(self, point: _SyncPoint) -> Any:
        """Waits for the others (called by the tower's thread)."""
        self.point = point
        self._running = False
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
        if self._running:  # Ctrl-C: the caller did not wait for the end of this tower's turn
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident),
                                                       ctypes.py_object(_Stop))
        self._go.release()
        self.join()

    def run(self) -> None:
        self._go.acquire()
        try:
            if not self._stopping:
                self._call()
        except _Stop:
            pass
        except BaseException as error:  # handed to the caller's thread
            placement = self._context.strategy.extended.placement
            note = notes.of_tower(self.number, placement, self._context.shares)
            _tf.add_note(error, note, not self._state.eager)
            self.error = error
        finally:
            self.ended = True
            self._fn = self._args = self._kwargs = None
            self._running = False
            self._paused.release()

    def _call(self) -> None:
        scope = self._scope()
        with self._state.entered(reuse=self.number > 0), self._context, \
                tf.device(self._context.device), tf.name_scope(scope), \
                _tf.variable_creator_scope(self._creator):
            self.result = self._fn(*self._args, **self._kwargs)

    def _scope(self) -> str:
        outer = f"{self._state.name_scope}/" if self._state.name_scope else ""
        return f"{outer}{scopes.of_tower(self.number, self._context.device)}/"
