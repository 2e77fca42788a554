"""Taking an element's parts from several streams, so that they never get out of step.

Goes in: what takes one part from each stream.  Comes out: the parts; after a step that failed
meanwhile an error, however the streams go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf

_OUT_OF_STEP = (
    "the input pipeline, or a step that took a batch from it, has failed before, and since then "
    "what was prefetched does not belong together. Make a new iterator. To go on behind an error "
    "with the same one, drop bad elements in the pipeline (dataset.ignore_errors()), or distribute "
    "the dataset with tf.distribute.InputOptions(experimental_fetch_to_device=False).")


class Taking:
    """Whether an element is being taken: a boolean variable, of this ``handle`` on ``device``.

    Where one stream fails, TensorFlow cancels what waits at the others, and from then on each of
    these says that its data has ended, or gives parts of the batch before.
    """

    def __init__(self, handle: tf.Tensor, device: str) -> None:
        self.handle, self._device = handle, device

    @classmethod
    def made(cls, device: str) -> Taking:
        """A new one."""
        with tf.device(device):
            taking = cls(_tf.anonymous_variable(tf.bool, tf.TensorShape([])), device)
        taking.say(False)
        return taking

    def say(self, under_way: Any) -> Any:
        """Whether one is, from now on."""
        with tf.device(self._device):
            return tf.raw_ops.AssignVariableOp(resource=self.handle,
                                               value=tf.convert_to_tensor(under_way))

    def _is_under_way(self) -> tf.Tensor:
        with tf.device(self._device):
            return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=tf.bool)

    def all_of(self, take: Callable[[], list[Any]]) -> list[Any]:
        """What ``take`` takes from all streams; ``tf.errors.OpError`` where a call has failed."""
        if tf.executing_eagerly():
            return self._in_python(take)
        taken = self._begun(take)
        with tf.control_dependencies(tf.nest.flatten(taken, expand_composites=True)):
            self.say(False)
        return taken

    def first_of(self, take: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """What ``take`` takes from the first stream, in a graph: whether it goes on, and more.

        Where it does, whoever takes from the others says then that the taking has ended.
        """
        taken = self._begun(take)
        with tf.control_dependencies(tf.nest.flatten(taken, expand_composites=True)):
            self.say(taken[0])
        return taken

    def _begun(self, take: Callable[[], Any]) -> Any:
        with tf.device(self._device):
            fits = tf.debugging.Assert(tf.logical_not(self._is_under_way()), [_OUT_OF_STEP])
        with tf.control_dependencies([fits]):
            begun = self.say(True)
        with tf.control_dependencies([begun]):
            return take()

    def _in_python(self, take: Callable[[], list[Any]]) -> list[Any]:
        if bool(self._is_under_way()):
            raise tf.errors.DataLossError(None, None, _OUT_OF_STEP)
        try:
            return take()
        except tf.errors.OutOfRangeError:
            raise
        except BaseException:
            self.say(True)
            raise
