"""Elements' parts brought to the towers' own memory before the step asks for them.

Goes in: a pipeline of split elements, and the towers' devices.  Comes out: a
:class:`PrefetchedIterator`.  TensorFlow's multi-device iterator holds a buffer on each device and
fills it beside the step.  It takes one dataset and hands its elements to the devices in turn.  So
each becomes R + 1: what stays on the host (row counts, strings, int32, ragged components), then
each tower's; a :class:`Layout` says how it comes apart and together.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import iterators, rows as rows_lib
from towerstrategy.batch.rows import Nest

_OUT_OF_STEP = (
    "the input pipeline, or a step that took a batch from it, has failed before, and since then "
    "what was prefetched does not belong together. Make a new iterator. To go on behind an error "
    "with the same one, drop bad elements in the pipeline (dataset.ignore_errors()), or distribute "
    "the dataset with tf.distribute.InputOptions(experimental_fetch_to_device=False).")
# The owner of what belongs to no tower.
HOST = -1


class Fetch(NamedTuple):
    """Where the parts of elements are to be."""

    devices: tuple[str, ...] = ()  # the towers'; none where all stays on the host
    host: str = ""  # the CPU that feeds them
    ready: int = 1  # elements that each device holds; with 0 none is fetched ahead of the step

    @property
    def is_safe(self) -> bool:
        """Whether the iterators made here can end."""
        # Those of a graph end in TensorFlow's threads: each holds one until what it fetches has
        # come, which takes a thread, too.  Where all are held, nothing goes on.
        return tf.executing_eagerly() or threads() >= 2 * (1 + len(self.devices))


def threads() -> int:
    """How many operations TensorFlow runs side by side."""
    asked = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    return (tf.config.threading.get_inter_op_parallelism_threads()
            or (int(asked) if asked.isdigit() else 0) or len(os.sched_getaffinity(0)))


class Layout:
    """Which of an element's tensors belongs to which tower, and which stays on the host.

    ``owners`` are, for each tensor of an element, the number of a tower or :data:`HOST`.
    """

    def __init__(self, spec: Nest, owners: Sequence[int]) -> None:
        self.spec, self.owners = spec, tuple(owners)
        self._tensors = tf.nest.flatten(spec, expand_composites=True)
        self._places = [[place for place, owner in enumerate(owners) if owner == number]
                        for number in range(HOST, max(owners, default=HOST) + 1)]

    @property
    def moves(self) -> bool:
        """Whether anything is to be fetched; what holds no plain tensors cannot be."""
        return len(self._places) > 1 and all(
            isinstance(spec, tf.TensorSpec) and spec.dtype not in (tf.variant, tf.resource)
            for spec in self._tensors)

    def apart(self, element: Nest, counts: tuple[Any, ...] = ()) -> list[tuple[Any, Any]]:
        """R + 1 elements of one kind for one: the host's, with ``counts``, then each tower's.

        Of each, what belongs to the others has no rows.
        """
        tensors = _tensors(element)
        own = [tuple(tensors[place] for place in places) for places in self._places]
        no_host, no_tower = (tuple(rows_lib.no_rows(self._tensors[place]) for place in places)
                             for places in self._places[:2])
        return [(own[0] + counts, no_tower), *((no_host + counts, part) for part in own[1:])]

    def in_parts(self, dataset: tf.data.Dataset,
                 rows_of: Callable[[Nest], Any] | None = None) -> tf.data.Dataset:
        """``dataset`` with each element taken apart, and with its ``rows_of``, if any.

        The parts have different numbers of rows, so they go through ``unbatch`` in optionals: a
        dataset of its own for each element, which ``flat_map`` takes, costs milliseconds.
        """
        kinds: list[Any] = []

        def wrapped(*element: Any) -> tf.Tensor:
            rows = None if rows_of is None else rows_of(element)
            parts = [tf.nest.flatten(part)
                     for part in self.apart(element, () if rows is None else (rows,))]
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

    def counted(self, dataset: tf.data.Dataset,
                follow: iterators.Follow) -> tuple[tf.data.Dataset, Any]:
        """The host's elements, followed by ``follow`` when they are taken; and its count."""
        own = len(self._places[0])
        if len(dataset.element_spec[0]) == own:
            return dataset, None
        return follow(dataset, lambda element: element[0][own])

    def element(self, parts: Sequence[tuple[Any, Any]]) -> Nest:
        """The element again, from what the host and each tower took."""
        host, _ = parts[0]
        tensors: list[Any] = [None] * len(self._tensors)
        for places, own in zip(self._places, [host, *(part for _, part in parts[1:])]):
            for place, tensor in zip(places, own):
                tensor.set_shape(self._tensors[place].shape)
                tensors[place] = tensor
        return tf.nest.pack_sequence_as(self.spec, tensors, expand_composites=True)


def _tensors(element: Nest) -> list[Any]:
    """All tensors of ``element``; components that are None have none."""
    return [leaf for leaf in tf.nest.flatten(element, expand_composites=True) if leaf is not None]


def owners_of(spec: Any, towers: int, counts: bool = True) -> list[int]:
    """Who has each tensor of a component, the towers' row counts left out where not ``counts``."""
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
    """Whether a component goes to a tower's own memory: strings cannot, ragged operations have CPU
    kernels alone, and most GPU kernels take int32 from the host's memory, so that what was brought
    to a GPU goes down again.
    """
    return isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec)) \
        and spec.dtype not in (tf.string, tf.int32)


class PrefetchedSpec(tf.TypeSpec):
    value_type = property(lambda _: PrefetchedIterator)

    def __init__(self, spec: Nest, owners: tuple[int, ...], streams: Any, once: bool,
                 agreement: Any) -> None:
        self._layout, self._streams = Layout(spec, owners), streams
        self._once, self._agreement = once, agreement

    def _serialize(self) -> tuple[Any, ...]:
        return (self._layout.spec, self._layout.owners, self._streams, self._once,
                self._agreement)

    _component_specs = property(lambda self: [self._streams, tf.TensorSpec([], tf.resource)])

    def _to_components(self, value: PrefetchedIterator) -> list[Any]:
        return [value._streams, value._under_way]

    def _from_components(self, components: Sequence[Any]) -> PrefetchedIterator:
        streams, under_way = components
        iterator = PrefetchedIterator(self._layout, lambda: (streams, under_way, None))
        iterator.agreement, iterator._once = self._agreement, self._once
        return iterator


class PrefetchedIterator(iterators.Steps, _tf.CompositeTensor, tf.distribute.DistributedIterator):
    """Iterates over split elements of which each tower's part is on its device already.

    Where one stream fails, TensorFlow cancels what waits at the others, and from then on each of
    these says that its data has ended, or gives parts of the batch before.  So a variable on the
    host is true while an element is being taken: one that failed leaves it so.

    ``make`` makes the streams, the handle of that variable, and what counts rows or None.
    """

    _once = False
    # TensorFlow takes long to make the streams, and Keras makes more iterators than it reads.
    _streams = property(lambda self: self._made[0])
    _under_way = property(lambda self: self._made[1])
    row_count = property(lambda self: self._made[2])
    _host = property(lambda self: self._streams._devices[0])
    spec = property(lambda self: self._layout.spec)

    def __init__(self, layout: Layout, make: Callable[[], tuple[Any, Any, Any]]) -> None:
        self._layout, self._make = layout, make

    @functools.cached_property
    def _made(self) -> tuple[Any, Any, Any]:
        return self._make()

    def __iter__(self) -> PrefetchedIterator:
        return self

    def take(self) -> Nest:
        if tf.executing_eagerly():
            return self._layout.element(self._from_all(self._streams.get_next))
        # Only the host's stream is to say that the data has ended.
        there, optional = self._from_first(self._of_host)
        with tf.device(self._host):
            host = tf.cond(there, optional.get_value,
                           self._streams._device_iterators[0].get_next)  # which raises then
        return self._layout.element(self._with_others(host))

    def _of_host(self) -> tuple[Any, ...]:
        optional = self._streams._device_iterators[0].get_next_as_optional()
        return optional.has_value(), optional

    def _from_all(self, take: Callable[[], list[Any]]) -> list[Any]:
        """What ``take`` takes from all streams; ``tf.errors.OpError`` where a call has failed."""
        if not tf.executing_eagerly():
            taken = self._begun(take)
            with tf.control_dependencies(tf.nest.flatten(taken, expand_composites=True)):
                self._say(False)
            return taken
        if bool(self._is_under_way()):
            raise tf.errors.DataLossError(None, None, _OUT_OF_STEP)
        try:
            return take()
        except tf.errors.OutOfRangeError:
            raise
        except BaseException:
            self._say(True)
            raise

    def _from_first(self, take: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """What ``take`` takes from the host's stream, in a graph: whether it goes on, and more."""
        # Where it has ended, so have the others then: one that went on would hold a thread.
        with tf.device(self._host):
            there, *held = self._begun(take)
            with tf.control_dependencies(tf.nest.flatten(held, expand_composites=True)):
                said = self._say(there)
            with tf.control_dependencies([said]):
                ended = tf.cond(there, lambda: True, self._others_ended)
            with tf.control_dependencies([ended]):
                return tf.identity(there), *held

    def _begun(self, take: Callable[[], Any]) -> Any:
        """What ``take`` takes, in a graph, where no element is being taken; and then one is."""
        with tf.device(self._host):
            fits = tf.debugging.Assert(tf.logical_not(self._is_under_way()), [_OUT_OF_STEP])
        with tf.control_dependencies([fits]):
            begun = self._say(True)
        with tf.control_dependencies([begun]):
            return take()

    def _say(self, under_way: Any) -> Any:
        """Whether an element is being taken, from now on."""
        with tf.device(self._host):
            return tf.raw_ops.AssignVariableOp(resource=self._under_way,
                                               value=tf.convert_to_tensor(under_way))

    def _is_under_way(self) -> tf.Tensor:
        with tf.device(self._host):
            return tf.raw_ops.ReadVariableOp(resource=self._under_way, dtype=tf.bool)

    def _with_others(self, host: Any) -> list[Any]:
        """``host``, what that stream had, and what the towers' have: ends what has been begun."""
        with tf.control_dependencies(tf.nest.flatten(host)):
            taken = self._of_others(lambda other: other.get_next())
        with tf.control_dependencies(tf.nest.flatten(taken)):
            self._say(False)
        return [host, *taken]

    def _of_others(self, take: Callable[[Any], Any]) -> list[Any]:
        """What ``take`` takes of each tower's stream, on its device."""
        taken = []
        for device, other in zip(self._streams._devices[1:], self._streams._device_iterators[1:]):
            with tf.device(device):
                taken.append(take(other))
        return taken

    def _others_ended(self) -> tf.Tensor:
        """True, after the towers' streams have ended."""
        ends = self._of_others(lambda other: other.get_next_as_optional())
        with tf.control_dependencies(tf.nest.flatten(ends, expand_composites=True)):
            return tf.identity(True)

    def read_once(self) -> PrefetchedIterator:
        # What the towers have is then taken where it is read, and does not go through the loop.
        self._once = True
        return self

    def copy_read_once(self) -> PrefetchedIterator:
        """The same over the same data, for one loop: this one's optionals stay whole."""
        self._made  # noqa: B018, once for both
        return copy.copy(self).read_once()

    def get_next_as_optional(self) -> tf.experimental.Optional:
        if not self._once:
            return super().get_next_as_optional()
        agreement = self.agreement
        there, *held = self._from_first(self._of_host if agreement is None else (
            lambda: agreement.of_host(self._streams._device_iterators[0].get_next()[0])))
        return iterators.HeldOptional(self.element_spec, there, held, self)

    def _optional(self) -> tf.experimental.Optional:
        parts = self._from_all(self._streams.get_next_as_optional)
        with tf.device(self._host):
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

    @property
    def _type_spec(self) -> PrefetchedSpec:
        return PrefetchedSpec(self._layout.spec, self._layout.owners, self._streams._type_spec,
                              self._once, self.agreement)


# Autograph reads each optional's value once, where there is one.
_tf.loop_over(PrefetchedIterator, PrefetchedIterator.copy_read_once)


def iterate(dataset: tf.data.Dataset, layout: Layout, fetch: Fetch,
            follow: iterators.Follow | None, rows_of: Callable[[Nest], Any]) -> PrefetchedIterator:
    """An iterator over ``dataset`` whose parts are on ``fetch.devices``.

    What ``follow`` counts has been taken, not read ahead; ``rows_of`` gives an element's rows.
    """
    eager = tf.executing_eagerly()

    def make() -> tuple[Any, Any, Any]:
        with tf.init_scope() if eager else contextlib.nullcontext(), tf.device(fetch.host):
            parts = layout.in_parts(dataset, None if follow is None else rows_of)
            streams = _tf.over_devices(parts, (fetch.host, *fetch.devices), fetch.ready)
            under_way = _tf.anonymous_variable(tf.bool, tf.TensorShape([]))
            tf.raw_ops.AssignVariableOp(resource=under_way, value=tf.constant(False))
            if follow is None:
                return streams, under_way, None
            first, *others = streams._device_iterators
            taken, count = layout.counted(first._dataset, follow)
            streams._device_iterators = [iter(taken), *others]
            return streams, under_way, count

    iterator = PrefetchedIterator(layout, make)
    if not eager:
        iterator._made  # noqa: B018, in a loop's body it would be made anew in each turn
    return iterator
