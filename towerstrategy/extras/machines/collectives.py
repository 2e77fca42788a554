"""Collectives over the machines: all-reduce, all-gather, and a broadcast of worker 0's values.

Goes in: a value on each machine, merged over its towers.  Comes out: the same value on all.
TensorFlow's collective ops (RING, NCCL between GPUs) run on the merge devices.  All workers must
call them in the same order, so no code that only some workers run may call them.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib
from towerstrategy.extras.machines import clusters
from towerstrategy.placement import devices as devices_lib, homes as homes_lib
from towerstrategy.sharding import traffic

# Seconds for all workers to start, if communication_options sets no timeout.
START = 600.

# The dtypes of TensorFlow's collective ops; other numbers are cast to one of these.
_WIRE_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)
_UNSUPPORTED = (tf.string, tf.variant, tf.resource)

_EXTREMES = {"max": tf.reduce_max, "min": tf.reduce_min, "and": tf.reduce_all,
             "or": tf.reduce_any}

# A tensor of at least so many bytes crosses alone; smaller ones are packed up to as many bytes.
LARGE = 2**22
MADE: list[Machines] = []  # all in this process; type specs of iterators hold an index into it


class Machines:
    """The collectives of one strategy's workers, which run on the merge device.

    Attributes:
      number: the index of this object in :data:`MADE`.
      count: how many workers there are.
      index: this worker's number.
      is_chief: whether this is worker 0, which gives the initial values and writes files.
      towers: how many towers this worker has.
      towers_of: how many towers each worker has.
      first: the number of this worker's first tower among the towers of all workers.
      here: the positions of this worker's towers among them.
      replicas: how many towers all workers have.
      rows: a guess of a batch's number of rows; 0 if some worker has micro-batches.
      units: the shares of all towers; None if all are equal.

    Raises:
      ValueError: workers have shares of different kinds, or different clusters.
      RuntimeError: not all workers have started in time.
    """

    def __init__(self, cluster: clusters.Cluster, placement: devices_lib.Placement,
                 options: Any = None) -> None:
        self.cluster, self.number = cluster, len(MADE)
        MADE.append(self)
        self.count, self.index = len(cluster.tasks), cluster.index
        self.is_chief = self.index == 0
        self.towers, self._device = len(placement.towers), placement.merge
        self._launcher = _tf.CollectiveLauncher(self._device, self.count, options)
        gathered = self._start(options, placement)
        # TensorFlow gathers in an order of its own; these are the positions of the workers' parts.
        self._order = sorted(range(self.count), key=lambda position: gathered[position][0])
        _, self.towers_of, rows, digests = map(list, zip(*sorted(gathered)))
        self._check_same_arguments(digests, placement.shares_from)
        self.first = sum(self.towers_of[:self.index])
        self.here = slice(self.first, self.first + self.towers)
        self.replicas = sum(self.towers_of)
        self.rows = min(rows) * self.replicas
        shares = tf.constant(placement.shares or (1.,) * self.towers, tf.float64)
        self.units = rows_lib.units_of(self.gather_rows([shares])[0].numpy().tolist())
        self._agree_on_seed()

    def _start(self, options: Any, placement: devices_lib.Placement) -> list[list[int]]:
        """Waits for all workers.

        Returns:
          Each worker's index, towers, a tower's rows, and the digest of its arguments.
        """
        digest = zlib.crc32(repr((self.cluster.tasks, placement.shares_from)).encode())
        local = tf.constant([[self.index, self.towers, traffic.rows_of_tower(placement), digest]],
                            tf.int64)
        seconds = getattr(options, "timeout_seconds", None) or START
        try:
            gathered = self._launcher.all_gather(local, _tf.Options(timeout_seconds=seconds))
        except tf.errors.OpError as error:
            silent = clusters.silent(self.cluster, {})
            late = isinstance(error, tf.errors.DeadlineExceededError)
            raise RuntimeError(
                f"the {self.count} workers {self.cluster.addresses} could not start together"
                + f": not all had come after {seconds:g} s" * late
                + (f"; no answer from {', '.join(silent)}" if silent else "; all of them answer")
                + ". All must be given the same cluster, and reach each other. Give them more "
                "time with communication_options=tf.distribute.experimental.CommunicationOptions("
                f"timeout_seconds=...). ({type(error).__name__}: {error.message})") from error
        clusters.watch(self.cluster)
        return gathered.numpy().tolist()

    def _check_same_arguments(self, digests: list[int], shares_from: str) -> None:
        others = [self.cluster.name_of(index) for index, digest in enumerate(digests)
                  if digest != digests[self.index]]
        if others:
            raise ValueError(
                "all workers must be given the same cluster, written alike, and shares of one "
                "kind, as they are compared over the towers of all, but "
                f"{', '.join(others)} was given others than this one, which was given "
                f"{self.cluster.addresses} and shares={shares_from or 'numbers or nothing'}.")

    def _agree_on_seed(self) -> None:
        """Sets worker 0's random seed on all workers, unless all have set the same seed."""
        # If workers take their rows of every batch, all pipelines, also Keras', must shuffle alike.
        seed = _tf.global_seed()
        local = random.getrandbits(31) if seed is None else seed % 2**31
        chiefs = int(self.chiefs([tf.constant(local, tf.int64)])[0])
        differing = self.sum([tf.constant(int(seed is None or local != chiefs))])[0]
        if int(differing):
            tf.random.set_seed(chiefs)
            random.seed(chiefs)  # by which Keras shuffles the batches of a Sequence or PyDataset

    def sum(self, values: Sequence[Any]) -> list[Any]:
        """The sums of ``values`` over the workers: an all-reduce for each pack of small tensors.

        A pack has one dtype and up to 4 MiB; a large tensor crosses alone.  Gradients are in the
        order of their layers, so the last are ready first.  So the packs are filled from the end,
        and each waits for its own values and later ones, not for earlier ones.

        ``tf.IndexedSlices`` of all workers are concatenated; their number may differ between
        workers.  None stays None; it must be None on every worker.
        """
        results = list(values)
        slices = {position: value for position, value in enumerate(values)
                  if isinstance(value, tf.IndexedSlices)}
        dense = {position: tf.convert_to_tensor(value) for position, value in enumerate(values)
                 if value is not None and position not in slices}
        for tensor in dense.values():
            if tensor.dtype == tf.bool or tensor.dtype in _UNSUPPORTED:
                raise TypeError(f"a sum of {tensor.dtype.name} values is not defined.")
        for positions in _packs(dense):
            summed = self._sum_pack([dense[position] for position in positions])
            for position, value in zip(positions, summed):
                results[position] = value
        parts = iter(self.gather_rows([part for value in slices.values()
                                       for part in (value.values, value.indices)]))
        for position, value in slices.items():
            results[position] = tf.IndexedSlices(next(parts), next(parts), value.dense_shape)
        return results

    def chiefs(self, values: Sequence[Any]) -> list[Any]:
        """Worker 0's ``values``: tensors with the same shapes on every worker."""
        # Strings, and other values that no collective op supports, stay each worker's own.
        tensors = [tf.convert_to_tensor(value) for value in values]
        sent = [None if tensor.dtype in _UNSUPPORTED else _encoded(tensor)[0] for tensor in tensors]
        if not self.is_chief:
            sent = [None if value is None else tf.zeros_like(value) for value in sent]
        return [tensor if value is None else _decoded([value], tensor.dtype)
                for tensor, value in zip(tensors, self.sum(sent))]

    def gather(self, value: Any, axis: int = 0) -> Any:
        """The workers' dense, ragged or sparse values, in order, concatenated along ``axis``."""
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return self._gather_composite(value, axis % value.shape.rank)
        value = tf.convert_to_tensor(value)
        if not value.shape.rank:
            raise ValueError("values of rank 0 cannot be gathered: there is no axis to concatenate "
                             f"them along (axis={axis}).")
        return self.gather_along([value], [axis % value.shape.rank])[0]

    def gather_along(self, values: Sequence[tf.Tensor], axes: Sequence[int]) -> list[tf.Tensor]:
        """Dense values, each gathered along its axis, which must be 0 if the rank is unknown."""
        move = tf.experimental.numpy.moveaxis
        gathered = self.gather_rows([move(value, axis, 0) if axis else value
                                     for value, axis in zip(values, axes)])
        return [move(rows, 0, axis) if axis else rows for rows, axis in zip(gathered, axes)]

    def extremes(self, values: Sequence[tf.Tensor], kinds: Sequence[str]) -> list[tf.Tensor]:
        """The "max", "min", "and" or "or" of each value over the workers, which have one shape."""
        gathered = self.gather_rows([value[tf.newaxis] for value in values])
        return [_EXTREMES[kind](rows, 0) for rows, kind in zip(gathered, kinds)]

    def gather_rows(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The workers' tensors, each concatenated along the first axis; row counts may differ."""
        encoded = [_encoded(value) for value in values]
        parts = [part for each in encoded for part in each]
        if not parts:
            return []
        with tf.device(self._device):
            rows = tf.stack([tf.shape(part, out_type=tf.int64)[0] for part in parts])
            all_rows = self._gather(rows[tf.newaxis])
            gathered = iter([self._gather_padded(part, all_rows[:, index])
                             for index, part in enumerate(parts)])
            return [_decoded([next(gathered) for _ in each], value.dtype)
                    for each, value in zip(encoded, values)]

    def next_key_in_loops(self) -> tf.Tensor:
        """An int32 scalar; collectives made later take no key in a loop before this is read."""
        return self._launcher.next_in_loops.read_value()

    def _sum_pack(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over the workers of tensors with one wire dtype, by one all-reduce."""
        with tf.device(self._device):
            packed = [_encoded(value)[0] for value in values]
            flat = [tf.reshape(value, [-1]) for value in packed]
            sizes: list[Any] = [part.shape.num_elements() for part in flat]
            if None in sizes:  # it may be empty; TensorFlow's collective ops fail on empty tensors
                sizes = [tf.size(part) for part in flat] + [1]
                flat.append(tf.zeros([1], flat[0].dtype))
            elif not sum(sizes):
                return values
            total = self._launcher.all_reduce(tf.concat(flat, 0) if flat[1:] else flat[0])
            parts = tf.split(total, sizes) if flat[1:] else [total]
            return [_decoded([tf.reshape(part, tf.shape(encoded))], value.dtype)
                    for part, encoded, value in zip(parts, packed, values)]

    def _gather_padded(self, value: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """The workers' tensors, which have these numbers of rows, concatenated."""
        # At least one row: TensorFlow's collective ops fail on empty tensors.
        most = tf.maximum(tf.reduce_max(rows), 1)
        shape = tf.shape(value, out_type=tf.int64)
        missing = tf.concat([[most - shape[0]], shape[1:]], 0)
        padded = tf.concat([value, tf.zeros(missing, value.dtype)], 0)
        gathered = tf.boolean_mask(self._gather(padded[tf.newaxis]), tf.sequence_mask(rows, most))
        gathered.set_shape(tf.TensorShape([None]).concatenate(value.shape[1:]))
        return gathered

    def _gather_composite(self, value: tf.RaggedTensor | tf.SparseTensor, axis: int) -> Any:
        """The workers' ragged, or sparse, tensors, concatenated along ``axis``."""
        parts = tf.nest.flatten(value, expand_composites=True)
        lengths = tf.stack([tf.shape(part, tf.int64)[0] for part in parts])
        counts, *gathered = self.gather_rows([lengths[tf.newaxis], *parts])
        by_worker = zip(*(tf.split(part, counts[:, index], num=self.count)
                          for index, part in enumerate(gathered)))
        if isinstance(value, tf.SparseTensor):
            return tf.sparse.concat(axis, [tf.SparseTensor(*parts) for parts in by_worker], True)
        return tf.concat([tf.RaggedTensor.from_nested_row_splits(flat, splits, validate=False)
                          for flat, *splits in by_worker], axis)

    def _gather(self, value: tf.Tensor) -> tf.Tensor:
        """The workers' values, which have one shape, concatenated in the order of workers."""
        gathered = self._launcher.all_gather(value, None)
        if self._order == list(range(self.count)):
            return gathered
        return tf.gather(gathered, self._order)


def _packs(values: dict[int, tf.Tensor]) -> list[list[int]]:
    """The keys of ``values`` that cross together; first the packs of the last values."""
    # Large ones cross alone: packing copies them, and a pack waits for all of its values.
    packs: list[list[int]] = []
    filling: dict[tf.DType, tuple[list[int], int]] = {}
    for position, value in reversed(values.items()):
        size = homes_lib.size_of(value)
        if size >= LARGE:
            packs.append([position])
            continue
        dtype = _wire_dtype(value.dtype)
        pack, pack_size = filling.get(dtype, ([], LARGE + 1))
        if pack_size + size > LARGE:
            pack, pack_size = [], 0
            packs.append(pack)
        pack.append(position)
        filling[dtype] = pack, pack_size + size
    return sorted(packs, key=min, reverse=True)


def _wire_dtype(dtype: tf.DType) -> tf.DType:
    """The dtype in which values of ``dtype`` cross."""
    if dtype in _WIRE_DTYPES:
        return dtype
    if dtype.is_complex:
        return dtype.real_dtype
    if dtype.is_floating:
        return tf.float32
    return tf.int64 if dtype in (tf.uint32, tf.uint64) else tf.int32


def _encoded(value: tf.Tensor) -> list[tf.Tensor]:
    """The tensors that cross for ``value``; for strings, their lengths and all their bytes.

    Raises:
      TypeError: it has neither numbers nor strings.
    """
    if value.dtype == tf.string:
        joined = tf.strings.reduce_join(value)
        return [tf.strings.length(value), tf.cast(tf.io.decode_raw(joined, tf.uint8), tf.int32)]
    if value.dtype in _UNSUPPORTED:
        raise TypeError(f"values of dtype {value.dtype.name} cannot cross machines: "
                        "TensorFlow's collective ops carry numbers only.")
    if value.dtype.is_complex:
        return [tf.stack([tf.math.real(value), tf.math.imag(value)], -1)]
    dtype = _wire_dtype(value.dtype)
    return [value if dtype == value.dtype else tf.cast(value, dtype)]


def _decoded(parts: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """The inverse of :func:`_encoded`."""
    value = parts[0]
    if dtype == tf.string:
        letters = tf.constant([bytes([code]) for code in range(256)])
        split = tf.RaggedTensor.from_row_lengths(
            tf.gather(letters, parts[1]), tf.reshape(value, [-1]), validate=False)
        strings = tf.reshape(tf.strings.reduce_join(split, -1), tf.shape(value))
        strings.set_shape(value.shape)
        return strings
    if dtype.is_complex:
        return tf.complex(value[..., 0], value[..., 1])
    return value if value.dtype == dtype else tf.cast(value, dtype)
