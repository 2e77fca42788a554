"""Elements' parts brought to the towers' own memory before the step asks for them.

Goes in: a pipeline of split elements, and the towers' devices.  Comes out: a
:class:`PrefetchedIterator`.  TensorFlow's multi-device iterator holds a buffer on each device and
fills it beside the step; it takes one dataset and deals its elements round in turn.  So each split
element becomes R + 1 of them: what stays on the host (row counts, strings, ragged components), then
each tower's components.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import iterators, taking
from towerstrategy.batch import rows as rows_lib
from towerstrategy.batch.rows import Nest

# The owner of what belongs to no tower.
HOST = -1


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


class Layout:
    """Which of an element's tensors belongs to which tower, and which stays on the host.

    Args:
      spec: the nest of type specs of an element.
      owners: for each tensor of an element, in order, the number of a tower or -1, the host.
    """

    def __init__(self, spec: Nest, owners: Sequence[int]) -> None:
        self.spec, self.owners = spec, tuple(owners)
        self._tensors = tf.nest.flatten(spec, expand_composites=True)
        self._places = [[place for place, owner in enumerate(owners) if owner == number]
                        for number in range(HOST, max(owners, default=HOST) + 1)]

    @classmethod
    def of(cls, spec: Nest, towers: int) -> Layout:
        """The layout of the split elements that ``spec`` describes."""
        return cls(spec, [owner for leaf in tf.nest.flatten(spec)
                          for owner in owners_of(leaf, towers)])

    @property
    def moves(self) -> bool:
        """Whether anything is to be fetched; what holds no plain tensors cannot be."""
        return len(self._places) > 1 and all(
            isinstance(spec, tf.TensorSpec) and spec.dtype not in (tf.variant, tf.resource)
            for spec in self._tensors)

    def apart(self, element: Nest, told: tuple[Any, ...] = ()) -> list[tuple[Any, Any]]:
        """R + 1 elements of one kind for one: the host's, with ``told`` behind, then each tower's.

        Of each, what belongs to the others has no rows.
        """
        tensors = _tensors(element)
        own = [tuple(tensors[place] for place in places) for places in self._places]
        no_host, no_tower = (tuple(rows_lib.rows_of_zeros(self._tensors[place]) for place in places)
                             for places in self._places[:2])
        return [(own[0] + told, no_tower), *((no_host + told, part) for part in own[1:])]

    def deal(self, dataset: tf.data.Dataset,
             rows_of: Callable[[Nest], Any] | None = None) -> tf.data.Dataset:
        """``dataset`` with each element taken apart, and with what ``rows_of`` tells of it, if any.

        The parts have different numbers of rows, so they go through ``unbatch`` in optionals: a
        dataset of its own for each element, which ``flat_map`` takes, costs milliseconds.
        """
        kinds: list[Any] = []

        def wrapped(*element: Any) -> tf.Tensor:
            rows = None if rows_of is None else rows_of(element)
            told = () if rows is None else (rows,)
            parts = [tf.nest.flatten(part) for part in self.apart(element, told)]
            kinds[:] = [tf.nest.map_structure(tf.type_spec_from_value, part) for part in parts]
            return tf.stack([tf.raw_ops.OptionalFromValue(components=part) for part in parts])

        def opened(part: tf.Tensor) -> Any:
            common = [first.most_specific_common_supertype(others)
                      for first, *others in zip(*kinds)]
            tensors = tf.raw_ops.OptionalGetValue(
                optional=part, output_types=[spec.dtype for spec in common],
                output_shapes=[spec.shape for spec in common])
            hosts = len(tensors) - len(self._places[1])
            return tuple(tensors[:hosts]), tuple(tensors[hosts:])

        wrapped_parts = _tf.map_in_place(dataset, wrapped).unbatch()
        return _tf.map_in_place(wrapped_parts, opened)

    def counted(self, dataset: tf.data.Dataset, follow: Callable[..., Any]) -> tuple[Any, Any]:
        """The host's elements, followed by ``follow`` when they are taken; and its count."""
        told = len(self._places[0])
        if len(dataset.element_spec[0]) == told:
            return dataset, None
        return iterators.followed(dataset, lambda host, _: host[told], follow)

    def element(self, dealt: Sequence[tuple[Any, Any]]) -> Nest:
        """The element again, of what the host and each tower took."""
        host, _ = dealt[0]
        tensors: list[Any] = [None] * len(self._tensors)
        for places, own in zip(self._places, [host, *(part for _, part in dealt[1:])]):
            for place, tensor in zip(places, own):
                tensor.set_shape(self._tensors[place].shape)
                tensors[place] = tensor
        return tf.nest.pack_sequence_as(self.spec, tensors, expand_composites=True)

    def copied(self, element: Nest, devices: Sequence[str]) -> Nest:
        """A copy of ``element``, each tensor where it is: the host's on the first device."""
        copies = []
        for tensor, owner in zip(_tensors(element), self.owners):
            with tf.device(devices[owner - HOST]):
                copies.append(tf.identity(tensor))
        return tf.nest.pack_sequence_as(self.spec, copies, expand_composites=True)


def _tensors(element: Nest) -> list[Any]:
    """All tensors of ``element``; components that are None have none."""
    return [leaf for leaf in tf.nest.flatten(element, expand_composites=True) if leaf is not None]


def owners_of(spec: Any, towers: int, counts: bool = True) -> list[int]:
    """Who has each tensor of a component.

    Args:
      spec: the component's.
      towers: how many there are.
      counts: whether the row counts that stand-ins have are among the tensors.
    """
    several = isinstance(spec, _tf.PerReplicaSpec)
    parts = spec._component_specs[:None if counts else towers] if several else [spec]
    owners = []
    for number, part in enumerate(parts):
        # Behind the towers' parts are row counts, which the host reads.
        moves = number < towers and (several or towers == 1) and _moves(part)
        tensors = tf.nest.flatten(part, expand_composites=True)
        owners += [number if moves else HOST] * len(tensors)
    return owners


def _moves(spec: Any) -> bool:
    """Whether a component goes to a tower's own memory.

    Strings cannot; operations on ragged tensors have kernels for the CPU alone; scalars that are no
    part of a batch are the same for all.
    """
    return (isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec)) and spec.dtype != tf.string
            and spec.shape.rank != 0)


class PrefetchedSpec(tf.TypeSpec):
    """The type spec of :class:`PrefetchedIterator`."""

    __slots__ = ["_layout", "_streams", "_once", "_kept_hash"]
    value_type = property(lambda _: PrefetchedIterator)

    def __init__(self, spec: Nest, owners: tuple[int, ...], streams: Any,
                 once: bool = False) -> None:
        self._layout, self._streams, self._once = Layout(spec, owners), streams, once
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

    def __init__(self, layout: Layout, streams: Any = None, under_way: taking.Taking | None = None,
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
        _, *others = self._streams._device_iterators
        taken = []
        with tf.control_dependencies(tf.nest.flatten(host)):
            for device, other in zip(self._streams._devices[1:], others):
                with tf.device(device):
                    taken.append(other.get_next())
        return taken

    def _others_ended(self) -> tf.Tensor:
        """True, behind the ends of the towers' streams, which are done then.

        Made in a graph, a stream that goes waits for what it still prefetches, on a thread of the
        few that this needs.
        """
        _, *others = self._streams._device_iterators
        ends = []
        for device, other in zip(self._streams._devices[1:], others):
            with tf.device(device):
                ends.append(other.get_next_as_optional())
        with tf.control_dependencies(tf.nest.flatten(ends, expand_composites=True)):
            return tf.identity(True)

    def others(self, host: Any) -> list[Any]:
        """The same, which ends what an optional of :meth:`read_once` has begun."""
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

    def get_next_as_optional(self) -> tf.experimental.Optional:
        devices = self._streams._devices
        if not self._once:
            return PartsOptional(self._layout, devices,
                                 self._taking.all_of(self._streams.get_next_as_optional))
        with tf.device(devices[0]):
            there = self._taking.first_of(self._streams._device_iterators[0].get_next_as_optional)
            tf.cond(there.has_value(), lambda: True, self._others_ended)
        return PartsOptional(self._layout, devices, [there], self)

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


# What the towers' parts are yet to be taken from, by id: a spec holds plain values alone.
_later: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class PartsOptionalSpec(tf.TypeSpec):
    """The type spec of :class:`PartsOptional`."""

    __slots__ = ["_layout", "_devices", "_parts", "_later"]
    value_type = property(lambda _: PartsOptional)

    def __init__(self, spec: Nest, owners: tuple[int, ...], devices: tuple[str, ...],
                 parts: tuple[Any, ...], later: int) -> None:
        self._layout, self._devices = Layout(spec, owners), devices
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
                             _later.get(self._later))


class PartsOptional(tf.experimental.Optional):
    """An element that is there or not, its parts where they were prefetched to.

    TensorFlow's optionals hold all tensors of a value on one device.

    Args:
      layout: of the element.
      devices: the host, then each tower's.
      parts: for each of them, what its iterator gave, or for the host alone.
      later: the iterator whose other streams are read when the value is, which is once then.
    """

    def __init__(self, layout: Layout, devices: Sequence[str],
                 parts: list[tf.experimental.Optional], later: Any = None) -> None:
        self._layout, self._devices, self._parts = layout, tuple(devices), parts
        self._later = later
        if later is not None:
            _later[id(later)] = later

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
                                 0 if self._later is None else id(self._later))


def iterate(dataset: tf.data.Dataset, layout: Layout, fetch: Fetch,
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
            streams = _tf.OwnedMultiDeviceIterator(
                dealt, (fetch.host, *fetch.devices), source_device=fetch.host,
                max_buffer_size=max(1, fetch.ready), prefetch_buffer_size=fetch.ready)
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
