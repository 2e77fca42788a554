"""TensorFlow's own thread of a replica, which takes over what TensorFlow keeps per thread."""

from __future__ import annotations

import contextlib

import tensorflow as tf
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.eager import context as eager_context

# Takes over the default graph, eager mode, variable creators, the summary writer and op callbacks
# from the thread that makes it; runs ``main_fn`` when ``should_run`` is set for the first time.
ReplicaThread = mirrored_run._MirroredReplicaThread


def keep_scopes_per_thread(graph: tf.Graph) -> None:
    """From here on ``graph`` keeps device, name and control scopes per thread."""
    graph.switch_to_thread_local()


def eager_if(eager: bool) -> contextlib.AbstractContextManager[None]:
    """Eager mode where ``eager``, nothing otherwise (``tf.init_scope`` inside a tower)."""
    return eager_context.eager_mode() if eager else contextlib.nullcontext()
