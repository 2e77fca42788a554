"""A gradient that is a product over rows.

Goes in: the two factors, rows in the first dimension.  Comes out: their product, made where it is
wanted: what crosses machines may be the rows instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class Product(NamedTuple):
    """The gradient ``transpose(left) @ right``, a product over rows."""

    left: Any
    right: Any

    def made(self) -> tf.Tensor:
        """The gradient itself."""
        return tf.matmul(self.left, self.right, transpose_a=True)

    @property
    def size(self) -> int:
        """Bytes of the gradient; 0 where they are not known."""
        shape = tf.TensorShape([self.left.shape[-1], self.right.shape[-1]])
        return (shape.num_elements() or 0) * self.left.dtype.size
