"""Elements' parts brought to the towers' own memory before the step asks for them.

Goes in: a pipeline of split elements, and the towers' devices.  Comes out: a
:class:`PrefetchedIterator`.  TensorFlow's multi-device iterator holds a buffer on each device and
fills it beside the step.
"""
from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import iterators, layouts, sub_batches, taking
from towerstrategy.batch.rows import Nest


class Fetch(NamedTuple):
    """Where the parts of elements are to be.

    Attributes:
      devices: the towers'; empty where all stays on the host.
      host: the CPU that feeds them.
      ready: how many elements each device holds; with 0 none is fetched ahead of the step.
    """

    devices: tuple[str, ...] = ()
    host: str = ""
    ready: int = 1

    @property
    def is_safe(self) -> bool:
        """Whether the iterators made here can end.

        Those of a graph end in TensorFlow's threads: each holds one until what it fetches has come,
        which takes a thread, too.  Where all are held, nothing goes on.
        """
        return tf.executing_eagerly() or threads() >= 2 * (1 + len(self.devices))


def threads() -> int:
    """How many operations TensorFlow runs side by side."""
    asked = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (tf.config.threading.get_inter_op_parallelism_threads()
            or (int(asked) if asked.isdigit() else 0) or cores or 1)


class PrefetchedSpec(sub_batches.HashedOnce, tf.TypeSpec):
    """The type spec of :class:`PrefetchedIterator`."""

    value_type = property(lambda _: PrefetchedIterator)

    def __init__(self, spec: Nest, owners: tuple[int, ...], streams: Any, once: bool,
                 agreement: Any) -> None:
        self._layout, self._streams = layouts.Layout(spec, owners), streams
        self._once, self._agreement = once, agreement

    def _serialize(self) -> tuple[Any, ...]:
        return (self._layout.spec, self._layout.owners, self._streams, self._once,
                self._agreement)

    _component_specs = property(lambda self: [self._streams, tf.TensorSpec([], tf.resource)])

    def _to_components(self, value: PrefetchedIterator) -> list[Any]:
        return [value._streams, value._taking.handle]

    def _from_components(self, components: Sequence[Any]) -> PrefetchedIterator:
        streams, handle = components
        under_way = taking.Taking(handle, streams._devices[0])
        iterator = PrefetchedIterator(self._layout, streams, under_way)
        iterator.agreement, iterator._once = self._agreement, self._once
        return iterator


class PrefetchedIterator(iterators.Steps, _tf.CompositeTensor, _tf.Trackable,
                         tf.distribute.DistributedIterator):
    """Iterates over split elements of which each tower's part is on its device already.

    Attributes:
      row_count: what counts the rows, see :func:`iterators.count_rows`; None where nothing does.
    """

    _once = False
    _kept_spec: PrefetchedSpec | None = None
    # TensorFlow takes long to make the streams, and Keras makes more iterators than it reads.
    _streams = property(lambda self: self._begun()[0])
    _taking = property(lambda self: self._begun()[1])
    row_count = property(lambda self: self._begun()[2])
    spec = property(lambda self: self._layout.spec)

    def __init__(self, layout: layouts.Layout, streams: Any = None,
                 under_way: taking.Taking | None = None,
                 make: Callable[[], tuple[Any, Any, Any]] | None = None) -> None:
        self._layout, self._made, self._make = layout, (streams, under_way, None), make

    def _begun(self) -> tuple[Any, Any, Any]:
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made

    def __iter__(self) -> PrefetchedIterator:
        return self

    def take(self) -> Nest:
        eager = tf.executing_eagerly()
        return self._layout.element(
            self._taking.all_of(self._streams.get_next if eager else self._host_first))

    def copied(self, values: Any) -> Any:
        return self._layout.copied(values, self._streams._devices)

    def _host_first(self) -> list[Any]:
        """The same in a graph, where only the host's stream is to say that the data has ended."""
        first = self._streams._device_iterators[0]
        with tf.device(self._streams._devices[0]):
            optional = first.get_next_as_optional()
            there = optional.has_value()

            def ended() -> Any:
                with tf.control_dependencies([self._others_ended()]):
                    return first.get_next()  # raises the error that says so

            with tf.control_dependencies([self._taking.say(there)]):
                host = tf.cond(there, optional.get_value, ended)
        return [host, *self._from_others(host)]

    def _from_others(self, host: Any) -> list[Any]:
        """What the towers' streams have next, after what the host's had."""
        with tf.control_dependencies(tf.nest.flatten(host)):
            return self._of_others(lambda other: other.get_next())

    def _of_others(self, take: Callable[[Any], Any]) -> list[Any]:
        """What ``take`` takes of each tower's stream, on its device."""
        taken = []
        for device, other in zip(self._streams._devices[1:], self._streams._device_iterators[1:]):
            with tf.device(device):
                taken.append(take(other))
        return taken

    def _others_ended(self) -> tf.Tensor:
        """True, after the towers' streams have ended: one that went on would hold a thread."""
        ends = self._of_others(lambda other: other.get_next_as_optional())
        with tf.control_dependencies(tf.nest.flatten(ends, expand_composites=True)):
            return tf.identity(True)

    def read_once(self) -> PrefetchedIterator:
        """This iterator, for a loop that reads each optional's value once if it has one.

        What the towers have is then taken where it is read, and does not go through the loop.
        """
        self._once, self._kept_spec = True, None
        return self

    def copy_read_once(self) -> PrefetchedIterator:
        """The same over the same data, for one loop: this one's optionals stay whole."""
        self._begun()
        return copy.copy(self).read_once()

    def get_next_as_optional(self) -> tf.experimental.Optional:
        if not self._once:
            return super().get_next_as_optional()
        first = self._streams._device_iterators[0]

        def take() -> tuple[Any, ...]:
            if self.agreement is not None:
                return self.agreement.of_host(first.get_next()[0])
            optional = first.get_next_as_optional()
            return optional.has_value(), optional

        with tf.device(self._streams._devices[0]):
            there, *held = self._taking.first_of(take)
            tf.cond(there, lambda: True, self._others_ended)
        return iterators.HeldOptional(self.element_spec, there, held, self)

    def _optional(self) -> tf.experimental.Optional:
        parts = self._taking.all_of(self._streams.get_next_as_optional)
        with tf.device(self._streams._devices[0]):
            there = parts[0].has_value()
        return iterators.HeldOptional(self.spec, there, parts, self)

    def opened(self, held: Any) -> Nest:
        """The element of which an optional has held these parts."""
        if not self._once:
            parts = []
            for optional, device in zip(held, self._streams._devices):
                with tf.device(device):
                    parts.append(optional.get_value())
            return self._layout.element(parts)
        if self.agreement is None:
            optional, = held
            return self._layout.element(self._with_others(optional.get_value()))
        rows, host = held
        return self.agreement.element(self._layout.element(self._with_others((host, ()))), rows)

    def _with_others(self, host: Any) -> list[Any]:
        """``host``, what that stream had, and what the towers' have: ends what has been begun."""
        taken = self._from_others(host)
        with tf.control_dependencies(tf.nest.flatten(taken)):
            self._taking.say(False)
        return [host, *taken]

    @property
    def _type_spec(self) -> PrefetchedSpec:
        if self._kept_spec is None:
            self._kept_spec = PrefetchedSpec(
                self._layout.spec, self._layout.owners, self._streams._type_spec, self._once,
                self.agreement)
        return self._kept_spec

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        raise NotImplementedError(
            "an iterator that prefetches to devices cannot be saved in a checkpoint, nor restored, "
            "because TensorFlow's multi-device iterator cannot. Distribute the dataset with "
            "tf.distribute.InputOptions(experimental_fetch_to_device=False): that iterator can.")

    def _restore_from_tensors(self, restored: Any) -> None:
        del restored
        self._serialize_to_tensors()


# Autograph reads each optional's value once, where there is one.
_tf.loop_over(PrefetchedIterator, PrefetchedIterator.copy_read_once)

def iterate(dataset: tf.data.Dataset, layout: layouts.Layout, fetch: Fetch,
            follow: iterators.Follow | None = None,
            rows_of: Callable[[Nest], Any] | None = None) -> PrefetchedIterator:
    """An iterator over ``dataset`` whose parts are on ``fetch.devices``.

    What ``follow`` counts (:func:`iterators.count_rows`) has been taken, not read ahead;
    ``rows_of`` gives the rows of each tower in an element.
    """
    eager = tf.executing_eagerly()

    def make() -> tuple[Any, Any, Any]:
        with tf.init_scope() if eager else contextlib.nullcontext(), tf.device(fetch.host):
            parts = layout.in_parts(dataset, None if follow is None else rows_of)
            streams = _tf.over_devices(parts, (fetch.host, *fetch.devices), fetch.ready)
            under_way = taking.Taking.made(fetch.host)
            if follow is None:
                return streams, under_way, None
            first, *others = streams._device_iterators
            taken, count = layout.counted(first._dataset, follow)
            streams._device_iterators = [iter(taken), *others]
            return streams, under_way, count

    iterator = PrefetchedIterator(layout, make=make)
    if not eager:
        # First read in a loop's body, it would be made anew in each turn.
        iterator._begun()
    return iterator
