"""Elements' parts brought to the towers' own memory before the step asks for them.

Goes in: a pipeline of split elements, and the towers' devices.  Comes out: a
:class:`PrefetchedIterator`.  TensorFlow's multi-device iterator holds a buffer on each device and
fills it beside the step.
"""
from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import iterators, layouts, taking
from towerstrategy.batch.rows import Nest


class Fetch(NamedTuple):
    """Where the parts of elements are to be.

    Attributes:
      devices: the towers'; empty where all stays on the host.
      host: the CPU that feeds them.
      ready: how many elements each device holds ready; with 0 none is fetched ahead of the step.
    """

    devices: tuple[str, ...] = ()
    host: str = ""
    ready: int = 1

    @property
    def is_safe(self) -> bool:
        """Whether what is made here can be done away with.

        The iterators of a graph end in TensorFlow's threads: each holds one until what it fetches
        has come, which takes a thread, too. Where all are held, nothing goes on for ever. Python
        ends the others, in its own thread.
        """
        return tf.executing_eagerly() or threads() >= 2 * (1 + len(self.devices))


def threads() -> int:
    """How many operations TensorFlow runs side by side."""
    asked = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (tf.config.threading.get_inter_op_parallelism_threads()
            or (int(asked) if asked.isdigit() else 0) or cores or 1)


class PrefetchedSpec(tf.TypeSpec):
    """The type spec of :class:`PrefetchedIterator`."""

    __slots__ = ["_layout", "_streams", "_once", "_kept_hash"]
    value_type = property(lambda _: PrefetchedIterator)

    def __init__(self, spec: Nest, owners: tuple[int, ...], streams: Any,
                 once: bool = False) -> None:
        self._layout, self._streams, self._once = layouts.Layout(spec, owners), streams, once
        self._kept_hash: int | None = None

    def _serialize(self) -> tuple[Any, ...]:
        return self._layout.spec, self._layout.owners, self._streams, self._once

    def __hash__(self) -> int:
        # Each call of a tf.function hashes its arguments' specs some times over.
        if self._kept_hash is None:
            self._kept_hash = super().__hash__()
        return self._kept_hash

    __eq__ = tf.TypeSpec.__eq__

    @property
    def _component_specs(self) -> list[Any]:
        return [self._streams, tf.TensorSpec([], tf.resource)]

    def _to_components(self, value: PrefetchedIterator) -> list[Any]:
        return [value._streams, value._taking.handle]

    def _from_components(self, components: Sequence[Any]) -> PrefetchedIterator:
        streams, handle = components
        under_way = taking.Taking(handle, streams._devices[0])
        iterator = PrefetchedIterator(self._layout, streams, under_way)
        return iterator.read_once() if self._once else iterator


class PrefetchedIterator(_tf.CompositeTensor, _tf.Trackable, tf.distribute.DistributedIterator):
    """Iterates over split elements of which each tower's part is on its device already.

    Attributes:
      row_count: what counts the rows, see :func:`iterators.count_rows`; None where nothing does.
    """

    _open_rows = False
    _between: Callable[[], None] | None = None
    _steps_in_graph = 0
    _kept_spec: PrefetchedSpec | None = None
    _once = False

    def __init__(self, layout: layouts.Layout, streams: Any = None,
                 under_way: taking.Taking | None = None,
                 make: Callable[[], tuple[Any, Any, Any]] | None = None) -> None:
        self._layout, self._made, self._make = layout, (streams, under_way, None), make

    @property
    def _streams(self) -> Any:
        return self._begun()[0]

    @property
    def _taking(self) -> taking.Taking:
        return self._begun()[1]

    @property
    def row_count(self) -> Any:
        return self._begun()[2]

    def _begun(self) -> tuple[Any, Any, Any]:
        # TensorFlow takes long to make one, and Keras makes more of them than it reads.
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made

    def __iter__(self) -> PrefetchedIterator:
        return self

    def get_next(self) -> Nest:
        return iterators.handed(self, self._layout.element(self._dealt()))

    def _dealt(self) -> list[Any]:
        """What each stream has next."""
        eager = tf.executing_eagerly()
        return self._taking.all_of(self._streams.get_next if eager else self._host_first)

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
                dealt = [tf.cond(there, optional.get_value, ended)]
        return [*dealt, *self._from_others(dealt[0])]

    def _from_others(self, host: Any) -> list[Any]:
        """What the towers' streams have next, behind what the host's had."""
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
        """True, behind the ends of the towers' streams, which are done then.

        Made in a graph, a stream that goes waits for what it still prefetches, on a thread of the
        few that this needs.
        """
        ends = self._of_others(lambda other: other.get_next_as_optional())
        with tf.control_dependencies(tf.nest.flatten(ends, expand_composites=True)):
            return tf.identity(True)

    def others(self, host: Any) -> list[Any]:
        """What they have next, which ends what an optional of :meth:`read_once` has begun."""
        taken = self._from_others(host)
        with tf.control_dependencies(tf.nest.flatten(taken)):
            self._taking.say(False)
        return taken

    def __next__(self) -> Nest:
        return iterators.next_in_python(self)

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
        devices = self._streams._devices
        if not self._once:
            return PartsOptional(self._layout, devices,
                                 self._taking.all_of(self._streams.get_next_as_optional))
        there = self._from_first(self._streams._device_iterators[0].get_next_as_optional,
                                 lambda optional: optional.has_value())
        return PartsOptional(self._layout, devices, [there], self)

    def _from_first(self, take: Callable[[], Any], goes_on: Callable[[Any], tf.Tensor]) -> Any:
        """What ``take`` takes from the host's stream; the others end where it does not go on."""
        with tf.device(self._streams._devices[0]):
            taken = self._taking.first_of(take, goes_on)
            tf.cond(goes_on(taken), lambda: True, self._others_ended)
        return taken

    @property
    def element_spec(self) -> Nest:
        return self._layout.spec

    @property
    def _type_spec(self) -> PrefetchedSpec:
        if self._kept_spec is None:
            self._kept_spec = PrefetchedSpec(self._layout.spec, self._layout.owners,
                                             self._streams._type_spec, self._once)
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

# What the towers' parts are yet to be taken from, by id: a spec holds plain values alone.
_later: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number_of(iterator: Any) -> int:
    """By what number a spec names the iterator whose other streams are read later; 0 for None."""
    if iterator is None:
        return 0
    _later[id(iterator)] = iterator
    return id(iterator)


def numbered(number: int) -> Any:
    """The iterator of that :func:`number_of`."""
    return _later.get(number)


class PartsOptionalSpec(tf.TypeSpec):
    """The type spec of :class:`PartsOptional`."""

    __slots__ = ["_layout", "_devices", "_parts", "_later"]
    value_type = property(lambda _: PartsOptional)

    def __init__(self, spec: Nest, owners: tuple[int, ...], devices: tuple[str, ...],
                 parts: tuple[Any, ...], later: int) -> None:
        self._layout, self._devices = layouts.Layout(spec, owners), devices
        self._parts, self._later = parts, later

    def _serialize(self) -> tuple[Any, ...]:
        return self._layout.spec, self._layout.owners, self._devices, self._parts, self._later

    @property
    def _component_specs(self) -> list[Any]:
        return list(self._parts)

    def _to_components(self, value: PartsOptional) -> list[Any]:
        return value._parts

    def _from_components(self, components: Sequence[Any]) -> PartsOptional:
        return PartsOptional(self._layout, self._devices, list(components),
                             numbered(self._later))


class PartsOptional(tf.experimental.Optional):
    """An element that is there or not, its parts where they were prefetched to.

    TensorFlow's optionals hold all tensors of a value on one device.

    Args:
      layout: of the element.
      devices: the host, then each tower's.
      parts: for each of them, what its iterator gave, or for the host alone.
      later: the iterator whose other streams are read when the value is, which is once then.
    """

    def __init__(self, layout: layouts.Layout, devices: Sequence[str],
                 parts: list[tf.experimental.Optional], later: Any = None) -> None:
        self._layout, self._devices, self._parts = layout, tuple(devices), parts
        self._later = later

    def has_value(self, name: str | None = None) -> tf.Tensor:
        with tf.device(self._devices[0]):
            return self._parts[0].has_value(name)

    def get_value(self, name: str | None = None) -> Nest:
        dealt = []
        for part, device in zip(self._parts, self._devices):
            with tf.device(device):
                dealt.append(part.get_value(name))
        if self._later is not None:
            dealt += self._later.others(dealt[0])
        return self._layout.element(dealt)

    @property
    def element_spec(self) -> Nest:
        return self._layout.spec

    @property
    def _type_spec(self) -> PartsOptionalSpec:
        return PartsOptionalSpec(self._layout.spec, self._layout.owners, self._devices,
                                 tuple(part._type_spec for part in self._parts),
                                 number_of(self._later))


def iterate(dataset: tf.data.Dataset, layout: layouts.Layout, fetch: Fetch,
            follow: Callable[..., Any] | None = None,
            rows_of: Callable[[Nest], Any] | None = None) -> PrefetchedIterator:
    """An iterator over ``dataset`` whose parts are on ``fetch.devices``.

    What ``follow`` counts (:func:`iterators.count_rows`) has been taken, not read ahead;
    ``rows_of`` tells the rows of each tower in an element.
    """

    eager = tf.executing_eagerly()

    def make() -> tuple[Any, Any, Any]:
        with tf.init_scope() if eager else contextlib.nullcontext(), tf.device(fetch.host):
            dealt = layout.deal(dataset, None if follow is None else rows_of)
            streams = _tf.over_devices(dealt, (fetch.host, *fetch.devices), fetch.ready)
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
