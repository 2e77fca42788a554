"""What a layer makes of activations ``[rows, 5]``: something of that shape, of several rows.

Goes in: nothing.  Comes out: ``FEATURES``, functions by name.  What a single operation makes is the
proof of its rule's.
"""

import tensorflow as tf

D = tf.float64
FEATURES = {
    "batch_mean": lambda h: h - tf.reduce_mean(h, 0),
    "batch_variance": lambda h: h / tf.sqrt(tf.math.reduce_variance(h, 0) + 0.1),
    "cumsum": lambda h: tf.cumsum(h, 0),
    "sort": lambda h: tf.sort(h, 0),
    "argsort": lambda h: tf.gather(h, tf.argsort(h[:, 0])),
    "softmax_over_rows": lambda h: tf.nn.softmax(h, 0) * 4,
    "top_k": lambda h: h + tf.reduce_sum(tf.gather(h, tf.math.top_k(h[:, 0], 3).indices), 0),
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
    "halves": lambda h: h - tf.reduce_mean(h[: tf.shape(h)[0] // 2], 0),
    "positions": lambda h: h * tf.cast(tf.range(tf.shape(h)[0]), D)[:, None] / 9,
    "pairs_flat": lambda h: h + tf.reduce_mean(tf.reshape(h[:, None] - h[None], [-1, 5]), 0),
    "custom_gradient": tf.custom_gradient(lambda h: (h, lambda dh: dh - tf.reduce_mean(dh, 0))),
    "boolean_mask": lambda h: h + tf.reduce_mean(tf.boolean_mask(h, h[:, 0] > 0), 0),
    "where": lambda h: h + tf.reduce_sum(tf.gather(h, tf.where(h[:, 0] > 0)[:, 0]), 0),
    "map_fn_with_mean": lambda h: tf.map_fn(lambda row: row - tf.reduce_mean(h, 0), h),
    "vectorized_map": lambda h: tf.vectorized_map(lambda row: row * tf.reduce_sum(row), h),
    "scan_over_rows": lambda h: tf.scan(lambda s, row: s * 0.5 + row, h),
    "foldl": lambda h: h + tf.foldl(lambda s, row: s * 0.5 + row, h),
    "py_function": lambda h: (
        h - tf.ensure_shape(tf.numpy_function(lambda a: a.mean(0), [tf.stop_gradient(h)], D), [5])
    ),
    "tensor_array": lambda h: tf.TensorArray(D, tf.shape(h)[0]).unstack(h).stack() * 2,
    "scatter_rows": lambda h: tf.tensor_scatter_nd_add(
        h, tf.argsort(h[:, 1])[:2, None], tf.ones([2, 5], D)
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
    "conv_over_rows": lambda h: tf.nn.conv1d(h[None], tf.ones([3, 5, 5], D) / 9, 1, "SAME")[0],
    "svd": lambda h: h * tf.linalg.svd(h, compute_uv=False)[0],
    "eigh": lambda h: h @ tf.linalg.expm(0.1 * tf.transpose(h) @ h),
    "histogram": lambda h: (
        h * (1 + tf.cast(tf.histogram_fixed_width(h, tf.constant([-1.0, 1.0], D), 4)[0], D))
    ),
    "dynamic_partition": lambda h: tf.concat(
        tf.dynamic_partition(h, tf.cast(h[:, 0] > 0, tf.int32), 2), 0
    ),
    "searchsorted": lambda h: h + tf.cast(tf.searchsorted(tf.sort(h[:, 0]), h[:, 1]), D)[:, None],
    "sparse": lambda h: tf.sparse.to_dense(
        tf.sparse.from_dense(tf.where(h > 0, h, tf.zeros_like(h)))
    ),
    "while_batch": lambda h: tf.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, a * 0.5 + tf.reduce_mean(a, 0)), [0, h]
    )[1],
    "while_rows": lambda h: tf.while_loop(
        lambda i, a: i < tf.shape(h)[0], lambda i, a: (i + 1, a + h[i]), [0, h]
    )[1],
    "while_most": lambda h: (
        h
        * tf.while_loop(
            lambda i, most: i < 2, lambda i, most: (i + 1, most - 3.0), [0, tf.reduce_max(h, 0)]
        )[1]
    ),
    "cond_rows": lambda h: tf.cond(
        tf.shape(h)[0] > 6, lambda: h * 2, lambda: h - tf.reduce_mean(h, 0)
    ),
    "case": lambda h: tf.case([(tf.reduce_sum(h) > 0, lambda: h)], default=lambda: -h),
    "asserted": lambda h: (tf.debugging.assert_greater(tf.shape(h)[0], 3), h)[1],
    "py_rows": lambda h: tf.ensure_shape(tf.py_function(lambda a: a * 2, [h], D), [None, 5]),
    "custom_grad_fn": lambda h: tf.grad_pass_through(lambda t: tf.round(t * 4) / 4)(h),
    "logsumexp": lambda h: h - tf.reduce_logsumexp(h, 0),
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
    "diag": lambda h: tf.linalg.diag(h[:, 0]) @ h,
    "inverse": lambda h: tf.linalg.inv(h @ tf.transpose(h) + tf.eye(tf.shape(h)[0], dtype=D)) @ h,
    "lstsq": lambda h: h - h[:, :2] @ tf.linalg.lstsq(h[:, :2], h, l2_regularizer=0.1),
    "knn": lambda h: tf.reduce_mean(
        tf.gather(h, tf.math.top_k(-tf.norm(h[:, None] - h[None] + 0.1, axis=-1), 3).indices), 1
    ),
    "depth": lambda h: tf.reshape(tf.reshape(h, [1, -1, 5]) * 2, [-1, 5]),
    "reshape_mix": lambda h: tf.transpose(tf.reshape(h, [5, -1])),
    "interleave": lambda h: tf.reshape(tf.stack([h, 2 * h], 1), [-1, 5])[: tf.shape(h)[0]],
    "chunked": lambda h: tf.concat([tf.nn.softmax(h[:4], 0), h[4:]], 0),
    "random_uniform": lambda h: h * tf.random.stateless_uniform(tf.shape(h), [1, 2], dtype=D),
    "random_normal": lambda h: h + tf.random.normal(tf.shape(h), dtype=D, seed=3),
    "categorical": lambda h: h * tf.cast(tf.random.stateless_categorical(h, 1, [1, 2]), D),
    "dropout": lambda h: tf.nn.dropout(h, 0.4, seed=2),
    "multinomial_rows": lambda h: tf.gather(
        h, tf.random.stateless_uniform([tf.shape(h)[0]], [3, 4], 0, tf.shape(h)[0], tf.int32)
    ),
    "jit": lambda h: tf.function(lambda t: tf.tanh(t) * 2, jit_compile=True)(h),
    "jit_mean": lambda h: tf.function(lambda t: t - tf.reduce_mean(t, 0), jit_compile=True)(h),
    "jit_grouped": lambda h: (  # which only XLA has gradients of, on CPUs
        h
        + tf.reduce_mean(
            tf.function(lambda t, k: tf.nn.conv2d(t, k, 1, "SAME"), jit_compile=True)(
                tf.reshape(h[:, :4], [-1, 2, 1, 2]), tf.reduce_mean(h) + tf.ones([1, 1, 1, 2], D)
            ),
            [1, 2, 3],
        )[:, None]
    ),
    "ema_rev": lambda h: tf.scan(
        lambda a, r: 0.9 * a + 0.1 * r, h, initializer=tf.zeros([5], D), reverse=True
    ),
    "fft2": lambda h: tf.signal.irfft(tf.signal.rfft(tf.pad(h, [[0, 0], [0, 3]])))[:, :5],
    "unfold": lambda h: tf.reduce_mean(tf.signal.frame(h, 2, 1, pad_end=True, axis=0), 1),
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
    "list_of_several_lengths": lambda h: (
        lambda entries: h * tf.reduce_sum(entries.read(1)) + entries.read(0)
    )(
        tf.TensorArray(D, 2, infer_shape=False, element_shape=[None, 5])
        .write(0, h)
        .write(1, tf.concat([tf.cumsum(h, 0), h[:1]], 0))
    ),
    "scan_in_scan": lambda h: tf.transpose(
        tf.scan(
            lambda s, col: tf.scan(lambda u, e: u * 0.5 + e, col) + s,
            tf.transpose(h),
            tf.zeros([tf.shape(h)[0]], D),
        )
    ),
    "grown_rows": lambda h: (
        tf.while_loop(
            lambda i, rows: i < 2,
            lambda i, rows: (i + 1, tf.concat([rows, h * tf.cast(i, D)], 0)),
            [0, h],
            shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 5])],
        )[1][-tf.shape(h)[0] :]
        + h
    ),
    "function_of_several_ranks": lambda h: (lambda f: h * f(tf.reduce_sum(h, 0)) + f(h))(
        tf.function(lambda t: t * t, reduce_retracing=True)
    ),
    "patches": lambda h: (
        h
        * tf.reduce_mean(
            tf.image.extract_patches(
                tf.reshape(h[:, :4], [-1, 2, 2, 1]), [1, 2, 2, 1], [1] * 4, [1] * 4, "SAME"
            ),
            [1, 2, 3],
        )[:, None]
    ),
    "map_defun": lambda h: tf.vectorized_map(lambda r: r - tf.reduce_mean(h, 0) + tf.cumsum(r), h),
    "centred_pairs": lambda h: (  # of a batch of one row, both operands have the same shape
        (lambda pairs: pairs - tf.reduce_mean(pairs, 0, keepdims=True))(h @ tf.transpose(h)) @ h),
    "frames_in_one_column": lambda h: (
        h[:, 1:] * tf.reshape(tf.reduce_sum(tf.reshape(
            tf.signal.frame(h, 2, 1), [-1, 2]) ** 2, 1), [-1, 4])
    ) @ tf.ones([4, 5], D),
}
