"""R results -> one: shares, sums, gradients, factors, reductions."""
