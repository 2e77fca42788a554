"""WholeBatch: a loss that sees all rows of a batch, for ``compile`` and for loops.

Goes in: a loss.  Comes out: what ``compile`` takes for a loss, and what a replica function calls
like one.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from towerstrategy import _keras
from towerstrategy.losses import over_rows


class WholeBatch(over_rows.OverRows):
    """A loss computed once, over the rows of all towers.

    For losses that put the rows of a batch together (in-batch negatives, contrastive losses, mined
    triplets), whose value for a batch is not the mean of its parts'.  The outputs, targets, sample
    weights and masks of all towers meet on the merge device, in order; the loss is computed there,
    and each tower gets the gradient of its rows.  It is what one device computes.

    In ``compile`` it stands for a loss, alone or among those of several outputs; the model holds,
    and saves, the inner one:

    >>> def contrast(targets, outputs):
    ...   products = tf.matmul(outputs, outputs, transpose_b=True)
    ...   return tf.keras.losses.sparse_categorical_crossentropy(
    ...       tf.range(tf.shape(products)[0]), products, from_logits=True)
    >>> with TowerStrategy(split_cpu(4)).scope():
    ...   model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2)])
    ...   model.compile("sgd", WholeBatch(contrast))
    >>> history = model.fit(np.ones([10, 3]), np.ones([10, 1]), batch_size=10, verbose=0)
    >>> round(history.history["loss"][0], 3)
    2.303

    In ``compile``'s metrics it makes a function that ranks a row among the others a metric.  In a
    replica function, a ``train_step`` or a ``compute_loss`` it is called, with whatever the inner
    loss takes; tensors with rows are gathered, scalars and everything else are tower 0's.  A
    number is the tower's part, so it needs no ``scale_loss``; values a row are the tower's:

    >>> strategy = TowerStrategy(split_cpu(4)[:2])
    >>> pairs = WholeBatch(
    ...     lambda x: tf.reduce_sum(tf.matmul(x, x, transpose_b=True)))
    >>> step = tf.function(lambda x: pairs(x))
    >>> parts = strategy.run(step, (strategy.split(np.ones([3, 1])),))
    >>> float(strategy.reduce("SUM", parts, axis=None))
    9.0

    With one tower, and without a strategy, it is the inner loss.

    Args:
      loss: a loss object of Keras 3 or tf_keras, a function, or the name of one.

    Raises:
      TypeError: ``loss`` is none of these.
    """

    def __init__(self, loss: Any) -> None:
        if not callable(loss) and not isinstance(loss, str):
            raise TypeError("loss must be a loss object, a function or the name of one, but got "
                            f"{loss!r} of type {type(loss).__name__}.")
        super().__init__(loss.inner if isinstance(loss, over_rows.OverRows) else loss)
        _keras.install_hooks()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The tower's part of the loss of all rows; elsewhere the inner loss."""
        inner = tf.keras.losses.get(self.inner) if isinstance(self.inner, str) else self.inner

        def compute(args: Any, kwargs: Any) -> Any:
            with _keras.on_one_device(inner):
                return inner(*args, **kwargs)

        return over_rows.part_of(compute, args, kwargs)

    def __repr__(self) -> str:
        return f"WholeBatch({self.inner!r})"
