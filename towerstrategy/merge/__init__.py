"""The towers' results -> one result: shares, sums, gradients, reductions."""
