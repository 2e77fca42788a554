"""What TensorFlow keeps per thread, handed from one thread to another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.ops import (
    summary_ops_v2,
    variable_scope,
)


class ThreadState:
    """What a tower's thread takes over from the thread that starts it.

    TensorFlow keeps the default graph, eager mode, the variable creators, the summary writer and
    the op callbacks per thread (``tensorflow/python/framework/ops.py``,
    ``eager/context.py``, ``ops/summary_ops_v2.py``).  Make it in the starting thread, then
    ``with state.entered(scope):`` in the tower's.

    Attributes:
      eager: whether the towers run eagerly.
      graph: where they run (the eager one outside functions).
      name_scope: of the starting thread, without a trailing slash.
    """

    def __init__(self) -> None:
        self.eager = tf.executing_eagerly()
        if not self.eager:
            # From here on the graph keeps device, name and control scopes per thread.
            tf.compat.v1.get_default_graph().switch_to_thread_local()
        eager_context.ensure_initialized()
        self.graph = tf.compat.v1.get_default_graph()
        with tf.init_scope():
            self._init_eager = tf.executing_eagerly()
            self._init_graph = tf.compat.v1.get_default_graph()
        self._creators = self.graph._variable_creator_stack[:]
        self._variable_scope = variable_scope.get_variable_scope()
        self.name_scope = self.graph.get_name_scope()
        self._op_callbacks = eager_context.context()._thread_local_data.op_callbacks
        summary = summary_ops_v2._summary_state
        self._summary = {
            name: getattr(summary, name)
            for name in ("step", "writer", "is_recording", "is_recording_distribution_strategy")
        }
        self._filters_tracebacks = tf.debugging.is_traceback_filtering_enabled()

    @contextlib.contextmanager
    def entered(self, reuse: bool) -> Iterator[None]:
        """Takes the state over; ``reuse`` is the v1 variable scope's."""
        for name, value in self._summary.items():
            setattr(summary_ops_v2._summary_state, name, value)
        eager_context.context()._thread_local_data.op_callbacks = self._op_callbacks
        if self._filters_tracebacks:
            tf.debugging.enable_traceback_filtering()
        else:
            tf.debugging.disable_traceback_filtering()
        with self._init_graph.as_default(), eager_if(self._init_eager), \
                self.graph.as_default(), eager_if(self.eager), \
                variable_scope.variable_scope(self._variable_scope, reuse=reuse):
            self.graph._variable_creator_stack = list(self._creators)
            yield


def eager_if(eager: bool) -> contextlib.AbstractContextManager[None]:
    """Eager mode where ``eager``, nothing otherwise (``tf.init_scope`` inside a tower)."""
    return eager_context.eager_mode() if eager else contextlib.nullcontext()
