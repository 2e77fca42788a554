"""Prefetching: the towers' parts of elements go to the towers' memory ahead of the step.

Goes in: a dataset of split elements, and the towers' devices.  Comes out: a
:class:`PrefetchedIterator`.  TensorFlow's multi-device iterator fills a buffer on each device while
steps run; it deals the elements of one dataset to the devices in turn.  So a :class:`Layout` makes
R + 1 elements of each split element: the part that stays on the host (row counts, strings, int32,
ragged components), then each tower's part.
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
    "the input pipeline, or a step that took a batch from it, has failed before, so the prefetched "
    "parts may belong to different batches. Make a new iterator. To continue after an error with "
    "the same one, drop bad elements in the pipeline (dataset.ignore_errors()), or distribute the "
    "dataset with tf.distribute.InputOptions(experimental_fetch_to_device=False).")
# In place of a tower's number: the host, which owns the tensors of no tower.
HOST = -1


class Fetch(NamedTuple):
    """Where to prefetch the parts of elements."""

    devices: tuple[str, ...] = ()  # the towers' devices; () if all parts stay on the host
    host: str = ""  # the CPU that runs the input pipeline
    ready: int = 1  # how many elements each device holds; 0: nothing is fetched ahead of the step

    @property
    def is_safe(self) -> bool:
        """Whether iterators made in the current context can end without a deadlock."""
        # An iterator of a graph ends in TensorFlow's threads: each stream blocks a thread until its
        # pending fetch is done, and the fetch needs a thread, too.
        return tf.executing_eagerly() or threads() >= 2 * (1 + len(self.devices))


def threads() -> int:
    """How many operations TensorFlow runs in parallel."""
    setting = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    return (tf.config.threading.get_inter_op_parallelism_threads()
            or (int(setting) if setting.isdigit() else 0) or len(os.sched_getaffinity(0)))


class Layout:
    """Takes elements apart into the host's and the towers' tensors, and puts them together.

    ``owners`` has, for each tensor of an element, the number of its tower or :data:`HOST`.
    """

    def __init__(self, spec: Nest, owners: Sequence[int]) -> None:
        self.spec, self.owners = spec, tuple(owners)
        self._tensors = tf.nest.flatten(spec, expand_composites=True)
        self._indices = [[index for index, owner in enumerate(owners) if owner == number]  # by part
                         for number in range(HOST, max(owners, default=HOST) + 1)]

    @property
    def fetches(self) -> bool:
        """Whether towers own tensors, and all tensors are of kinds that can be fetched."""
        return len(self._indices) > 1 and all(
            isinstance(spec, tf.TensorSpec) and spec.dtype not in (tf.variant, tf.resource)
            for spec in self._tensors)

    def dataset_of_parts(self, dataset: tf.data.Dataset,
                         rows_of: Callable[[Nest], Any] | None = None) -> tf.data.Dataset:
        """A dataset of the R + 1 parts of each element: the host's, then each tower's.

        All have one structure, the host's tensors and a tower's; others' tensors have no rows.
        ``rows_of`` gives the row counts of an element, which the host's tensors then end with.

        The parts have different numbers of rows, so they go through ``unbatch`` as optionals:
        ``flat_map`` would make a dataset for each element, which costs milliseconds.
        """
        specs: list[Any] = []  # of the tensors of each part

        def to_optionals(*element: Any) -> tf.Tensor:
            tensors = iterators.tensors_of(element)
            rows = None if rows_of is None else rows_of(element)
            counts = [] if rows is None else [rows]
            host, *towers = ([tensors[index] for index in indices] for indices in self._indices)
            no_host, no_tower = ([rows_lib.no_rows(self._tensors[index]) for index in indices]
                                 for indices in self._indices[:2])
            parts = [((*host, *counts), (*no_tower,)),
                     *(((*no_host, *counts), (*tower,)) for tower in towers)]
            specs[:] = [tf.nest.map_structure(tf.type_spec_from_value, part) for part in parts]
            return tf.stack(list(map(iterators.as_optional, parts)))

        def from_optional(part: tf.Tensor) -> Any:
            return iterators.value_of(part, tf.nest.map_structure(
                lambda first, *others: first.most_specific_common_supertype(others), *specs))

        return _tf.map_in_place(_tf.map_in_place(dataset, to_optionals).unbatch(), from_optional)

    def rows_of(self, host: tuple[Any, Any]) -> Any:
        """The row counts with which the host's part ends, or None."""
        return next(iter(host[0][len(self._indices[0]):]), None)

    def element(self, parts: Sequence[tuple[Any, Any]]) -> Nest:
        """The element of which the host and the towers have these parts."""
        host, _ = parts[0]
        tensors: list[Any] = [None] * len(self._tensors)
        for indices, owned in zip(self._indices, [host, *(part for _, part in parts[1:])]):
            for index, tensor in zip(indices, owned):
                tensor.set_shape(self._tensors[index].shape)
                tensors[index] = tensor
        return tf.nest.pack_sequence_as(self.spec, tensors, expand_composites=True)


def owners_of(element_spec: Nest, towers: int) -> list[int]:
    """The owner of each tensor of an element."""
    owners = []
    for spec in tf.nest.flatten(element_spec):
        several = isinstance(spec, _tf.PerReplicaSpec)
        for number, part in enumerate(spec._component_specs if several else [spec]):
            # Behind the towers' parts are the row counts, which the host reads.
            fetched = number < towers and (several or towers == 1) and _is_fetched(part)
            tensors = tf.nest.flatten(part, expand_composites=True)
            owners += [number if fetched else HOST] * len(tensors)
    return owners


def _is_fetched(spec: Any) -> bool:
    """Whether a component is fetched.  Strings cannot be; ragged ops have only CPU kernels; and
    most GPU kernels read int32 from the host's memory, so int32 tensors would be copied back.
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
        return [value._streams, value._taking]

    def _from_components(self, components: Sequence[Any]) -> PrefetchedIterator:
        streams, taking = components
        iterator = PrefetchedIterator(self._layout, lambda: (streams, taking, None))
        iterator.agreement, iterator._once = self._agreement, self._once
        return iterator


class PrefetchedIterator(iterators.Steps, _tf.CompositeTensor, tf.distribute.DistributedIterator):
    """Iterates over split elements, from a stream on the host and one on each tower's device.

    If one stream fails, TensorFlow cancels the waiting requests of the others, which then report
    the end of their data or return parts of the batch before.  So a variable on the host is true
    while an element is being taken; after a failure it stays true, and the next step raises.

    ``make`` makes the streams, the handle of that variable, and the ``row_count`` or None.
    """

    _once = False  # whether each optional's value is read just once, see read_once
    # Made when first used: it takes TensorFlow long, and Keras makes more iterators than it reads.
    _streams = property(lambda self: self._made[0])
    _taking = property(lambda self: self._made[1])
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
            return self._layout.element(self._take_from_all(self._streams.get_next))
        # Only the host's stream decides whether the data has ended.
        has_value, optional = self._take_from_host(self._host_optional)
        with tf.device(self._host):
            host = tf.cond(has_value, optional.get_value,
                           self._streams._device_iterators[0].get_next)  # raises at the end
        return self._layout.element(self._with_towers(host))

    def _host_optional(self) -> tuple[Any, ...]:
        optional = self._streams._device_iterators[0].get_next_as_optional()
        return optional.has_value(), optional

    def _take_from_all(self, take: Callable[[], list[Any]]) -> list[Any]:
        """The result of ``take``, called on all streams; raises if an earlier call has failed."""
        try:
            taken = self._begin(take)
        except tf.errors.OutOfRangeError:  # in eager code; the end of the data is no failure
            self._set_taking(False)
            raise
        with tf.control_dependencies(tf.nest.flatten(taken, expand_composites=True)):
            self._set_taking(False)
        return taken

    def _take_from_host(self, take: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """In a graph: whether the host's stream has an element, then ``take``'s other results."""
        # If not, the towers' streams must end, too: a stream that does not end holds a thread.
        with tf.device(self._host):
            has_value, *held = self._begin(take)
            with tf.control_dependencies(tf.nest.flatten(held, expand_composites=True)):
                written = self._set_taking(has_value)
            with tf.control_dependencies([written]):
                ended = tf.cond(has_value, lambda: True, self._end_towers_streams)
            with tf.control_dependencies([ended]):
                return tf.identity(has_value), *held

    def _begin(self, take: Callable[[], Any]) -> Any:
        """Checks that no element is being taken, notes that one is, then calls ``take``."""
        with tf.device(self._host):
            taking = tf.raw_ops.ReadVariableOp(resource=self._taking, dtype=tf.bool)
            check = tf.debugging.Assert(tf.logical_not(taking), [_OUT_OF_STEP])
        with tf.control_dependencies([check]):
            written = self._set_taking(True)
        with tf.control_dependencies([written]):
            return take()

    def _set_taking(self, taking: Any) -> Any:
        """Notes whether an element is being taken from now on."""
        with tf.device(self._host):
            return tf.raw_ops.AssignVariableOp(resource=self._taking,
                                               value=tf.convert_to_tensor(taking))

    def _with_towers(self, host: Any) -> list[Any]:
        """The host's part ``host`` and the towers' parts of this element, which is then taken."""
        with tf.control_dependencies(tf.nest.flatten(host)):
            taken = self._on_towers(lambda stream: stream.get_next())
        with tf.control_dependencies(tf.nest.flatten(taken)):
            self._set_taking(False)
        return [host, *taken]

    def _on_towers(self, take: Callable[[Any], Any]) -> list[Any]:
        """The results of ``take`` for each tower's stream, on the tower's device."""
        taken = []
        for device, stream in zip(self._streams._devices[1:], self._streams._device_iterators[1:]):
            with tf.device(device):
                taken.append(take(stream))
        return taken

    def _end_towers_streams(self) -> tf.Tensor:
        """Reads the end of the towers' streams; returns True."""
        ends = self._on_towers(lambda stream: stream.get_next_as_optional())
        with tf.control_dependencies(tf.nest.flatten(ends, expand_composites=True)):
            return tf.identity(True)

    def read_once(self) -> PrefetchedIterator:
        # Its optionals hold the host's part only; their get_value takes the towers' parts.
        self._made  # noqa: B018, so that both share the streams
        iterator = copy.copy(self)
        iterator._once = True
        return iterator

    def get_next_as_optional(self) -> tf.experimental.Optional:
        if not self._once:
            return super().get_next_as_optional()
        agreement = self.agreement
        has_value, *held = self._take_from_host(self._host_optional if agreement is None else (
            lambda: agreement.of_host(self._streams._device_iterators[0].get_next()[0])))
        return iterators.HeldOptional(self.element_spec, has_value, held, self)

    def _optional(self) -> tf.experimental.Optional:
        parts = self._take_from_all(self._streams.get_next_as_optional)
        with tf.device(self._host):
            has_value = parts[0].has_value()
        return iterators.HeldOptional(self.spec, has_value, parts, self)

    def element_of(self, held: Any) -> Nest:
        """The element of an optional that has ``held`` these parts."""
        if not self._once:
            parts = []
            for optional, device in zip(held, self._streams._devices):
                with tf.device(device):
                    parts.append(optional.get_value())
            return self._layout.element(parts)
        if self.agreement is None:
            optional, = held
            return self._layout.element(self._with_towers(optional.get_value()))
        rows, host = held
        return self.agreement.element(self._layout.element(self._with_towers((host, ()))), rows)

    @property
    def _type_spec(self) -> PrefetchedSpec:
        return PrefetchedSpec(self._layout.spec, self._layout.owners, self._streams._type_spec,
                              self._once, self.agreement)


# Autograph reads the value of each optional that has one just once.
_tf.loop_over(PrefetchedIterator, PrefetchedIterator.read_once)


def iterate(dataset: tf.data.Dataset, layout: Layout, fetch: Fetch,
            follow: iterators.Follow | None, rows_of: Callable[[Nest], Any]) -> PrefetchedIterator:
    """An iterator over ``dataset`` that prefetches the towers' parts to ``fetch.devices``.

    ``follow`` counts an element's ``rows_of`` when it is taken, not when it is prefetched.
    """
    eager = tf.executing_eagerly()

    def make() -> tuple[Any, Any, Any]:
        with tf.init_scope() if eager else contextlib.nullcontext(), tf.device(fetch.host):
            parts = layout.dataset_of_parts(dataset, None if follow is None else rows_of)
            streams = _tf.over_devices(parts, (fetch.host, *fetch.devices), fetch.ready)
            taking = _tf.anonymous_variable(tf.bool, tf.TensorShape([]))
            tf.raw_ops.AssignVariableOp(resource=taking, value=tf.constant(False))
            if follow is None:
                return streams, taking, None
            host, *towers = streams._device_iterators
            counted, row_count = follow(host._dataset, layout.rows_of)
            streams._device_iterators = [iter(counted), *towers]
            return streams, taking, row_count

    iterator = PrefetchedIterator(layout, make)
    if not eager:
        iterator._made  # noqa: B018, now: in a loop's body, each iteration would make the streams
    return iterator
