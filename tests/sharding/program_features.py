"""What a layer makes of activations ``[rows, 5]``: something of that shape, of several rows.

Goes in: nothing.  Comes out: ``FEATURES``, functions by name.
"""

import tensorflow as tf

D = tf.float64
FEATURES = {
    "batch_mean": lambda h: h - tf.reduce_mean(h, 0),
    "batch_max": lambda h: h / (1 + tf.reduce_max(tf.abs(h), 0)),
    "batch_variance": lambda h: h / tf.sqrt(tf.math.reduce_variance(h, 0) + 0.1),
    "batch_std_map": lambda h: tf.concat(
        [h[:, :4], tf.ones_like(h[:, :1]) * tf.reduce_mean(tf.math.reduce_std(h, 0))], 1
    ),
    "moments": lambda h: (h - tf.nn.moments(h, [0])[0]) * tf.nn.moments(h, [0])[1],
    "cumsum": lambda h: tf.cumsum(h, 0),
    "cumsum_reverse_exclusive": lambda h: tf.cumsum(h, 0, exclusive=True, reverse=True),
    "cumprod": lambda h: tf.math.cumprod(1 + h / 4, 0),
    "sort": lambda h: tf.sort(h, 0),
    "argsort": lambda h: tf.gather(h, tf.argsort(h[:, 0])),
    "roll": lambda h: tf.roll(h, 1, 0),
    "reverse": lambda h: tf.reverse(h, [0]),
    "slice_back": lambda h: h[::-1],
    "softmax_over_rows": lambda h: tf.nn.softmax(h, 0) * 4,
    "top_k": lambda h: h + tf.reduce_sum(tf.gather(h, tf.math.top_k(h[:, 0], 3).indices), 0),
    "unique": lambda h: h * tf.cast(tf.size(tf.unique(tf.cast(h[:, 0] * 3, tf.int32)).y), D),
    "unique_ids": lambda h: tf.gather(
        tf.math.unsorted_segment_mean(h, tf.unique(tf.cast(h[:, 0] * 3, tf.int32)).idx, 23),
        tf.unique(tf.cast(h[:, 0] * 3, tf.int32)).idx,
    ),
    "shuffle": lambda h: h + 0.5 * tf.random.shuffle(h, seed=3),
    "mixup_by_index": lambda h: (
        0.7 * h
        + 0.3 * tf.gather(h, tf.argsort(tf.random.stateless_uniform(tf.shape(h)[:1], [1, 2])))
    ),
    "attention_over_rows": lambda h: tf.nn.softmax(h @ tf.transpose(h)) @ h,
    "outer": lambda h: h @ (tf.transpose(h) @ h) / tf.cast(tf.shape(h)[0], D),
    "whitening": lambda h: tf.transpose(
        tf.linalg.triangular_solve(
            tf.linalg.cholesky(tf.transpose(h) @ h + tf.eye(5, dtype=D)), tf.transpose(h)
        )
    ),
    "first_row": lambda h: h - h[0],
    "last_row": lambda h: h - h[-1:],
    "halves": lambda h: h - tf.reduce_mean(h[: tf.shape(h)[0] // 2], 0),
    "differences": lambda h: tf.concat([h[:1], h[1:] - h[:-1]], 0),
    "positions": lambda h: h * tf.cast(tf.range(tf.shape(h)[0]), D)[:, None] / 9,
    "pairs_flat": lambda h: h + tf.reduce_mean(tf.reshape(h[:, None] - h[None], [-1, 5]), 0),
    "flat_norm": lambda h: h / tf.norm(tf.reshape(h, [-1])),
    "global_norm": lambda h: h / tf.linalg.global_norm([h]),
    "custom_gradient": tf.custom_gradient(lambda h: (h, lambda dh: dh - tf.reduce_mean(dh, 0))),
    "stop_gradient_of_mean": lambda h: h - tf.stop_gradient(tf.reduce_mean(h, 0)),
    "boolean_mask": lambda h: h + tf.reduce_mean(tf.boolean_mask(h, h[:, 0] > 0), 0),
    "where": lambda h: h + tf.reduce_sum(tf.gather(h, tf.where(h[:, 0] > 0)[:, 0]), 0),
    "median": lambda h: h - tf.sort(h, 0)[tf.shape(h)[0] // 2],
    "fft_over_rows": lambda h: tf.math.real(
        tf.transpose(tf.signal.fft(tf.transpose(tf.cast(h, tf.complex128))))
    ),
    "map_fn": lambda h: tf.map_fn(lambda row: row * tf.reduce_sum(row), h),
    "map_fn_with_mean": lambda h: tf.map_fn(lambda row: row - tf.reduce_mean(h, 0), h),
    "vectorized_map": lambda h: tf.vectorized_map(lambda row: row * tf.reduce_sum(row), h),
    "scan_over_rows": lambda h: tf.scan(lambda s, row: s * 0.5 + row, h),
    "foldl": lambda h: h + tf.foldl(lambda s, row: s * 0.5 + row, h),
    "split_in_two": lambda h: h - tf.add_n([tf.reduce_max(half, 0) for half in (h[:2], h[2:])]),
    "py_function": lambda h: (
        h - tf.ensure_shape(tf.numpy_function(lambda a: a.mean(0), [tf.stop_gradient(h)], D), [5])
    ),
    "tensor_array": lambda h: tf.TensorArray(D, tf.shape(h)[0]).unstack(h).stack() * 2,
    "scatter_rows": lambda h: tf.tensor_scatter_nd_add(
        h, tf.argsort(h[:, 1])[:2, None], tf.ones([2, 5], D)
    ),
    "one_hot_classes": lambda h: (
        h - tf.gather(tf.math.unsorted_segment_mean(h, tf.argmax(h, 1), 5), tf.argmax(h, 1))
    ),
    "ragged": lambda h: (
        h
        * tf.RaggedTensor.from_row_splits(
            tf.reshape(h, [-1]), tf.range(tf.shape(h)[0] + 1) * 5
        ).to_tensor(shape=[None, 5])
    ),
    "graph_of_rows": lambda h: (
        tf.math.unsorted_segment_sum(
            tf.gather(h, tf.range(tf.shape(h)[0])[::-1]),
            tf.roll(tf.range(tf.shape(h)[0]), 1, 0),
            tf.shape(h)[0],
        )
        + h
    ),
    "einsum_gram": lambda h: h + 0.1 * tf.einsum("ij,jk->ik", h, tf.einsum("ni,nj->ij", h, h)),
    "conv_over_rows": lambda h: tf.nn.conv1d(h[None], tf.ones([3, 5, 5], D) / 9, 1, "SAME")[0],
    "svd": lambda h: h * tf.linalg.svd(h, compute_uv=False)[0],
    "eigh": lambda h: h @ tf.linalg.expm(0.1 * tf.transpose(h) @ h),
    "confusion": lambda h: (
        h * tf.cast(tf.math.confusion_matrix(tf.argmax(h, 1), tf.argmin(h, 1), 5)[0, 0] + 1, D)
    ),
    "histogram": lambda h: (
        h * (1 + tf.cast(tf.histogram_fixed_width(h, tf.constant([-1.0, 1.0], D), 4)[0], D))
    ),
    "dynamic_partition": lambda h: tf.concat(
        tf.dynamic_partition(h, tf.cast(h[:, 0] > 0, tf.int32), 2), 0
    ),
    "dynamic_stitch": lambda h: tf.dynamic_stitch([tf.range(tf.shape(h)[0])[::-1]], [h]),
    "searchsorted": lambda h: h + tf.cast(tf.searchsorted(tf.sort(h[:, 0]), h[:, 1]), D)[:, None],
    "sparse": lambda h: tf.sparse.to_dense(
        tf.sparse.from_dense(tf.where(h > 0, h, tf.zeros_like(h)))
    ),
    "sequence_mask": lambda h: h * tf.sequence_mask(tf.range(tf.shape(h)[0]) % 5, 5, dtype=D),
    "meshgrid": lambda h: h * tf.cast(tf.meshgrid(tf.range(5), tf.range(tf.shape(h)[0]))[1], D),
    "repeat": lambda h: tf.math.segment_mean(
        tf.repeat(h, 2, 0), tf.repeat(tf.range(tf.shape(h)[0]), 2)
    ),
    "tile": lambda h: tf.tile(h, [2, 1])[: tf.shape(h)[0]],
    "tile2": lambda h: tf.reduce_mean(tf.reshape(tf.tile(h, [1, 3]), [-1, 3, 5]), 1),
    "pad": lambda h: tf.pad(h, [[1, 0], [0, 0]])[:-1],
    "pad_cols": lambda h: tf.pad(h, [[0, 0], [1, 0]])[:, 1:],
    "expand": lambda h: tf.squeeze(
        tf.nn.conv2d(h[:, None, :, None], tf.ones([1, 3, 1, 1], D), 1, "SAME"), [1, 3]
    ),
    "stack_unstack": lambda h: tf.stack(tf.unstack(h, axis=1)[::-1], 1),
    "transpose_all": lambda h: tf.transpose(tf.sort(tf.transpose(h), 1)),
    "batch_gather": lambda h: tf.gather(h, tf.argsort(h, 1), batch_dims=1),
    "gather_nd": lambda h: tf.gather_nd(h, tf.argsort(h[:, 0])[:, None]),
    "rows_by_number": lambda h: tf.gather(h, [0, 1, 0], axis=0)[:1] + h,
    "while_batch": lambda h: tf.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, a * 0.5 + tf.reduce_mean(a, 0)), [0, h]
    )[1],
    "while_rows": lambda h: tf.while_loop(
        lambda i, a: i < tf.shape(h)[0], lambda i, a: (i + 1, a + h[i]), [0, h]
    )[1],
    "cond_rows": lambda h: tf.cond(
        tf.shape(h)[0] > 6, lambda: h * 2, lambda: h - tf.reduce_mean(h, 0)
    ),
    "case": lambda h: tf.case([(tf.reduce_sum(h) > 0, lambda: h)], default=lambda: -h),
    "asserted": lambda h: (tf.debugging.assert_greater(tf.shape(h)[0], 3), h)[1],
    "py_rows": lambda h: tf.ensure_shape(tf.py_function(lambda a: a * 2, [h], D), [None, 5]),
    "custom_grad_fn": lambda h: tf.grad_pass_through(lambda t: tf.round(t * 4) / 4)(h),
    "top_k_rows": lambda h: tf.nn.softmax(
        tf.where(h >= tf.math.top_k(h, 2).values[:, 1:], h, -1e9 * tf.ones_like(h))
    ),
    "percent": lambda h: h - tf.reduce_mean(tf.math.top_k(tf.transpose(h), 2).values, 1),
    "l2_all": lambda h: tf.math.l2_normalize(h),
    "logsumexp": lambda h: h - tf.reduce_logsumexp(h, 0),
    "prod": lambda h: h * tf.reduce_prod(h, 0) * 10,
    "any_all": lambda h: (
        tf.where(tf.reduce_any(h > 0.9, 0), h, 2 * h) + tf.cast(tf.reduce_all(h < 2), D)
    ),
    "argmax0": lambda h: h + tf.cast(tf.argmax(h, 0), D),
    "count_nonzero": lambda h: h * tf.cast(tf.math.count_nonzero(h > 0, 0), D),
    "strings": lambda h: (
        h * tf.cast(tf.strings.length(tf.strings.as_string(tf.cast(h[:, :1] * 10, tf.int32))), D)
    ),
    "strings_join": lambda h: (
        h
        * tf.cast(
            tf.strings.length(
                tf.strings.reduce_join(tf.strings.as_string(tf.cast(h * 10, tf.int32)))
            ),
            D,
        )
        / 40
    ),
    "cummax": lambda h: tf.scan(tf.maximum, h),
    "matrix_band": lambda h: tf.linalg.band_part(h @ tf.transpose(h), 1, 0) @ h * 0.1,
    "diag": lambda h: tf.linalg.diag(h[:, 0]) @ h,
    "tridiag": lambda h: tf.linalg.set_diag(h @ tf.transpose(h), h[:, 0]) @ h * 0.1,
    "inverse": lambda h: tf.linalg.inv(h @ tf.transpose(h) + tf.eye(tf.shape(h)[0], dtype=D)) @ h,
    "lstsq": lambda h: h - h[:, :2] @ tf.linalg.lstsq(h[:, :2], h, l2_regularizer=0.1),
    "kron": lambda h: tf.einsum("ij,kl->ik", h, h) @ h * 0.01,
    "dist": lambda h: tf.nn.relu(1 - tf.norm(h[:, None] - h[None] + 0.1, axis=-1)) @ h,
    "knn": lambda h: tf.reduce_mean(
        tf.gather(h, tf.math.top_k(-tf.norm(h[:, None] - h[None] + 0.1, axis=-1), 3).indices), 1
    ),
    "depth": lambda h: tf.reshape(tf.reshape(h, [1, -1, 5]) * 2, [-1, 5]),
    "mixed_reshape": lambda h: tf.reshape(tf.reshape(h, [-1]), tf.shape(h)),
    "reshape_swap": lambda h: tf.reshape(
        tf.transpose(tf.reshape(h, [-1, 5, 1]), [2, 0, 1]), [-1, 5]
    ),
    "reshape_mix": lambda h: tf.transpose(tf.reshape(h, [5, -1])),
    "shift_pairs": lambda h: tf.concat([h[1:], h[:1]], 0) * h,
    "every_other": lambda h: tf.concat([h[::2], h[1::2]], 0),
    "interleave": lambda h: tf.reshape(tf.stack([h, 2 * h], 1), [-1, 5])[: tf.shape(h)[0]],
    "concat_self": lambda h: tf.split(tf.concat([h, h * 2], 0), 2)[1],
    "concat_mean": lambda h: tf.concat([h, tf.reduce_mean(h, 0, keepdims=True)], 0)[1:],
    "chunked": lambda h: tf.concat([tf.nn.softmax(h[:4], 0), h[4:]], 0),
    "broadcast_to": lambda h: h + tf.broadcast_to(tf.reduce_mean(h, 0), tf.shape(h)),
    "random_uniform": lambda h: h * tf.random.stateless_uniform(tf.shape(h), [1, 2], dtype=D),
    "random_normal": lambda h: h + tf.random.normal(tf.shape(h), dtype=D, seed=3),
    "random_perm": lambda h: tf.gather(
        h, tf.random.experimental.stateless_shuffle(tf.range(tf.shape(h)[0]), [1, 2])
    ),
    "categorical": lambda h: h * tf.cast(tf.random.stateless_categorical(h, 1, [1, 2]), D),
    "dropout": lambda h: tf.nn.dropout(h, 0.4, seed=2),
    "multinomial_rows": lambda h: tf.gather(
        h, tf.random.stateless_uniform([tf.shape(h)[0]], [3, 4], 0, tf.shape(h)[0], tf.int32)
    ),
    "jit": lambda h: tf.function(lambda t: tf.tanh(t) * 2, jit_compile=True)(h),
    "jit_mean": lambda h: tf.function(lambda t: t - tf.reduce_mean(t, 0), jit_compile=True)(h),
    "clipped": lambda h: tf.clip_by_value(h, tf.reduce_min(h, 0), tf.reduce_mean(h, 0)),
    "clip_norm": lambda h: tf.clip_by_norm(h, 1.0),
    "ema": lambda h: tf.scan(lambda a, r: 0.9 * a + 0.1 * r, h, initializer=tf.zeros([5], D)),
    "ema_rev": lambda h: tf.scan(
        lambda a, r: 0.9 * a + 0.1 * r, h, initializer=tf.zeros([5], D), reverse=True
    ),
    "foldr": lambda h: h * tf.foldr(lambda a, r: 0.9 * a + 0.1 * r, h),
    "fft2": lambda h: tf.signal.irfft(tf.signal.rfft(tf.pad(h, [[0, 0], [0, 3]])))[:, :5],
    "unfold": lambda h: tf.reduce_mean(tf.signal.frame(h, 2, 1, pad_end=True, axis=0), 1),
    "segsum": lambda h: tf.gather(
        tf.math.segment_sum(h, tf.range(tf.shape(h)[0]) // 2), tf.range(tf.shape(h)[0]) // 2
    ),
    "ragged_reduce": lambda h: (
        h
        * tf.reduce_mean(
            tf.RaggedTensor.from_value_rowids(h, tf.range(tf.shape(h)[0]) // 2).to_tensor()
        )
    ),
    "ragged_rows": lambda h: (
        h
        * tf.reduce_sum(
            tf.RaggedTensor.from_tensor(h, lengths=tf.range(tf.shape(h)[0]) % 5), 1, keepdims=True
        )
    ),
    "map_defun": lambda h: tf.vectorized_map(lambda r: r - tf.reduce_mean(h, 0) + tf.cumsum(r), h),
}
