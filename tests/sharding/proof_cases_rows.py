"""Samples of operations whose indices name rows by their number, and of some that only seem to.

Goes in: nothing.  Comes out: samples, see :mod:`proof_samples`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from proof_samples import around, real, whole

raw = tf.raw_ops


def _rows(y: tf.Tensor) -> tf.Tensor:
    return tf.range(tf.shape(y)[0])


# How an index of rows [6, 2], or [6, 2, 2], is made of labels [6], or [6, 2].
INDICES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "stacked": lambda y: tf.stack([_rows(y), y], 1),
    "joined": lambda y: tf.concat([_rows(y)[:, None], tf.expand_dims(y, 1)], -1),
    "reshaped": lambda y: tf.concat([tf.reshape(_rows(y), [-1, 1]), y[..., None]], 1),
    "long": lambda y: tf.stack(
        [tf.range(tf.shape(y, tf.int64)[0], dtype=tf.int64), tf.cast(y, tf.int64)], -1),
    "from_one": lambda y: tf.stack([tf.range(1, tf.shape(y)[0] + 1) - 1, y], 1),
    "backwards": lambda y: tf.stack([_rows(y)[::-1], y], 1),
    "by_two": lambda y: tf.stack([tf.range(0, 2 * tf.shape(y)[0], 2) // 2, y], 1),
    "columns_first": lambda y: tf.stack([y, _rows(y) % 4], 1),
    "moved_on": lambda y: tf.stack([tf.roll(_rows(y), 1, 0), y], 1),
    "transposed": lambda y: tf.transpose([_rows(y), y]),
    "transposed_columns": lambda y: tf.transpose([y, _rows(y) % 4]),
}
SEVERAL: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "tiled": lambda y: tf.stack([tf.tile(_rows(y)[:, None], [1, 2]), y], -1),
    "flat": lambda y: tf.stack([tf.reshape(tf.tile(_rows(y)[:, None], [1, 2]), [-1]),
                                tf.reshape(y, [-1])], 1),
    "repeated": lambda y: tf.concat([tf.repeat(_rows(y), 2)[:, None],
                                     tf.reshape(y, [-1, 1])], 1),
    "of_columns": lambda y: tf.stack([tf.tile(tf.range(2)[None], [tf.shape(y)[0], 1]), y], -1),
    "in_turn": lambda y: tf.stack([tf.tile(_rows(y), [2]), tf.reshape(y, [-1])], 1),
    "times_ones": lambda y: tf.stack([_rows(y)[:, None] * tf.ones_like(y), y], -1),
    "times_others": lambda y: tf.stack([_rows(y)[:, None] * tf.cast(y > 1, y.dtype), y], -1),
    "times_zeros": lambda y: tf.stack([tf.zeros_like(y) * _rows(y)[:, None], y], -1),
    "plus_zeros": lambda y: tf.stack([tf.zeros_like(y) + _rows(y)[:, None], y], -1),
    "broadcast": lambda y: tf.stack([tf.broadcast_to(_rows(y)[:, None], tf.shape(y)), y], -1),
    "in_a_grid": lambda y: tf.stack(tf.meshgrid(_rows(y), tf.range(2), indexing="ij"), -1),
    "across_a_grid": lambda y: tf.transpose(
        tf.stack(tf.meshgrid(_rows(y), tf.range(2)), -1), [1, 0, 2]),
    "stacked_first": lambda y: tf.transpose(
        tf.stack([tf.tile(_rows(y)[:, None], [1, 2]), y]), [1, 2, 0]),
}


# Which row each row takes: its own, as tf.vectorized_map writes it, or only seemingly so.
GUARDS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "own": lambda x, i: tf.where(tf.shape(x)[0] > 1, i, 0),
    "columns": lambda x, i: tf.where(tf.shape(x)[1] > 1, i, 0),
    "many": lambda x, i: tf.where(tf.shape(x)[0] > 9, i, 0),
    "first": lambda x, i: tf.where(tf.shape(x)[0] > 1, i, 1),
    "rows": lambda x, i: tf.where(x[:, 0] > .5, i, 0),
    "several": lambda x, i: tf.where(x[:, 0] > tf.range(6, dtype=x.dtype) / 9, i, 0),
    "higher_rank": lambda x, i: tf.maximum(i, tf.zeros_like(x[..., None, None], i.dtype)),
}


# Positions of rows [6, 4], which are laid end to end, by labels [6].
POSITIONS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "first": lambda x, y: _rows(x) * 4,
    "some": lambda x, y: tf.reshape([0, 3, 1] + 4 * _rows(x)[:, None], [-1]),
    "by_label": lambda x, y: _rows(x) * 4 + y,
    "open": lambda x, y: _rows(x) * tf.shape(x)[1] + y,
    "in_two_steps": lambda x, y: (_rows(x) * 2 + 1) * 2 + 1,
    "too_few": lambda x, y: _rows(x) * 2 + 1,
    "of_the_next": lambda x, y: (_rows(x) * 4 + 4) % 24,
    "behind": lambda x, y: tf.minimum(_rows(x) * 4 + 5, 23),
    "first_and_others": lambda x, y: tf.reshape(_rows(x)[:, None] * 4 + tf.concat(
        [[0], tf.boolean_mask([-3, 0, 9], [True, True, False])], 0), [-1]) % 24,
    "across": lambda x, y: tf.reshape(_rows(x)[None] * 4 + tf.range(4)[:, None], [-1]),
}


def _laid_flat(indices: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
    """Positions, gathered, and their gradient."""
    def call(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.gather(tf.reshape(x, [-1, 3]), indices(x, y))
            loss = tf.reduce_sum(found ** 2)
        return found, tf.convert_to_tensor(tape.gradient(loss, x))

    return call


def _guarded(guard: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
    """Rows, gathered by the numbers of as many as two tensors have."""
    return lambda x, y: tf.gather(x, guard(x, tf.range(
        tf.reduce_max([tf.shape(x)[0], tf.shape(y)[0]]))))


def _bags(x: tf.Tensor, y: tf.Tensor) -> Any:
    """Sums over each row's positions, and their gradient."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        sums = tf.math.unsorted_segment_sum(
            tf.reshape(x, [-1, 3]), tf.repeat(_rows(y), 2), tf.shape(y)[0])
        loss = tf.reduce_sum(sums ** 2 * y)
    return sums, tape.gradient(loss, x)


def _chosen(indices: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
    """Entries that are gathered, and their gradient."""
    def call(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.gather_nd(x, indices(y))
            loss = tf.reduce_sum(found ** 2)
        return found, tape.gradient(loss, x)

    return call


def _of_each_row(x: tf.Tensor, y: tf.Tensor) -> Any:
    """Positions of each row, as ``batch_dims`` finds them, and the gradients of that."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = tf.gather(x, y, axis=1, batch_dims=1)
        loss = tf.reduce_sum(found ** 2 * tf.gather_nd(x, y[..., None], batch_dims=1))
    return found, tape.gradient(loss, x)


def _positions_of_another(x: tf.Tensor, y: tf.Tensor, others: tf.Tensor) -> Any:
    """Positions of ``others``, which has more than ``x``, where they name the next rows."""
    return tf.gather(others, y, axis=1, batch_dims=1), tf.gather(
        tf.reshape(x, [-1, 3]), _rows(x)[:, None] * 4 + y)


def _put(type: str, indices: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
    """Entries that are put where rows and labels say, and the gradients of that."""
    def call(x: tf.Tensor, y: tf.Tensor, new: tf.Tensor) -> Any:
        at = indices(y)
        with tf.GradientTape() as tape:
            tape.watch([x, new])
            put = getattr(raw, type)(tensor=x, indices=at, updates=new)
            loss = tf.reduce_sum(put ** 2 * x)
        return put, tape.gradient(loss, [x, new])

    return call


def _scattered(indices: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
    def call(x: tf.Tensor, y: tf.Tensor, new: tf.Tensor) -> Any:
        at = indices(y)
        return tf.scatter_nd(at, new, tf.shape(x, at.dtype))

    return call


def _summed(type: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """Over the positions of each row."""
    return lambda x: getattr(raw, type)(data=tf.reshape(x, [-1, 3]), num_segments=tf.shape(x)[0],
                                        segment_ids=tf.repeat(_rows(x), 2))


def _cropped(x: tf.Tensor, boxes: tf.Tensor) -> Any:
    """Boxes of each image, and the gradients of images and boxes."""
    images = tf.reshape(tf.tile(tf.range(tf.shape(x)[0])[:, None], [1, 2]), [-1])
    with tf.GradientTape() as tape:
        tape.watch([x, boxes])
        crops = tf.image.crop_and_resize(x, tf.reshape(boxes, [-1, 4]), images, [2, 2])
        loss = tf.reduce_sum(crops ** 2)
    return crops, tape.gradient(loss, [x, boxes])


MASKS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "rows": lambda x: x[:, 0, 0] > 0, "positions": lambda x: x[:, :, 0] > 0, "all": lambda x: x > 0}


def _masked(mask: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
    """Entries that a mask chooses, how many they are, and the gradient of their mean."""
    def call(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.boolean_mask(x, mask(x))
            loss = tf.reduce_mean(found ** 2)
        return found, tf.size(found), tape.gradient(loss, x)

    return call


def _put_back(mask: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
    """What is made of chosen entries, where they were, as a loss that ignores a class does."""
    def call(x: tf.Tensor) -> Any:
        at = tf.where(mask(x))
        return tf.scatter_nd(at, tf.exp(tf.gather_nd(x, at)), tf.shape(x, tf.int64))

    return call


def _of_both(mask: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
    """Two tensors of which one mask chooses."""
    def call(x: tf.Tensor, y: tf.Tensor) -> Any:
        chosen = mask(x)
        return tf.boolean_mask(x, chosen) * tf.boolean_mask(y, chosen), tf.gather_nd(
            x, tf.where(chosen)) + tf.boolean_mask(y, chosen)

    return call


def _by_number(x: tf.Tensor, table: tf.Tensor) -> Any:
    """Chosen rows of another tensor, which has as many, or others."""
    return tf.gather(table, tf.where(x[:, 0] > 0)[:, 0])


def _routed(x: tf.Tensor, y: tf.Tensor) -> Any:
    """Rows that are chosen by one of several entries each, as tokens are for an expert."""
    at = tf.where(y > 0)
    rows, others = at[:, 0], at[:, 1]
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        found = tf.exp(tf.gather(x, rows)) * tf.gather_nd(y, at)[:, None]
        out = tf.tensor_scatter_nd_add(tf.zeros_like(x), rows[:, None], found)
        loss = tf.reduce_sum(out ** 2)
    return out, others, tape.gradient(loss, [x, y])


def _beside(x: tf.Tensor) -> Any:
    """As many entries, but not those of the same rows."""
    return tf.boolean_mask(x, x[:, 0] > 0) * tf.boolean_mask(x, x[:, 0] < 0)


def _chosen_again(x: tf.Tensor) -> Any:
    chosen = tf.boolean_mask(x, x[:, 0] > 0)
    return tf.boolean_mask(chosen, chosen[:, 1] > 0), tf.gather(
        chosen, tf.range(tf.shape(chosen)[0]))


def _chosen_views(x: tf.Tensor) -> tf.Tensor:
    """Two views of chosen rows, each of which has a number."""
    chosen = tf.boolean_mask(x, x[:, 0] > 0)
    views = tf.concat([chosen, tf.tanh(chosen)], 0)
    return views * tf.cast(tf.range(tf.shape(views)[0]), x.dtype)[:, tf.newaxis]


def _own_choice() -> None:
    for name, mask in MASKS.items():
        for type in ("Where", "GatherV2", "UnsortedSegmentSum"):
            around(type, _masked(mask), real(6, 2, 3), title=name)
        for type in ("GatherNd", "ScatterNd"):
            around(type, _put_back(mask), real(6, 2, 3), title=name)
        around("Where", _of_both(mask), real(6, 2, 3), real(6, 2, 3), title=name)
    signs = np.array([[1], [1], [-1], [-1], [-1], [1]])
    for size in (6, 12):
        around("GatherV2", _by_number, real(6, 4), real(size, 3))
    for type in ("GatherV2", "TensorScatterAdd"):
        around(type, _routed, real(6, 3), real(6, 2), title="routed")
    around("Where", _beside, np.abs(real(6, 4)) * signs, title="beside")
    around("Where", _chosen_again, np.abs(real(6, 4)) * signs, title="again")
    around("Range", _chosen_views, np.abs(real(6, 4)) * signs, title="views")


def _own_rows() -> None:
    for name, indices in (INDICES | SEVERAL).items():
        labels = (6, 2) if name in SEVERAL else (6,)
        flat = name in ("flat", "repeated", "in_turn")
        for type in ("GatherNd", "ScatterNd"):
            around(type, _chosen(indices), real(6, 4), whole(*labels), title=name)
        for inner in ((), (3,)):
            new = real(*((12,) if flat else labels), *inner)
            for type in ("Update", "Add", "Max") if name == "stacked" else ("Update",):
                around(f"TensorScatter{type}", _put(f"TensorScatter{type}", indices),
                       real(6, 4, *inner), whole(*labels), new, title=name)
        if name in ("long", "flat", "moved_on"):
            around("ScatterNd", _scattered(indices), real(6, 4, 3), whole(*labels), new, title=name)
    for name, guard in GUARDS.items():
        around("GatherV2", _guarded(guard), real(6, 1), real(6, 3), title=name)
    for name, positions in POSITIONS.items():
        for type in ("GatherV2", "UnsortedSegmentSum"):
            around(type, _laid_flat(positions), real(6, 4, 3), whole(6), title=name)
    for type in ("GatherV2", "UnsortedSegmentSum", "GatherNd", "ScatterNd"):
        around(type, _of_each_row, real(6, 4, 3), whole(6, 2), title="of_each_row")
    many = np.concatenate([whole(5, 2, low=4, high=8), whole(1, 2)])
    around("GatherV2", _positions_of_another, real(6, 4, 3), many, real(6, 9, 3))
    around("GatherV2", _bags, real(6, 2, 3), real(6, 3), title="bags")
    for rows in (6, 12):
        around("Max", _guarded(lambda x, i: i % 6), real(6, 1), real(rows, 3))
        around("Min", lambda x: tf.range(raw.Min(input=[tf.shape(x)[0]], axis=[0])), real(rows, 3))
    for kind in ("Sum", "Max", "Min", "Prod"):
        around(f"UnsortedSegment{kind}", _summed(f"UnsortedSegment{kind}"), real(6, 2, 3))
    corners = np.sort(real(6, 2, 2, 2, dtype=np.float32), 2).reshape(6, 2, 4)
    for type in ("CropAndResize", "CropAndResizeGradImage", "CropAndResizeGradBoxes"):
        around(type, _cropped, real(6, 4, 5, 2, dtype=np.float32), corners)


_own_rows()
_own_choice()
