"""Gradients that are products over rows, made once from the rows of all towers.

Goes in: one gradient a tower, symbolic tensors of the graph being traced.  Comes out: their sum, or
None where it has no factors.

The gradient of a dense layer's kernel is ``transpose(x) @ dy``, a product over rows, so the sum
over towers is ``transpose(concat(x)) @ concat(dy)``: one product as on a single device, in place of
R products and a sum of R arrays of the kernel's size.  A bias' gradient, the sum of ``dy`` over
rows, likewise.  What crosses devices is rows, not kernels.  The towers' own products are never run:
nothing needs them any more.  Known from distributed training as sufficient factors (Xie et al.,
"Distributed Machine Learning via Sufficient Factor Broadcasting", 2016).

The product is then made on the device of the variable and not by the towers, so this is for towers
and merge devices that share the same cores: those on CPU (:attr:`devices.Placement.on_cpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.machines import row_products

# Makes a tower's factor zero where that tower must not count: (tensor, tower) -> tensor.
Mask = Callable[[tf.Tensor, int], tf.Tensor]


class RowSum(NamedTuple):
    """The gradient that is the sum of ``rows`` over rows."""

    rows: Any


def apart(gradient: Any) -> Any:
    """The factors of a tower's ``gradient``; the gradient itself where it has none."""
    if not isinstance(gradient, tf.Tensor) or _tf.is_eager(gradient):
        return gradient
    operation = gradient.op
    if (operation.type == "MatMul" and operation.get_attr("transpose_a")
            and not operation.get_attr("transpose_b")):
        return row_products.Product(*operation.inputs)
    if operation.type == "BiasAddGrad" and operation.inputs[0].shape.rank == 2:
        return RowSum(*operation.inputs)
    return gradient


class Factors:
    """The rows of all towers, put behind one another once for all gradients that use them."""

    def __init__(self, mask: Mask | None = None) -> None:
        self._mask = mask
        self._rows: dict[tuple[str, ...], tf.Tensor] = {}

    def total(self, gradients: Sequence[Any]) -> tf.Tensor | None:
        """The sum of the towers' ``gradients`` from their factors; None where they have none.

        Args:
          gradients: one a tower, each apart (:func:`apart`) or whole.
        """
        product = self.product(gradients)
        if product is not None:
            return product.made()
        parts = [apart(gradient) for gradient in gradients]
        if all(isinstance(part, RowSum) for part in parts):
            return tf.reduce_sum(self._behind_one_another([part.rows for part in parts]), 0)
        return None

    def product(self, gradients: Sequence[Any]) -> row_products.Product | None:
        """The sum of the towers' ``gradients`` as one product; None where they are none."""
        parts = [apart(gradient) for gradient in gradients]
        if not all(isinstance(part, row_products.Product) for part in parts):
            return None
        return row_products.Product(*(self._behind_one_another(rows) for rows in zip(*parts)))

    def _behind_one_another(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        key = tuple(part.name for part in parts)
        if key not in self._rows:
            if self._mask is not None:
                parts = [self._mask(part, tower) for tower, part in enumerate(parts)]
            self._rows[key] = tf.concat(parts, 0)
        return self._rows[key]
