"""R results -> one: shares, sums, gradients, reductions, results."""
